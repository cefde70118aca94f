"""The fleets of other machines, read over the user's own ssh: one long-lived command on each, no open port.

``hosts.json`` in the state folder (mode 0600) lists the machines. Each has its own thread, so one that does not respond
delays only itself; a lost connection is retried with increasing pauses.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from vllm_console import __version__
from vllm_console.attached import Endpoint
from vllm_console.fleet.remote_protocol import (
    LONGEST_LINE,
    PROTOCOL,
    ProtocolError,
    decode,
    decode_error,
    encode,
    views_of,
)
from vllm_console.fleet.snapshot import ServerView
from vllm_console.fleet.types import HOSTS
from vllm_console.text import error_sentence, plain
from vllm_launchers.errors import NotFoundError, OperationError, UsageError
from vllm_launchers.keeper.folders import NAME
from vllm_launchers.keeper.records import State
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.private import open_regular, own_folder, replace_file
from vllm_launchers.secrets import redact

CONNECT_SECONDS = 10
ASK_SECONDS = 1.0
"""Pause between a response and the next request."""

ANSWER_SECONDS = 15.0
"""Response timeout, after which the connection counts as lost."""

LONGEST_PAUSE_SECONDS = 60.0
LONGEST_GREETING = 64 << 10
GREETING_LINES = 50
"""Maximum number of other lines, such as output of shell start-up files, before the greeting."""

VERB_SECONDS = 120.0

CLOSED = "the connection was closed"

_DESTINATION = lazy_pattern(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_\[][A-Za-z0-9._:%\]-]*")
_COMMAND = lazy_pattern(r"[A-Za-z0-9/._~+-]+")


class RemoteHost(msgspec.Struct, frozen=True):
    """A machine: its ``name`` here, and how ssh reaches it (``[user@]host``, and a ``port`` if one was given).

    ``command`` is this program there: on its ``PATH``, or a path.
    """

    name: str
    destination: str
    port: int | None = None
    command: str = "vllm-console"

    @property
    def url(self) -> str:
        """The URL as it was attached."""
        path = f"/{self.command.lstrip('/')}" if "/" in self.command else ""
        return f"ssh://{self.destination}{f':{self.port}' if self.port else ''}{path}"

    def argv(self, words: Sequence[str], *, terminal: bool = False) -> list[str]:
        """The command line that runs this program there with ``words``.

        Without a terminal, ssh never prompts: keys, agents and known hosts are the user's own.
        """
        options = ["-T", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ServerAliveInterval=10"]
        options += ["-o", "ServerAliveCountMax=2", *(() if terminal else ("-o", "BatchMode=yes"))]
        options += ["-p", str(self.port)] if self.port else []
        # ssh passes the words to a shell there.
        return ["ssh", *options, "--", self.destination, f"{self.command} {shlex.join(words)}"]


def host_from(url: str, name: str | None) -> RemoteHost:
    """Parse ``ssh://[user@]host[:port][/path/to/vllm-console]``. Raises UsageError."""
    shown = plain(url, 120)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"'{shown}' is not an address; use ssh://[user@]host") from error
    if parts.password is not None or parts.query or parts.fragment:
        raise UsageError("passwords are not accepted or stored: write ssh://[user@]host, and use a key or an agent")
    user, at, host = parts.netloc.rpartition("@")
    host = host if port is None else host.rpartition(":")[0]
    destination = f"{user}{at}{host}"
    if not _DESTINATION.fullmatch(destination):
        raise UsageError(f"'{shown}' does not name a host for ssh; use ssh://[user@]host")
    command = parts.path if parts.path not in ("", "/") else "vllm-console"
    if not _COMMAND.fullmatch(command):
        raise UsageError("the path to vllm-console there may have letters, digits and /._~+- only")
    chosen = name if name is not None else re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip("-._")[:63]
    if not NAME.fullmatch(chosen):
        raise UsageError(f"'{plain(chosen, 80)}' is not a valid host name: use letters, digits, '.', '_' and '-'")
    return RemoteHost(chosen, destination, port, command)


