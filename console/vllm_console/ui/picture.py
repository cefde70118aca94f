"""Pictures of the console for documents: the real app, drawn without a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from vllm_console.fleet.api import Fleet, UsageError
from vllm_console.ui.app import ConsoleApp


def take_picture(fleet: Fleet, path: Path, size: str, after: float, keys: Sequence[str]) -> None:
    """Let the app run for ``after`` seconds, press ``keys``, write an SVG.

    Raises:
        UsageError: ``size`` is not ``COLSxROWS`` between 40x10 and 400x200.
    """
    columns, _, rows = size.partition("x")
    if not (columns.isdigit() and rows.isdigit() and 40 <= int(columns) <= 400 and 10 <= int(rows) <= 200):
        raise UsageError(f"--size {size}: expected columns x rows, such as 120x40")

    async def draw() -> None:
        app = ConsoleApp(fleet, demo=True)
        async with app.run_test(size=(int(columns), int(rows))) as pilot:
            await asyncio.sleep(after)
            await pilot.press(*keys)
            await pilot.pause(1.0)
            path.write_text(app.export_screenshot(title="vllm-console"), encoding="utf-8")

    asyncio.run(draw())
