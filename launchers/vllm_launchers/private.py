"""Private folders and files: created private regardless of the umask, and corrected if they are not.

Standard library only: every package may use it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

FOLDER_MODE, FILE_MODE = 0o700, 0o600
OTHERS = 0o077
SERVERS, REMOVED, DEMOS, CRASHES, ATTACHED = "servers", "removed", "demo", "crashes", "attached"
_OURS = (SERVERS, REMOVED, DEMOS, CRASHES, ATTACHED)
_OUR_FILES = (
    "runs.sqlite",
    "findings.",
    "launch.lock",
    "reports.json",
    "start-times.json",
    "gpu-samples.",
    "gpu-history.",
    "commands.json",
    "hosts.json",
)
"""Name prefixes of the files in a state folder; a folder that contains anything else also serves other purposes."""
LEFTOVER_SECONDS = 3600.0
"""The age at which a temporary file is taken for one whose writer was killed. A write takes seconds at most."""
EXIT_SECONDS = 5.0
"""How long an exiting program waits for files that its daemon threads are writing. A hung file system never answers."""

_writers: set[threading.Thread] = set()
"""Threads that are writing a file."""


def open_standard_streams() -> None:
    """Open closed standard streams on ``/dev/null``: the first step of every program.

    Otherwise the next file opened, such as a lock, would get one of their numbers, and output or a child's streams
    would overwrite it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)


