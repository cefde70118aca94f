"""Claims as text and in placement, which of two config files applies, and the console's dialog."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from types import ModuleType

import pytest
from msgspec.structs import replace

from vllm_console import settings
from vllm_console.cli import host_source
from vllm_console.fleet.board import gpu_claims, parse_gpu_indices, until_from
from vllm_console.settings import ConfigError, Settings, gpu_reserves, gpu_shares, read_settings
from vllm_console.ui.app import ConsoleApp
from vllm_launchers.errors import UsageError
from vllm_launchers.host.board import Board, BoardPage, Claim, dump, format_claim, parse_claims, read_board
from vllm_launchers.host.gpu.document import encode_host, read_host
from vllm_launchers.host.gpu.host import with_claims
from vllm_launchers.host.gpu.sharing import GpuShare
from vllm_launchers.plan.placement import rank_placements

NOON = 1_767_268_800.0
"""2026-01-01 12:00 UTC, a Thursday."""


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("18:00", 6.0),
        ("9:30", 21.5),
        ("2h", 2.0),
        ("90m", 1.5),
        ("1d", 24.0),
        ("1d12h", 36.0),
        ("30min", 0.5),
        ("1.5h", 1.5),
        ("900s", 0.25),
    ],
)
def test_claim_end_is_parsed(text: str, until: float) -> None:
    assert until_from(text, NOON) == NOON + until * 3600


@pytest.mark.parametrize("text", ["", "soon", "25:00", "2", "h", "-2h", "18.00"])
def test_invalid_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="such as 18:00"):
        until_from(text, NOON)


def test_gpu_indices_are_parsed() -> None:
    assert parse_gpu_indices(["2", "0,1"]) == (0, 1, 2)
    for words in (["x"], [""], ["1,"], ["-1"], ["99999"], ["²"]):
        with pytest.raises(UsageError, match="indices of GPUs"):
            parse_gpu_indices(words)


def test_claim_is_formatted_in_the_readers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim((2,), NOON, NOON + 6 * 3600, "training", 1001, "anna")
    assert format_claim(claim, NOON) == "claimed until 18:00 by anna: training"
    assert (
        format_claim(replace(claim, until=NOON + 30 * 3600, why=""), NOON, mine=True)
        == "claimed until Fri 18:00 by you"
    )
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    assert format_claim(claim, NOON).startswith("claimed until 19:00")


def test_page_has_only_one_valid_name(tmp_path: Path) -> None:
    """There are other spellings of the owner's number; each would be read as the same page again."""
    uid, now = os.getuid(), time.time()
    page = dump(BoardPage((Claim((2,), now, now + 60, "training"),)))
    others = [f"0{uid}", f"00{uid}", f"{uid}".translate({ord("0") + n: 0x0660 + n for n in range(10)})]
    for name in (str(uid), *others):
        (tmp_path / f"{name}.json").write_bytes(page)
    found = read_board(tmp_path, now)
    assert [(one.uid, one.gpus) for one in found.claims] == [(uid, (2,))]
    assert len(found.notices) == len(others)
    assert all("is not a valid board page" in notice for notice in found.notices)


def test_gpus_claimed_by_others_are_not_chosen(tmp_path: Path) -> None:
    host, now = read_host(Path("4xa6000")), time.time()
    best = rank_placements(host, 1).best
    assert best is not None
    theirs = Claim(best.gpus, now, now + 60, "", os.getuid() + 1, "anna")
    claimed = with_claims(host, gpu_claims(Board(tmp_path, now, (theirs,))))
    other = rank_placements(claimed, 1).best
    assert other is None or other.gpus != best.gpus
    mine = with_claims(host, gpu_claims(Board(tmp_path, now, (replace(theirs, uid=os.getuid()),))))
    assert rank_placements(mine, 1).best == best
    expired = with_claims(host, gpu_claims(Board(tmp_path, now, (replace(theirs, until=now - 1),))))
    assert rank_placements(expired, 1).best == best
    assert "by anna" in rank_placements(claimed, len(host.gpus)).problem
    assert encode_host(claimed)["gpus"][best.gpus[0]]["claims"][0]["user"] == "anna"


