"""Reads and writes the board: one file per user, each trusted only for its owner."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from vllm_launchers.errors import OperationError
from vllm_launchers.host.gpu.host import MOST_GPUS
from vllm_launchers.host.ports import user_name
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.private import close_to_others, lock
from vllm_launchers.procfs import PROC
from vllm_launchers.procfs import stat as process_stat
from vllm_launchers.typed_decoding import convert

T = TypeVar("T")

VERSION = 1
MOST_BYTES = 256 * 1024
"""Larger files are not read."""

MOST_ENTRIES = 32
"""Maximum claims, and maximum servers, of one user on the board; that many always fit in a file."""

LAST_GPU = 9999
MOST_TEXT = 200
SKEW_SECONDS = 300.0
"""How far in the future the start of an entry may lie, since clocks are sometimes set back."""

LONGEST_SECONDS = 14 * 86_400.0
"""The longest valid claim."""


class BoardError(OperationError):
    """The board cannot be used as requested; the message is one sentence."""


class Claim(msgspec.Struct, frozen=True):
    """GPUs that a user claims, until when (Unix seconds) and why. Advisory, not a lock."""

    gpus: tuple[int, ...]
    since: float
    until: float
    why: str = ""
    uid: int = -1
    user: str = ""


class Announced(msgspec.Struct, frozen=True):
    """A server that a user announces. ``pid`` and ``start_time`` (clock ticks since boot) are its keeper's, which lives
    as long as the server is up or will be restarted. ``seen``: whether that process exists and is theirs, None if this
    user can't see others' processes. ``open``: others can use the server, because it listens without an API key.
    """

    name: str
    preset: str
    model: str
    engine: str
    gpus: tuple[int, ...]
    port: int
    since: float
    pid: int
    start_time: int
    uid: int = -1
    user: str = ""
    seen: bool | None = True
    open: bool = False


class BoardPage(msgspec.Struct, frozen=True):
    """One user's entries on the board."""

    claims: tuple[Claim, ...] = ()
    servers: tuple[Announced, ...] = ()


class Board(msgspec.Struct, frozen=True):
    """All valid entries at one moment (``at``, Unix seconds), earliest claims first. ``notices``: skipped entries and
    problems with the folder, one sentence each. ``unsafe``: why nothing is written to the board; empty if all is well.
    """

    folder: Path
    at: float
    claims: tuple[Claim, ...] = ()
    servers: tuple[Announced, ...] = ()
    notices: tuple[str, ...] = msgspec.field(default=())
    unsafe: str = ""


Gpus = Annotated[tuple[Annotated[int, Meta(ge=0, le=LAST_GPU)], ...], Meta(max_length=MOST_GPUS)]
Moment = Annotated[datetime, Meta(tz=True)]


class _ClaimEntry(msgspec.Struct, kw_only=True):
    gpus: Gpus
    since: Moment
    until: Moment
    why: str = ""


class _ServerEntry(msgspec.Struct, kw_only=True):
    name: str
    preset: str = ""
    model: str = ""
    engine: str = ""
    gpus: Gpus
    port: Annotated[int, Meta(ge=0, le=65_535)]
    since: Moment
    pid: Annotated[int, Meta(ge=0, le=1 << 31)]
    start_time: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    open: bool = False


