"""Finds vLLM servers among this machine's processes. Read-only: never signals anything."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.procfs import PROC, pids, stat
from vllm_launchers.secrets import redact_argv

DEFAULT_PORT = 8000
MAX_COMMAND_BYTES = 128 * 1024
SERVER_MODULES = {"vllm.entrypoints.openai.api_server": False, "vllm.entrypoints.cli.main": True}
"""Modules that serve, and whether they require the argument ``serve``."""

SIMULATED_MODULES = ("vllm_launchers.simulated", "vllm_launchers.simulated.prepared")
PREPARED = "vllm_launchers/prepared/bootstrap.py"
"""The script that starts vLLM in two steps; its arguments are those of vLLM's own command."""

_RECHECK = 8
"""Each scan rereads one in this many known processes, because a process may become another program (``exec``)."""

_PYTHON = lazy_pattern(r"(?:python|pypy)[0-9.]*t?")


class ObservedServer(msgspec.Struct, frozen=True):
    """A running vLLM server. ``start_time`` is in clock ticks since boot. Secrets in ``argv`` are redacted.

    ``port`` and ``model`` are None if neither the command line nor its sockets show them. ``host`` defaults to
    ``0.0.0.0``, as in vLLM.
    """

    pid: int
    start_time: int
    user: str
    argv: tuple[str, ...]
    port: int | None
    host: str
    model: str | None
    simulated: bool = False


class ServerCommand(msgspec.Struct, frozen=True):
    """A server's properties according to its command line."""

    model: str | None
    host: str
    port: int | None
    simulated: bool


class _ScannedProcess(msgspec.Struct):
    start_time: int
    command: ServerCommand | None
    argv: tuple[str, ...] = ()


class ProcessScanner:
    """Scans repeatedly, reading only new processes: a scan of 300 known processes takes about 1 ms."""

    def __init__(self, proc: Path = Path(PROC)) -> None:
        self._proc = str(proc)
        self._known: dict[int, _ScannedProcess] = {}
        self._turn = 0

    def scan(self, excluded: Collection[int] = ()) -> list[ObservedServer]:
        """Servers running now, sorted by pid, except ``excluded`` processes and their descendants."""
        present = set(pids(self._proc))
        for pid in self._known.keys() - present:
            del self._known[pid]
        self._turn += 1
        for pid in present:
            known = self._known.get(pid)
            if known is None or known.command is not None or (pid + self._turn) % _RECHECK == 0:
                self._look(pid)
        found = {pid: known for pid, known in self._known.items() if known.command is not None}
        excluded = set(excluded)
        servers = [self._server(pid, known, excluded, found) for pid, known in sorted(found.items())]
        return [server for server in servers if server is not None]

    def _look(self, pid: int) -> None:
        try:
            with open(f"{self._proc}/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - this runs per process and scan
                data = file.read(MAX_COMMAND_BYTES)
            argv = tuple(word.decode("utf-8", "replace") for word in data.rstrip(b"\0").split(b"\0"))
            command = server_command(argv)
        except OSError:
            self._known.pop(pid, None)  # it has ended
            return
        if command is None:
            self._known[pid] = _ScannedProcess(0, None)
        elif (found := stat(pid, self._proc)) is not None:
            self._known[pid] = _ScannedProcess(found.start_time, command, argv)
        else:
            self._known.pop(pid, None)

    def _server(
        self, pid: int, known: _ScannedProcess, excluded: set[int], found: Mapping[int, _ScannedProcess]
    ) -> ObservedServer | None:
        assert known.command is not None
        # A fork of a server shows its command line until it execs; report only one of them.
        if pid in excluded or self._descends(pid, excluded | (found.keys() - {pid})):
            return None
        # Imported only if there is a server: sockets and users are a tenth of the cost of sampling our own servers.
        from vllm_launchers.host.ports import listening_ports, user_name

        command = known.command
        port = command.port
        if port is None:
            ports = listening_ports(pid)
            default = DEFAULT_PORT if known.argv[0][:6] != "VLLM::" else None
            port = ports[0] if ports else default
        try:
            uid = os.stat(f"{self._proc}/{pid}").st_uid  # noqa: PTH116
        except OSError:
            return None
        argv = redact_argv(known.argv)
        return ObservedServer(
            pid, known.start_time, user_name(uid), argv, port, command.host, command.model, command.simulated
        )

    def _descends(self, pid: int, ancestors: Collection[int]) -> bool:
        for _ in range(64):
            found = stat(pid, self._proc)
            if found is None:
                return False
            pid = found.parent
            if pid in ancestors:
                return True
            if pid <= 1:
                return False
        return False


def announced_ports(excluded: Collection[int] = ()) -> set[int]:
    """Ports of all vLLM servers with a readable command line, including ports that are not bound yet.

    ``excluded``: pids of processes to ignore.
    """
    return {server.port for server in ProcessScanner().scan(excluded) if server.port is not None}


def server_command(argv: Sequence[str]) -> ServerCommand | None:
    """Parse the command line of a vLLM server; None for other processes.

    Recognizes ``vllm serve``, the modules behind it, the simulated engine and vLLM's process titles, but not a shell,
    an editor or ``grep`` with these words in its arguments.
    """
    if not argv or not argv[0]:
        return None
    if argv[0].startswith("VLLM::"):
        is_server = argv[0].startswith("VLLM::APIServer")
        return ServerCommand(None, "0.0.0.0", None, simulated=False) if is_server else None
    words = list(argv)
    if _PYTHON.fullmatch(os.path.basename(words[0])):  # noqa: PTH119 - this runs for every process
        words = words[1:]
        while words and words[0].startswith("-") and words[0] != "-m":
            words = words[2 if words[0] in ("-X", "-W") else 1 :]
        if words and words[0].endswith(PREPARED):  # followed by vLLM's command or its module
            words = ["-m", *words[1:]] if words[1:2] and words[1] in SERVER_MODULES else words[1:]
        if words and words[0] == "-m":
            return _module(words[1:])
    return _command(words) if words else None


def _command(words: Sequence[str]) -> ServerCommand | None:
    if os.path.basename(words[0]) == "vllm" and words[1:2] == ["serve"]:  # noqa: PTH119
        return _arguments(words[2:], positional=True, simulated=False)
    if words[0].endswith("vllm/entrypoints/openai/api_server.py"):
        return _arguments(words[1:], positional=False, simulated=False)
    return None


def _module(words: Sequence[str]) -> ServerCommand | None:
    module, rest = (words[0], words[1:]) if words else ("", ())
    simulated = module in SIMULATED_MODULES
    if simulated or SERVER_MODULES.get(module):
        return _arguments(rest[1:], positional=True, simulated=simulated) if rest[:1] == ["serve"] else None
    return _arguments(rest, positional=False, simulated=False) if module in SERVER_MODULES else None


def _arguments(words: Sequence[str], *, positional: bool, simulated: bool) -> ServerCommand:
    values: dict[str, str] = {}
    flag = model = ""
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-")
            values[name] = value
            flag = "" if equals else name
        elif flag:
            values[flag] = word
            flag = "" if flag in ("model", "host", "port") else flag  # another one may take several words
        else:
            model = model or word
    if not positional or not model:
        model = values.get("model", "")
    text = values.get("port", "")
    port = int(text) if text.isdecimal() and len(text) <= 5 and 0 < int(text) <= 65535 else None
    return ServerCommand(model or None, values.get("host") or "0.0.0.0", port, simulated)
