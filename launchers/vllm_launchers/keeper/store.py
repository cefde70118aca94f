"""Folders, locks and records on disk: one folder per server, its user's alone.

``<root>/servers/<name>/`` (mode 0700) holds ``record.json``, ``keeper.lock``, ``keeper.sock``, ``server.pipe``,
``server.log`` (and ``.1``, ``.2``, …) with ``log.position``, ``keeper.log``, ``companion.log`` and whatever a companion
keeps there.

Races, and what settles them:

- Two consoles take one name: both make the folder, one gets the lock. Who holds the lock and finds no record owns it.
- A folder is removed while somebody waits for its lock: the waiter finds that the path no longer leads to the file
  it has locked, and opens anew.
- A reader meets a writer: a record is replaced by rename, so a reader sees the old one or the new one, whole.
- A record cannot be written (disk full, quota, read-only): its keeper goes on in memory and marks the file as lagging,
  by a lock on it; readers then ask the keeper. It goes on trying, and stays until the file is true again.
- `lock_is_held` must take the lock for an instant to learn whether it is free; takers therefore try for a moment.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat as stat_bits
import time
from collections.abc import Mapping
from pathlib import Path

from vllm_launchers.keeper import codec
from vllm_launchers.keeper.errors import BadNameError, NewerRecordError, NoSuchServerError, NotOursError, RecordError
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.private import make_folder, open_file

STATE_VARIABLE = "VLLMCONSOLE_STATE"
"""Overrides where records live. Not in the ``VLLM_`` namespace: vLLM warns about names there that it does not know."""
RECORD = "record.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
LOCK_PATIENCE = 0.3
LONGEST_RECORD = 16 << 20
"""Bytes: of a longer one nothing is read. A record with ten generations has some 50 KB."""

Stamp = tuple[int, int, int]
"""Modification time in ns, inode and size of ``record.json``: differs whenever the record was written."""


def default_root(environment: Mapping[str, str] = os.environ) -> Path:
    """``$VLLMCONSOLE_STATE``, else ``$XDG_STATE_HOME/vllm-console``, else ``~/.local/state/vllm-console``."""
    if chosen := environment.get(STATE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    state_home = environment.get("XDG_STATE_HOME", "")
    base = Path(state_home) if state_home.startswith("/") else Path.home() / ".local" / "state"
    return base / "vllm-console"


def check_name(name: str) -> str:
    """Return the name; raises `BadNameError` where it could not be a server's."""
    if not NAME.fullmatch(name):
        raise BadNameError(
            f"{name!r} cannot be a server's name: use up to 63 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return name


def servers_folder(root: Path) -> Path:
    """Where the servers' folders are."""
    return root / "servers"


def server_folder(root: Path, name: str) -> Path:
    """The folder of one server, whether it exists or not. Raises `BadNameError`."""
    return servers_folder(root) / check_name(name)


def prepare(root: Path, name: str) -> Path:
    """Make the folder of a server with all above it, private, and return it. Raises `NotOursError`."""
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
    """Raise `NotOursError` unless a folder, or what a link leads to, is this user's. A missing one is fine."""
    try:
        link, status = path.lstat(), path.stat()
    except FileNotFoundError:
        return
    except PermissionError as error:
        raise NotOursError(f"{path} cannot be looked into: it belongs to another user") from error
    if stat_bits.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), 0):
        raise NotOursError(f"{path} is a link that another user made (uid {link.st_uid})")
    if not stat_bits.S_ISDIR(status.st_mode):
        raise NotOursError(f"{path} is not a folder; move it away, or set {STATE_VARIABLE} to another place")
    if status.st_uid != os.geteuid():
        raise NotOursError(
            f"{path} belongs to another user (uid {status.st_uid}); set {STATE_VARIABLE} to a folder of your own"
        )


def check_own_folder(folder: Path) -> None:
    """Raise `NotOursError` unless a server's folder is a folder of this user, and no link to one elsewhere."""
    if folder.is_symlink():
        raise NotOursError(f"{folder} is a link: what it leads to may be another server's; delete the link")
    check_ours(folder)


def read_record(folder: Path) -> ServerRecord:
    """Read the record of a server. Raises `NoSuchServerError`, `RecordError`, `NotOursError`."""
    path = folder / RECORD
    check_own_folder(folder)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe in its place must not hold us
    except FileNotFoundError as error:
        raise NoSuchServerError(f"there is no server named {folder.name}") from error
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_uid != os.geteuid():
            raise NotOursError(f"{path} belongs to another user")
        data = file.read(LONGEST_RECORD + 1)
    try:
        if len(data) > LONGEST_RECORD:
            raise RecordError(f"is larger than {LONGEST_RECORD >> 20} MiB")
        record = codec.loads(data)
        if record.name != folder.name:
            raise RecordError(f"is the record of a server named {record.name!r}: it was copied or moved here")
        return record
    except RecordError as error:
        # Whether a server still runs cannot be told from such a record, so nothing is cleaned up by itself.
        way_out = "" if isinstance(error, NewerRecordError) else f"; if its server has ended, delete {folder}"
        raise type(error)(f"{path} {error}{way_out}") from error


def write_record(folder: Path, record: ServerRecord) -> None:
    """Replace the record in one step, on disk before it is seen. Raises OSError (disk full, folder gone)."""
    replace_file(folder / RECORD, codec.dumps(record))


def replace_file(path: Path, data: bytes) -> None:
    """Write, sync and rename; a failure leaves the old file as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sweep(folder: Path) -> None:
    """Delete what a writer left that died in the middle; only for the holder of the lock."""
    for path in folder.glob(".record.json.*"):
        path.unlink(missing_ok=True)


def stamp(folder: Path) -> Stamp | None:
    """What changes whenever the record does; None where there is no record. Never twice the same while it lags."""
    try:
        status = (folder / RECORD).stat()
    except OSError:
        return None
    if lags(folder):
        return (time.monotonic_ns(), 0, 0)
    return (status.st_mtime_ns, status.st_ino, status.st_size)


def mark_lagging(folder: Path) -> int | None:
    """Mark the record's file as behind what its keeper knows; returns the mark, to be closed, or None if it must wait.

    The mark is a lock on the file: it needs no room on a full disk, ends with its keeper, and is gone as soon as
    another file takes the place of this one.
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
    except OSError:  # a reader looks at it this instant
        os.close(fd)
        return None
    return fd


def lags(folder: Path) -> bool:
    """Whether a keeper has marked the record's file as behind what it knows."""
    return _locked(folder / RECORD)


def take_lock(folder: Path, patience: float = LOCK_PATIENCE) -> int | None:
    """Take the keeper's lock; returns its descriptor, or None where a keeper (or another starter) holds it.

    The lock belongs to the open file, so a child that inherits the descriptor goes on holding it.
    """
    path = folder / "keeper.lock"
    deadline = time.monotonic() + patience
    while True:
        fd = open_file(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _leads_to(path, fd):
                return fd
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(fd)
                raise
        os.close(fd)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)


def lock_is_held(folder: Path) -> bool:
    """Whether a keeper lives for this folder."""
    return _locked(folder / "keeper.lock")


def _locked(path: Path) -> bool:
    """Whether somebody holds a file's lock for himself alone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return True
        raise
    finally:
        os.close(fd)
    return False


def _leads_to(path: Path, fd: int) -> bool:
    """Whether a path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
