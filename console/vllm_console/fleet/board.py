"""The board that people of one machine share, as a fleet uses it: what others say, one's own claims and servers."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.fleet.api import FleetError, RefusedError, UsageError
from vllm_launchers.keeper.errors import KeeperError

if TYPE_CHECKING:
    from vllm_console.fleet.gpus import GpuSource
    from vllm_console.fleet.model import ServerView
    from vllm_console.fleet.records import Records
    from vllm_launchers.keeper.records import ServerRecord
    from vllm_launchers.machine.board.model import Announced, Board, Page
    from vllm_launchers.machine.gpu.host import GpuClaim

READ_SECONDS = 5.0
"""How often the board is read."""

NO_BOARD = (
    'no board is named: it is one folder for all people of this machine, made with "install -d -m 1777 FOLDER" and '
    'named with board = "FOLDER" in /etc/vllm-console/config.toml, or in your own config.toml'
)
_SPAN = re.compile(r"(?:(\d{1,3})d)?(?:(\d{1,3})h)?(?:(\d{1,4})m(?:in)?)?")
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")


class SharedBoard:
    """One board. A console's (``watched``) is read and written by a thread, so that a folder that hangs delays nothing
    else; a command's when it is asked for. ``trouble`` is why it cannot be used, in a sentence.
    """

    def __init__(self, folder: Path, *, watched: bool, read_only: bool) -> None:
        self.folder = folder
        self.trouble = ""
        self._watched, self._read_only = watched, read_only
        self._newest: Board | None = None
        self._read_at = float("-inf")
        self._servers: tuple[Announced, ...] | None = None
        """What the page should say runs; None while nothing was said to run."""
        self._known: frozenset[tuple[int, int]] = frozenset()
        self._written: object = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._ended = False

    def latest(self) -> Board | None:
        """The newest look at it; None where there was none yet, or it cannot be read."""
        if self._watched:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="board", daemon=True)
                self._thread.start()
        elif time.monotonic() - self._read_at >= READ_SECONDS:
            self._turn()
        return self._newest

    def announce(self, records: Sequence[ServerRecord]) -> None:
        """Say on one's own page which of these servers run."""
        if self._read_only:
            return
        servers, known = announced(records), known_keepers(records)
        if servers == self._servers or (not servers and self._servers is None):
            return
        # A keeper that has gone from its record may live a moment longer.
        self._servers, self._known = servers, self._known | known
        if self._watched:
            self._wake.set()
        else:
            self._turn()

    def change(self, change: Callable[[Page], Page]) -> None:
        """Change one's own page now.

        Raises:
            FleetError: the board cannot be written.
        """
        from vllm_launchers.machine.board.model import BoardError
        from vllm_launchers.machine.board.write import change_page

        try:
            change_page(self.folder, change, time.time())
        except BoardError as error:
            raise FleetError(str(error)) from error
        self._read_at = float("-inf")
        self._wake.set()

    def read(self) -> Board:
        """The board as it is now.

        Raises:
            FleetError: it cannot be read.
        """
        from vllm_launchers.machine.board.model import BoardError
        from vllm_launchers.machine.board.read import read_board

        try:
            found = read_board(self.folder, time.time())
        except (BoardError, OSError) as error:
            raise FleetError(str(error)) from error
        self._newest, self._read_at = found, time.monotonic()
        return found

    def close(self) -> None:
        """Stop looking, without waiting."""
        self._ended = True
        self._wake.set()

    def _watch(self) -> None:
        while not self._ended:
            self._wake.clear()
            self._turn()
            self._wake.wait(READ_SECONDS)

    def _turn(self) -> None:
        """Write what is to be written, then read. What goes wrong is said, and tried again next time."""
        self._read_at = time.monotonic()
        servers, known = self._servers, self._known
        try:
            if servers is not None and servers != self._written:
                self.change(lambda page: with_servers(page, servers, known))
                self._written = servers
            self.trouble = self.read().unsafe
        except FleetError as error:
            self.trouble = str(error)
            self._read_at = time.monotonic()