def read_hosts(state: Path) -> tuple[RemoteHost, ...]:
    """The attached machines. Raises OperationError if the file can't be read."""
    path = state / HOSTS
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise OperationError(f"{path} belongs to another user")
            hosts = msgspec.json.decode(file.read(1 << 20), type=tuple[RemoteHost, ...])
    except (FileNotFoundError, NotADirectoryError):  # also if the state folder is a file, which other reads report
        return ()
    except (OSError, msgspec.DecodeError) as error:
        raise OperationError(f"{path} can't be read: {plain(str(error), 200)}; delete it to start over") from error
    return tuple(host for host in hosts if _is_sound(host))


def _is_sound(host: RemoteHost) -> bool:
    """Whether `host_from` could have created this host, so that nothing else gets into a command line."""
    sound = _DESTINATION.fullmatch(host.destination) and _COMMAND.fullmatch(host.command)
    return bool(sound and NAME.fullmatch(host.name))


def write_hosts(state: Path, hosts: Sequence[RemoteHost]) -> None:
    """Replace the file. Raises OperationError."""
    try:
        own_folder(state)
        replace_file(state / HOSTS, msgspec.json.format(msgspec.json.encode(hosts)) + b"\n")
    except OSError as error:
        raise OperationError(f"{state / HOSTS} can't be written: {error.strerror}") from error


def split_host(name: str) -> tuple[str, str] | None:
    """Host and server of ``HOST/NAME``; None for a server of this machine."""
    host, slash, server = name.partition("/")
    return (host, server) if slash and NAME.fullmatch(host) and server and "/" not in server else None


