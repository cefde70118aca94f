"""Folders and files for oneself alone: made so whatever the file mode mask says, and mended where they are not.

Standard library only: every room may use it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER_MODE, FILE_MODE = 0o700, 0o600
OTHERS = 0o077
SERVERS, DEMOS, CRASHES = "servers", "demo", "crashes"
_OURS = (SERVERS, DEMOS, CRASHES)
_OUR_FILES = ("runs.sqlite", "findings.", "launch.lock", "reports.json", "start-times.json", "gpu-looks.")
"""How the names begin of what lies in a state folder; one that holds anything else is somebody's for more than this."""


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for oneself alone; one that exists stays as it is.

    Raises:
        OSError: it cannot be made, or something else has its name.
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
        make_folder(path)
        return
    path.chmod(FOLDER_MODE)  # a mask can take rights of one's own


def own_folder(path: Path) -> None:
    """Make a folder like `make_folder`.

    Raises:
        PermissionError: it is another user's, into which root could write all the same.
        OSError: it cannot be made.
    """
    make_folder(path)
    if why := not_ours(path):
        raise PermissionError(errno.EPERM, why, str(path))


def open_file(path: Path, flags: int) -> int:
    """Open a file that is made for oneself alone where it is not there; returns the descriptor. Raises OSError."""
    opened = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    close_to_others(opened)
    return opened


def close_to_others(opened: int) -> None:
    """Take what others may do with an open file of one's own from them, and give oneself what a mask took."""
    with contextlib.suppress(OSError):  # a file system without modes: then its folder has to do
        found = os.fstat(opened)
        if stat.S_ISREG(found.st_mode) and found.st_mode & 0o777 != FILE_MODE and found.st_uid == os.geteuid():
            os.fchmod(opened, FILE_MODE)


def lock(opened: int, seconds: float) -> None:
    """Take the lock of an open file for oneself alone; it goes with the file.

    Raises:
        OSError: another process has held it for longer than ``seconds``, or it cannot be locked.
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


def check(state: Path, *, mend: bool) -> list[str]:
    """See that a state folder and all in it is this user's alone; what was not, in sentences for people.

    What is this user's and open to others is mended, unless ``mend`` is False; what is another user's is only told.
    A folder that holds other things besides is never given other rights itself.
    """
    try:
        if told := not_ours(state):
            return [told]
        root = state.stat()
        entries = sorted(os.listdir(state))  # noqa: PTH208 - names are all that is wanted
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{state} cannot be looked into: {error.strerror}"]
    mixed = [name for name in entries if not (name in _OURS or _is_file_of_ours(name))]
    sentences, wide = [], []
    if root.st_mode & OTHERS:
        if mixed or root.st_mode & stat.S_ISVTX:
            why = f"it holds {mixed[0]!r}, which is not vllm-console's" if mixed else "it is a folder for everybody"
            mode = f"{stat.S_IMODE(root.st_mode):04o}"
            sentences.append(
                f"{state} can be entered by others (mode {mode}) and is left so, for {why}: choose another with --state"
            )
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
    return sentences + (_mended(state, wide) if mend else _told(state, wide, "nothing is mended while read-only"))


def not_ours(state: Path) -> str:
    """Why a state folder must not be used, in a sentence: it is another user's, or a link that one made. Else empty.

    Raises:
        OSError: it is not there, or cannot be looked at.
    """
    link = state.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), 0):
        return f"{state} is a link that another user made (uid {link.st_uid}): choose a folder of your own with --state"
    if (owner := state.stat().st_uid) != os.geteuid():
        return f"{state} belongs to another user (uid {owner}): choose a folder of your own with --state"
    return ""


def _below(state: Path, names: Sequence[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """What is ours by its name: files of the folder itself, reports of crashes, servers and what lies in theirs."""
    for name in names:
        path = state / name
        if name in _OURS:
            yield from _looked_at(path, {SERVERS: 1, CRASHES: 0, DEMOS: 3}[name])
        elif _is_file_of_ours(name):
            with contextlib.suppress(OSError):
                yield path, path.lstat()


def _is_file_of_ours(name: str) -> bool:
    return name.removeprefix(".").startswith(_OUR_FILES)  # with a dot: a new one that was being written


def _looked_at(folder: Path, deeper: int) -> Iterator[tuple[Path, os.stat_result]]:
    """A folder and what is in it, so many folders down; never through a link, nor into what is another user's."""
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


def _mended(state: Path, wide: Sequence[Path]) -> list[str]:
    left, why = [], ""
    for path in wide:
        try:
            _narrow(path, follow=path == state)
        except FileNotFoundError:
            continue  # gone meanwhile
        except OSError as error:
            left.append(path)
            why = why or f"it cannot be mended: {error.strerror}"
    done = [path for path in wide if path not in left]
    told = [f"others could look into {_few(state, done)}: mended, it is yours alone now"] if done else []
    return told + _told(state, left, why)


def _told(state: Path, wide: Sequence[Path], why: str) -> list[str]:
    return [f"others can look into {_few(state, wide)} ({why}); mend it with: chmod -R go= {state}"] if wide else []


def _few(state: Path, paths: Sequence[Path]) -> str:
    if paths[:1] == [state] or len(paths) == 1:
        return str(paths[0])
    return f"{len(paths)} files in {state}, such as {paths[0].relative_to(state)}"


def _narrow(path: Path, *, follow: bool) -> None:
    """Take all rights on a file or folder of one's own from others. Raises OSError."""
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        found = os.fstat(opened)
        if found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
            mode = FOLDER_MODE if stat.S_ISDIR(found.st_mode) else FILE_MODE
            Path(f"/proc/self/fd/{opened}").chmod(mode)
    finally:
        os.close(opened)
