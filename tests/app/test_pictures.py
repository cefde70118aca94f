"""Screenshots of the console: any screen, as SVG or PNG, on the command line and by a key."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from fakes import made_runs
from vllm_console.runs.compare import compare
from vllm_console.ui import screenshot
from vllm_console.ui.screen_names import SCREENS
from vllm_console.ui.screenshot import Shot, take_picture
from vllm_launchers.errors import NotFoundError, OperationError, UsageError
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import NO_DRIVER

SHOWN = {
    "overview": "KV cache",
    "findings": "Findings",
    "compare": "before",
    "describe": "Command",
    "log": "a line of the log",
    "flags": "max-num-seqs",
    "gpus": "RTX A6000",
    "launch": "chatbot",
    "messages": "essages",
    "help": "Launch a new server",
}


@pytest.fixture(autouse=True)
def soon_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake fleet responds at once, so a screenshot only waits for a plan, which begins after 0.12 s."""
    monkeypatch.setattr(screenshot, "SETTLED_SECONDS", 0.2)


def without_gpus(fakes, *servers):
    """A fleet that says at once that there are no GPUs; otherwise a screenshot waits for them."""
    fleet = fakes.FakeFleet(*servers)
    fleet.gpus = {"host_problem": NO_DRIVER}
    return fleet


@pytest.fixture
def picture(fakes, tmp_path: Path) -> Callable[..., str]:
    """Takes a screenshot of the fake fleet; returns its text."""

    def take(**options) -> str:
        path, log = tmp_path / "picture.svg", tmp_path / "server.log"
        log.write_text("INFO 11-22 10:00:00 a line of the log\n")
        fleet = fakes.FakeFleet(lambda at: replace(fakes.chat(at), log_path=str(log)), fakes.coder)
        fleet.gpus = {"host": read_host(Path("4xa6000"))}
        fleet.comparison = compare(*made_runs.pair(made_runs.minutes(1), made_runs.minutes(2, slower=0.6)))
        assert take_picture(fleet, Shot(path, **options)) == path
        return path.read_text().replace("&#160;", " ")

    return take


@pytest.mark.parametrize("screen", SCREENS)
def test_every_screen_can_be_shown(picture, screen: str) -> None:
    assert SHOWN[screen] in picture(screen=screen)


def test_keys_are_pressed_on_the_screen_of_the_server_asked_for(picture) -> None:
    svg = picture(server="coder", keys=["left_square_bracket"])
    assert "staged" in svg
    assert svg.index("▸") < svg.index("coder")
    assert "@font-face" not in svg


def test_a_png_is_one(fakes, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    try:
        take_picture(without_gpus(fakes, fakes.chat), Shot(path, size="80x24"))
    except UsageError as error:
        pytest.skip(str(error))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_is_reported_before_anything_is_done(fakes, tmp_path: Path, monkeypatch) -> None:
    fleet = fakes.FakeFleet(fakes.chat)
    with pytest.raises(UsageError, match=r"must end in \.svg or \.png"):
        take_picture(fleet, Shot(tmp_path / "picture.gif"))
    with pytest.raises(UsageError, match="does not exist"):
        take_picture(fleet, Shot(tmp_path / "none" / "picture.svg"))
    with pytest.raises(UsageError, match="--size 9x9"):
        take_picture(fleet, Shot(tmp_path / "picture.svg", size="9x9"))
    with pytest.raises(NotFoundError, match="nobody"):
        take_picture(fleet, Shot(tmp_path / "picture.svg", server="nobody"))
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(UsageError, match="pip install resvg-py"):
        take_picture(fleet, Shot(tmp_path / "picture.png"))


def test_hints_are_in_a_picture_if_they_are_asked_for(fakes, tmp_path: Path) -> None:
    path, fleet = tmp_path / "picture.svg", without_gpus(fakes, fakes.observed)
    take_picture(fleet, Shot(path))
    assert "1/4" not in path.read_text()
    take_picture(fleet, Shot(path, hints=tmp_path / "hints-hidden"))
    assert "1/4" in path.read_text()


def test_a_screen_that_does_not_open_is_an_error_with_its_reason(fakes, tmp_path: Path) -> None:
    fleet = without_gpus(fakes, fakes.observed)
    with pytest.raises(OperationError, match="'compare' did not open: Only runs of your own servers"):
        take_picture(fleet, Shot(tmp_path / "picture.svg", screen="compare"))


async def test_a_key_saves_a_picture_in_the_first_folder_that_takes_it(console, fakes, tmp_path: Path) -> None:
    async with console(fakes.chat, pictures=(tmp_path / "none", tmp_path)) as c:
        await c.press("I")
        await c.sees("Picture saved:")
        (path,) = await asyncio.to_thread(lambda: list(tmp_path.glob("vllm-console-*.svg")))
        assert "KV&#160;cache" in path.read_text()
