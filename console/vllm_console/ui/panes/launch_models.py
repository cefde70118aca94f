"""The launch screen's list of models as lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.style import Style
from textual.strip import Strip

from vllm_console.model_text import COLUMNS, fit_text, model_cells
from vllm_console.text import plain
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.launch_settings import section_title, text_lines
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import BAD, CURSOR, DIM, OK, STRONG, WARN
from vllm_console.ui.widgets.draw import fit
from vllm_launchers.plan.model import MemoryFit

if TYPE_CHECKING:
    from vllm_launchers.vllm.modelfacts.local import LocalModel

_FITS = 14
_FULL, _SHORT = COLUMNS, (("ON DISK", 10), ("WEIGHTS", 11), ("PARAMS", 7), ("CONTEXT", 9))
WIDE = 100
"""Minimum columns for cells as wide as in the command's table."""

PLANNING = "planning…"


def model_lines(
    models: Sequence[LocalModel],
    fits: Mapping[str, MemoryFit],
    picked: int,
    size: tuple[int, int],
    *,
    reading: bool = False,
    problems: Sequence[str] = (),
    none_here: bool = False,
) -> list[Strip]:
    """The matching models with the plan's verdict on each if known; below, details of the selected one.

    ``none_here``: there are no models on this machine, regardless of the input.
    """
    width, height = size
    title = section_title("Models on this machine", width, True, ((f"{len(models)}", DIM),) if models else ())
    if reading:
        return [title, line((" reading models…", DIM))]
    detail = [line(), *_detail(models[picked], fits, width)] if 0 <= picked < len(models) else []
    detail += [strip for text in problems for strip in text_lines(f"! {text}", width, WARN)]
    if not models:
        get = f"{key_of('launch_get')} then downloads it from the hub"
        text = f"No match: enter accepts a hub id or a folder as typed; {get}."
        text = f"No models on this machine. Type a hub id or a folder and press enter; {get}." if none_here else text
        return [title, *text_lines(text, width, DIM), *detail][:height]
    columns = _FULL if width >= WIDE else _SHORT
    names = max(12, width - 3 - sum(room for _, room in columns) - _FITS)
    heading = fit(" MODEL", names + 3) + "".join(fit(head, room) for head, room in columns) + "FITS"
    room = max(3, height - 2 - len(detail))
    first = min(max(0, picked - room // 2), max(0, len(models) - room))
    rows = [
        _row(one, fits.get(one.model), columns, names, width, index == picked)
        for index, one in enumerate(models[first : first + room], first)
    ]
    if (below := len(models) - first - len(rows)) > 0:
        rows[-1] = line((f"   … {below + 1} more", DIM))
    return [title, line((fit(heading, width), DIM)), *rows, *detail][:height]


def _row(
    one: LocalModel,
    verdict: MemoryFit | None,
    columns: Sequence[tuple[str, int]],
    names: int,
    width: int,
    current: bool,
) -> Strip:
    cells = "".join(fit(f"{plain(cell)} ", room) for cell, (_, room) in zip(model_cells(one), columns, strict=True))
    text = f"{'▸' if current else ' '} {fit(_short(plain(one.model), names), names)} {cells}"
    verdict_text = PLANNING if verdict is None and one.facts is not None else fit_text(verdict)
    base = CURSOR if current else DIM if one.problem else None
    left = max(0, width - names - 3 - sum(room for _, room in columns))
    return line((text, base), (fit(verdict_text, left), _style(verdict, base)))


def _style(verdict: MemoryFit | None, base: Style | None) -> Style | None:
    if base is CURSOR or verdict is None:
        return base or DIM
    if verdict.fits is False or verdict.error or verdict.incomplete:
        return BAD if verdict.fits is False else WARN
    return OK if verdict.fits else DIM


def _short(name: str, room: int) -> str:
    """Shorten a long name to its end, which is more informative."""
    return name if len(name) <= room else "…" + name[-(room - 1) :]


def _detail(one: LocalModel, fits: Mapping[str, MemoryFit], width: int) -> list[Strip]:
    verdict = fits.get(one.model)
    lines = text_lines(one.model, width, STRONG)
    lines += text_lines(f"in {one.folder}", width, DIM)[:2] if one.folder != one.model else []
    lines += text_lines(one.problem, width, WARN)
    why = (verdict.error or verdict.incomplete) if verdict is not None else ""
    return lines + (text_lines(why, width, WARN)[:3] if why else [])
