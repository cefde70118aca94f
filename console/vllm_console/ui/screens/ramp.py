"""The ramp screen: progress, latency curves over the request rate, and one row per step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.style import Style
from textual.strip import Strip

from vllm_console.fleet.background_commands import RampView
from vllm_console.metrics.quantile import p99_in
from vllm_console.runs.measurement import attained_text
from vllm_console.text import count, duration, percent, rate, seconds
from vllm_console.ui.screens.dialogs import Confirm
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import BAD, DIM, OK, STRONG, WARN
from vllm_console.ui.widgets.draw import fit, paragraph
from vllm_console.ui.widgets.reader import ReaderScreen, TextReader
from vllm_console.ui.widgets.scatter import scatter
from vllm_console.ui.widgets.table import Value, table
from vllm_launchers.units import three_digits

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp

REDRAW_SECONDS = 0.5

SLOWER_FOR_OTHERS = "Other clients will be slower meanwhile."

_COLUMNS = (
    ">REQ/S", ">DONE", ">FAILED", ">TTFT p99",
    ">ITL p99", ">TOK/S", ">KV", ">WAIT",
    ">ATTAINED", "OK",
)  # fmt: skip

_CURVES = (("TTFT p99", "ttft_seconds", "ttft_p99_seconds"), ("ITL p99", "itl_seconds", "itl_p99_seconds"))
"""Title, latency key and limit key of each curve."""


class RampScreen(ReaderScreen):
    """Shows a server's ramp. Leaving while it runs asks whether to end it; results so far stay on screen."""

    def __init__(self, console: ConsoleApp, title: str, server: str) -> None:
        super().__init__(
            TextReader(
                lambda: f"{title}: ramp to the highest rate that meets the objectives",
                lambda width: ramp_lines(self._view, width, self.app.size.height),
                step_back=self._end,
            )
        )
        self._main, self._server = console, server
        self._asked = False
        self._drawn: RampView | None = None
        """The state that was drawn last."""

    @property
    def _view(self) -> RampView:
        """The ramp's current state; a problem if the server is gone."""
        return self._main.fleet.ramps.view(self._server) or RampView(running=False, problem="the server is gone")

    def on_mount(self) -> None:
        """Start the periodic redraw."""
        self.set_interval(REDRAW_SECONDS, self._follow)

    def _follow(self) -> None:
        view = self._view
        if not self.uncovered:
            return
        if view != self._drawn:
            self._drawn = view
            self._reader.redraw()
        if view.others and not view.running and not self._asked and self._main.screen is self:
            self._asked = True
            question = f"{view.others}. Measure anyway?"
            self._main.push_screen(Confirm(question, [SLOWER_FOR_OTHERS], "measure", late=True), self._others_asked)

    def _others_asked(self, yes: bool | None) -> None:
        if not yes:
            self.close_with()
            return
        fleet, name = self._main.fleet, self._server
        self._main.act("", lambda: fleet.ramps.start(name, others_allowed=True), lambda _: "", about=name)

    def _end(self) -> bool:
        """Ask before leaving a running ramp. Returns whether leaving is prevented; one that is ending may be left."""
        view = self._view
        if not view.running or view.canceled:
            return False
        if view.progress is None and not view.steps:  # still checking for other clients: nothing to lose
            self._main.act("", partial(self._main.fleet.ramps.cancel, self._server), lambda _: "", about=self._server)
            return False
        question = f"End the ramp on {self._server}?"
        self._main.operations.verbs.ask(question, ["Results so far are kept."], "end it", self._ended)
        return True

    def _ended(self) -> None:
        self._asked = True  # don't ask to measure anyway
        if not self._view.running:  # the ramp ended while the dialog was open
            self.close_with()
            return
        fleet, name = self._main.fleet, self._server
        self._main.act("", lambda: fleet.ramps.cancel(name), lambda _: "", about=name)


def ramp_lines(view: RampView, width: int, height: int) -> list[Strip]:
    """The state or result, the curves if there are two rates, and the steps, newest first.

    ``height`` is the height of the screen.
    """
    lines = _state(view, width)
    lines += _curves(view, width, 13 if height >= 36 else 8)
    rows = [_row(step, view.limits) for step in reversed(view.steps)]
    if rows:
        lines += [line(), *table(_COLUMNS, rows, width)]
    return lines


