"""One line about the tuner that is running on the selected server. Pure."""

from __future__ import annotations

from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.load.tuner_progress import TextLength, TunerProgress
from vllm_console.text import duration, plain
from vllm_console.ui.terminal.lines import cells, line
from vllm_console.ui.theme import ACCENT, STRONG
from vllm_console.ui.widgets.draw import fit


def tuner_line(server: ServerView, now: float, width: int) -> Strip:
    """The trial number, what it tries, the best so far and the time left, in the first form that fits."""
    tuner = server.tuner
    if tuner is None:
        return line()
    name = fit(plain(server.name), min(cells(plain(server.name)), 20))
    room = max(1, width - cells(name) - 6)
    texts = _texts(tuner, now)
    text = next((one for one in texts if cells(one) <= room), texts[-1])
    return line((" ± ", ACCENT), (f"{name}  ", STRONG), (fit(plain(text), room).rstrip(), ACCENT))


def _texts(tuner: TunerProgress, now: float) -> list[str]:
    """All forms of the text, most detailed first; what is being tried is kept longest."""
    place = tuner.short_place
    lead, brief = f"tuner{f', {tuner.place}' if place else ''}: ", f"tuner{f' {place}' if place else ''}: "
    left = duration(max(0.0, tuner.until - now)) + " left"
    full, middle, short, shortest = TextLength
    forms = (
        (lead + tuner.doing(full), tuner.found(full), f"at most {left}"),
        (brief + tuner.doing(middle), tuner.found(middle), left),
        (brief + tuner.doing(middle), tuner.found(short), left),
        (brief + tuner.doing(middle), tuner.found(short)),
        (brief + tuner.doing(short), tuner.found(short)),
        (brief + tuner.doing(shortest), tuner.found(short)),
        (brief + tuner.doing(shortest),),
    )
    return [" · ".join(filter(None, form)) for form in forms]