class BoardVerbs:
    """The fleet's verbs on the shared board."""

    _board: SharedBoard | None
    _gpus: GpuSource | None
    _records: Records
    _charts: bool
    _acted: bool = False
    """Whether this fleet has started, restarted or stopped a server."""

    def _refuse_read_only(self) -> None:
        raise NotImplementedError

    def _tell_gpus(self) -> None:
        raise NotImplementedError

    def board(self) -> Board:
        """Who says what runs here, and which GPUs are claimed till when.

        Raises:
            FleetError: no board is named, or it cannot be read.
        """
        return self._named().read()

    def claim(self, gpus: Sequence[int], until: float, why: str = "") -> Board:
        """Say that GPUs are taken, until when (Unix seconds) and why; a claim of one's own of the same GPUs goes.

        Raises:
            RefusedError: somebody else has claimed one of them, or this console is read-only.
            UsageError: there is no such GPU, or the time is past or too far away.
            FleetError: the board cannot be written.
        """
        from vllm_launchers.machine.board.model import LONGEST_SECONDS, Claim, claim_words, gpus_text, shown

        self._refuse_read_only()
        named, now, wanted = self._named(), time.time(), tuple(sorted(set(gpus)))
        if not wanted:
            raise UsageError("name the GPUs to claim, such as 2 or 0,1")
        if not now < until <= now + LONGEST_SECONDS:
            raise UsageError(f"a claim ends in the future, and within {LONGEST_SECONDS / 86_400:.0f} days")
        self._check_gpus(wanted)
        for other in named.read().claims:
            if other.uid != os.getuid() and (both := sorted(set(wanted) & set(other.gpus))):
                raise RefusedError(f"{gpus_text(both)} is {claim_words(other, now)}; ask {other.user}, or take another")
        new = Claim(wanted, float(int(now)), float(int(until)), shown(why))
        named.change(lambda page: without_claims(page, wanted, new))
        return named.read()

    def release(self, gpus: Sequence[int] = ()) -> Board:
        """Take one's own claims of these GPUs back, or all of them.

        Raises:
            RefusedError: somebody else holds the claim, or this console is read-only.
            FleetError: there is no such claim, or the board cannot be written.
        """
        from vllm_launchers.machine.board.model import claim_words, gpus_text

        self._refuse_read_only()
        named = self._named()
        found = named.read()
        own = {index for one in found.claims if one.uid == os.getuid() for index in one.gpus}
        for index in gpus or ():
            other = next((one for one in found.claims if index in one.gpus and one.uid != os.getuid()), None)
            if index not in own and other is not None:
                raise RefusedError(f"GPU {index} is {claim_words(other, found.at)}, not by you")
            if index not in own:
                raise FleetError(f"GPU {index} is not claimed; see 'vllm-console board'")
        if not own:
            raise FleetError("you have no claim to take back; see 'vllm-console board'")
        gone = tuple(gpus) or tuple(own)
        named.change(lambda page: without_claims(page, gone))
        still = sorted({i for one in named.read().claims if one.uid == os.getuid() for i in one.gpus} & set(gone))
        if still:
            raise FleetError(f"{gpus_text(still)} is still claimed by you: the board has another page of yours")
        return named.read()

    def _announce(self) -> None:
        """After a verb: say what runs now. That a board cannot be written keeps no server from running."""
        self._acted = True
        if self._board is not None:
            with contextlib.suppress(KeeperError):
                self._board.announce(self._records.read()[0])

    def _with_board(
        self, records: Sequence[ServerRecord], views: list[ServerView]
    ) -> tuple[list[ServerView], list[str]]:
        """At a look: say what runs, where this fleet is one that says it; others' servers with the preset and model
        that their owners announced; and what is wrong with the board, if anything is.
        """
        if self._board is None:
            return views, []
        if self._charts or self._acted:
            self._board.announce(records)
        if self._charts or any(not view.ours for view in views):
            found = self._board.latest()
            views = with_announced(views, found.servers if found is not None else ())
        if self._gpus is not None:
            self._gpus.claims = gpu_claims(self._board.latest())
        return views, [self._board.trouble] if self._board.trouble else []

    def _named(self) -> SharedBoard:
        if self._board is None:
            raise FleetError(NO_BOARD)
        return self._board

    def _check_gpus(self, wanted: Sequence[int]) -> None:
        """That there are such GPUs, where any are known of."""
        self._tell_gpus()
        source = self._gpus
        if source is None or not (source.recorded or source.has_driver):
            return
        known = [gpu.index for gpu in source.read().gpus]
        missing = [index for index in wanted if index not in known]
        if known and missing:
            raise UsageError(
                f"there is no GPU {', '.join(map(str, missing))} here; there are {min(known)} to {max(known)}"
            )


