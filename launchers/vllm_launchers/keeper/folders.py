"""Folders, locks and records on disk: one folder per server, private to its user.

``<root>/servers/<name>/`` (mode 0700) holds ``record.json``, ``keeper.lock``, ``keeper.sock``, ``server.output``,
``server.log`` (and ``.1``, ``.2``, …) with ``log.position``, ``keeper.log``, ``sidecar.log`` and whatever a sidecar
keeps there.

Races, and how they are resolved:

- Two consoles use the same name: both create the folder, and one gets the lock. Whoever holds the lock and finds no
  record owns the name.
- A folder is removed while somebody waits for its lock: the waiter notices that the path no longer leads to the file it
  has locked, and opens it again.
- A read during a write: a record is replaced by a rename, so a reader sees a complete old or new one.
- A record can't be written (disk full, quota, read-only): its keeper continues in memory and marks the file as stale by
  locking it; readers then ask the keeper. The keeper keeps trying, and stays until the file is up to date.
- `lock_is_held` has to take the lock for an instant to see whether it is free, so takers retry for a moment.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat as stat_bits
import time
from collections.abc import Mapping
from pathlib import Path

from vllm_launchers.keeper import wire
from vllm_launchers.keeper.errors import (
    BadNameError,
    KeeperError,
    NewerRecordError,
    NoSuchServerError,
    NotOursError,
    RecordError,
)
from vllm_launchers.keeper.files import LOCK, RECORD
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.private import make_folder, not_ours, open_file, replace_file, user_folder

STATE_VARIABLE = "VLLMCONSOLE_STATE"
"""Overrides the records folder. Not named ``VLLM_…``, because vLLM warns about unknown names with that prefix."""
NAME = lazy_pattern(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
LOCK_TIMEOUT = 0.3
LONGEST_RECORD = 16 << 20
"""Maximum bytes of a record to read. A record with ten generations is about 50 KB."""

Stamp = tuple[int, int, int]
"""Modification time in ns, inode and size of ``record.json``: changes with every write."""


def default_root(environment: Mapping[str, str] = os.environ) -> Path:
    """``$VLLMCONSOLE_STATE``, else ``$XDG_STATE_HOME/vllm-console``, else ``~/.local/state/vllm-console``."""
    if chosen := environment.get(STATE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    return user_folder("XDG_STATE_HOME", ".local/state", environment)


def command_text(root: Path, words: str) -> str:
    """A quoted command line for this state folder: ``'vllm-console --state /data leftovers'``."""
    import shlex

    option = "" if root.resolve() == default_root().resolve() else f" --state {shlex.quote(str(root))}"
    return f"'vllm-console{option} {words}'"


def check_name(name: str) -> str:
    """Return the name. Raises `BadNameError` if it is not valid for a server."""
    if not NAME.fullmatch(name):
        raise BadNameError(
            f"invalid server name {name!r}: use up to 63 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    return name


def servers_folder(root: Path) -> Path:
    """The folder of all servers' folders."""
    return root / "servers"


def server_folder(root: Path, name: str) -> Path:
    """The folder of one server, whether it exists or not. Raises `BadNameError`."""
    return servers_folder(root) / check_name(name)


def prepare(root: Path, name: str) -> Path:
    """Create a server's folder and its parents, private to this user, and return it. Raises `NotOursError`."""
    folder = server_folder(root, name)
    check_ours(root)
    make_folder(root)
    check_ours(root)
    for path in (servers_folder(root), folder):
        make_folder(path)
        check_ours(path)
        if stat_bits.S_IMODE(path.stat().st_mode) != 0o700:
            path.chmod(0o700)
    return folder


def check_ours(path: Path) -> None:
    """Raise `NotOursError` unless a folder, or the target of a link, belongs to this user. A missing one is fine."""
    try:
        why = not_ours(path)
    except FileNotFoundError:
        return
    except PermissionError:
        why = f"no access to {path}: it belongs to another user"
    except NotADirectoryError as error:
        why = f"can't use {path}: {error.strerror}; choose another with --state"
    if why:
        raise NotOursError(why)


def check_own_folder(folder: Path) -> None:
    """Raise `NotOursError` unless a server's folder is a real folder of this user, not a link."""
    if folder.is_symlink():
        raise NotOursError(f"{folder} is a link, possibly to another server's folder; delete the link")
    check_ours(folder)


