"""Reads the board: every person's file, trusting nothing but who owns it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vllm_launchers.machine.board.model import MOST_BYTES, Announced, Board, BoardError, Claim, Page, parse
from vllm_launchers.machine.ports import user_name
from vllm_launchers.procfs import PROC
from vllm_launchers.procfs import stat as process_stat

PAGE = re.compile(r"(0|[1-9][0-9]{0,9})\.json")
"""The name of a person's file: their uid."""

MOST_PAGES = 512
MOST_NOTICES = 20


def open_folder(folder: Path) -> tuple[int, str]:
    """Open the board's folder; its descriptor, and why nothing should be written there, or nothing.

    Raises:
        BoardError: it is not there, or cannot be looked into.
    """
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BoardError(
            f"{folder}: there is no such board here ({os.strerror(error.errno or 0)}); "
            f"whoever looks after this machine makes it with: install -d -m 1777 {folder}"
        ) from error
    status = os.fstat(opened)
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return opened, (
            f"{folder} is not safe: anybody may delete what others write there, so it is only read; "
            f"mend it with: chmod 1777 {folder}"
        )
    return opened, ""


def read_board(folder: Path, now: float) -> Board:
    """All that holds at ``now`` (Unix seconds). What is no person's own file is left aside, with a sentence.

    Raises:
        BoardError: the folder is not there, or cannot be looked into.
    """
    opened, unsafe = open_folder(folder)
    claims: list[Claim] = []
    servers: list[Announced] = []
    notices = [unsafe] if unsafe else []
    try:
        for name in _names(opened, notices):
            found = PAGE.fullmatch(name)
            if found is None:
                notices.append(f"{folder / name} is nobody's page and is left aside")
                continue
            uid = int(found[1])
            try:
                page, problems = read_page(opened, uid, now)
            except FileNotFoundError:
                continue  # its owner has just taken it down
            except BoardError as error:
                notices.append(f"{folder / name} is left aside: it {error}")
                continue
            user = user_name(uid)
            notices += [f"{folder / name}: {text}; that is left aside" for text in problems]
            claims += [replace(one, uid=uid, user=user) for one in page.claims]
            servers += _theirs(page, uid, user)
    finally:
        os.close(opened)
    if len(notices) > MOST_NOTICES:
        notices = [*notices[:MOST_NOTICES], f"and {len(notices) - MOST_NOTICES} more"]
    claims.sort(key=lambda one: (one.since, one.uid))
    servers.sort(key=lambda one: (one.user, one.name))
    return Board(folder, now, tuple(claims), tuple(servers), tuple(notices), unsafe)


def read_page(folder: int, uid: int, now: float) -> tuple[Page, list[str]]:
    """One person's page out of the open ``folder``, and what of it is left aside.

    Raises:
        BoardError: it is somebody else's, no plain file, too large, or no page.
        FileNotFoundError: there is none.
    """
    name = f"{uid}.json"
    try:
        # Neither a link nor a pipe can make this read, or wait for, anything else.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BoardError(f"cannot be read: {os.strerror(error.errno or 0)}") from error
    status = os.fstat(opened)
    if not stat.S_ISREG(status.st_mode):
        os.close(opened)
        raise BoardError("is no plain file")
    with os.fdopen(opened, "rb") as file:
        if status.st_uid != uid:
            raise BoardError(f"belongs to {user_name(status.st_uid)}, not to {user_name(uid)}")
        if status.st_nlink != 1:
            raise BoardError("has a second name, so it may be another file of theirs")
        try:
            data = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise BoardError(f"cannot be read: {os.strerror(error.errno or 0)}") from error
    if len(data) > MOST_BYTES:
        raise BoardError(f"is larger than {MOST_BYTES // 1024} KiB")
    return parse(data, now)


def is_running(pid: int, start_time: int, uid: int) -> bool | None:
    """Whether that very process is there and belongs to ``uid``; None where others' processes cannot be seen."""
    found = process_stat(pid)
    if found is None:
        hidden = uid != os.getuid() and process_stat(1) is None  # /proc mounted with hidepid
        return None if hidden else False
    try:
        owner = os.stat(f"{PROC}/{pid}").st_uid  # noqa: PTH116 - as all of /proc is read
    except OSError:
        return False
    return found.start_time == start_time and owner == uid


def _names(folder: int, notices: list[str]) -> Iterator[str]:
    """What lies in the folder but for hidden files, sorted, and not without end."""
    with os.scandir(folder) as entries:
        names = []
        for number, entry in enumerate(entries):
            if number >= 8 * MOST_PAGES:
                break
            if not entry.name.startswith("."):
                names.append(entry.name)
    if len(names) > MOST_PAGES:
        notices.append(f"more than {MOST_PAGES} files lie on the board: the rest is left aside")
    yield from sorted(names)[:MOST_PAGES]


def _theirs(page: Page, uid: int, user: str) -> Iterator[Announced]:
    """The servers of a page that run."""
    for one in page.servers:
        seen = is_running(one.pid, one.start_time, uid)
        if seen is not False:
            yield replace(one, uid=uid, user=user, seen=seen)