def announced(records: Sequence[ServerRecord]) -> tuple[Announced, ...]:
    """The servers that are up, or will be again, as their owner's page has them."""
    from vllm_console.fleet.details import unpack
    from vllm_console.fleet.watched import exposed_words
    from vllm_launchers.machine.board.model import Announced

    found = []
    for record in records:
        if record.state.alive and record.keeper is not None:
            details, spec = unpack(record.current.spec.details), record.current.spec
            engine = f"{details.engine.kind} {details.engine.version or ''}".strip() if details.engine else ""
            since = float(int(record.current.started_at))
            keeper = record.keeper
            found.append(
                Announced(
                    record.name, details.preset, details.model, engine, details.gpus, spec.port, since,
                    keeper.pid, keeper.start_time, open=bool(exposed_words(record)),
                )
            )  # fmt: skip
    return tuple(found)


def with_announced(views: Sequence[ServerView], servers: Sequence[Announced]) -> list[ServerView]:
    """Others' servers with what their owners say of them: by owner and port, and only where it is seen to run."""
    from dataclasses import replace

    said = {(one.user, one.port): one for one in servers if one.seen and one.uid != os.getuid()}
    found = []
    for view in views:
        one = said.get((view.owner, view.port)) if not view.ours else None
        if one is not None:
            notice = f"{view.notice}; on the board as {one.name}"
            view = replace(view, preset=one.preset, model=view.model or one.model, gpus=one.gpus, notice=notice)
        found.append(view)
    return found


def known_keepers(records: Sequence[ServerRecord]) -> frozenset[tuple[int, int]]:
    """The keepers of all these servers, so that those of another state folder stay on the page."""
    return frozenset((r.keeper.pid, r.keeper.start_time) for r in records if r.keeper is not None)


def with_servers(page: Page, servers: Sequence[Announced], known: frozenset[tuple[int, int]]) -> Page:
    """The page with these servers in place of those that ``known`` keepers hold."""
    from dataclasses import replace

    others = [one for one in page.servers if (one.pid, one.start_time) not in known]
    return replace(page, servers=(*others, *servers))


def without_claims(page: Page, gpus: Sequence[int], *new: object) -> Page:
    """The page without claims of these GPUs, and with ``new`` ones."""
    from dataclasses import replace

    left = [replace(one, gpus=tuple(index for index in one.gpus if index not in gpus)) for one in page.claims]
    return replace(page, claims=(*(one for one in left if one.gpus), *new))  # type: ignore[arg-type]


def gpu_claims(board: Board | None) -> Mapping[int, tuple[GpuClaim, ...]]:
    """Who claims which GPU, the earliest claim first."""
    found: dict[int, tuple[GpuClaim, ...]] = {}
    if board is None:
        return found
    from vllm_launchers.machine.board.model import claim_words
    from vllm_launchers.machine.gpu.host import GpuClaim

    now = time.time()
    for one in board.claims:
        if one.until > now:
            mine = one.uid == os.getuid()
            claim = GpuClaim(one.user, one.until, one.why, mine=mine, words=claim_words(one, now, mine=mine))
            for index in one.gpus:
                found[index] = (*found.get(index, ()), claim)
    return found


def until_from(text: str, now: float) -> float:
    """When a claim ends: ``18:00`` on this person's clock (tomorrow where that is past), ``2h``, ``1d12h``, ``90m``.

    Raises:
        UsageError: it is none of these.
    """
    text = text.strip()
    if clock := _CLOCK.fullmatch(text):
        at = time.localtime(now)
        for day in (0, 1):
            wanted = (at.tm_year, at.tm_mon, at.tm_mday + day, int(clock[1]), int(clock[2]), 0, 0, 0, -1)
            if (until := time.mktime(wanted)) > now:
                return until
    span = _SPAN.fullmatch(text)
    if span is not None and any(span.groups()):
        days, hours, minutes = (int(part or 0) for part in span.groups())
        return now + days * 86_400 + hours * 3600 + minutes * 60
    raise UsageError(f"till {text[:40] or 'when'}: expected a time such as 18:00, or how long, such as 2h, 90m or 1d")


def gpus_from_words(words: Sequence[str]) -> tuple[int, ...]:
    """The GPUs that words such as ``2`` or ``0,1`` name.

    Raises:
        UsageError: a word names none.
    """
    parts = [part for word in words for part in word.split(",")]
    if not parts or not all(part.isascii() and part.isdigit() and len(part) <= 4 for part in parts):
        raise UsageError(f"{' '.join(words)[:60]}: expected indices of GPUs, such as 2 or 0,1")
    return tuple(sorted({int(part) for part in parts}))
