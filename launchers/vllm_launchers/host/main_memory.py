"""The machine's RAM, within the limits of this process's control groups (of a container or a job). Cheap to read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vllm_launchers.units import GIB

MEMINFO = Path("/proc/meminfo")
GROUPS = Path("/proc/self/cgroup")
GROUPS_FOLDER = Path("/sys/fs/cgroup")


class MainMemory(msgspec.Struct, frozen=True):
    """GiB of RAM in total, and available without swapping; None if unknown."""

    total_gib: float | None = None
    available_gib: float | None = None


def main_memory() -> MainMemory:
    """What this process and its children may use now."""
    try:
        lines = MEMINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return MainMemory()
    sizes = {name: int(words[0]) << 10 for name, *words in map(str.split, lines) if words and words[0].isdecimal()}
    total, available = sizes.get("MemTotal:"), sizes.get("MemAvailable:")
    for limit, used in _limits():
        total = min(total, limit) if total is not None else None
        available = min(available, max(0, limit - used)) if available is not None else None
    return MainMemory(total / GIB if total is not None else None, available / GIB if available is not None else None)


def _limits() -> Iterator[tuple[int, int]]:
    """The limit of each control group of this process, and how much of it is in use, in bytes.

    Cached file pages do not count as in use, as in the kernel's ``MemAvailable``. In a container, the group's path may
    be unknown there; its limit is then in the topmost folder.
    """
    try:
        groups = GROUPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if not controllers:
            root, files, prefix = GROUPS_FOLDER, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):  # version 1
            root, files = GROUPS_FOLDER / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            prefix = "total_"
        else:
            continue
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):  # no limit ("max"), or an unknown layout
                limit, used = (int((folder / file).read_text(encoding="ascii")) for file in files)
                statistics = dict(map(str.split, (folder / "memory.stat").read_text(encoding="ascii").splitlines()))
                cached = sum(int(statistics[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
                yield limit, max(0, used - cached)
