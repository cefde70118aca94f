"""In place of the metric panes while there is nothing to measure: start-up stages, or why a server is down."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from textual.strip import Strip

from vllm_console.fleet.model import ServerView, Stage, State
from vllm_console.format import count, duration
from vllm_console.telemetry.progress import Progress, Startup, share_of
from vllm_console.text import plain
from vllm_console.ui.findings import findings_of, remedy_text
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
    """Title with the state and its age, how far it is, stages, memory, reason, what a person can do."""
    age = duration(now - server.state_since)
    right: tuple[Part, ...] = ((f"{server.state} {age}", _STYLE.get(server.state, STRONG)),)
    mark = " · simulated" if server.simulated else ""
    what = "Start-up of " if server.state is State.STARTING else ""
    lines = [rule(f"{what}{plain(server.name)} · generation {server.generation}{mark}", width, right)]
    lines += _why(server, width)
    advice = [line((" " + text, DIM)) for text in _advice(server)]
    if server.state is State.FAILED:
        lines += [*advice, line()]
    if server.state is State.STARTING and server.stages:
        lines += way_lines(server.startup, width)
    lines += stage_lines(server.stages, now, width)
    lines += _totals(server, now)
    lines += memory_lines(server.startup, width)
    if server.state is not State.FAILED:
        lines += advice
    return lines[:height]


def _why(server: ServerView, width: int) -> list[Strip]:
    """For a failed server what was found, the line that shows it and the remedies; else its reason."""
    found = findings_of(server) if server.diagnosis is not None else ()
    if not found:
        style = _STYLE.get(server.state, DIM)
        rows = textwrap.wrap(plain(server.reason), max(20, width - 2))[:4] if server.reason else []
        return [line((f" {text}", style)) for text in rows]
    failure = found[0]
    lines = [line((f" {text}", BAD)) for text in textwrap.wrap(failure.symptom, max(20, width - 2))[:3]]
    if failure.line:
        lines += [line((f"   {text}", DIM)) for text in textwrap.wrap(failure.line, max(20, width - 4))[:2]]
    for number, remedy in enumerate(failure.remedies[:3]):
        text = fit(remedy_text(server.flags, remedy), max(10, width - 5)).rstrip()
        lines.append(line((" f " if number == 0 and not remedy.changes.empty else "   ", ACCENT), text))
    return lines


def way_lines(startup: Startup | None, width: int) -> list[Strip]:
    """How far the start is and how long it will go on, by an earlier one; and its silence, where that is too long."""
    if startup is None:
        return []
    lines = []
    if startup.progress is not None:
        way = startup.progress
        by = "which took" if way.seconds_left is None else "by its last start of"
        told = f"  {way.share:4.0%}  {left_words(way)}, {by} {_took(way.usual)}"
        room = max(6, min(40, width - 4 - len(told)))
        lines.append(line("   ", (progress(way.share, room), ACCENT), fit(told, width - room - 3).rstrip()))
    else:
        told = "how long it takes is not known yet: no earlier start of this model was seen"
        lines.append(line((fit(f"   {told}", width).rstrip(), DIM)))
    if startup.quiet_seconds is not None:
        told = f" ! no sign of life for {duration(startup.quiet_seconds)}: neither its log nor the model's cache grows"
        lines += [line((text if index == 0 else f"   {text}", WARN))
                  for index, text in enumerate(textwrap.wrap(told, width, drop_whitespace=True))]  # fmt: skip
    return lines


def left_words(way: Progress) -> str:
    """``about 40s left``, or that it takes longer than before."""
    if way.seconds_left is None:
        return "longer than the last time"
    if way.seconds_left < 1:
        return "nearly there"
    # Steps of five seconds: an estimate that changes each second promises too much, and costs bytes.
    rounded = way.seconds_left if way.seconds_left < 10 else round(way.seconds_left / 5) * 5
    return f"about {duration(max(1.0, rounded))} left"


def memory_lines(startup: Startup | None, width: int) -> list[Strip]:
    """What the engine said of its memory, per GPU."""
    report = startup.report if startup is not None else None
    if report is None:
        return []
    kv = [f"{report.kv_gib:.1f} GiB"] if report.kv_gib is not None else []
    kv += [f"{count(report.kv_tokens)} tokens"] if report.kv_tokens is not None else []
    said = [
        f"weights {report.weights_gib:.1f} GiB" if report.weights_gib is not None else "",
        f"KV cache {', '.join(kv)}" if kv else "",
        f"CUDA graphs {report.graphs_gib:.1f} GiB" if report.graphs_gib is not None else "",
        f"{report.max_concurrency:.1f} full-length requests at once" if report.max_concurrency is not None else "",
    ]
    rows: list[str] = []
    for text in filter(None, said):
        if rows and len(rows[-1]) + len(text) + 3 <= width - 22:
            rows[-1] += f" · {text}"
        else:
            rows.append(text)
    return [line((f"   {fit('memory' if at == 0 else '', 18)}", DIM), row) for at, row in enumerate(rows)]


def stage_lines(stages: Sequence[Stage], now: float, width: int) -> list[Strip]:
    """A line per stage: done or running, its name, how long, its figure; the bars share one scale."""
    taken = [stage.seconds if stage.seconds is not None else max(0.0, now - stage.started_at) for stage in stages]
    longest = max(taken, default=0.0) or 1.0
    told = max((len(plain(stage.detail)) for stage in stages), default=0)
    room = min(40, width - 31 - max(9, told))
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
        back = "   z flags before" if server.previous_flags is not None else ""
        found = findings_of(server)
        cure = "f cure   " if found and found[0].cures else ""
        why = "i why   " if found else ""
        return ["", f"{cure}{why}l log   e flags{back}   r start again   x forget it"]
    if server.state is State.STOPPED:
        return ["", "r start it again   e flags   x forget it"]
    if server.state is State.STARTING and not server.stages:
        return ["waiting for its first line of log"]
    return []