def dump(page: BoardPage) -> bytes:
    """A page as the content of its file."""
    claims = [
        _ClaimEntry(gpus=one.gpus, since=utc(one.since), until=utc(one.until), why=safe_line(one.why))
        for one in page.claims
    ]
    servers = [
        _ServerEntry(
            name=safe_line(one.name),
            preset=safe_line(one.preset),
            model=safe_line(one.model),
            engine=safe_line(one.engine),
            gpus=one.gpus,
            port=one.port,
            since=utc(one.since),
            pid=one.pid,
            start_time=one.start_time,
            open=one.open,
        )
        for one in page.servers
    ]
    document = {"version": VERSION, "claims": claims, "servers": servers}
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def parse_claims(data: bytes, now: float) -> tuple[BoardPage, list[str]]:
    """Parse a user's file as of ``now``; also returns reasons for skipped parts. Expired claims are dropped silently.

    Raises:
        BoardError: the file as a whole is invalid.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BoardError("is not JSON") from error
    if not isinstance(document, dict) or not isinstance(document.get("version"), int):
        raise BoardError("is not a page of the board")
    if document["version"] > VERSION:
        raise BoardError("was written by a newer vllm-console")
    problems: list[str] = []
    claims = _each(document, "claims", lambda one: _claim(convert(one, _ClaimEntry), now), problems)
    servers = _each(document, "servers", lambda one: _server(convert(one, _ServerEntry), now), problems)
    return BoardPage(tuple(one for one in claims if one.until > now), tuple(servers)), problems


def utc(at: float) -> datetime:
    """Unix seconds as a timestamp for the board, in whole seconds."""
    return datetime.fromtimestamp(int(at), UTC)


def format_until(until: float, now: float) -> str:
    """An end time in local time: ``18:00``, ``Mon 18:00`` within a week, else with the date."""
    there, here = time.localtime(until), time.localtime(now)
    if there[:3] == here[:3]:
        return time.strftime("%H:%M", there)
    return time.strftime("%a %H:%M" if until - now < 6 * 86_400 else "%b %d %H:%M", there)


def format_claim(claim: Claim, now: float, *, mine: bool = False) -> str:
    """``claimed until 18:00 by anna: training``."""
    why = f": {claim.why}" if claim.why else ""
    return f"claimed until {format_until(claim.until, now)} by {'you' if mine else claim.user}{why}"


def safe_line(text: str) -> str:
    """Text from other users without terminal escapes, as one line of limited length."""
    return "".join(c if c.isprintable() else " " for c in text[: MOST_TEXT * 4])[:MOST_TEXT].strip()


def _each(document: Mapping[str, Any], name: str, read: Callable[[object], T], problems: list[str]) -> list[T]:
    entries = document.get(name, [])
    if not isinstance(entries, list):
        problems.append(f"its {name} are not a list")
        return []
    found = []
    for number, entry in enumerate(entries[:MOST_ENTRIES], 1):
        try:
            found.append(read(entry))
        except (msgspec.ValidationError, ValueError, BoardError) as error:
            problems.append(f"number {number} of its {name}: {error}")
    if len(entries) > MOST_ENTRIES:
        problems.append(f"of its {len(entries)} {name} {MOST_ENTRIES} are read")
    return found


def _claim(entry: _ClaimEntry, now: float) -> Claim:
    since, until = _begun(entry.since, now), entry.until.timestamp()
    if not entry.gpus:
        raise BoardError("it names no GPU")
    if until > now + LONGEST_SECONDS + SKEW_SECONDS:
        raise BoardError(f"it holds for longer than {LONGEST_SECONDS / 86_400:.0f} days")
    return Claim(tuple(sorted({*entry.gpus})), since, until, safe_line(entry.why))


def _server(entry: _ServerEntry, now: float) -> Announced:
    name = safe_line(entry.name)
    if not name:
        raise BoardError("it has no name")
    return Announced(
        name,
        safe_line(entry.preset),
        safe_line(entry.model),
        safe_line(entry.engine),
        tuple(sorted({*entry.gpus})),
        entry.port,
        _begun(entry.since, now),
        entry.pid,
        entry.start_time,
        open=entry.open,
    )


def _begun(since: datetime, now: float) -> float:
    """The start of an entry, in Unix seconds."""
    at = since.timestamp()
    if at > now + SKEW_SECONDS:
        raise BoardError("it begins in the future")
    if at < 0:
        raise BoardError("it begins before 1970")
    return at


PAGE = lazy_pattern(r"(0|[1-9][0-9]{0,9})\.json")
"""The name of a user's file: their uid."""

MOST_PAGES = 512
MOST_FILES = 1_000_000
"""How many files to search for pages. A page counts only if its owner is the user it is named after, so nobody can
crowd out the pages of others, whatever else is in the folder."""
MOST_NOTICES = 20
MOST_JUNK_NAMED = 8


def open_folder(folder: Path) -> tuple[int, str]:
    """Open the board's folder; returns its descriptor, and why nothing should be written there (empty if safe).

    Raises:
        BoardError: it does not exist or can't be read.
    """
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BoardError(
            f"{folder}: there is no such board ({os.strerror(error.errno or 0)}); an administrator creates it with: "
            f"install -d -m 1777 {folder}"
        ) from error
    status = os.fstat(opened)
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return opened, (
            f"{folder} is not safe: any user can delete files of others there, so it is only read; "
            f"fix it with: chmod 1777 {folder}"
        )
    return opened, ""


