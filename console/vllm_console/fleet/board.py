"""The GPU board that the users of a machine share: others' servers and claims, and this user's own."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.text import duration_from
from vllm_launchers.errors import OperationError, RefusedError, UsageError

if TYPE_CHECKING:
    from vllm_console.fleet.snapshot import ServerView
    from vllm_launchers.host.board import Announced, Board, BoardPage
    from vllm_launchers.host.gpu.host import GpuClaim
    from vllm_launchers.keeper.records import ServerRecord

READ_SECONDS = 5.0
"""How often the board is read."""

NO_BOARD = (
    "GPU board not configured: create a folder that all users may write (install -d -m 1777 FOLDER) and set "
    'board = "FOLDER" in /etc/vllm-console/config.toml, or in your own config.toml'
)
_CLOCK = r"([01]?\d|2[0-3]):([0-5]\d)"


class SharedBoard:
    """One GPU board.

    In a console (``watched``) a thread reads and writes it, so that an unresponsive folder delays nothing else; in a
    command, it is read and written on request. ``trouble`` is a sentence explaining why the board cannot be used, or
    empty.
    """

    def __init__(self, folder: Path, *, watched: bool, read_only: bool) -> None:
        self.folder = folder
        self.trouble = ""
        self._watched, self._read_only = watched, read_only
        self._newest: Board | None = None
        self._read_at = float("-inf")
        self._servers: tuple[Announced, ...] | None = None
        """The servers that this user's page should list; None before the first announcement."""
        self._known: frozenset[tuple[int, int]] = frozenset()
        self._written: object = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._ended = False

    def latest(self) -> Board | None:
        """The board as last read; None before the first read, or if it cannot be read."""
        if self._watched:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="board", daemon=True)
                self._thread.start()
        elif time.monotonic() - self._read_at >= READ_SECONDS:
            self._sync()
        return self._newest

    def announce(self, records: Sequence[ServerRecord]) -> None:
        """Announce the running ones of these servers on this user's page."""
        if self._read_only:
            return
        servers, known = announced(records), known_keepers(records)
        if servers == self._servers or (not servers and self._servers is None):
            return
        # A keeper that was removed from its record may still run for a moment.
        self._servers, self._known = servers, self._known | known
        if self._watched:
            self._wake.set()
        else:
            self._sync()

    def change(self, change: Callable[[BoardPage], BoardPage]) -> None:
        """Change this user's page now. Raises OperationError if the board cannot be written."""
        from vllm_launchers.host.board import change_page

        change_page(self.folder, change, time.time())
        self._read_at = float("-inf")
        self._wake.set()

    def read(self) -> Board:
        """The board as it is now. Raises OperationError if it cannot be read."""
        from vllm_launchers.host.board import BoardError, read_board

        try:
            found = read_board(self.folder, time.time())
        except (BoardError, OSError) as error:
            raise OperationError(str(error)) from error
        self._newest, self._read_at = found, time.monotonic()
        return found

    def exchange(
        self, records: Sequence[ServerRecord], views: list[ServerView], *, announce: bool, always: bool
    ) -> list[ServerView]:
        """Update the board at a snapshot, and add the announced preset and model to others' servers.

        ``announce`` writes what runs. The board is read if there are others' servers, or ``always``.
        """
        if announce:
            self.announce(records)
        if always or any(not view.ours for view in views):
            found = self.latest()
            views = with_announced(views, found.servers if found is not None else ())
        return views

    def close(self) -> None:
        """Stop watching, without waiting."""
        self._ended = True
        self._wake.set()

    def _watch(self) -> None:
        while not self._ended:
            self._wake.clear()
            self._sync()
            self._wake.wait(READ_SECONDS)

    def _sync(self) -> None:
        """Write pending changes, then read. Errors are kept in `trouble`; the next call retries."""
        self._read_at = time.monotonic()
        servers, known = self._servers, self._known
        try:
            if servers is not None and servers != self._written:
                self.change(lambda page: page_with_servers(page, servers, known))
                self._written = servers
            self.trouble = self.read().unsafe
        except OperationError as error:
            self.trouble = str(error)
            self._read_at = time.monotonic()


