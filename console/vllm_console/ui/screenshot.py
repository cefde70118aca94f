"""Takes screenshots without a terminal by running the real app and opening a screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from textual.pilot import Pilot
from textual.worker import Worker

from vllm_console.fleet.types import Replay
from vllm_console.text import plain
from vllm_console.ui.app import ConsoleApp
from vllm_console.ui.picture import check_picture, save_picture
from vllm_console.ui.screen_names import SCREENS
from vllm_launchers.errors import NotFoundError, OperationError, UsageError

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet

FILLED_SECONDS = 20.0
"""Timeout for servers, their charts or a screen to appear."""

GPU_SECONDS = 5.0
"""Timeout for GPUs: a machine may have none, or a driver that hangs."""

SETTLED_SECONDS = 0.5
"""Wait before the screenshot, so that panes are laid out and a plan is made."""


class Shot(msgspec.Struct, frozen=True):
    """What a screenshot shows, and the file to write.

    ``size`` is ``COLSxROWS``. ``server`` is the server to select, empty for the first. ``at`` is an earlier moment
    (Unix seconds). ``after`` is how many seconds to wait first. ``keys`` are pressed on the screen. ``replay`` is a run
    to show instead of a server. ``hints`` is passed to `ConsoleApp`.
    """

    path: Path
    screen: str = "overview"
    size: str = "120x40"
    server: str = ""
    at: float | None = None
    after: float = 0.0
    keys: Sequence[str] = ()
    demo: bool = False
    hints: Path | None = None
    replay: Replay | None = None


def take_picture(fleet: LocalFleet, shot: Shot) -> Path:
    """Open the app on a fleet, show a screen and save a screenshot; return its absolute path.

    Raises:
        UsageError: ``shot`` is invalid.
        NotFoundError: there is no such server.
        OperationError: the screen does not open, or the file can't be written.
    """
    columns, rows = size_of(shot.size)
    check_picture(shot.path)

    async def draw() -> str:
        app = ConsoleApp(
            fleet, demo=shot.demo, hints=shot.hints, read_only=fleet.read_only, at=shot.at, replay=shot.replay
        )
        async with app.run_test(size=(columns, rows)) as pilot:
            await _fill(app, shot)
            await asyncio.sleep(shot.after)
            await _open(app, pilot, shot.screen)
            if shot.keys:
                await pilot.press(*shot.keys)
                await _until(lambda: _charted(app, shot))  # the keys may have selected another server
            await _until(lambda: not any(worker.is_running for worker in _work(app)))
            await pilot.pause(SETTLED_SECONDS)
            return app.export_screenshot(title="vllm-console")

    return save_picture(asyncio.run(draw()), shot.path)


def size_of(text: str) -> tuple[int, int]:
    """Parse ``COLSxROWS``.

    Raises:
        UsageError: it is not a size between 40x10 and 400x200.
    """
    columns, _, rows = text.partition("x")
    if not (columns.isdecimal() and rows.isdecimal() and 40 <= int(columns) <= 400 and 10 <= int(rows) <= 200):
        raise UsageError(f"--size {plain(text, 40)}: expected columns x rows between 40x10 and 400x200, such as 120x40")
    return int(columns), int(rows)


async def _fill(app: ConsoleApp, shot: Shot) -> None:
    await _until(lambda: app.snapshot is not None)
    if shot.server and shot.replay is None:
        if app.server(shot.server) is None:
            raise NotFoundError(f"no server is called '{plain(shot.server)}'; see 'vllm-console list'")
        app.operations.select(shot.server)
    app.poll_once()

    def gpus_known() -> bool:
        snapshot = app.snapshot
        return snapshot is not None and (snapshot.host is not None or bool(snapshot.host_problem))

    await _until(lambda: _charted(app, shot))
    await _until(gpus_known, GPU_SECONDS)


def _charted(app: ConsoleApp, shot: Shot) -> bool:
    """Whether the selected server's charts are loaded, if it has any."""
    server = app.operations.selected
    if server is None or (server.replayed and server.moment is None):
        return shot.replay is None
    return not (server.state.alive or server.replayed) or (server.series is not None and not server.series.loading)


async def _open(app: ConsoleApp, pilot: Pilot[None], screen: str) -> None:
    action = SCREENS[screen]
    if not action:
        return
    before = app.message
    await app.run_action(action, app.operations)
    await _until(lambda: app.screen is not app.operations or _refused(app, before))
    if app.screen is app.operations:
        why = app.message[0] if app.message is not None and app.message != before else "nothing happened"
        raise OperationError(f"the screen '{screen}' did not open: {why}")
    await pilot.pause()


def _refused(app: ConsoleApp, before: object) -> bool:
    """Whether a message appeared instead of the screen and no work is pending."""
    return app.message != before and not any(worker.is_running for worker in _work(app))


_LASTING = ("poll", "log")
"""Groups of workers that run forever."""


def _work(app: ConsoleApp) -> list[Worker[Any]]:
    return [worker for worker in app.workers if worker.group not in _LASTING]


async def _until(done: Callable[[], bool], seconds: float = FILLED_SECONDS) -> None:
    """Wait until ``done()`` is true, at most this long."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not done() and loop.time() < deadline:
        await asyncio.sleep(0.05)