def make_folder(path: Path) -> None:
    """Create a private folder and its missing parents; an existing one is left alone.

    Raises:
        OSError: it can't be created, or something else has its name.
    """
    try:
        path.mkdir(FOLDER_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_folder(path.parent)
        path.mkdir(FOLDER_MODE, exist_ok=True)  # where nothing can be created, as in /proc, this fails again
    path.chmod(FOLDER_MODE)  # a umask can remove the user's own rights


def own_folder(path: Path) -> None:
    """Create a folder like `make_folder`.

    Raises:
        PermissionError: it belongs to another user (even if root could write to it).
        OSError: it can't be created.
    """
    make_folder(path)
    if why := not_ours(path):
        raise PermissionError(errno.EPERM, why, str(path))


def open_file(path: Path, flags: int) -> int:
    """Open a file, created as private if missing; returns the descriptor. Raises OSError."""
    opened = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    close_to_others(opened)
    return opened


def replace_file(path: Path, data: bytes) -> None:
    """Write a private file beside ``path``, sync and rename it; a failure leaves the old file as it was.

    A writer that is killed meanwhile leaves its temporary file; a later one deletes it. A program that exits completes
    the files that its daemon threads are writing.
    """
    _delete_leftovers(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    _writers.add(threading.current_thread())
    try:
        with os.fdopen(open_file(fresh, os.O_WRONLY | os.O_EXCL), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except (OSError, KeyboardInterrupt):
        fresh.unlink(missing_ok=True)
        raise
    finally:
        _writers.discard(threading.current_thread())


@atexit.register
def _finish_writes() -> None:
    """Wait until no thread is writing a file, for a limited time. In a forked child, no other thread is alive."""
    deadline = time.monotonic() + EXIT_SECONDS
    with contextlib.suppress(KeyboardInterrupt):
        while any(thread.is_alive() for thread in list(_writers)) and time.monotonic() < deadline:
            time.sleep(0.01)


def _delete_leftovers(path: Path) -> None:
    """Delete temporary files of ``path`` whose writers were killed. By age, since the writer may be on another host."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(f".{path.name}.") and time.time() - entry.stat().st_mtime > LEFTOVER_SECONDS:
                os.unlink(entry.path)  # noqa: PTH108 - a path object for each record that is written would cost more


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; refuses a folder or pipe in its place without blocking. Raises OSError."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(opened, "rb")


def close_to_others(opened: int) -> None:
    """Remove others' rights on an open file of this user, and restore the owner's rights that a umask removed."""
    with contextlib.suppress(OSError):  # a file system without modes: its folder has to protect it
        found = os.fstat(opened)
        if stat.S_ISREG(found.st_mode) and found.st_mode & 0o777 != FILE_MODE and found.st_uid == os.geteuid():
            os.fchmod(opened, FILE_MODE)


def lock(opened: int, seconds: float) -> None:
    """Lock an open file exclusively; the lock ends with the file.

    Raises:
        OSError: another process has held the lock for longer than ``seconds``, or the file can't be locked.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise OSError(errno.EAGAIN, "another process has been holding its lock") from error
        time.sleep(0.02)


@contextlib.contextmanager
def locked(path: Path, seconds: float, busy: Exception | None = None) -> Iterator[int]:
    """Hold the lock of a file, which is created if missing; yields its descriptor.

    Raises: OSError: it can't be locked, or another process has held the lock for longer than ``seconds``. If ``busy``
    is given, that is raised instead.
    """
    opened = open_file(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        try:
            lock(opened, seconds)
        except OSError as error:
            if busy is None:
                raise
            raise busy from error
        yield opened
    finally:
        os.close(opened)


def _left_open(state: Path, mode: int, mixed: Sequence[str]) -> str:
    """Why a folder that others can access is left so; ``mixed`` are names in it that are not ours."""
    why = f"it also contains {mixed[0]!r}, which is not part of vllm-console" if mixed else "it is a shared folder"
    return (
        f"Other users can access {state} (mode {stat.S_IMODE(mode):04o}). It was left unchanged because {why}. "
        "Choose another with --state"
    )


def check(state: Path, *, fix: bool) -> list[str]:
    """Check that a state folder and everything in it is private; returns sentences about what was not.

    Anything of this user's that is open to others is fixed, unless ``fix`` is False; another user's files are only
    reported. A folder that also contains other things keeps its own mode.
    """
    try:
        if problem := not_ours(state):
            return [problem]
        root = state.stat()
        entries = sorted(os.listdir(state))  # noqa: PTH208 - names are all that is wanted
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"can't read {state}: {error.strerror}"]
    mixed = [name for name in entries if not (name in _OURS or _is_file_of_ours(name))]
    sentences, wide = [], []
    if root.st_mode & OTHERS:
        if mixed or root.st_mode & stat.S_ISVTX:
            sentences.append(_left_open(state, root.st_mode, mixed))
        else:
            wide.append(state)
    theirs = []
    for path, found in _below(state, entries):
        if found.st_uid != os.geteuid():
            theirs.append((path, found.st_uid))
        elif found.st_mode & OTHERS and not stat.S_ISLNK(found.st_mode):
            wide.append(path)
    if theirs:
        path, uid = theirs[0]
        more = f" and {len(theirs) - 1} more" if len(theirs) > 1 else ""
        sentences.append(f"{path}{more} belongs to another user (uid {uid}), inside your state folder: delete it")
    return sentences + (_fixed(state, wide) if fix else _open(state, wide, "not changed while read-only"))


def not_ours(folder: Path) -> str:
    """Why a folder must not be used, as a sentence: it is another user's, their link, or a file. Else empty.

    Raises:
        OSError: it does not exist or can't be read.
    """
    link, status = folder.lstat(), folder.stat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), 0):
        return (
            f"{folder} is a link that another user made (uid {link.st_uid}): choose a folder of your own with --state"
        )
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder; move it away, or choose another with --state"
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user (uid {status.st_uid}): choose a folder of your own with --state"
    return ""


def _below(state: Path, names: Sequence[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """This program's files, by name: those in the folder itself, crash reports, servers and their files."""
    for name in names:
        path = state / name
        if name in _OURS:
            yield from _looked_at(path, {SERVERS: 1, REMOVED: 1, CRASHES: 0, DEMOS: 3, ATTACHED: 1}[name])
        elif _is_file_of_ours(name):
            with contextlib.suppress(OSError):
                yield path, path.lstat()


def _is_file_of_ours(name: str) -> bool:
    return name.removeprefix(".").startswith(_OUR_FILES)  # with a dot: a new file that was being written


def _looked_at(folder: Path, deeper: int) -> Iterator[tuple[Path, os.stat_result]]:
    """A folder and its contents to a maximum depth; follows no links and skips other users' folders."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        yield folder, found
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and deeper:
                    yield from _looked_at(Path(entry.path), deeper - 1)
                else:
                    with contextlib.suppress(OSError):
                        yield Path(entry.path), entry.stat(follow_symlinks=False)


def _fixed(state: Path, wide: Sequence[Path]) -> list[str]:
    left, why = [], ""
    for path in wide:
        try:
            _narrow(path, follow=path == state)
        except FileNotFoundError:
            continue  # it was deleted
        except OSError as error:
            left.append(path)
            why = why or f"can't change permissions: {error.strerror}"
    done = [path for path in wide if path not in left]
    verb = "was" if len(done) == 1 or done[:1] == [state] else "were"
    changed = [f"{_few(state, done)} {verb} open to other users; fixed, now private"] if done else []
    return changed + _open(state, left, why)


def _open(state: Path, wide: Sequence[Path], why: str) -> list[str]:
    return [f"{_few(state, wide)}: open to other users ({why}); fix it with: chmod -R go= {state}"] if wide else []


def _few(state: Path, paths: Sequence[Path]) -> str:
    if paths[:1] == [state] or len(paths) == 1:
        return str(paths[0])
    return f"{len(paths)} files in {state} ({paths[0].relative_to(state)} and others)"


def _narrow(path: Path, *, follow: bool) -> None:
    """Remove all of others' rights on this user's file or folder. Raises OSError."""
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        found = os.fstat(opened)
        if found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
            mode = FOLDER_MODE if stat.S_ISDIR(found.st_mode) else FILE_MODE
            Path(f"/proc/self/fd/{opened}").chmod(mode)
    finally:
        os.close(opened)


# -- this program's folders of a user, by the XDG Base Directory Specification ----------------------------------------


def user_folder(variable: str, default: str, environment: Mapping[str, str] = os.environ) -> Path:
    """``$VARIABLE/vllm-console``, else ``~/DEFAULT/vllm-console``; a relative path is ignored, as XDG requires."""
    base = environment.get(variable, "")
    return (Path(base) if base.startswith("/") else Path.home() / default) / "vllm-console"
