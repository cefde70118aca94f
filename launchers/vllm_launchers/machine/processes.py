"""Finds vLLM servers among the processes of this machine. Looks only: nothing is ever signalled."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_launchers.procfs import PROC, pids, stat
from vllm_launchers.secrets import redact_argv

DEFAULT_PORT = 8000
MAX_COMMAND_BYTES = 128 * 1024
SERVER_MODULES = {"vllm.entrypoints.openai.api_server": False, "vllm.entrypoints.cli.main": True}
"""Modules that serve, and whether they want the word ``serve``."""

SIMULATED_MODULE = "vllm_launchers.simulated"

_RECHECK = 8
"""A process may become another program (``exec``), so at each scan one in so many known ones is read again."""

_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*t?")


@dataclass(frozen=True, slots=True)
class ObservedServer:
    """A running vLLM server. ``start_time`` is in clock ticks since boot. ``argv`` has its secrets hidden.

    ``port`` and ``model`` are None when neither the command line nor its sockets tell. ``host`` is as it was
    given, ``0.0.0.0`` (vLLM's default) where it was not.
    """

    pid: int
    start_time: int
    user: str
    argv: tuple[str, ...]
    port: int | None
    host: str
    model: str | None
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What a command line says of the server that it runs."""

    model: str | None
    host: str
    port: int | None
    simulated: bool


@dataclass(slots=True)
class _Known:
    start_time: int
    command: ServerCommand | None
    argv: tuple[str, ...] = ()


class ProcessScanner:
    """Scans again and again, and reads only what is new: a scan of 300 known processes takes about 1 ms."""

    def __init__(self, proc: Path = Path(PROC)) -> None:
        self._proc = str(proc)
        self._known: dict[int, _Known] = {}
        self._turn = 0

    def scan(self, excluded: Collection[int] = ()) -> list[ObservedServer]:
        """The servers that run now, sorted by pid, without ``excluded`` processes and what descends from them."""
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
            self._known.pop(pid, None)  # it ended meanwhile
            return
        if command is None:
            self._known[pid] = _Known(0, None)
        elif (found := stat(pid, self._proc)) is not None:
            self._known[pid] = _Known(found.start_time, command, argv)
        else:
            self._known.pop(pid, None)

    def _server(
        self, pid: int, known: _Known, excluded: set[int], found: Mapping[int, _Known]
    ) -> ObservedServer | None:
        assert known.command is not None
        # A fork of a server shows its command line until it becomes something else; one server is enough.
        if pid in excluded or self._descends(pid, excluded | (found.keys() - {pid})):
            return None
        # Only where there is such a server: sockets and users are a tenth of what a look at our own servers takes.
        from vllm_launchers.machine.ports import listening_ports, user_name

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


def announced_ports() -> set[int]:
    """The ports of all vLLM servers whose command line can be read, those that have not bound them yet included."""
    return {server.port for server in ProcessScanner().scan() if server.port is not None}


def server_command(argv: Sequence[str]) -> ServerCommand | None:
    """What a command line says of a vLLM server, or None when it runs none.

    Knows ``vllm serve``, the modules behind it, the simulated engine and vLLM's process titles. A shell, an editor or
    ``grep`` that merely has the words in its arguments is none.
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
        if not words:
            return None
        if words[0] == "-m":
            return _module(words[1:])
    if os.path.basename(words[0]) == "vllm" and words[1:2] == ["serve"]:  # noqa: PTH119
        return _arguments(words[2:], positional=True, simulated=False)
    if words[0].endswith("vllm/entrypoints/openai/api_server.py"):
        return _arguments(words[1:], positional=False, simulated=False)
    return None


def _module(words: Sequence[str]) -> ServerCommand | None:
    module, rest = (words[0], words[1:]) if words else ("", ())
    simulated = module == SIMULATED_MODULE
    if simulated or SERVER_MODULES.get(module):
        return _arguments(rest[1:], positional=True, simulated=simulated) if rest[:1] == ["serve"] else None
    return _arguments(rest, positional=False, simulated=False) if module in SERVER_MODULES else None


def _arguments(words: Sequence[str], *, positional: bool, simulated: bool) -> ServerCommand:
    values: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else ""
            values.setdefault(name.replace("_", "-"), value if equals else following)
    model = values.get("model")
    if positional and words and not words[0].startswith("-"):
        model = words[0]
    text = values.get("port", "")
    port = int(text) if text.isdecimal() and len(text) <= 5 and 0 < int(text) <= 65535 else None
    return ServerCommand(model or None, values.get("host") or "0.0.0.0", port, simulated)