def test_claims_are_of_this_machines_gpus_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, now = tmp_path / "board", time.time()
    board.mkdir()
    board.chmod(0o1777)
    (board / f"{os.getuid()}.json").write_bytes(dump(BoardPage((Claim((2,), now - 1, now + 60, "training"),))))
    here = replace(read_host(Path("4xa6000")), hostname="here")
    monkeypatch.setattr(host_source, "this_host", lambda _: here)

    def claimed(host_file: Path | None) -> list[int]:
        args = argparse.Namespace(
            state=tmp_path / "state",
            read_only=False,
            host=None,
            host_file=host_file,
            settings=Settings(board=str(board)),
        )
        return [gpu.index for gpu in host_source.load_host(args).gpus if gpu.claims]

    assert claimed(None) == [2]
    assert claimed(Path("4xa6000")) == []


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    admin, own = tmp_path / "etc" / "config.toml", tmp_path / "own.toml"
    admin.parent.mkdir(mode=0o755)
    for path in (admin, own):
        path.touch(mode=0o644)
        path.chmod(0o644)
    monkeypatch.setattr(settings, "ADMIN_CONFIG", admin)
    monkeypatch.setattr(settings, "ADMIN_UID", os.getuid())
    return admin, own


def test_user_settings_extend_but_never_loosen_the_administrators(both: tuple[Path, Path]) -> None:
    admin, own = both
    admin.write_text(
        'read_only = true\nboard = "/var/board"\nrefresh_seconds = 2\nvllm = ["/opt/a"]\n'
        '[shares]\n0 = "24 GiB"\n[reserve]\n0 = "4 GiB"\n[alerts]\nseverity = "critical"\nterminal = ["bell"]\n'
    )
    own.write_text(
        'read_only = false\nboard = "/tmp/mine"\nrefresh_seconds = 1\nvllm = ["/opt/b"]\n'
        '[shares]\n0 = "40 GiB"\n1 = "50 %"\n[reserve]\n0 = "1 GiB"\n[alerts]\nseverity = "note"\n'
    )
    found = read_settings(own)
    assert (found.read_only, found.read_only_by) == (True, f"read_only = true in {admin}")
    assert (found.board, found.refresh_seconds, found.vllm) == ("/var/board", 1, ("/opt/b", "/opt/a"))
    assert set(gpu_shares(found)) == {GpuShare(0, gib=24.0), GpuShare(0, gib=40.0), GpuShare(1, fraction=0.5)}
    assert set(gpu_reserves(found)) == {GpuShare(0, gib=4.0), GpuShare(0, gib=1.0)}
    assert (found.alerts.severity, found.alerts.terminal) == ("note", ("bell",))
    assert found.sources["board"] == str(admin)
    assert found.sources["refresh_seconds"] == str(own)
    assert "its board is ignored" in found.notices[0]


def test_user_settings_may_be_stricter(both: tuple[Path, Path]) -> None:
    both[1].write_text("read_only = true\n")
    assert read_settings(both[1]).read_only_by == f"read_only = true in {both[1]}"
    both[1].write_text('board = "board"\n')
    with pytest.raises(ConfigError, match="absolute path"):
        read_settings(both[1])


def test_entry_that_begins_before_the_calendar_is_ignored() -> None:
    """Its start could be read, but not written again."""
    entry = b'{"gpus": [0], "since": "0001-01-01T00:00:00+14:00", "until": "2026-01-01T13:00:00Z"}'
    page, problems = parse_claims(b'{"version": 1, "claims": [' + entry + b"]}", NOON)
    assert dump(page) == dump(BoardPage())
    assert problems == ["number 1 of its claims: it begins before 1970"]


async def test_claims_are_shown_made_and_released(fakes: ModuleType) -> None:
    now = fakes.NOW
    theirs = Claim((2,), now, time.time() + 7200, "training", os.getuid() + 1, "anna")
    fleet = fakes.FakeFleet(fakes.chat)
    fleet.on_board = Board(Path("/board"), now, (theirs,))
    fleet.gpus = {"host": with_claims(read_host(Path("4xa6000")), gpu_claims(fleet.on_board))}
    app = ConsoleApp(fleet, refresh=0.05)
    async with app.run_test(size=(120, 40)) as pilot:

        def text() -> str:
            strips = app.screen._compositor.render_strips()
            return "\n".join("".join(segment.text for segment in strip) for strip in strips)

        async def sees(wanted: str) -> None:
            end = time.monotonic() + 60
            while wanted not in text():
                assert time.monotonic() < end, text()
                await pilot.pause(0.02)

        await pilot.press("6")
        await sees("by anna: training")
        await pilot.press("C")
        await sees("Claim GPUs on the shared board")
        await pilot.press(*"nonsense", "enter")
        await sees("type GPUs and until when")
        app.screen.query_one("#claim").value = "1,3 2h my run"  # type: ignore[attr-defined]
        await pilot.press("enter")
        await sees("GPU 1,3 claimed by you.")
        call = fleet.calls[-1]
        assert (call[0], call[1], call[3]) == ("claim", (1, 3), "my run")
        await pilot.press("C")
        await sees("Claim GPUs on the shared board")
        await pilot.press(*"release", "enter")
        await sees("Released your claims.")
        assert fleet.calls[-1] == ("release", ())
