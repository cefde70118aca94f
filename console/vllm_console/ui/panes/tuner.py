"""The tuner that is at work on the selected server, in one line; what would be lost with it. Pure."""

from __future__ import annotations

from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.load.tuner import TunerProgress, TunerStep, changes_text, figure_text, flags_text
from vllm_console.text import plain, round_duration
from vllm_console.ui.terminal.lines import cells, line
from vllm_console.ui.theme import ACCENT, STRONG
from vllm_console.ui.widgets.draw import fit

_SHORT_NAMES = {"max-num-seqs": "seqs", "max-num-batched-tokens": "tokens", "gpu-memory-utilization": "memory"}


def tuner_line(server: ServerView, now: float, width: int) -> Strip:
    """Which trial of how many, what is tried, the best so far, the time left: the first form that fits."""
    tuner = server.tuner
    if tuner is None:
        return line()
    name = fit(plain(server.name), min(cells(plain(server.name)), 20))
    room = max(1, width - cells(name) - 6)
    texts = _texts(tuner, now)
    text = next((one for one in texts if cells(one) <= room), texts[-1])
    return line((" ± ", ACCENT), (f"{name}  ", STRONG), (fit(plain(text), room).rstrip(), ACCENT))


def short_place(tuner: TunerProgress) -> str:
    """``2/4``: the trial; empty before the first one and after the last."""
    return f"{tuner.trial}/{tuner.trials}" if tuner.trial else ""


def _texts(tuner: TunerProgress, now: float) -> list[str]:
    """What there is to say, the most detailed form first; what is tried now is kept longest."""
    place = short_place(tuner)
    lead, brief = f"tuner{f', {tuner.place}' if place else ''}: ", f"tuner{f' {place}' if place else ''}: "
    short = {_SHORT_NAMES.get(name, name): value for name, value in tuner.set.items()}
    was = {_SHORT_NAMES.get(name, name): value for name, value in tuner.was.items()}
    doing, shorter, shortest = (
        _doing(tuner, text) for text in (tuner.changes, changes_text(short, was), flags_text(short))
    )
    found, best, figure = _found(tuner)
    left = round_duration(max(0.0, tuner.until - now)) + " left"
    forms = (
        (lead + doing, tuner.found, f"at most {left}"),
        (brief + doing, found, left),
        (brief + doing, best, left),
        (brief + doing, best),
        (brief + shorter, best),
        (brief + shorter, figure),
        (brief + shortest, figure),
        (brief + shortest,),
    )
    return [" · ".join(filter(None, form)) for form in forms]


def _doing(tuner: TunerProgress, changes: str) -> str:
    """What it does, with its changes in other words."""
    match tuner.step:
        case TunerStep.PREDICTING:
            return "predicting"
        case TunerStep.FINISHING:
            return f"ending with {changes}" if changes else "ending with the original flags"
        case TunerStep.RESTARTING:
            return f"restarting with {changes}"
    return f"measuring {changes or 'the original flags'}"


def _found(tuner: TunerProgress) -> tuple[str, str, str]:
    """The best so far in three lengths; empty while nothing was measured."""
    if tuner.original is None:
        return "", "", ""
    original = figure_text(tuner.original, tuner.unit)
    if tuner.best is None:
        return f"best: the original flags, {original}", f"original {original}", f"original {original}"
    figure = figure_text(tuner.best.measured, tuner.unit)
    return f"best: {flags_text(tuner.best.set)}, {figure} (original {original})", f"best {figure}", f"best {figure}"
