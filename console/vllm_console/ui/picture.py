"""Pictures of the console for documents: the real app, drawn without a terminal."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Sequence
from pathlib import Path

from vllm_console.fleet.api import Fleet, UsageError
from vllm_console.ui.app import ConsoleApp

_WEB_FONT = re.compile(r"\s*@font-face \{.*?\}\n", re.DOTALL)
_FONT = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
_TEXT = re.compile(
    r'<text class="(?P<style>[^"]+)" x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)"[^>]*>'
    r"(?P<text>[^<]*[\u2801-\u28ff][^<]*)</text>"
)
_CELL_WIDTH, _CELL_HEIGHT, _ASCENT = 12.2, 24.4, 20.0
"""Size of a character cell in Textual's pictures, and from its top to the baseline, in SVG units."""

_DOTS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
"""Column and row of each bit of a braille character, lowest bit first (Unicode, braille patterns)."""


def self_contained(svg: str) -> str:
    """The picture without anything to be fetched: fonts that machines have, and charts drawn as shapes.

    Few monospaced fonts hold braille characters, and none shows them without gaps.
    """
    svg = re.sub(r"font-family: (?:Fira Code|arial)[^;]*;", f"font-family: {_FONT};", _WEB_FONT.sub("\n", svg))
    return _TEXT.sub(_with_shapes, svg)


def _with_shapes(match: re.Match[str]) -> str:
    """A run of text with its braille characters drawn, and the rest left as text."""
    left, top = float(match["x"]), float(match["y"]) - _ASCENT
    width, height = _CELL_WIDTH / 2, _CELL_HEIGHT / 4
    shapes = []
    for column, character in enumerate(html.unescape(match["text"])):
        bits = ord(character) - 0x2800
        if not 0 < bits < 256:
            continue
        for bit, (x, y) in enumerate(_DOTS):
            if bits >> bit & 1:
                place = f'x="{left + column * _CELL_WIDTH + x * width:.1f}" y="{top + y * height:.1f}"'
                shapes.append(
                    f'<rect class="{match["style"]}" {place} width="{width - 0.6:.1f}" height="{height:.1f}"/>'
                )
    text = re.sub("[\u2801-\u28ff]", "\u00a0", match[0])
    return text + "".join(shapes)


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
            path.write_text(self_contained(app.export_screenshot(title="vllm-console")), encoding="utf-8")

    asyncio.run(draw())
