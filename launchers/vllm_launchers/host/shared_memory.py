"""Files in ``/dev/shm`` left by servers: vLLM, PyTorch and NCCL remove theirs only on an orderly exit.

A file is offered for removal if it has a name used by one of these, belongs to this user, is at least a minute old, and
no process has it mapped or open; if that can't be verified, the file is kept, with the reason. In a container that
shares the machine's ``/dev/shm`` (``--ipc=host``), processes that are invisible here may use a file: there, only files
that a keeper saw in its own server's memory count.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat as stat_bits
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.procfs import PROC, SHARED_MEMORY, descriptors, mapped_files, pids

NAMES = (
    (lazy_pattern(r"vllm_.+|VLLM_OBJECT_STORAGE_SHM_BUFFER.*"), "vLLM's name for memory that its processes share"),
    (lazy_pattern(r"psm_[0-9a-f]{6,16}"), "the name of Python's shared memory, as between vLLM's engine and workers"),
    (lazy_pattern(r"sem\.mp-[A-Za-z0-9_]{8}"), "the name of Python's semaphores, as of vLLM's workers"),
    (lazy_pattern(r"nccl-[A-Za-z0-9]{6}"), "NCCL's name for memory between GPUs' processes"),
    (lazy_pattern(r"torch_\d+_\d+_\d+"), "PyTorch's name for shared tensors"),
)
SEEN = "its keeper saw it in a server's memory"
FRESH_SECONDS = 60.0
"""A younger file may be between its creation and its first use."""
MACHINE_PIDS = "pid:[4026531836]"
"""The namespace in which every process of the machine is visible; containers have others."""
SUSPECT = lazy_pattern(r"python|pypy|vllm|\bray\b|torch|nccl|mpi|cuda|nsys|ncu", re.IGNORECASE)
"""Matches the command line of a process that may share memory with a server, if its maps can't be read. Every user has
some unreadable processes (ssh-agent, systemd's helpers), which are unrelated.
"""


class LeftFile(msgspec.Struct, frozen=True):
    """An unused file: path, size in bytes, inode, and why it is considered a server's.

    ``sure``: a keeper saw it in its server, or it has vLLM's own name. Any Python program may create the others.
    """

    path: str
    size: int
    inode: int
    why: str
    sure: bool = True


class LeftFiles(msgspec.Struct, frozen=True):
    """The files that can be removed, and a sentence for each reason to keep others."""

    found: tuple[LeftFile, ...] = ()
    spared: tuple[str, ...] = ()


def find(
    recorded: Mapping[str, int] | None = None,
    *,
    folder: Path = Path(SHARED_MEMORY),
    now: float | None = None,
    whole_machine: bool | None = None,
) -> LeftFiles:
    """Search a folder of shared memory.

    ``recorded``: name to inode of what keepers saw in their servers' memory. ``now`` in Unix seconds.
    ``whole_machine``: whether all processes of the machine are visible from here.
    """
    known = recorded or {}
    here = sees_whole_machine() if whole_machine is None else whole_machine
    candidates = list(_candidates(folder, known, time.time() if now is None else now))
    if not candidates:
        return LeftFiles()
    used, unseen = _used({(device, file.inode) for device, file in candidates}, folder)
    found, spared, outside = [], [], 0
    for device, file in candidates:
        if (device, file.inode) in used:
            continue  # belongs to a running server: not reported
        if unseen:
            spared.append(f"{file.path}: left, because {', '.join(unseen)} can't be looked into and may use it")
        elif not here and known.get(os.path.basename(file.path)) != file.inode:  # noqa: PTH119
            outside += 1
        else:
            found.append(file)
    if outside:
        spared.append(f"{outside} in {folder}: left, because processes outside this container may use them")
    return LeftFiles(tuple(found), tuple(spared))


def remove(files: Iterable[LeftFile], found_again: LeftFiles) -> tuple[list[LeftFile], list[str]]:
    """Remove files that a second search found again; returns the removed ones, and a sentence for each other one."""
    gone, problems = [], []
    for file in files:
        try:
            status = os.lstat(file.path)
            if file not in found_again.found or status.st_ino != file.inode:
                problems.append(f"{file.path}: kept, because it is in use again or was replaced")
                continue
            os.unlink(file.path)  # noqa: PTH108
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{file.path}: {error.strerror or error}")
        else:
            gone.append(file)
    return gone, problems


def sees_whole_machine() -> bool:
    """Whether all processes of this machine are visible, not just a container's."""
    try:
        return os.readlink(f"{PROC}/self/ns/pid") == MACHINE_PIDS  # noqa: PTH115
    except OSError:
        return False


def _candidates(folder: Path, known: Mapping[str, int], now: float) -> Iterator[tuple[int, LeftFile]]:
    """This user's private, old enough files that have such a name or were recorded; each with its device."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                why = _why(entry.name, status.st_ino, known)
                if not why or not stat_bits.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                    continue
                if status.st_mode & 0o022 and os.getuid() != 0:
                    continue  # others may use it, which can't be seen from here
                if now - max(status.st_mtime, status.st_ctime) < FRESH_SECONDS and entry.name not in known:
                    continue
                sure = why in (SEEN, NAMES[0][1])
                yield status.st_dev, LeftFile(entry.path, status.st_size, status.st_ino, why, sure)


def _why(name: str, inode: int, known: Mapping[str, int]) -> str:
    if known.get(name) == inode:
        return SEEN
    return next((why for pattern, why in NAMES if pattern.fullmatch(name)), "")


def _used(wanted: set[tuple[int, int]], folder: Path) -> tuple[set[tuple[int, int]], list[str]]:
    """Which of these files (device, inode) a process has mapped or open, and which processes can't be inspected."""
    inodes = {inode for _, inode in wanted}
    prefix, used, unseen = f"{folder}/", set(), []
    for pid in pids():
        mapped, files = mapped_files(pid), descriptors(pid)
        if mapped is None or files is None:
            if (name := _unseen(pid)) is not None:
                unseen.append(f"pid {pid} ({name})")
            continue
        for file in mapped:
            # By inode: a semaphore is mapped under its original temporary name.
            if file.inode in inodes:
                used |= {one for one in wanted if one == (file.device, file.inode)}
                used |= {one for one in wanted if one[1] == file.inode and file.path.startswith(prefix)}
        for number, link in files.items():
            if link.startswith((prefix, f"{SHARED_MEMORY}/")):
                with contextlib.suppress(OSError):
                    status = os.stat(f"{PROC}/{pid}/fd/{number}")  # noqa: PTH116
                    used.add((status.st_dev, status.st_ino))
    return used, unseen


def _unseen(pid: int) -> str | None:
    """The name of this user's process that can't be inspected; None if it is another user's, ended or harmless."""
    try:
        lines = Path(f"{PROC}/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    if fields.get("State", ["X"])[0] in "ZX" or int(fields["Uid"][0]) != os.getuid():
        return None  # only its owner can use a private file
    name = " ".join(fields.get("Name", []))
    try:
        command = Path(f"{PROC}/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        command = "python"  # assume the worst
    return name if SUSPECT.search(f"{name} {command}") else None
