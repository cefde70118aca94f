"""Runs and comparisons as text."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_console.attached import DETACHED
from vllm_console.cli.output import row_line, table_lines
from vllm_console.diagnosis.finding import title_of_code
from vllm_console.history.energy import Tariff
from vllm_console.metrics.quantile import p99_in, text_of
from vllm_console.runs.compare import Comparison, ComparisonVerdict, Side
from vllm_console.runs.measurement import Measurement, attained_text, limit_text, newest_ramp, plots
from vllm_console.runs.store import Run
from vllm_console.runs.text import (
    amount_text,
    compared_text,
    detail_text,
    energy_cost_text,
    factor_sides,
    figure_change_text,
    likeness_text,
    notes,
    objective_text,
    plain_sentence,
    setting_text,
    side_text,
    signed,
    times_note,
    traffic_text,
    verdict_text,
)
from vllm_console.runs.windows import quantile_in
from vllm_console.text import UNKNOWN, clock, count, duration, percent, plain
from vllm_launchers.units import three_digits

WIDTH = 100
_COLUMNS = (("ID", 5), ("RUN", 20), ("SINCE", 13), ("LASTED", 9), ("REQ/S", 7), ("TTFT p99", 9), ("ITL p99", 9),
            ("TOK/S", 8), ("HOW", 0))  # fmt: skip


def run_lines(runs: Sequence[Run], now: float) -> list[str]:
    """One line per run below a heading, with its difference from the previous run on the next line."""
    lines = table_lines(_COLUMNS, ())
    for run in runs:
        lines.append(row_line([plain(cell) for cell in _cells(run, now)], _COLUMNS))
        if run.changed:
            lines.append("     " + plain("  ".join(setting_text(change) for change in run.changed)))
        if run.findings:
            lines += textwrap.wrap(
                _held(run), WIDTH, initial_indent="     ", subsequent_indent="     ", break_on_hyphens=False
            )
        lines += [f"     {_measured(one, now)}" for one in run.measurements]
    return [
        *lines,
        "REQ/S, TTFT, ITL and TOK/S: medians over the minutes with traffic of each run; REQ/S and TOK/S without",
        "those in which traffic began or ended, if there are others",
    ]


_STEP_COLUMNS = (("REQ/S", 7), ("SENT", 7), ("FAILED", 7), ("TTFT p99", 10), ("ITL p99", 9), ("TOK/S", 8), ("KV", 6),
                 ("PREEMPT", 8), ("WAIT", 6), ("ATTAINED", 9))  # fmt: skip


def step_heading() -> str:
    """The heading for `step_line`."""
    return "".join(f"{title:>{width}}" for title, width in _STEP_COLUMNS)


def step_line(step: Mapping[str, Any]) -> str:
    """One step of a measurement, marked at its end if the objectives do not hold."""
    rate = step["rate"]
    cells = (
        three_digits(rate) if rate is not None else UNKNOWN,
        count(step["sent"]),
        count(step["failed"]),
        p99_in(step["ttft_seconds"]),
        p99_in(step["itl_seconds"]),
        count(step["tokens_per_second"]),
        percent(step["kv_cache_usage"]),
        count(step["preemptions"]),
        count(step["waiting"]),
        attained_text(step["attained"]),
    )
    text = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _STEP_COLUMNS, strict=True))
    return f"{text} !" if step["ok"] is False else text


def ramp_step_lines(found: Measurement) -> list[str]:
    """All steps below a heading."""
    return [step_heading(), *map(step_line, found.steps)]


def _measured(found: Measurement, now: float) -> str:
    """A ramp or an imported result: its time and outcome."""
    why = f", limited by {limit_text(found.limited_by)}" if found.limited_by else ""
    return plain(f"{found.kind} {clock(found.at, now)}: {found.summary}{why}")


def _held(run: Run) -> str:
    """The findings that were open, longest first."""
    longest = sorted(run.findings.items(), key=lambda held: -held[1])
    findings = "; ".join(f"{title_of_code(code)} for {duration(minutes * 60)}" for code, minutes in longest)
    return f"findings: {findings}" + (" (findings about GPUs not included)" if run.judged_until is not None else "")


def _cells(run: Run, now: float) -> tuple[str, ...]:
    figures = run.figures
    until = run.ended_at or now
    return (
        str(run.id),
        run.name,
        clock(run.started_at, now),
        duration(until - run.started_at),
        amount_text("", figures.get("requests_per_second")),
        text_of(quantile_in(figures, "ttft_p99")),
        text_of(quantile_in(figures, "itl_p99")),
        count(figures.get("generation_tokens_per_second")),
        _how(run),
    )


def _how(run: Run) -> str:
    if not run.flags and run.ended_at is None:
        return "only its metrics were recorded"
    if run.ended_at is None:
        return f"starting, {run.preset}" if run.ready_at is None and not run.windows else f"running, {run.preset}"
    if run.ended.get("reason") == DETACHED:
        return DETACHED
    removed = " (server removed)" if run.removed else ""
    if not run.ended:  # its end was lost, or an attached endpoint was restarted or detached by an earlier release
        return f"ended, {run.preset}{removed}" if run.preset else f"ended{removed}"
    if run.ended.get("requested"):
        return f"stopped, {run.preset}{removed}"
    cause = run.cause if run.cause != "other" else ""
    return f"failed: {cause or run.ended.get('reason') or 'reason unknown'}{removed}"


def comparison_lines(found: Comparison, tariff: Tariff | None = None) -> list[str]:
    """The outcome and verdict first, then the changes, the traffic, and every figure."""
    early = found.verdict is ComparisonVerdict.TOO_LITTLE
    texts = (verdict_text(found),) if early else (plain_sentence(found), detail_text(found))
    lines = [row for text in texts for row in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]
    for note in filter(None, (times_note(found, time.time()), *notes(found))):
        lines += textwrap.wrap(f"- {note}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    lines += ["", f"before  {_side(found.before)}", f"after   {_side(found.after)}"]
    lines += [f"changed {setting_text(change)}" for change in found.differences]
    if not found.empty:
        lines += _tables(found)
    if cost := energy_cost_text(found, tariff):
        lines.append(f"  energy: {cost}")
    return [plain(line) for line in [*lines, *_ramps(found)]]


def _tables(found: Comparison) -> list[str]:
    lines = ["", f"{f'traffic: {traffic_text(found)}':<22}{'before':>14}{'after':>14}   change"]
    early = found.verdict is ComparisonVerdict.TOO_LITTLE
    for factor in found.factors:
        before, after = factor_sides(factor)
        change = f"{signed(factor.change):<8}{likeness_text(factor, early=early)}"
        lines.append(f"  {factor.name:<20}{before:>14}{after:>14}   {change}".rstrip())
    lines += ["", f"{'figures (medians)':<22}{'before':>14}{'after':>14}   {'change':<28}verdict"]
    for figure in found.figures:
        before, after = (side_text(figure, after=after) for after in (False, True))
        outcome = " ".join(filter(None, (str(figure.verdict or ""), objective_text(figure))))
        lines.append(f"  {figure.name:<20}{before:>14}{after:>14}   {figure_change_text(figure):<28}{outcome}".rstrip())
    return lines


def _ramps(found: Comparison) -> list[str]:
    """The newest ramp of each run, in one plot."""
    sides = ((mark, newest_ramp(side.run.measurements)) for mark, side in (("o", found.before), ("*", found.after)))
    known = [(mark, ramp) for mark, ramp in sides if ramp is not None]
    if not known:
        return []
    names = {"o": "before", "*": "after"}
    lines = ["", *(f"{mark} {names[mark]:<7}{ramp.kind}: {ramp.summary}" for mark, ramp in known)]
    return [*lines, *plots(known)]


def _side(side: Side) -> str:
    return f"{side.run.name}: {compared_text(side)} compared"
