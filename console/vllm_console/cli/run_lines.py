"""Runs and comparisons as text."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence

from vllm_console.diagnosis.titles import title_of_code
from vllm_console.format import count, duration, seconds
from vllm_console.telemetry.compare_words import (
    amount_words,
    change_words,
    goal_words,
    setting_words,
    signed,
    value_words,
)
from vllm_console.telemetry.comparison import Comparison
from vllm_console.telemetry.ledger import Run
from vllm_console.text import plain

WIDTH = 100
_COLUMNS = (("ID", 5), ("RUN", 20), ("SINCE", 13), ("LASTED", 9), ("REQ/S", 7), ("TTFT99", 8), ("ITL99", 8),
            ("TOK/S", 8), ("HOW", 0))  # fmt: skip


def run_lines(runs: Sequence[Run], now: float) -> list[str]:
    """One line per run under a heading, its difference to the run before in a line of its own below."""
    lines = ["".join(f"{title:<{width}}" for title, width in _COLUMNS).rstrip()]
    for run in runs:
        cells = [plain(cell) for cell in _cells(run, now)]
        lines.append("".join(f"{cell:<{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)).rstrip())
        if run.changed:
            lines.append("     " + plain("  ".join(setting_words(change) for change in run.changed)))
        if run.conditions:
            lines += textwrap.wrap(_held(run), WIDTH, initial_indent="     ", subsequent_indent="     ")
    return lines


def _held(run: Run) -> str:
    """Which conditions held, the longest first."""
    longest = sorted(run.conditions.items(), key=lambda held: -held[1])
    told = ", ".join(f"{title_of_code(code)} {duration(minutes * 60)}" for code, minutes in longest)
    return f"held: {told}" + (" (from its history, without GPUs)" if run.judged_until is not None else "")


def _cells(run: Run, now: float) -> tuple[str, ...]:
    figures = run.figures
    until = run.ended_at or now
    return (
        str(run.id),
        run.name,
        time.strftime("%m-%d %H:%M", time.localtime(run.started_at)),
        duration(until - run.started_at),
        amount_words("", figures.get("requests_per_second")),
        seconds(figures.get("ttft_p99")),
        seconds(figures.get("itl_p99")),
        count(figures.get("generation_tokens_per_second")),
        _how(run),
    )


def _how(run: Run) -> str:
    if not run.flags and run.ended_at is None:
        return "only its minutes were recorded"
    if run.ended_at is None:
        return f"on its way, {run.preset}" if run.ready_at is None and not run.windows else f"runs, {run.preset}"
    if run.ended.get("requested"):
        return f"stopped, {run.preset}"
    return f"failed, {run.cause or run.ended.get('reason') or 'its reason is not known'}"


def comparison_lines(found: Comparison) -> list[str]:
    """The verdict first, then what was changed, the traffic, and every figure."""
    lines = textwrap.wrap(found.sentence, WIDTH)
    for note in found.notes:
        lines += textwrap.wrap(f"- {note}", WIDTH, subsequent_indent="  ")
    lines += ["", f"before  {_side(found, after=False)}", f"after   {_side(found, after=True)}"]
    lines += [f"changed {setting_words(change)}" for change in found.differences]
    lines += ["", f"{f'traffic: {found.traffic}':<22}{'before':>12}{'after':>12}   change"]
    for factor in found.factors:
        before, after = (amount_words(factor.unit, value) for value in (factor.before, factor.after))
        change = f"{signed(factor.change):<8}{factor.likeness}"
        lines.append(f"  {factor.name:<20}{before:>12}{after:>12}   {change}".rstrip())
    lines += ["", f"{'figures (medians)':<22}{'before':>12}{'after':>12}   {'change':<28}verdict"]
    for figure in found.figures:
        before, after = (value_words(figure.unit, value) for value in (figure.before, figure.after))
        said = " ".join(filter(None, (str(figure.verdict or ""), goal_words(figure))))
        lines.append(f"  {figure.name:<20}{before:>12}{after:>12}   {change_words(figure):<28}{said}".rstrip())
    return [plain(line) for line in lines]


def _side(found: Comparison, *, after: bool) -> str:
    side = found.after if after else found.before
    windows = f"{side.compared} of {side.windows} windows of {side.seconds:.0f} s compared"
    return f"run {side.run.id}, {side.run.name}: {windows}"
