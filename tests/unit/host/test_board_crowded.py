"""A board full of other users' files: claims are still read, and the user's own page can still be written."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_launchers.errors import OperationError
from vllm_launchers.host.board import MOST_NOTICES, BoardError, BoardPage, Claim, change_page, dump, read_board
from vllm_launchers.launch import launcher

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can put files of others there")

HOLDER = """
import fcntl, os, sys
os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.fchmod(opened, 0o666)
    fcntl.flock(opened, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def board() -> Iterator[Path]:
    """A board as created by an administrator, open to everybody; pytest's own folders are private."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def claim(now: float, why: str = "training") -> Claim:
    return Claim((2,), now, now + 600, why)


def hold(*paths: Path) -> subprocess.Popen[str]:
    """Create these files as another user who holds their locks."""
    words = [sys.executable, "-c", HOLDER, *map(str, paths)]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    return other


def test_thousands_of_other_files_hide_no_claim(board: Path) -> None:
    now = time.time()
    for number in range(5_000):
        (board / f"+{number}").touch()  # sorts before every page
    (board / f"{os.getuid()}.json").write_bytes(dump(BoardPage((claim(now),))))
    found = read_board(board, now)
    assert [(one.uid, one.gpus) for one in found.claims] == [(os.getuid(), (2,))]
    assert len(found.notices) <= MOST_NOTICES
    assert "more files that are not valid board pages" in found.notices[-1]


@as_root
def test_thousands_of_pages_of_other_owners_hide_no_claim(board: Path) -> None:
    now = time.time()
    page = dump(BoardPage((claim(now),)))
    for uid in range(71_000, 73_000):
        path = board / f"{uid}.json"
        path.write_bytes(page)
        os.chown(path, 4_242, -1)
    mine = board / "9999.json"
    mine.write_bytes(page)
    os.chown(mine, 9_999, -1)
    found = read_board(board, now)
    assert [one.uid for one in found.claims] == [9_999]
    assert "71000.json is ignored: it belongs to uid 4242, not to uid 71000" in "\n".join(found.notices)


@as_root
def test_page_errors_are_reported_before_other_files(board: Path) -> None:
    for number in range(500):
        (board / f"+{number}").touch()
    (board / "0.json").write_text("no page")
    found = read_board(board, time.time())
    assert "0.json is ignored: it is not JSON" in found.notices[0]


@as_root
def test_lock_file_of_another_user_blocks_no_claim(board: Path) -> None:
    now = time.time()
    other = hold(board / ".0.lock")
    try:
        for why in ("first", "second"):
            page = change_page(board, lambda page, why=why: BoardPage((*page.claims, claim(now, why))), now)
        assert [one.why for one in page.claims] == ["first", "second"]
        assert len(list(board.glob(".0.lock.*"))) == 1, "both commands used the same new lock"
        assert (board / ".0.lock").stat().st_uid == NOBODY
    finally:
        other.communicate("")


@as_root
def test_commands_exclude_each_other_despite_a_foreign_lock_file(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_launchers.host import board as board_module

    now = time.time()
    monkeypatch.setattr(board_module, "LOCK_SECONDS", 0.1)
    other = hold(board / ".0.lock")
    try:
        change_page(board, lambda _: BoardPage((claim(now),)), now)
        (own,) = board.glob(".0.lock.*")
        with own.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(BoardError, match="another command of yours"):
                change_page(board, lambda _: BoardPage(), now)
    finally:
        other.communicate("")


@as_root
def test_files_in_the_way_of_a_new_page_block_no_claim(board: Path) -> None:
    """Temporary names of a page that is being written: other users could create predictable ones."""
    now = time.time()
    taken = board / f".0.json.{os.getpid()}"
    taken.touch()
    os.chown(taken, NOBODY, -1)
    left = board / ".0.json.0123456789abcdef"
    left.touch()
    change_page(board, lambda _: BoardPage((claim(now),)), now)
    assert [one.uid for one in read_board(board, now).claims] == [0]
    assert taken.exists(), "another's file is not touched"
    assert not left.exists(), "a leftover of the user's own killed command is"


@as_root
def test_foreign_file_in_place_of_the_own_page_is_reported(board: Path) -> None:
    page = board / "0.json"
    page.touch()
    os.chown(page, NOBODY, -1)
    with pytest.raises(BoardError, match="belongs to nobody, not to root: it takes the place of yours"):
        change_page(board, lambda _: BoardPage((claim(time.time()),)), time.time())


@as_root
def test_foreign_launch_lock_is_reported(board: Path) -> None:
    state = board / "state"
    state.mkdir()
    state.chmod(0o777)
    other = hold(state / "launch.lock")
    try:
        with pytest.raises(OperationError, match=r"launch.lock belongs to another user \(uid 65534\)"):
            with launcher.launch_lock(state, timeout=0.1):
                pass
    finally:
        other.communicate("")
