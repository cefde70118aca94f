"""External names are shown as plain text on every screen and by every command, and no shell is used."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from fakes import fake_fleet, hostile, made_runs
from vllm_console.fleet.leftovers import Leftovers
from vllm_console.fleet.snapshot import ServerView
from vllm_console.runs.compare import compare
from vllm_console.text import plain
from vllm_console.ui.app import ConsoleApp
from vllm_launchers.host.board import Board, Claim
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.shared_memory import LeftFile
from vllm_launchers.keeper.orphans import Orphan
from vllm_launchers.keeper.records import ProcessIdentity

ROOT = Path(__file__).resolve().parents[2]
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}


def calls_in_the_source() -> list[tuple[str, ast.Call]]:
    found = []
    for folder in ("console", "launchers"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            found += [(f"{path}:{node.lineno}", node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return found


def test_source_never_uses_a_shell() -> None:
    found = calls_in_the_source()
    assert len(found) > 5000
    for where, call in found:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        owner = getattr(getattr(call.func, "value", None), "id", "")
        assert not (name in SHELLS and owner in ("os", "subprocess", "asyncio", "")), where
        assert name not in ("eval", "exec") or owner, where
        assert all(word.arg != "shell" for word in call.keywords), where


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b]52;c;AAAA\x07b", "ab"),
        ("a\x1b]8;;http://x\x1b\\b\x1b]8;;\x1b\\", "ab"),
        ("a\x1b[2J\x1b[31mb", "ab"),
        ("a\x9b31mb\x9d0;title\x9cc", "abc"),
        ("a\x90q\x9cb", "ab"),
        ("a\u202egnp.exe", "agnp.exe"),
        ("a\u200bb\u2060c\U000e0041d\ufeffe", "abcde"),
        ("a\ud800b", "ab"),
        ("a\nb\u2028c\xa0d", "a b c d"),
        ("ours\rtheirs\r\n", "ours theirs"),
        ("a" + "\u0301" * 500 + "b", "a" + "\u0301" * 4 + "b"),
        ("[bold red]x[/]", "[bold red]x[/]"),
        ("$(touch x); `id`", "$(touch x); `id`"),
        ("日本語 é 👍🏽 Việt e\u0323\u0302", "日本語 é 👍🏽 Việt e\u0323\u0302"),
        (hostile.MARK * 10_000, (hostile.MARK * 500)),
    ],
)
def test_displayed_name_is_one_printable_line(name: str, shown: str) -> None:
    assert plain(name) == shown
    assert plain(name).isprintable()
    plain(name).encode()


LEFT = Leftovers(
    (Orphan(ProcessIdentity(4711, 5, "boot"), "VLLM::EngineCor", "/state/servers/chat", "its server is failed"),),
    (LeftFile("/dev/shm/psm_0a1b2c3d", 240 << 20, 7, "seen"),),
    ("a process of another user",),
)
CLAIMS = (Claim((0,), fake_fleet.NOW - 1, fake_fleet.NOW + 9999, "training", 5, "anna"),)


def node_of_several(at: float) -> ServerView:
    """One of two nodes that serve a model together."""
    return replace(fake_fleet.chat(at), name="node", node="node 0 of 2")


SCREENS = (
    ("1 2 3 4", "OperationsScreen"),
    ("5", "OperationsScreen"),
    ("6 6", "OperationsScreen"),
    ("j j j j j j", "OperationsScreen"),
    ("d", "DescribeScreen"),
    ("e", "FlagsScreen"),
    ("e down down enter", "FlagsScreen"),
    ("n", "LaunchScreen"),
    ("n down right down enter", "LaunchScreen"),
    ("l", "LogScreen"),
    ("l slash M enter w y", "LogScreen"),
    ("c", "CompareScreen"),
    ("D", "GpuDetailsScreen"),
    ("C", "ClaimDialog"),
    ("X", "Confirm"),
    ("s", "Confirm"),
    ("w", "Choose"),
    ("question_mark", "HelpScreen"),
    ("colon", "PaletteScreen"),
)
"""Keys of the operations screen and the screens that they open."""


class HostileConsole:
    """A console on a hostile fleet, with access to its screen text."""

    def __init__(self, app: ConsoleApp, pilot: object) -> None:
        self.app, self.pilot = app, pilot

    def segments(self) -> list[str]:
        return [segment.text for strip in self.app.screen._compositor.render_strips() for segment in strip]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; on timeout, fail with ``what``, the console's message and its screen."""
        for _ in range(1000):
            if condition():
                return
            await self.pilot.pause()
            await asyncio.sleep(0.01)
        raise AssertionError(f"{what}; message {self.app.message}:\n{''.join(self.segments())}")

    async def assert_only_text(self, *, marked: bool) -> None:
        """The screen contains no escape code; with ``marked``, it shows part of a hostile name."""
        if marked:
            await self.until(lambda: hostile.MARK in "".join(self.segments()), "never saw the name")
        await self.pilot.pause()
        for text in self.segments():
            assert text.isprintable(), repr(text)
            assert "\u0301" * 5 not in text
        assert self.app.crash is None


async def test_every_screen_shows_hostile_names_as_plain_text(tmp_path: Path) -> None:
    """Every text of servers, GPUs, presets, flags, plans, claims, findings and logs is hostile."""
    log = tmp_path / "server.log"
    log.write_bytes(hostile.WORST.encode(errors="surrogatepass") * 50 + b"\xff\xfe" + b"x" * 100_000 + b"\n")
    found = compare(*made_runs.pair(made_runs.minutes(1), made_runs.minutes(2, slower=1.6)))
    first = (fake_fleet.pressed, fake_fleet.diagnosed, fake_fleet.loading, fake_fleet.silent)
    servers = (*first, *fake_fleet.EVERY_STATE, node_of_several)
    fleet = hostile.HostileFleet(*servers, log=log, comparison=found)
    fleet.gpus = {"host": read_host(Path("4xa6000")), "host_problem": "a problem"}
    fleet.on_board, fleet.left = Board(Path("/board"), fake_fleet.NOW, CLAIMS, notices=("a notice",)), LEFT
    app = ConsoleApp(fleet, refresh=0.2)
    seen = set()
    async with app.run_test(size=(120, 40)) as pilot:
        console = HostileConsole(app, pilot)
        await console.until(lambda: app.snapshot is not None, "no snapshot")
        await console.assert_only_text(marked=True)
        for keys, name in SCREENS:
            await pilot.press(*keys.split())
            await console.until(lambda name=name: type(app.screen).__name__ == name, f"{keys} did not lead to {name}")
            await console.assert_only_text(marked=name not in ("HelpScreen", "CommandPalette") and keys != "1 2 3 4")
            seen.add(name)
            while app.screen is not app.operations:
                await pilot.press("escape")
                await pilot.pause()
            await pilot.press("g")
        await pilot.press("i")
        await console.until(lambda: type(app.screen).__name__ == "FindingsScreen", "i did not lead to FindingsScreen")
        await console.assert_only_text(marked=True)
        await pilot.press("escape", "s", "y")
        await console.until(lambda: app.message is not None and hostile.MARK in app.message[0], "no refusal was shown")
        await console.assert_only_text(marked=True)
    assert ("stop", fleet.snapshot().servers[0].name) in fleet.calls
    assert len(seen) == len({name for _, name in SCREENS})
    assert fleet.snapshot().servers[0].name.startswith(hostile.WORST)