class GpuClaims:
    """Claims GPUs on the board, or refuses to; the board itself is ``board``, None if none is configured.

    ``gpus`` finds the indices of this machine's GPUs; it returns none if they are unknown, and raises RefusedError if a
    recorded host is used instead.
    """

    def __init__(
        self, board: SharedBoard | None, refuse_read_only: Callable[[], None], gpus: Callable[[], Sequence[int]]
    ) -> None:
        self._board, self._refuse_read_only, self._gpus = board, refuse_read_only, gpus

    def board(self) -> Board:
        """The board: who runs what here, and which GPUs are claimed until when.

        Raises:
            OperationError: no board is configured, or it cannot be read.
        """
        return self._named_board().read()

    def claim(self, gpus: Sequence[int], until: float, why: str = "") -> Board:
        """Claim GPUs until ``until`` (Unix seconds); replaces this user's claims of the same GPUs.

        Raises:
            RefusedError: another user has claimed one of them, a recorded host has them, or this console is read-only.
            UsageError: there is no such GPU, or the time is past or too far ahead.
            OperationError: no board is configured, or it cannot be written.
        """
        from vllm_launchers.host.board import LONGEST_SECONDS, Claim, format_claim, safe_line
        from vllm_launchers.host.gpu.host import gpus_text

        self._refuse_read_only()
        board = self._named_board()
        now, wanted = time.time(), tuple(sorted(set(gpus)))
        if not wanted:
            raise UsageError("name the GPUs to claim, such as 2 or 0,1")
        if not now < until <= now + LONGEST_SECONDS:
            raise UsageError(f"a claim must end in the future, within {LONGEST_SECONDS / 86_400:.0f} days")
        self._check_exist(wanted)
        for other in board.read().claims:
            if other.uid != os.getuid() and (both := sorted(set(wanted) & set(other.gpus))):
                raise RefusedError(
                    f"{gpus_text(both)} is {format_claim(other, now)}; ask {other.user}, or take another"
                )
        new = Claim(wanted, float(int(now)), float(int(until)), safe_line(why))
        board.change(lambda page: without_claims(page, wanted, new))
        return board.read()

    def release(self, gpus: Sequence[int] = ()) -> Board:
        """Release this user's claims of these GPUs, or all of them.

        Raises:
            RefusedError: another user holds the claim, or this console is read-only.
            OperationError: no board is configured, there is no such claim, or the board cannot be written.
        """
        from vllm_launchers.host.board import format_claim
        from vllm_launchers.host.gpu.host import gpus_text

        self._refuse_read_only()
        board = self._named_board()
        found = board.read()
        own = {index for one in found.claims if one.uid == os.getuid() for index in one.gpus}
        for index in gpus or ():
            other = next((one for one in found.claims if index in one.gpus and one.uid != os.getuid()), None)
            if index not in own and other is not None:
                raise RefusedError(f"GPU {index} is {format_claim(other, found.at)}, not by you")
            if index not in own:
                raise OperationError(f"GPU {index} is not claimed; see 'vllm-console board'")
        if not own:
            raise OperationError("you have no claim to release; see 'vllm-console board'")
        gone = tuple(gpus) or tuple(own)
        board.change(lambda page: without_claims(page, gone))
        still = sorted({i for one in board.read().claims if one.uid == os.getuid() for i in one.gpus} & set(gone))
        if still:
            raise OperationError(f"{gpus_text(still)} is still claimed by you: the board has another file of yours")
        return board.read()

    def _named_board(self) -> SharedBoard:
        if self._board is None:
            raise OperationError(NO_BOARD)
        return self._board

    def _check_exist(self, wanted: Sequence[int]) -> None:
        """Raise UsageError for GPUs that do not exist, if any are known."""
        known = self._gpus()
        missing = [index for index in wanted if index not in known]
        if known and missing:
            raise UsageError(
                f"there is no GPU {', '.join(map(str, missing))} here; there are {min(known)} to {max(known)}"
            )


