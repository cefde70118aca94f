"""Saves screenshots as self-contained SVG or as PNG."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterable
from pathlib import Path

from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.patterns import lazy_pattern

_WEB_FONT = lazy_pattern(r"\s*@font-face \{.*?\}\n", re.DOTALL)
MONOSPACE = "DejaVu Sans Mono"
_FONT = f"'{MONOSPACE}', Menlo, Consolas, monospace"
_TEXT = lazy_pattern(
    r'<text class="(?P<style>[^"]+)" x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)"[^>]*>'
    r"(?P<text>[^<]*[\u2801-\u28ff][^<]*)</text>"
)
_CELL_WIDTH, _CELL_HEIGHT, _ASCENT = 12.2, 24.4, 20.0
"""Width and height of a character cell in Textual's SVG, and the distance from its top to the baseline."""

_DOTS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
"""Column and row of each bit of a braille character, lowest bit first (Unicode, braille patterns)."""


def self_contained(svg: str) -> str:
    """Return the SVG without external resources: with installed fonts, and braille charts drawn as shapes.

    Few monospaced fonts have braille characters, and none shows them without gaps.
    """
    svg = re.sub(r"font-family: (?:Fira Code|arial)[^;]*;", f"font-family: {_FONT};", _WEB_FONT.sub("\n", svg))
    return _TEXT.sub(_with_shapes, svg)


def _with_shapes(match: re.Match[str]) -> str:
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


def check_picture(path: Path) -> None:
    """Check that a screenshot can be saved as ``path``, before taking it.

    Raises:
        UsageError: the name ends in neither ``.svg`` nor ``.png``, the directory is missing, or PNG is not available.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"{path}: a picture's name must end in .svg or .png")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: the folder {path.absolute().parent} does not exist")
    if path.suffix.lower() == ".png":
        _png(_PROBE)


def save_picture(svg: str, path: Path) -> Path:
    """Save Textual's SVG as SVG or PNG, depending on the file name; return the absolute path.

    Raises:
        UsageError: see `check_picture`.
        OperationError: the file cannot be written.
    """
    check_picture(path)
    own = self_contained(svg)
    data = _png(own) if path.suffix.lower() == ".png" else own.encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise OperationError(f"{path}: the picture can't be written: {error.strerror}") from error
    return path.absolute()


def save_in_first(svg: str, folders: Iterable[Path]) -> Path:
    """Save a screenshot, named after the time, to the first directory that is writable; return its path.

    Raises:
        OperationError: none is.
    """
    name = f"vllm-console-{time.strftime('%Y%m%d-%H%M%S')}.svg"
    problem = OperationError("no folder to save a picture in")
    for folder in folders:
        try:
            return save_picture(svg, folder / name)
        except OperationError as error:
            problem = error
    raise problem


_PROBE = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="24">{}</svg>'
_PROBE_TEXT = f'<text x="2" y="20" font-family="{_FONT}" font-size="20">M</text>'


def _png(svg: str) -> bytes:
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise UsageError("PNG needs the package resvg-py: pip install resvg-py. Or name the file .svg") from error
    drawn, empty = (
        svg_to_bytes(svg_string=_PROBE.format(text), monospace_family=MONOSPACE) for text in (_PROBE_TEXT, "")
    )
    if bytes(drawn) == bytes(empty):
        raise UsageError(
            "PNG needs a font, and this machine has none: install one, such as Debian's fonts-dejavu-core. "
            "Or name the file .svg"
        )
    return bytes(svg_to_bytes(svg_string=svg, monospace_family=MONOSPACE))