class Session:
    """One run of the command on a machine: requests to its stdin, answers from its stdout."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Start it. Raises OSError."""
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._waited = {0}
        self._ids = 0
        self._problem = ""
        self._said: deque[str] = deque(maxlen=20)
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        try:
            for thread in (threading.Thread(target=self._read, daemon=True), self._errors):
                thread.start()
        except RuntimeError as error:  # a shortage of threads
            self._process.kill()
            self._process.wait()
            raise OSError(errno.EAGAIN, str(error)) from error

    def greet(self) -> None:
        """Wait for the greeting, and check that both sides use the same protocol.

        Raises:
            ProtocolError: they don't, or there is no greeting.
        """
        hello = self._answer(0, CONNECT_SECONDS + ANSWER_SECONDS).get("hello")
        if not isinstance(hello, dict) or hello.get("protocol") != PROTOCOL:
            version = plain(str(hello.get("version")), 40) if isinstance(hello, dict) else "unknown version"
            raise ProtocolError(
                f"its vllm-console ({version}) and this one ({__version__}) are incompatible: update the older one"
            )

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer; thread-safe. Raises ProtocolError."""
        with self._changed:
            self._ids += 1
            number = self._ids
            self._waited.add(number)
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(encode({"id": number, **request}))
                self._process.stdin.flush()
            except (OSError, ValueError) as error:
                raise ProtocolError(self._problem or CLOSED) from error
        return self._answer(number, seconds)

    def _answer(self, number: int, seconds: float) -> dict[str, Any]:
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._problem, seconds)
            self._waited.discard(number)
            if (found := self._answers.pop(number, None)) is not None:
                return found
            raise ProtocolError(self._problem or f"no answer within {seconds:g}s")

    def _read(self) -> None:
        """Thread: read answers until the output ends."""
        assert self._process.stdout is not None
        problem, others = CLOSED, 0
        try:
            with self._process.stdout as stdout:
                while line := stdout.readline(LONGEST_LINE if self._greeted else LONGEST_GREETING):
                    if not self._greeted and not line.lstrip().startswith(b"{"):
                        others += 1  # output of a shell's start-up files
                        if others > GREETING_LINES:
                            raise ProtocolError("it does not respond like vllm-console")
                        continue
                    self._take(decode(line))
        except (ProtocolError, OSError, ValueError) as error:
            problem = str(error)
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    _greeted = False

    def _take(self, message: dict[str, Any]) -> None:
        number = 0 if "hello" in message and not self._greeted else message.get("id")
        self._greeted = True
        with self._changed:
            if isinstance(number, int) and number in self._waited:
                self._answers[number] = message
                self._changed.notify_all()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError), self._process.stderr as stderr:
            while line := stderr.readline(4096):
                self._said.append(redact(plain(line.decode(errors="replace").strip(), 300)))

    def close(self) -> str:
        """End the process; return the last line of its stderr.

        Its output is closed by the threads that read it. A process left behind by ssh, such as the master of shared
        connections, may hold the other end open for hours, and closing from here would wait for that.
        """
        process = self._process
        with contextlib.suppress(OSError):
            process.terminate()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._errors.join(1)
        if process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                process.stdin.close()
        lines = [line for line in self._said if line]
        return lines[-1] if lines else ""


class Connection:
    """One machine, and the thread that reads its fleet (``read_only`` applies there, too). The lock guards shared
    state.
    """

    def __init__(self, host: RemoteHost, *, read_only: bool = False) -> None:
        self.host = host
        self._words = ["--read-only", "remote"] if read_only else ["remote"]
        self.answered = threading.Event()
        """Set once it has answered, or could not be reached."""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._views: tuple[ServerView, ...] = ()
        self._notices: tuple[str, ...] = ()
        self._since = time.time()
        self._problem = ""
        self._selected: str | None = None
        threading.Thread(target=self._run, name=f"host-{host.name}", daemon=True).start()

    def select(self, selected: str | None) -> None:
        """Request the charts of this server (``HOST/NAME``) from now on, if it is one of this machine."""
        named = split_host(selected) if selected else None
        with self._lock:
            self._selected = named[1] if named is not None and named[0] == self.host.name else None

    def views(self) -> tuple[list[ServerView], list[str]]:
        """Its servers as of its newest answer, and its notices.

        If it can't be reached, or has no servers, one row represents the machine.
        """
        with self._lock:
            if self._problem:
                return [self._row(State.UNRESPONSIVE, "")], []
            if not self.answered.is_set():
                return [self._row(State.STARTING, "connecting over ssh")], []
            notices = [f"{self.host.name}: {plain(one)}" for one in self._notices]
            return list(self._views) or [self._row(State.READY, "no servers there")], notices

    def _row(self, state: State, notice: str) -> ServerView:
        return ServerView(
            self.host.name, state, self._since, ours=False, attached=Endpoint(self.host.url, notice=notice),
            reason=self._problem, contacted=state is not State.STARTING,
        )  # fmt: skip

    def do(self, verb: str, name: str, **more: Any) -> None:
        """Carry out an action there, under that machine's rules; block until it is done.

        Raises:
            UnfitError, OperationError: it was refused or failed there (with that message), or the machine can't be
                reached.
        """
        with self._lock:
            session, problem = self._session, self._problem
        if session is None or problem:
            raise OperationError(f"{self.host.name} is not connected: {problem or 'not yet'}")
        try:
            answer = session.ask({"do": verb, "name": name, **more}, VERB_SECONDS)
        except ProtocolError as error:
            raise OperationError(f"{self.host.name}: {error}; it is unknown whether it was done") from error
        refusal = answer.get("error")
        if isinstance(refusal, dict):
            raise decode_error(refusal, self.host.name)

    def close(self) -> None:
        """End the connection; servers keep running."""
        self._ended.set()
        with self._lock:
            session = self._session
        if session is not None:
            session.close()

    def _run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                problem = self._converse()
            except Exception as error:  # noqa: BLE001 - the thread's boundary: shown in its row, and tried again
                problem = f"unexpected error: {error_sentence(error)}"
            if self._ended.is_set():
                return
            failures = 1 if time.monotonic() - began > LONGEST_PAUSE_SECONDS else failures + 1
            self._report(problem)
            self._ended.wait(min(LONGEST_PAUSE_SECONDS, 2.0 ** min(failures, 6)))

    def _report(self, problem: str) -> None:
        with self._lock:
            if bool(problem) != bool(self._problem):
                self._since = time.time()
            self._problem = problem
        self.answered.set()

    def _converse(self) -> str:
        """Connect and request snapshots until the connection ends; return why it did."""
        try:
            session = Session(self.host.argv(self._words))
        except OSError as error:
            return f"ssh can't be run: {error.strerror}"
        with self._lock:
            self._session = session
        try:
            session.greet()
            while not self._ended.is_set():
                with self._lock:
                    selected = self._selected
                answer = session.ask({"do": "snapshot", "selected": selected}, ANSWER_SECONDS)
                views, notices = views_of(answer.get("snapshot"), self.host.name)
                with self._lock:
                    self._views, self._notices = tuple(views), tuple(notices)
                self._report("")
                self._ended.wait(ASK_SECONDS)
            return ""
        except ProtocolError as error:
            problem = str(error)
        finally:
            with self._lock:
                self._session = None
            message = session.close()
        # ssh's message explains why the connection was closed.
        return message if message and problem == CLOSED else problem


class RemoteHosts:
    """The machines of one state folder; each is connected when first needed."""

    def __init__(self, state: Path, patience: float, *, read_only: bool = False) -> None:
        self._state, self._patience, self._read_only = state, patience, read_only
        self._connections: dict[str, Connection] = {}
        self._known: tuple[object, tuple[RemoteHost, ...]] = (None, ())

    def hosts(self) -> tuple[RemoteHost, ...]:
        """The attached machines. Raises OperationError."""
        try:
            status = (self._state / HOSTS).stat()
            stamp: object = (status.st_mtime_ns, status.st_ino)
        except OSError:
            return ()
        if stamp != self._known[0]:
            self._known = (stamp, read_hosts(self._state))
        return self._known[1]

    def views(self, selected: str | None) -> tuple[list[ServerView], list[str]]:
        """The servers of all machines, and notices; waits for a new machine's first answer, within its patience."""
        try:
            hosts = self.hosts()
        except OperationError as error:
            return [], [str(error)]
        for name, connection in list(self._connections.items()):
            if connection.host not in hosts:  # detached, or the name now refers to another machine
                self._connections.pop(name).close()
        new = [host for host in hosts if host.name not in self._connections]
        self._connections.update({host.name: Connection(host, read_only=self._read_only) for host in new})
        deadline = time.monotonic() + self._patience
        for host in new:
            self._connections[host.name].answered.wait(max(0.0, deadline - time.monotonic()))
        found: list[ServerView] = []
        notices: list[str] = []
        for host in hosts:
            self._connections[host.name].select(selected)
            views, more = self._connections[host.name].views()
            found += views
            notices += more
        return found, notices

    def connection(self, name: str) -> Connection:
        """The connection to an attached machine. Raises NotFoundError."""
        if name not in self._connections:
            raise NotFoundError(f"no machine is attached as '{plain(name)}'")
        return self._connections[name]

    def attach(self, host: RemoteHost) -> None:
        """Add a machine, or replace the one of that name. Raises OperationError."""
        write_hosts(self._state, [*(one for one in self.hosts() if one.name != host.name), host])

    def detach(self, name: str) -> bool:
        """Forget a machine; return whether there was one. Raises OperationError."""
        hosts = self.hosts()
        if all(host.name != name for host in hosts):
            return False
        write_hosts(self._state, [host for host in hosts if host.name != name])
        return True

    def close(self) -> None:
        """End all connections."""
        for connection in tuple(self._connections.values()):  # a snapshot that hangs may still be running
            connection.close()
        self._connections.clear()
