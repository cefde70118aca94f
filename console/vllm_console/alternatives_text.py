"""Ways to launch a model, side by side, as lines of text: for `plan` and for the launch screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_console.text import UNKNOWN, plain
from vllm_launchers.units import counted

if TYPE_CHECKING:
    from vllm_launchers.plan.alternatives import Alternative
    from vllm_launchers.plan.pace import Pace, Paces

LONGEST_LABEL = 40
NARROW_LABEL = 22


def alternatives_table(
    alternatives: Sequence[Alternative], *, narrow: bool = False, room: int | None = None
) -> list[str]:
    """A heading, then a row per way: GiB per GPU, maximum requests, expected time per token and tokens per second.

    The plan's own is marked. Times and tokens are for 1, 8 and all concurrent requests: those in flight, or those that
    fit, as `format_full` shows. ``narrow`` keeps rows within 76 columns; if they are wider than ``room``, the last
    columns are left out.
    """
    forms = [_rows(alternatives, narrow=narrow, paces=paces) for paces in (2, 1, 0)]
    return next((rows for rows in forms if room is None or max(map(len, rows)) <= room), forms[-1])


def _rows(alternatives: Sequence[Alternative], *, narrow: bool, paces: int) -> list[str]:
    most = NARROW_LABEL if narrow else LONGEST_LABEL
    labels = [_cut(plain(one.label), most) for one in alternatives]
    width = max(map(len, labels), default=0)
    times = [_three(one.paces, lambda pace: f"{pace.tpot_seconds * 1e3:.0f}") for one in alternatives]
    rates = [_three(one.paces, lambda pace: f"{pace.tokens_per_second:,.0f}") for one in alternatives]
    heads = ("ms 1/8/full", "tok/s 1/8/full") if narrow else ("ms/token 1/8/full", "tokens/s 1/8/full")
    wide = max(map(len, (heads[0], *times)))
    columns, room = ("GPU  wts    KV", 5) if narrow else ("GPUs weights    KV", 7)
    gpus = len(columns.split()[0])

    def row(start: str, held: str, time: str, tokens: str) -> str:
        return "  ".join((f"{start} {held:>5}", f"{time:<{wide}}", tokens)[: 1 + paces]).rstrip()

    lines = [row(f"   {'layout':<{width}} {columns}", "reqs", *heads)]
    for number, one in enumerate(alternatives):
        held = UNKNOWN if one.concurrent_requests is None else f"{int(one.concurrent_requests or 0):,}"
        mark = "*" if one.chosen else " "
        start = f"{number + 1}{mark} {labels[number]:<{width}} {one.layout.total:>{gpus}} {one.weights_gib:>{room}.1f}"
        lines.append(row(f"{start} {one.kv_gib:>5.1f}", held, times[number], rates[number]))
    return lines


_KINDS = {"TP": "tensor", "PP": "pipeline", "DP": "data"}


def format_legend(alternatives: Sequence[Alternative]) -> str:
    """The meaning of marks and abbreviations that occur in the table, in one line."""
    labels = " ".join(one.label for one in alternatives)
    kinds = ", ".join(f"{short} {kind}" for short, kind in _KINDS.items() if short in labels.split())
    parts = [f"{kinds} parallel" if kinds else "", "* this plan", "GiB per GPU", "1/8/full requests at once"]
    parts.insert(1, "experts whole: expert parallel" if "experts whole" in labels else "")
    return "; ".join(filter(None, parts))


def format_full(alternatives: Sequence[Alternative]) -> str:
    """The meaning of ``full`` in the heading; empty if no pace is known."""
    most = max((one.paces.full.concurrency for one in alternatives if one.paces and one.paces.full), default=None)
    return f"full: {counted(most, 'concurrent request')}, or as many as fit" if most is not None else ""


def alternative_text(one: Alternative) -> str:
    """Why it is chosen or not, and its trade-off, and the full name of another model, which the table may cut."""
    parts = (part.strip() for part in (one.reason, one.tradeoff))
    ended = (part if part.endswith((".", "!", "?")) else f"{part}." for part in parts if part)
    model = (f"Model: {one.model}",) if one.model else ()  # without a period, to copy it
    return plain(" ".join((*(part[0].upper() + part[1:] for part in ended), *model)))


def format_pace(paces: Paces, room: int | None = None) -> str:
    """``42 tokens/s (24 ms per token) with 1 request, 201 (40) with 8, 1,154 (56) with 64``; empty for none.

    In ``room`` cells, only as many as fit completely, but at least the first one.
    """
    found: list[str] = []
    shown: set[int] = set()
    for pace in (paces.one, paces.some, paces.full):
        if pace is None or pace.concurrency in shown:
            continue
        shown.add(pace.concurrency)
        per_token = f"{pace.tpot_seconds * 1e3:.0f}"
        units = (" tokens/s", " ms per token", " request" if pace.concurrency == 1 else "")
        rate, time, count = units if not found else ("", "", "")
        found.append(f"{pace.tokens_per_second:,.0f}{rate} ({per_token}{time}) with {pace.concurrency:,}{count}")
    while room is not None and len(found) > 1 and len(", ".join(found)) > room:
        found.pop()
    return ", ".join(found)


def _three(paces: Paces | None, shown: Callable[[Pace], str]) -> str:
    if paces is None:
        return UNKNOWN
    return "/".join(UNKNOWN if pace is None else shown(pace) for pace in (paces.one, paces.some, paces.full))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
