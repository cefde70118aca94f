"""Partial updates make the screen equal to a full update, however widgets overlap."""

import pytest
from textual.app import App, ComposeResult
from textual.containers import Horizontal
from textual.strip import Strip
from textual.widgets import Static

from vllm_console.ui.terminal.lines import LineView, cells_of, line
from vllm_console.ui.terminal.repaint import PartialRepaintScreen, PartialUpdate

WIDTH, HEIGHT = 40, 8


@pytest.fixture
def undrawn() -> None:
    """Overrides the fixture of the same name, so that frames are drawn."""


class Layered(PartialRepaintScreen):
    CSS = """
    Layered { layers: base top; layout: vertical; }
    #row { height: 4; }
    #row LineView { height: 1fr; margin-right: 2; }
    #over { layer: top; width: 9; height: 2; offset: 14 1; }
    """

    def compose(self) -> ComposeResult:
        with Horizontal(id="row"):
            yield LineView(id="left")
            yield LineView(id="right")
        yield Static("no view of lines", id="plain")
        yield LineView(id="over")


class Probe(App[None]):
    def get_default_screen(self) -> Layered:
        return Layered()


def drawn(screen: PartialRepaintScreen) -> list[list[str]]:
    """The characters of a full update."""
    return [[text for text, _ in cells_of(Strip.join([strip]))] for strip in screen._compositor.render_strips()]


def record(screen: PartialRepaintScreen) -> list[PartialUpdate]:
    """All partial updates from now on."""
    updates: list[PartialUpdate] = []
    render = screen._compositor.render_partial_update

    def recorded() -> PartialUpdate | None:
        update = render()
        if isinstance(update, PartialUpdate):
            updates.append(update)
        return update

    screen._compositor.render_partial_update = recorded  # type: ignore[method-assign]
    return updates


async def test_partial_updates_add_up_to_the_full_screen():
    app = Probe()
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        screen = app.screen
        assert isinstance(screen, PartialRepaintScreen)
        await pilot.pause()
        grid, updates = drawn(screen), record(screen)
        steps = [
            lambda: screen.query_one("#left", LineView).show([line("one"), line("under the other one: 日本")]),
            lambda: screen.query_one("#over", LineView).show([line("in front"), line("日本日本x")]),
            lambda: screen.query_one("#right", LineView).show(
                [line(f"row {number} " + "r" * 30) for number in range(6)]
            ),
            lambda: screen.query_one("#plain", Static).update("changed"),
            lambda: setattr(screen.query_one("#over"), "display", False),
            lambda: setattr(screen.query_one("#row"), "display", False),
        ]
        for step in steps:
            step()
            await pilot.pause()
            for update in updates:
                for x, y, segments in update.pieces:
                    for at, (text, _) in enumerate(cells_of(segments), start=x):
                        grid[y][at] = text
            assert updates
            updates.clear()
            assert grid == drawn(screen)


async def test_an_update_holds_only_what_changed():
    app = Probe()
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        screen = app.screen
        assert isinstance(screen, PartialRepaintScreen)
        view = screen.query_one("#left", LineView)
        view.show([line("12 requests")])
        await pilot.pause()
        updates = record(screen)
        view.show([line("13 requests")])
        await pilot.pause()
        assert [
            (x, y, "".join(one.text for one in segments)) for update in updates for x, y, segments in update.pieces
        ] == [(1, 0, "3")]
