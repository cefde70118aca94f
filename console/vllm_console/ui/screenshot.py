"""Pictures without a terminal: the real app, with one of its screens opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from textual.pilot import Pilot
from textual.worker import Worker

from vllm_console.fleet.verbs import Replay
from vllm_console.text import plain
from vllm_console.ui.app import ConsoleApp
from vllm_console.ui.picture import check_picture, save_picture
from vllm_console.ui.screen_names import SCREENS
from vllm_launchers.errors import NotFoundError, OperationError, UsageError

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet

FILLED_SECONDS = 20.0
"""How long servers, their charts and a screen may take to appear."""

GPU_SECONDS = 5.0
"""How long GPUs may take: a machine may have none, or a driver that hangs."""

SETTLED_SECONDS = 0.5
"""How long a screen is left alone before its picture: panes are laid out, and a plan is made."""


class Shot(msgspec.Struct, frozen=True):
    """What a picture shows, and where it goes.

    ``size`` is ``COLSxROWS``; ``server`` the one under the cursor, empty for the first; ``at`` an earlier moment (Unix
    seconds); ``after`` how many seconds it is watched first; ``keys`` are pressed on the screen; ``replay`` is the run
    that is shown in place of a server; ``hints`` is as `ConsoleApp` says.
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
    """Open the app on a fleet, show a screen, and save a picture of it; returns its full path.

    Raises:
        UsageError: a part of ``shot`` makes no sense.
        NotFoundError: there is no such server.
        OperationError: the screen does not open, or the picture can't be written.
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
                await _until(lambda: _charted(app, shot))  # they may have chosen another server
            await _until(lambda: not any(worker.is_running for worker in _work(app)))
            await pilot.pause(SETTLED_SECONDS)
            return app.export_screenshot(title="vllm-console")

    return save_picture(asyncio.run(draw()), shot.path)


def size_of(text: str) -> tuple[int, int]:
    """Columns and rows of ``COLSxROWS``.

    Raises:
        UsageError: it is none between 40x10 and 400x200.
    """
    columns, _, rows = text.partition("x")
    if not (columns.isdecimal() and rows.isdecimal() and 40 <= int(columns) <= 400 and 10 <= int(rows) <= 200):
        raise UsageError(f"--size {plain(text, 40)}: expected columns x rows between 40x10 and 400x200, such as 120x40")
    return int(columns), int(rows)


async def _fill(app: ConsoleApp, shot: Shot) -> None:
    """Wait for the servers, the GPUs, and the charts of the one under the cursor."""
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
    """Whether the charts of the server under the cursor are known, if it has any."""
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
    """Whether a message came instead of the screen, and nothing is on the way any more."""
    return app.message != before and not any(worker.is_running for worker in _work(app))


_LASTING = ("poll", "log")
"""Groups of workers that never end."""


def _work(app: ConsoleApp) -> list[Worker[Any]]:
    return [worker for worker in app.workers if worker.group not in _LASTING]


async def _until(done: Callable[[], bool], seconds: float = FILLED_SECONDS) -> None:
    """Wait until something is so; not for ever."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not done() and loop.time() < deadline:
        await asyncio.sleep(0.05)