def read_record(folder: Path) -> ServerRecord:
    """Read the record of a server. Raises `NoSuchServerError`, `RecordError`, `NotOursError`."""
    path = folder / RECORD
    check_own_folder(folder)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe in its place must not block
    except FileNotFoundError as error:
        raise NoSuchServerError(f"no server named {folder.name}") from error
    except OSError as error:
        raise RecordError(f"can't read {path}: {error.strerror}") from error
    status = os.fstat(fd)
    if not stat_bits.S_ISREG(status.st_mode):
        os.close(fd)
        raise RecordError(f"can't read {path}: it is not a regular file; {_way_out(folder)}")
    with os.fdopen(fd, "rb") as file:
        if status.st_uid != os.geteuid():
            raise NotOursError(f"{path} belongs to another user")
        data = file.read(LONGEST_RECORD + 1)
    try:
        if len(data) > LONGEST_RECORD:
            raise RecordError(f"is larger than {LONGEST_RECORD >> 20} MiB")
        record = wire.loads(data)
        if record.name != folder.name:
            raise RecordError(f"is the record of a server named {record.name!r}: it was copied or moved here")
        return record
    except RecordError as error:
        # Such a record does not show whether its server still runs, so nothing is cleaned up automatically.
        hint = "" if isinstance(error, NewerRecordError) else f"; {_way_out(folder)}"
        raise type(error)(f"{path} {error}{hint}") from error


def _way_out(folder: Path) -> str:
    """What to do about an unreadable record. A keeper rewrites it from its own copy."""
    if lock_is_held(folder):
        return "its keeper writes it again within seconds"
    ends = command_text(folder.parent.parent, "leftovers --remove")
    return f"it has no keeper: end its remaining processes with {ends}, then delete {folder}"


def write_record(folder: Path, record: ServerRecord) -> None:
    """Replace the record atomically, after syncing it to disk. Raises OSError (disk full, folder gone)."""
    replace_file(folder / RECORD, wire.dumps(record))


def sweep(folder: Path) -> None:
    """Delete temporary files of writers that died midway; only for the folder's one keeper."""
    for path in folder.glob(".record.json.*"):
        path.unlink(missing_ok=True)


def stamp(folder: Path) -> Stamp | None:
    """A value that changes whenever the record does; None if there is no record. While the record is stale, each value
    is different."""
    path = f"{folder}/{RECORD}"  # a string is cheap: a console calls this every second
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    if _locked(path):
        return (time.monotonic_ns(), 0, 0)
    return (status.st_mtime_ns, status.st_ino, status.st_size)


def has_record(folder: Path | str) -> bool:
    """Whether the folder has a record."""
    return os.path.exists(f"{folder}/{RECORD}")  # noqa: PTH110 - as above


def mark_stale(folder: Path) -> int | None:
    """Mark the record's file as stale; returns the mark, to be closed, or None if it can't be marked now.

    The mark is a lock on the file: it needs no space on a full disk, ends with its keeper, and disappears when the file
    is replaced.
    """
    path = folder / RECORD
    try:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # a read-only file system
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a reader is checking it at this moment
        os.close(fd)
        return None
    return fd


def is_stale(folder: Path) -> bool:
    """Whether a keeper has marked the record's file as stale."""
    return _locked(folder / RECORD)


def take_lock(folder: Path, timeout: float = LOCK_TIMEOUT) -> int | None:
    """Take the keeper's lock; returns its descriptor, or None if a keeper (or another starter) holds it.

    The lock belongs to the open file, so a child that inherits the descriptor continues to hold it.
    """
    path = folder / LOCK
    deadline = time.monotonic() + timeout
    while True:
        fd = _above_standard(open_file(path, os.O_RDWR | os.O_NOFOLLOW))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if leads_to(path, fd):
                return fd
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(fd)
                raise
        os.close(fd)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)


def _above_standard(fd: int) -> int:
    """The same file as a descriptor above 2, because a child's standard streams replace the lower ones."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def lock_is_held(folder: Path) -> bool:
    """Whether a keeper holds this folder's lock. A keeper that lost its lock may still be alive (`folder_claim`)."""
    return _locked(folder / LOCK)


def _locked(path: Path | str) -> bool:
    """Whether a process holds an exclusive lock on a file. Raises `KeeperError` if the file system has no locks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return True
        raise KeeperError(f"can't check the lock of {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    return False


def leads_to(path: Path, fd: int) -> bool:
    """Whether a path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
