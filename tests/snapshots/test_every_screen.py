"""Screenshots of the console's screens and dialogs: each at every size, and on light, colorless and ASCII terminals.

Those of the launch screen, the flag editor, the log and the comparison are in separate files by state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from vllm_console.fleet.adapters import Adapter, Adapters
from vllm_console.fleet.leftovers import Leftovers
from vllm_console.ui.app import ConsoleApp
from vllm_console.ui.screens.palette import PaletteScreen
from vllm_launchers.host.board import Board, Claim
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.shared_memory import LeftFile

SIZES = [(60, 15), (80, 24), (120, 40), (200, 60), (200, 20)]
LOOKS = ["light", "no-color", "ascii"]

CLAIMS = (
    Claim(
        (0, 1),
        1_767_268_000.0,
        1_767_290_000.0,
        "training until evening, ask before you stop it",
        4711,
        "anna",
    ),
    Claim((3,), 1_767_268_000.0, 1_767_276_000.0, "", 4712, "erik"),
)
FILES = tuple(
    LeftFile(f"/dev/shm/psm_{number:08x}", number << 26, number, "its server has ended") for number in range(1, 12)
)

POEMS = Adapter("poems", "/a/poems", "m", 8, 13_600_000, True, False)
CODE = Adapter("code", "/a/code", "m", 16, 27_000_000, False, False)
ADAPTERS = Adapters("chat", True, True, 2, 4, 16, (POEMS, CODE))

KEYS = {
    "servers": (),
    "staged": ("left_square_bracket", "v", "p"),
    "tuning": ("a", "down", "right"),
    "sort": ("o",),
    "restart": ("left_square_bracket", "r"),
    "stop": ("s",),
    "switch": ("w",),
    "claim": ("C",),
    "adapters": ("F",),
    "leftovers": ("X",),
    "findings": ("i", "j"),
    "describe": ("d",),
    "gpus": ("6",),
    "gpu-details": ("D",),
    "messages": ("m",),
    "help": ("question_mark",),
    "help-search": ("question_mark", "slash", *"flag"),
    "palette": ("colon", *"la"),
    "palette-refused": ("colon", *"set max-num-seqs=many"),
}
"""Each screen, and the keys that open it. If a thread opens it, the screenshot waits for that."""

STAYS = {"servers", "staged", "tuning", "gpus"}
"""States of the operations screen itself."""


@pytest.fixture
def made(app: Callable[..., ConsoleApp], fakes: ModuleType) -> Callable[..., ConsoleApp]:
    def make(screen: str, **options: Any) -> ConsoleApp:
        servers = () if screen == "servers" else (fakes.pressed, fakes.coder, fakes.docs)
        console = app(*servers, gpus={"host": read_host(Path("4xa6000")), "host_recorded": True}, **options)
        fleet: Any = console.fleet
        fleet.on_board = Board(Path("/board"), fakes.NOW, CLAIMS)
        fleet.left = Leftovers(files=FILES)
        fleet.lora = ADAPTERS
        return console

    return make


@pytest.fixture
def opened(
    pressing: Callable[..., Callable[[Pilot[Any]], Any]], fakes: ModuleType
) -> Callable[[str], Callable[[Pilot[Any]], Any]]:
    """Open a screen and wait until it is complete."""

    def of(screen: str) -> Callable[[Pilot[Any]], Any]:
        async def run(pilot: Pilot[Any]) -> None:
            console = pilot.app
            assert isinstance(console, ConsoleApp)
            if screen == "messages":
                console.messages.clock = lambda: fakes.NOW
                console.say("Copied the command line of chat to the terminal's clipboard (OSC 52).")
                console.say("chat: port 8000 is taken by python (pid 4242, owner anna); choose another with --port")
            await pressing(*KEYS[screen])(pilot)
            for _ in range(1000):
                if screen in STAYS or (console.screen is not console.operations and _complete(console)):
                    break
                await asyncio.sleep(0.01)
            else:
                pytest.fail(f"{screen} never opened")
            for field in console.screen.query(Input):
                field.cursor_blink = False
            await pilot.pause()

        return run

    return of


def _complete(console: ConsoleApp) -> bool:
    """Whether everything that comes from threads is shown."""
    strips = console.screen._compositor.render_strips()
    text = "\n".join("".join(segment.text for segment in strip) for strip in strips)
    if isinstance(console.screen, PaletteScreen):
        servers = console.screen._commands._on_servers
        return servers is not None and bool(servers.presets)
    return "checking" not in text


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("screen", KEYS)
def test_size(snap_compare, made, opened, screen, size):
    assert snap_compare(made(screen), terminal_size=size, run_before=opened(screen))


@pytest.mark.parametrize("look_name", LOOKS)
@pytest.mark.parametrize("screen", KEYS)
def test_appearance(snap_compare, made, opened, look, screen, look_name):
    assert snap_compare(made(screen, **look(look_name)), terminal_size=(80, 24), run_before=opened(screen))