def read_board(folder: Path, now: float) -> Board:
    """All entries valid at ``now`` (Unix seconds). Invalid files are skipped, with a notice.

    Raises:
        BoardError: the folder does not exist or can't be read.
    """
    opened, unsafe = open_folder(folder)
    claims: list[Claim] = []
    servers: list[Announced] = []
    notices = [unsafe] if unsafe else []
    try:
        uids, junk = _pages(opened, folder)
        for uid in uids:
            name = f"{uid}.json"
            try:
                page, problems = read_page(opened, uid, now)
            except FileNotFoundError:
                continue  # its owner has just removed it
            except BoardError as error:
                notices.append(f"{folder / name} is ignored: it {error}")
                continue
            user = user_name(uid)
            notices += [f"{folder / name}: {text}; ignored" for text in problems]
            claims += [replace(one, uid=uid, user=user) for one in page.claims]
            servers += _theirs(page, uid, user)
    finally:
        os.close(opened)
    notices += junk
    if len(notices) > MOST_NOTICES:
        notices = [*notices[:MOST_NOTICES], f"and {len(notices) - MOST_NOTICES} more"]
    claims.sort(key=lambda one: (one.since, one.uid))
    servers.sort(key=lambda one: (one.user, one.name))
    return Board(folder, now, tuple(claims), tuple(servers), tuple(notices), unsafe)


def read_page(folder: int, uid: int, now: float) -> tuple[BoardPage, list[str]]:
    """One user's page in the open ``folder``, and reasons for its skipped parts.

    Raises:
        BoardError: it belongs to another user, is not a regular file, is too large, or is not a page.
        FileNotFoundError: it does not exist.
    """
    name = f"{uid}.json"
    try:
        # Neither a link nor a pipe can make this read or wait for anything else.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BoardError(f"can't be read: {os.strerror(error.errno or 0)}") from error
    status = os.fstat(opened)
    if not stat.S_ISREG(status.st_mode):
        os.close(opened)
        raise BoardError("is not a regular file")
    with os.fdopen(opened, "rb") as file:
        if status.st_uid != uid:
            raise BoardError(f"belongs to {user_name(status.st_uid)}, not to {user_name(uid)}")
        if status.st_nlink != 1:
            raise BoardError("has another hard link, so it may be a different file of theirs")
        try:
            data = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise BoardError(f"can't be read: {os.strerror(error.errno or 0)}") from error
    if len(data) > MOST_BYTES:
        raise BoardError(f"is larger than {MOST_BYTES // 1024} KiB")
    return parse_claims(data, now)


def is_running(pid: int, start_time: int, uid: int) -> bool | None:
    """Whether that exact process exists and belongs to ``uid``; None if others' processes are invisible."""
    found = process_stat(pid)
    if found is None:
        hidden = uid != os.getuid() and process_stat(1) is None  # /proc mounted with hidepid
        return None if hidden else False
    try:
        owner = os.stat(f"{PROC}/{pid}").st_uid  # noqa: PTH116 - as all of /proc is read
    except OSError:
        return False
    return found.start_time == start_time and owner == uid


def _pages(opened: int, folder: Path) -> tuple[list[int], list[str]]:
    """Owners of the pages in the open folder, and sentences about other non-hidden files."""
    uids: list[int] = []
    others: list[str] = []
    left = 0
    with os.scandir(opened) as entries:
        for number, entry in enumerate(entries):
            if number >= MOST_FILES:
                left += 1
                break
            if entry.name.startswith("."):
                continue
            found = PAGE.fullmatch(entry.name)
            if found is None or not _owned_by(entry, int(found[1])):
                others.append(entry.name)
            else:
                uids.append(int(found[1]))
    others.sort()
    notices = [_aside(opened, folder, name) for name in others[:MOST_JUNK_NAMED]]
    if len(others) > len(notices):
        notices.append(f"and {len(others) - len(notices)} more files that are not valid board pages")
    if len(uids) > MOST_PAGES or left:
        notices.insert(
            0, f"more than {MOST_PAGES if not left else MOST_FILES} files are on the board: not all are read"
        )
    return sorted(uids)[:MOST_PAGES], notices


def _owned_by(entry: os.DirEntry[str], uid: int) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_uid == uid
    except OSError:
        return False