def _state(view: RampView, width: int) -> list[Strip]:
    if view.running:
        rows = [line((f" {_now(view)}", STRONG))]
        if not view.steps and not view.canceled:
            rows += [row for text in _coming(view) for row in (line(), *paragraph(text, width - 1, DIM))]
        return rows
    texts: list[tuple[str, Style | None]] = []
    if view.result is not None:
        known = view.result.ceiling_requests_per_second is not None
        texts.append((view.result.sentence, OK if known else WARN))
        if view.result.goodput is not None:
            there = f"Goodput there: {rate(view.result.goodput, 'req')} with TTFT and mean ITL within their limits."
            texts.append((there, None))
    elif view.canceled:
        texts.append(("Canceled before anything was measured.", WARN))
    elif view.others:
        texts.append((f"{view.others}.", WARN))
    if view.problem:
        problem = view.problem.removesuffix(".")
        texts.append((f"{problem[:1].upper()}{problem[1:]}.", BAD))
    return [row for text, style in texts for row in paragraph(text, width - 1, style)]


def _coming(view: RampView) -> list[str]:
    limits = [
        f"{title} ≤ {seconds(view.limits[limit])}" for title, _, limit in _CURVES if view.limits.get(limit) is not None
    ]
    objectives = f" ({', '.join(limits)})" if limits else ""
    return [
        "Sends the preset's requests at one rate after another to find the highest rate at which the objectives "
        f"hold{objectives}. This takes {duration(view.budget_seconds)} at most.",
        "A row with latencies, tokens per second and KV cache usage appears here for each rate, newest first; from "
        "the second rate on, charts plot p99 against the rate.",
    ]


def _now(view: RampView) -> str:
    if view.canceled:
        return "Ending…"
    now = view.progress
    if now is None:
        return "Checking whether other clients use the server, then warming it up…"
    what = "warming up at" if now.warming_up else "measuring"
    at_most = duration(view.budget_seconds)
    return f"Now {what} {rate(now.rate, 'req')}, {now.in_flight:,} in flight; {duration(now.elapsed)} of {at_most}"


def _curves(view: RampView, width: int, height: int) -> list[Strip]:
    """Charts of p99 TTFT and ITL over the request rate, side by side, with limits and the ceiling if known."""
    found = view.measured
    across = width // 2 - 1
    panels = []
    for title, latency, limit in _CURVES:
        points = found.curve(latency)
        if len(points) < 2:
            continue
        most = found.limits.get(limit)
        name = f"{title} over requests/s" + (f", limit {seconds(most)}" if most is not None else "")
        ceiling = found.ceiling_requests_per_second
        drawn = scatter(points, across, height, three_digits, seconds, log=True, limit=most, at=ceiling, few=True)
        panels.append([line((fit(f" {name}", across), DIM)), *drawn])
    if not panels:
        return []
    rows = [list(row) for row in zip(*panels, strict=True)]
    lines = [line(), *(Strip.join([row[0], *(part for one in row[1:] for part in (line("  "), one))]) for row in rows)]
    if found.ceiling_requests_per_second is not None:
        place = three_digits(found.ceiling_requests_per_second)
        lines.append(line((f" ┊ the ceiling, {place} req/s   ╌ the limit", DIM)))
    return lines


def _row(step: Mapping[str, Any], limits: Mapping[str, float]) -> list[Value]:
    ttft, itl = (_p99(step[latency], limits.get(limit)) for _, latency, limit in _CURVES)
    return [
        three_digits(step["rate"]),
        count(step["completed"]),
        (count(step["failed"]), WARN if step["failed"] else None),
        ttft,
        itl,
        count(step["tokens_per_second"]),
        percent(step["kv_cache_usage"]),
        count(step["waiting"]),
        attained_text(step["attained"]),
        ("yes", OK) if step["ok"] else ("no", BAD),
    ]


def _p99(latency: Mapping[str, float | None], most: float | None) -> Value:
    """A p99, red if it exceeds its limit."""
    known = latency.get("p99_above") or latency.get("p99")
    return p99_in(latency), BAD if known is not None and most is not None and known > most else None
