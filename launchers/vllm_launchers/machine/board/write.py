"""Writes one's own page of the board: replaced whole, under a lock, and nobody else's file is ever touched."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_launchers.machine.board.model import MOST_ENTRIES, BoardError, Page, dump
from vllm_launchers.machine.board.read import is_running, open_folder, read_page
from vllm_launchers.private import close_to_others

LOCK_SECONDS = 3.0
"""So long another command of the same person may take to write."""


def change_page(folder: Path, change: Callable[[Page], Page], now: float) -> Page:
    """Change one's own page, and leave out of it what has expired and which servers have ended; gives what stands now.

    An empty page is taken down.

    Raises:
        BoardError: the board is not there, not safe or cannot be written; one sentence.
    """
    opened, unsafe = open_folder(folder)
    try:
        if unsafe:
            raise BoardError(unsafe)
        with _locked(folder, opened):
            before = _own(opened, now)
            after = _holding(change(_holding(before, now)), now)
            if after != before:
                _write(opened, after)
            return after
    except OSError as error:
        raise BoardError(
            f"{folder}: your page of the board cannot be written: {os.strerror(error.errno or 0)}"
        ) from error
    finally:
        os.close(opened)


def _own(folder: int, now: float) -> Page | None:
    """One's page as it stands; None where it is there and of no use, so that it is written anew.

    Raises:
        BoardError: somebody else's file stands in its place.
    """
    uid = os.getuid()
    try:
        return read_page(folder, uid, now)[0]
    except FileNotFoundError:
        return Page()
    except BoardError as error:
        status = os.stat(f"{uid}.json", dir_fd=folder, follow_symlinks=False)
        if status.st_uid != uid:
            raise BoardError(f"{uid}.json on the board {error}: it stands where yours would") from error
        return None


def _holding(page: Page | None, now: float) -> Page:
    """What of a page holds now, and no more than others will read."""
    if page is None:
        return Page()
    uid = os.getuid()
    claims = [one for one in page.claims if one.until > now]
    servers = [one for one in page.servers if is_running(one.pid, one.start_time, uid) is not False]
    return Page(tuple(claims[-MOST_ENTRIES:]), tuple(servers[-MOST_ENTRIES:]))


def _write(folder: int, page: Page) -> None:
    name = f"{os.getuid()}.json"
    if not page.claims and not page.servers:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return
    fresh = f".{name}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # of an earlier process of this number that was killed
        os.unlink(fresh, dir_fd=folder)
    opened = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(opened, "wb") as file:
            os.fchmod(opened, 0o644)  # whatever the umask: it is for others to read
            file.write(dump(page))
            file.flush()
            os.fsync(opened)
        os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh, dir_fd=folder)
        raise


@contextlib.contextmanager
def _locked(folder: Path, opened: int) -> Iterator[None]:
    """Hold the lock of one's own page, so that two commands of one person lose nothing of each other's."""
    name = f".{os.getuid()}.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(name, flags, 0o600, dir_fd=opened)
    close_to_others(lock)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            if time.monotonic() > deadline:
                raise BoardError(f"{folder / name} is held by another command of yours; try again")
            time.sleep(0.02)
        yield
    finally:
        os.close(lock)
