"""Replaces the metric panes when there is nothing to measure: startup stages, or why a server is down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.logs.startup_facts import Stage
from vllm_console.text import count, duration, plain, took
from vllm_console.ui.findings import findings_of, fix_texts
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import clickable, line
from vllm_console.ui.theme import ACCENT, BAD, DIM, OK, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, fit, paragraph, progress_line, rule
from vllm_launchers.keeper.records import State

if TYPE_CHECKING:
    from vllm_console.logs.startup import Progress, Startup

_STYLE = {State.FAILED: BAD, State.UNRESPONSIVE: BAD, State.STOPPING: WARN, State.STARTING: ACCENT}


def state_lines(server: ServerView, now: float, width: int, height: int) -> list[Strip]:
    """Title with state and age, progress, stages, memory, reason, and what the user can do."""
    age = duration(now - server.state_since)
    right: tuple[Part, ...] = ((f"{server.state_text} {age}", _STYLE.get(server.state, STRONG)),)
    what = "Start-up of " if server.state is State.STARTING else ""
    lines = [rule(f"{what}{server.marked_name} · run {server.generation}", width, right)]
    if about := server.tuner_restart:
        lines.append(line((fit(f" Restarted: {about}", width).rstrip(), ACCENT)))
    lines += _why(server, width)
    advice = _advice(server)
    if server.state is State.FAILED:
        lines += [*advice, line()]
    if server.state is State.STARTING and server.stages:
        lines += progress_lines(server.startup, width)
    lines += stage_lines(server.stages, now, width)
    lines += _totals(server, now)
    lines += memory_lines(server.startup, width)
    if server.state is not State.FAILED:
        lines += advice
    return lines[:height]


def _why(server: ServerView, width: int) -> list[Strip]:
    """For a failed server the cause, the log line that shows it and the fixes; otherwise its reason."""
    found = findings_of(server) if server.diagnosis is not None else ()
    if not found:
        return paragraph(_asleep(server) or server.reason, width - 1, _STYLE.get(server.state, DIM), most=4)
    failure = found[0]
    lines = paragraph(failure.symptom, width - 1, BAD, most=3)
    lines += paragraph(failure.line, width - 1, DIM, "   ", most=2)
    for number, fix in enumerate(failure.fixes[:3]):
        texts, room = fix_texts(server.flags, fix), max(10, width - 5)
        text = next((text for text in texts if cell_len(text) <= room), fit(texts[-1], room))
        key = f" {key_of('stage_fix')}" if number == 0 and not fix.changes.empty else ""
        lines.append(line((fit(key, max(2, len(key))) + " ", ACCENT), text))
    return lines


def _asleep(server: ServerView) -> str:
    """How it sleeps, and who has its GPUs; empty for a server that is awake."""
    if server.state is not State.ASLEEP or server.sleep is None:
        return ""
    pair = f"; {server.partner} shares its GPUs" if server.partner else ""
    return f"{server.sleep.sentence}{pair}. It serves no requests until woken up"


def progress_lines(startup: Startup | None, width: int) -> list[Strip]:
    """Startup progress and the time left, estimated from an earlier start; a warning if it is silent for too long."""
    if startup is None:
        return []
    lines = []
    if startup.progress is not None:
        done = startup.progress
        text = f"  {done.share:4.0%}  {format_left(done)} (last start took {took(done.usual)})"
        room = max(6, min(40, width - 4 - len(text)))
        lines.append(line("   ", (progress_line(done.share, room), ACCENT), fit(text, width - room - 3).rstrip()))
    else:
        lines.append(line((fit("   No estimate: first start of this model here", width).rstrip(), DIM)))
    if startup.quiet_seconds is not None:
        text = f"no progress for {duration(startup.quiet_seconds)}: neither its log nor the model's cache grows"
        lines += paragraph(text, width, WARN, "   ", first=[(" ! ", WARN)])
    return lines


def format_left(progress: Progress) -> str:
    """``~40s left``, or that it takes longer than last time."""
    if progress.seconds_left is None:
        return "longer than last time"
    if progress.seconds_left < 1:
        return "almost done"
    # Steps of five seconds: an estimate that changes each second suggests too much precision, and costs bytes.
    rounded = progress.seconds_left if progress.seconds_left < 10 else round(progress.seconds_left / 5) * 5
    return f"~{duration(max(1.0, rounded))} left"


def memory_lines(startup: Startup | None, width: int) -> list[Strip]:
    """The memory that the engine reported, per GPU."""
    report = startup.report if startup is not None else None
    if report is None:
        return []
    kv = [f"{report.kv_gib:.1f} GiB"] if report.kv_gib is not None else []
    kv += [f"{count(report.kv_tokens)} tokens"] if report.kv_tokens is not None else []
    parts = [
        f"weights {report.weights_gib:.1f} GiB" if report.weights_gib is not None else "",
        f"KV cache {', '.join(kv)}" if kv else "",
        f"CUDA graphs {report.graphs_gib:.1f} GiB" if report.graphs_gib is not None else "",
        f"{report.max_concurrency:.1f} full-length requests in parallel" if report.max_concurrency is not None else "",
    ]
    rows: list[str] = []
    for text in filter(None, parts):
        if rows and len(rows[-1]) + len(text) + 3 <= width - 22:
            rows[-1] += f" · {text}"
        else:
            rows.append(text)
    return [line((f"   {fit('memory' if at == 0 else '', 18)}", DIM), row) for at, row in enumerate(rows)]


def stage_lines(stages: Sequence[Stage], now: float, width: int) -> list[Strip]:
    """A line per stage: done or running, name, duration, detail. The bars share one scale."""
    taken = [stage.seconds if stage.seconds is not None else max(0.0, now - stage.started_at) for stage in stages]
    longest = max(taken, default=0.0) or 1.0
    detail = max((len(plain(stage.detail)) for stage in stages), default=0)
    room = min(40, width - 31 - max(9, detail))
    lines = []
    for stage, seconds in zip(stages, taken, strict=True):
        running = stage.seconds is None
        share = stage.share
        if room < 6:
            drawn = ""
        elif running and share is not None:
            drawn = progress_line(share, room)
        else:
            drawn = fit("█" * max(1, round(seconds / longest * room)), room)
        lines.append(
            line(
                (" ● ", ACCENT) if running else (" ✓ ", OK),
                (fit(plain(stage.name), 16), STRONG if running else None),
                fit(took(seconds), 8, ">") + "  ",
                (drawn, ACCENT if running else DIM),
                (f"  {plain(stage.detail)}" if stage.detail else "", None),
            )
        )
    return lines


def _totals(server: ServerView, now: float) -> list[Strip]:
    lines = []
    if server.stages:
        done = [stage.seconds for stage in server.stages]
        end = now if None in done else max(s.started_at + (s.seconds or 0.0) for s in server.stages)
        lines.append(line(("   " + fit("total", 16), DIM), fit(took(end - server.stages[0].started_at), 8, ">")))
    if server.downtime_seconds is not None:
        lines.append(line(("   " + fit("last downtime", 16), DIM), fit(took(server.downtime_seconds), 8, ">")))
    if server.next_attempt_at is not None and server.next_attempt_at > now:
        lines.append(line((f"   next attempt in {duration(server.next_attempt_at - now)}", WARN)))
    return lines


def _advice(server: ServerView) -> list[Strip]:
    """What the user can do about a server that is down, or what it is waiting for."""
    if not server.ours:
        return [line((f" {plain(server.foreign.removeprefix('was '))}", DIM))]
    if server.node and server.state in (State.FAILED, State.STOPPED):  # a node is never changed or started alone
        return [line(), _keys([("open_log", "log"), ("remove", "remove")])]
    if server.state is State.FAILED:
        found = findings_of(server)
        fix = [("stage_fix", "fix")] if found and found[0].flag_fixes else []
        why = [("findings", "findings")] if found else []
        revert = [("previous_flags", "revert")] if server.previous_flags is not None else []
        start = [("restart", "start"), ("remove", "remove")]
        return [line(), _keys([*fix, *why, ("open_log", "log"), ("edit_flags", "flags"), *revert, *start])]
    if server.state is State.STOPPED:
        return [line(), _keys([("restart", "start"), ("edit_flags", "flags"), ("remove", "remove")])]
    if server.state is State.ASLEEP:
        return [line(), _keys([("switch_pair", "wake up"), ("stop", "stop"), ("open_log", "log")])]
    if server.state is State.STARTING and not server.stages:
        return [line((" waiting for its first log line", DIM))]
    return []


def _keys(hints: Sequence[tuple[str, str]]) -> Strip:
    parts: list[Part] = [" "]
    for id, word in hints:
        parts += [(f"{key_of(id)} {word}", clickable(f"screen.{id}", DIM)), "   "]
    return line(*parts[:-1])
