"""Whether this machine ends processes when their user logs out, and what to do about it.

systemd-logind has two ways (logind.conf(5), loginctl(1)): with ``KillUserProcesses=yes``, everything in the scope of a
login session ends with the session, lingering or not; and processes below the user's own service manager end with the
user's last session unless lingering is enabled. A process's cgroup shows which one applies.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from vllm_launchers.patterns import lazy_pattern

FOLDERS = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd")
"""Locations of logind's settings; the first one that has a file with a given name wins."""
LINGER = "var/lib/systemd/linger"

_SCOPE = lazy_pattern(r"/user-\d+\.slice/session-[^/]+\.scope(?:/|$)", re.MULTILINE)
_MANAGER = lazy_pattern(r"/user-\d+\.slice/user@\d+\.service(?:/|$)", re.MULTILINE)
_SETTING = lazy_pattern(r"\s*(#?)\s*(KillUserProcesses|KillOnlyUsers|KillExcludeUsers)\s*=(.*)", re.IGNORECASE)
_YES = frozenset({"1", "yes", "y", "true", "t", "on"})


class Ending(msgspec.Struct, frozen=True):
    """What ends at logout: ``why`` as a clause, and what to do (``fix``), for users."""

    why: str
    fix: str

    @property
    def sentence(self) -> str:
        """The complete sentence."""
        return f"servers started here end when you log out: {self.why}; {self.fix}"


class Logind(msgspec.Struct, frozen=True):
    """logind's configuration: whether and whose session processes it ends, and which file says so."""

    kills: bool = False
    only: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset({"root"})
    file: str = ""

    def kills_those_of(self, user: str) -> bool:
        """Whether the processes of this user's sessions end with the session."""
        return self.kills and (not self.only or user in self.only) and user not in self.excluded


def logind_settings(main: tuple[str, str] | None, more: Iterable[tuple[str, str]]) -> Logind:
    """Combine logind's files: path and content of the main one, and of the drop-ins in order. Pure.

    Commented-out values in the main file are the distribution's built-in defaults.
    """
    found = Logind()
    for file, text in (*([main] if main else []), *more):
        for line in text.splitlines():
            match = _SETTING.fullmatch(line)
            if match is None or (match[1] and (main is None or file != main[0] or found.file)):
                continue
            found = _set(found, match[2].lower(), match[3].strip(), file, commented=bool(match[1]))
    return found


def _set(found: Logind, name: str, value: str, file: str, *, commented: bool) -> Logind:
    words = frozenset(value.split())
    if name == "killuserprocesses":
        return Logind(value.lower() in _YES, found.only, found.excluded, file)
    if commented:  # the other defaults are the same everywhere
        return found
    if name == "killonlyusers":
        return Logind(found.kills, found.only | words if words else frozenset(), found.excluded, found.file)
    return Logind(found.kills, found.only, found.excluded | words if words else frozenset({"root"}), found.file)


def ending(cgroup: str, user: str, logind: Logind, *, lingers: bool) -> Ending | None:
    """What ends a process of ``user`` at logout, according to its ``/proc/PID/cgroup``; None if nothing does. Pure."""
    linger = "" if lingers else "'loginctl enable-linger' once, then "
    if _SCOPE.search(cgroup) and logind.kills_those_of(user):
        why = f"this machine ends all processes of a login session (KillUserProcesses=yes in {logind.file})"
        return Ending(why, f"to prevent that: {linger}start with 'systemd-run --user --scope vllm-console'")
    if _MANAGER.search(cgroup) and not lingers:
        return Ending(
            "they run below your own service manager, and lingering is not enabled for you",
            "'loginctl enable-linger' once",
        )
    return None


def session_end(pid: int | None = None, root: Path = Path("/")) -> str:
    """A sentence if processes started by ``pid`` (default: this one) end at logout; else empty. Never raises."""
    cgroup = _text(root / "proc" / (str(pid) if pid is not None else "self") / "cgroup")
    if not (_SCOPE.search(cgroup) or _MANAGER.search(cgroup)):
        return ""
    user = _user()
    found = ending(cgroup, user, _read_settings(root), lingers=bool(user) and (root / LINGER / user).exists())
    return found.sentence if found is not None else ""


def _read_settings(root: Path) -> Logind:
    main = next(((f"/{folder}/logind.conf", root / folder / "logind.conf") for folder in FOLDERS
                 if (root / folder / "logind.conf").is_file()), None)  # fmt: skip
    more: dict[str, str] = {}
    for folder in FOLDERS:
        for path in _files(root / folder / "logind.conf.d"):
            more.setdefault(path.name, f"{folder}/logind.conf.d/{path.name}")
    drop_ins = [(f"/{more[name]}", _text(root / more[name])) for name in sorted(more)]
    return logind_settings((main[0], _text(main[1])) if main else None, drop_ins)


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.name.endswith(".conf")]
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "")