def announced(records: Sequence[ServerRecord]) -> tuple[Announced, ...]:
    """This user's servers that are up or will be restarted, as the page lists them."""
    from vllm_launchers.host.board import Announced
    from vllm_launchers.launch.details import exposed_message, unpack

    found = []
    for record in records:
        if record.state.alive and record.keeper is not None:
            details, spec = unpack(record.current.spec.details), record.current.spec
            engine = f"{details.engine.kind} {details.engine.version or ''}".strip() if details.engine else ""
            since = float(int(record.current.started_at))
            keeper = record.keeper
            found.append(
                Announced(
                    record.name, details.preset, details.model, engine, details.gpus_on(None), spec.port, since,
                    keeper.pid, keeper.start_time, open=bool(exposed_message(record)),
                )
            )  # fmt: skip
    return tuple(found)


def with_announced(views: Sequence[ServerView], servers: Sequence[Announced]) -> list[ServerView]:
    """Add to others' servers what their owners announce: matched by owner and port, only if seen running."""
    from msgspec.structs import replace

    announced_by = {(one.user, one.port): one for one in servers if one.seen and one.uid != os.getuid()}
    found = []
    for view in views:
        one = announced_by.get((view.owner, view.port)) if not view.ours else None
        if one is not None:
            notice = f"{view.notice}; on the board as {one.name}"
            view = replace(view, preset=one.preset, model=view.model or one.model, gpus=one.gpus, notice=notice)
        found.append(view)
    return found


def known_keepers(records: Sequence[ServerRecord]) -> frozenset[tuple[int, int]]:
    """The keepers of these servers; entries of other state folders stay on the page."""
    return frozenset((r.keeper.pid, r.keeper.start_time) for r in records if r.keeper is not None)


def page_with_servers(page: BoardPage, servers: Sequence[Announced], known: frozenset[tuple[int, int]]) -> BoardPage:
    """The page with ``servers`` replacing those of the ``known`` keepers."""
    from msgspec.structs import replace

    others = [one for one in page.servers if (one.pid, one.start_time) not in known]
    return replace(page, servers=(*others, *servers))


def without_claims(page: BoardPage, gpus: Sequence[int], *new: object) -> BoardPage:
    """The page without claims of these GPUs, and with the ``new`` claims."""
    from msgspec.structs import replace

    left = [replace(one, gpus=tuple(index for index in one.gpus if index not in gpus)) for one in page.claims]
    return replace(page, claims=(*(one for one in left if one.gpus), *new))


def gpu_claims(board: Board | None) -> Mapping[int, tuple[GpuClaim, ...]]:
    """The claims of each GPU, earliest first."""
    found: dict[int, tuple[GpuClaim, ...]] = {}
    if board is None:
        return found
    from vllm_launchers.host.board import format_claim
    from vllm_launchers.host.gpu.host import GpuClaim

    now = time.time()
    for one in board.claims:
        if one.until > now:
            mine = one.uid == os.getuid()
            claim = GpuClaim(one.user, one.until, one.why, mine=mine, words=format_claim(one, now, mine=mine))
            for index in one.gpus:
                found[index] = (*found.get(index, ()), claim)
    return found


def until_from(text: str, now: float) -> float:
    """Parse when a claim ends: local time ``18:00`` (tomorrow if past), or a duration with its unit.

    A bare number is refused: it could be seconds or an hour of the day.

    Raises:
        UsageError: it is in neither form.
    """
    text = text.strip()
    if clock := re.fullmatch(_CLOCK, text):
        at = time.localtime(now)
        for day in (0, 1):
            wanted = (at.tm_year, at.tm_mon, at.tm_mday + day, int(clock[1]), int(clock[2]), 0, 0, 0, -1)
            if (until := time.mktime(wanted)) > now:
                return until
    if text[-1:].isalpha() and (seconds := duration_from(text)) is not None:
        return now + seconds
    raise UsageError(f"until {text[:40] or 'when'}: expected a time such as 18:00, or how long, such as 2h, 90m or 1d")


def parse_gpu_indices(words: Sequence[str]) -> tuple[int, ...]:
    """Parse GPU indices from arguments such as ``2`` or ``0,1``. Raises UsageError if an argument is not an index."""
    parts = [part for word in words for part in word.split(",")]
    if not parts or not all(part.isascii() and part.isdigit() and len(part) <= 4 for part in parts):
        raise UsageError(f"{' '.join(words)[:60]}: expected indices of GPUs, such as 2 or 0,1")
    return tuple(sorted({int(part) for part in parts}))