def _aside(opened: int, folder: Path, name: str) -> str:
    """Why a file is not a page."""
    found = PAGE.fullmatch(name)
    try:
        owner = os.stat(name, dir_fd=opened, follow_symlinks=False).st_uid
    except OSError:
        found = None
    if found is None:
        return f"{folder / name} is not a valid board page; it is ignored"
    return f"{folder / name} is ignored: it belongs to {user_name(owner)}, not to {user_name(int(found[1]))}"


def _theirs(page: BoardPage, uid: int, user: str) -> Iterator[Announced]:
    """The servers of a page that are running."""
    for one in page.servers:
        seen = is_running(one.pid, one.start_time, uid)
        if seen is not False:
            yield replace(one, uid=uid, user=user, seen=seen)


# -- writing this user's page -----------------------------------------------------------------------------------------


LOCK_ATTEMPTS = 20
LOCK_SECONDS = 3.0
"""How long to wait for another command of the same user to finish writing."""


def change_page(folder: Path, change: Callable[[BoardPage], BoardPage], now: float) -> BoardPage:
    """Change this user's page, dropping expired claims and ended servers; returns the new page.

    An empty page is deleted.

    Raises:
        BoardError: the board does not exist, is unsafe or can't be written; one sentence.
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
            f"{folder}: your page of the board can't be written: {os.strerror(error.errno or 0)}"
        ) from error
    finally:
        os.close(opened)


def _own(folder: int, now: float) -> BoardPage | None:
    """This user's page; None if it exists but is unusable, so that it is rewritten.

    Raises:
        BoardError: another user's file is in its place.
    """
    uid = os.getuid()
    try:
        return read_page(folder, uid, now)[0]
    except FileNotFoundError:
        return BoardPage()
    except BoardError as error:
        status = os.stat(f"{uid}.json", dir_fd=folder, follow_symlinks=False)
        if status.st_uid != uid:
            raise BoardError(f"{uid}.json on the board {error}: it takes the place of yours") from error
        return None


def _holding(page: BoardPage | None, now: float) -> BoardPage:
    """The valid entries of a page, limited to the number that others read."""
    if page is None:
        return BoardPage()
    uid = os.getuid()
    claims = [one for one in page.claims if one.until > now]
    servers = [one for one in page.servers if is_running(one.pid, one.start_time, uid) is not False]
    return BoardPage(tuple(claims[-MOST_ENTRIES:]), tuple(servers[-MOST_ENTRIES:]))


def _write(folder: int, page: BoardPage) -> None:
    name = f"{os.getuid()}.json"
    if not page.claims and not page.servers:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return
    for left in _own_files(folder, f".{name}"):  # left by a process that was killed; we hold the lock
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left, dir_fd=folder)
    fresh = f".{name}.{secrets.token_hex(8)}"  # an unpredictable name
    opened = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(opened, "wb") as file:
            os.fchmod(opened, 0o644)  # regardless of the umask, because others must be able to read it
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
    """Lock this user's page, so that two commands of one user do not overwrite each other's changes."""
    file, name = _lock_file(opened)
    try:
        try:
            lock(file, LOCK_SECONDS)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                raise BoardError(f"{folder / name} is held by another command of yours; try again") from error
            raise
        yield
    finally:
        os.close(file)


def _lock_file(folder: int) -> tuple[int, str]:
    """Open or create this user's lock file in the open ``folder``; returns its descriptor and name.

    Anyone may put a file with that name into the folder and hold its lock forever. So only a file that belongs to this
    user is used, and nobody else may open it. If another user's file has the usual name, a random suffix is added.

    Raises:
        OSError: none can be created.
    """
    usual = f".{os.getuid()}.lock"
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(LOCK_ATTEMPTS):
        mine = _own_files(folder, usual)
        if not mine:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(usual, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder))
                continue  # another command may have created one at the same time; both take the first of them
            name = f"{usual}.{secrets.token_hex(8)}"
            os.close(os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder))
            continue
        with contextlib.suppress(FileNotFoundError):
            file = os.open(mine[0], flags, dir_fd=folder)
            close_to_others(file)
            return file, mine[0]
    raise OSError(errno.EAGAIN, "its lock file keeps disappearing")


def _own_files(folder: int, name: str) -> list[str]:
    """This user's own regular files with this name, or with a suffix to it, sorted."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name == name or entry.name.startswith(f"{name}.")]
    found = []
    for name in sorted(names):
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode):
                found.append(name)
    return found
