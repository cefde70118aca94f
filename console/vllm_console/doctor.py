"""Everything a maintainer would ask for, in one document: versions, installs, record health, findings, crashes.

Secrets are redacted: names of variables stay, values are removed. Problems come first, each with its fix.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_console import __version__
from vllm_console.crash_report import reports
from vllm_console.fleet.leftovers import find_lost, format_lost
from vllm_console.text import UNKNOWN, plain, size
from vllm_launchers.secrets import is_secret_name, redact

if TYPE_CHECKING:
    from vllm_launchers.host.gpu.host import Host
    from vllm_launchers.vllm.engines import Engine

Document = dict[str, Any]

VERSION = 1
PACKAGES = ("textual", "rich", "httpx", "nvidia-ml-py", "psutil", "msgspec", "vllm")
RECENT_FINDINGS = 20
RECENT_NOTES_SECONDS = 24 * 3600.0
LEAST_FREE_BYTES = 1 << 30
LEAST_FILES = 1024
NO_VLLM = "no vLLM on PATH"
PREFIXES = ("VLLM_", "CUDA_", "NCCL_", "HF_", "XDG_", "TERM", "COLORTERM", "NO_COLOR", "LC_", "LANG", "TMUX", "SSH_TTY")
"""Environment variables that affect servers or this program."""


def examine(
    state: Path,
    config: Path,
    engines: tuple[Engine, ...],
    host: Host,
    refused: Sequence[str] = (),
    mistakes: Sequence[str] = (),
) -> Document:
    """Gather the document: ``{"version", "problems": [{"what", "do"}], "program", "machine", …}``. Changes nothing.

    ``refused`` lists unusable installations, with the reason.
    """
    from vllm_launchers.host.gpu.document import encode_host
    from vllm_launchers.host.session_end import session_end

    problems: list[Document] = []
    document: Document = {
        "version": VERSION,
        "problems": problems,
        "program": _program(),
        "machine": _machine(),
        "folders": _folders(state, config, problems),
        "engines": [{"kind": str(e.kind), "version": e.version, "path": e.path} for e in engines],
        "servers": _servers(state, problems),
        "findings": _findings(state),
        "crashes": [str(path) for path in reports(state)],
        "environment": _environment(),
        "host": encode_host(host),
    }
    for sentence in mistakes:
        _problem(problems, sentence, "correct it: until then, the console and most commands refuse to run")
    for sentence in refused:
        _problem(problems, sentence, "repair it, or name another with --vllm PATH or in config.toml")
    if all(engine.kind == "simulated" for engine in engines) and not refused:
        _problem(problems, NO_VLLM, "install it, or name one with --vllm PATH or in config.toml")
    if host.problem:
        _problem(problems, f"can't read GPUs: {host.problem}", "check that nvidia-smi works for this user")
    if document["machine"]["open_files_limit"] < LEAST_FILES:
        _problem(problems, "the open file limit is low", f"raise 'ulimit -n' to {LEAST_FILES} or more")
    if lost := format_lost(find_lost(state)):
        _problem(problems, lost, "'vllm-console leftovers' lists the processes; with --remove it ends them")
    if at_logout := session_end():
        _problem(
            problems,
            at_logout,
            "alternatively, start servers from a session that outlives your login, such as a system service",
        )
    if document["crashes"]:
        newest = document["crashes"][-1]
        _problem(
            problems, f"vllm-console has crashed before; latest report: {newest}", "attach that report to an issue"
        )
    return _redacted(document)  # type: ignore[no-any-return]


def format_report(document: Document) -> Iterator[str]:
    """The document as text, line by line."""
    problems = document["problems"]
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    yield f"{count}:" if problems else "No problems found."
    for problem in problems:
        yield plain(f"! {problem['what']}")
        yield plain(f"    {problem['do']}")
    titles = {"servers": "Servers of vllm-console", "findings": "Findings that a console reported"}
    for title in ("program", "machine", "folders", "engines", "servers", "findings", "crashes", "environment"):
        yield ""
        yield titles.get(title, title.capitalize())
        yield from (f"  {line}" for line in _lines(document[title]))


def _lines(part: object) -> Iterator[str]:
    if isinstance(part, Mapping):
        width = max(map(len, part), default=0)
        for name, value in part.items():
            if isinstance(value, Mapping):
                value = ", ".join(_fact(key, one) for key, one in value.items() if one not in (None, ""))
            yield plain(f"{_name(name):<{width}}  {_value(name, value)}")
    elif isinstance(part, list):
        if not part:
            yield "none"
        for entry in part:
            texts = (
                map(str, (v for v in entry.values() if v not in (None, ""))) if isinstance(entry, Mapping) else [entry]
            )
            yield plain("  ".join(texts))


NOT_CREATED = "not created yet"
"""Shown instead of the mode of a folder that does not exist."""


def _name(key: str) -> str:
    """A key of the document as text."""
    return key.removesuffix("_bytes").replace("_", " ") if key.islower() else key


def _fact(key: str, value: object) -> str:
    """A fact about a folder or a server; paths, states and placeholders need no key."""
    text = _value(key, value)
    return text if key in ("path", "state") or value == NOT_CREATED else f"{_name(key)} {text}"


def _value(key: str, value: object) -> str:
    if (key.endswith("_bytes") or key == "free") and isinstance(value, int):
        return size(value)
    return UNKNOWN if value is None else {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _problem(problems: list[Document], what: str, do: str) -> None:
    problems.append({"what": what, "do": do})


def _program() -> Document:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {"vllm-console": __version__, "python": platform.python_version(), "executable": sys.executable, **versions}


def _machine() -> Document:
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "uid": os.getuid(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shm_free_bytes": shm.free if shm else None,
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "container": Path("/.dockerenv").exists() or "container" in os.environ,
    }


def _folders(state: Path, config: Path, problems: list[Document]) -> Document:
    found: Document = {}
    for name, path in (("state", state), ("config", config)):
        try:
            info = path.stat()
        except FileNotFoundError:
            found[name] = {"path": str(path), "mode": NOT_CREATED}
            continue
        except OSError as error:
            _problem(problems, f"{path}: {os.strerror(error.errno or 0)}", "make it readable for this user")
            found[name] = {"path": str(path), "mode": None}
            continue
        free = shutil.disk_usage(path).free
        found[name] = {"path": str(path), "mode": f"{stat.S_IMODE(info.st_mode):04o}", "uid": info.st_uid, "free": free}
        if free < LEAST_FREE_BYTES:
            _problem(problems, f"{path}: less than 1 GiB free", "free some space: records and history are stored there")
        if name == "state" and info.st_uid != os.getuid():
            _problem(problems, f"{path} belongs to another user", "choose another with --state")
        elif name == "state" and stat.S_IMODE(info.st_mode) & 0o077:
            _problem(problems, f"{path} is open to other users", f"chmod 700 {path}")
        elif name == "state":
            from vllm_launchers.private import check

            for sentence in check(path, fix=False):
                _problem(problems, sentence, "any command without --read-only fixes the permissions of your own files")
    return found


def _servers(state: Path, problems: list[Document]) -> list[Document]:
    from vllm_launchers.keeper import client, folders
    from vllm_launchers.keeper.errors import KeeperError
    from vllm_launchers.launch.details import exposed_message

    try:
        records, unreadable = client.list_records(state)
    except KeeperError as error:
        _problem(problems, str(error), "make it readable for this user")
        return []
    for sentence in unreadable:
        _problem(problems, sentence, "a server with an unreadable record is left alone; remove its folder by hand")
    servers = []
    for record in records:
        kept = client.keeper_alive(state, record.name)
        place = client.elsewhere(state, record)
        if place:
            what = f"{record.name} runs {place}"
            _problem(problems, what, "manage it there; here it is read-only")
        elif silence := client.keeper_silence(record):
            _problem(problems, silence, "find out why it was suspended; nothing is lost once it continues")
        elif record.needs_keeper and not kept:
            _problem(problems, f"{record.name}: its keeper is gone", "the next command or console starts a new keeper")
        for what in _deleted(folders.server_folder(state, record.name), kept):
            do = "don't touch a server's files; 'vllm-console remove' deletes those of an ended server"
            _problem(problems, f"{record.name}: {what}", do)
        if problem := exposed_message(record):
            do = "export VLLM_API_KEY and restart it, or start it without --host"
            _problem(problems, f"{record.name}: {problem}", do)
        servers.append(
            {
                "name": record.name,
                "state": str(record.state),
                "generation": record.current.number,
                "keeper": place or ("alive" if kept else "none"),
                "reason": record.reason,
            }
        )
    return servers


def _deleted(folder: Path, kept: bool) -> Iterator[str]:
    """Deleted and overwritten files of a server: recent notes of its keeper, and currently missing files."""
    from vllm_launchers.keeper.folder_claim import NEEDED
    from vllm_launchers.keeper.record_writer import OVERWRITTEN, RESTORED, Notes

    if kept:
        yield from (f"{name} is missing" for name in NEEDED if not os.path.lexists(folder / name))
    for line in Notes(folder).recent(RECENT_NOTES_SECONDS):
        if RESTORED in line or OVERWRITTEN in line:
            yield f"{line} (its keeper.log)"


def _findings(state: Path) -> list[Document]:
    from vllm_console.alerts.notifier import FindingsLog

    return [dict(entry) for entry in FindingsLog(state).read()][-RECENT_FINDINGS:]


def _environment() -> Document:
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    return {name: "(set, not shown)" if is_secret_name(name) else redact(value) for name, value in chosen.items()}


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: _redacted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner) for inner in value]
    return value
