"""In place of the metric panes while there is nothing to measure: start-up stages, or why a server is down."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from textual.strip import Strip

from vllm_console.fleet.model import ServerView, Stage, State
from vllm_console.format import duration
from vllm_console.text import plain
from vllm_console.ui.panes.base import Pane
from vllm_console.ui.theme import ACCENT, BAD, DIM, OK, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, fit, progress, rule
from vllm_console.ui.widgets.lines import line

_STYLE = {State.FAILED: BAD, State.UNRESPONSIVE: BAD, State.STOPPING: WARN, State.STARTING: ACCENT}


class StatePane(Pane):
    """Each stage with its duration, the total, what a restart cost; for a server that is down, why and what to do."""

    def draw(self, server: ServerView, now: float, width: int, height: int) -> Sequence[Strip]:
        """The pane's lines."""
        return state_lines(server, now, width, height)


def state_lines(server: ServerView, now: float, width: int, height: int) -> list[Strip]:
    """Title with the state and its age, stages, reason, what a person can do."""
    age = duration(now - server.state_since)
    right: tuple[Part, ...] = ((f"{server.state} {age}", _STYLE.get(server.state, STRONG)),)
    mark = " · simulated" if server.simulated else ""
    what = "Start-up of " if server.state is State.STARTING else ""
    lines = [rule(f"{what}{plain(server.name)} · generation {server.generation}{mark}", width, right)]
    if server.reason:
        style = _STYLE.get(server.state, DIM)
        lines += [line((f" {text}", style)) for text in textwrap.wrap(plain(server.reason), max(20, width - 2))[:4]]
    lines += stage_lines(server.stages, now, width)
    lines += _totals(server, now)
    lines += [line((" " + text, DIM)) for text in _advice(server)]
    return lines[:height]


def stage_lines(stages: Sequence[Stage], now: float, width: int) -> list[Strip]:
    """A line per stage: done or running, its name, how long, its figure; the bars share one scale."""
    taken = [stage.seconds if stage.seconds is not None else max(0.0, now - stage.started_at) for stage in stages]
    longest = max(taken, default=0.0) or 1.0
    room = min(40, width - 40)
    lines = []
    for stage, seconds in zip(stages, taken, strict=True):
        running = stage.seconds is None
        share = share_of(stage.detail)
        if room < 6:
            drawn = ""
        elif running and share is not None:
            drawn = progress(share, room)
        else:
            drawn = fit("█" * max(1, round(seconds / longest * room)), room)
        lines.append(
            line(
                (" ● ", ACCENT) if running else (" ✓ ", OK),
                (fit(plain(stage.name), 16), STRONG if running else None),
                fit(_took(seconds), 8, ">") + "  ",
                (drawn, ACCENT if running else DIM),
                (f"  {plain(stage.detail)}" if stage.detail else "", None),
            )
        )
    return lines


def share_of(detail: str) -> float | None:
    """The share in a stage's figure, when it is a percentage: ``61 %`` is 0.61."""
    text = detail.rstrip().removesuffix("%").rstrip()
    try:
        return float(text) / 100 if detail.rstrip().endswith("%") else None
    except ValueError:
        return None


def _took(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 60 else duration(seconds)


def _totals(server: ServerView, now: float) -> list[Strip]:
    lines = []
    if server.stages:
        done = [stage.seconds for stage in server.stages]
        end = now if None in done else max(s.started_at + (s.seconds or 0.0) for s in server.stages)
        lines.append(line(("   " + fit("in all", 16), DIM), fit(_took(end - server.stages[0].started_at), 8, ">")))
    if server.downtime_seconds is not None:
        lines.append(line(("   " + fit("last downtime", 16), DIM), fit(_took(server.downtime_seconds), 8, ">")))
    if server.next_attempt_at is not None and server.next_attempt_at > now:
        lines.append(line((f"   next attempt in {duration(server.next_attempt_at - now)}", WARN)))
    return lines


def _advice(server: ServerView) -> list[str]:
    if not server.ours:
        return [f"belongs to {plain(server.owner) or 'someone else'}: shown, never touched"]
    if server.state is State.FAILED:
        back = "   z flags it ran with before" if server.previous_flags is not None else ""
        return ["", f"l log   e flags{back}   r start it again   x forget it"]
    if server.state is State.STOPPED:
        return ["", "r start it again   e flags   x forget it"]
    if server.state is State.STARTING and not server.stages:
        return ["waiting for its first line of log"]
    return []
