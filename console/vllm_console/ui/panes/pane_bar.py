"""The bar above the panes: all panes, which are visible, and which have a problem. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.diagnosis.finding import Severity
from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import clickable, line
from vllm_console.ui.theme import ACCENT, BAD, CURSOR, DIM, KEY, STRONG
from vllm_console.ui.widgets.draw import Part
from vllm_launchers.keeper.records import State

KV_CACHE, PREEMPTIONS, LATENCY, THROUGHPUT, LOG, GPUS, REQUESTS, STEPS = range(1, 9)

NAMES = {
    KV_CACHE: "KV",
    PREEMPTIONS: "Preempt",
    LATENCY: "Latency",
    THROUGHPUT: "Throughput",
    LOG: "Log",
    GPUS: "GPUs",
    REQUESTS: "Requests",
    STEPS: "Steps",
}

SHORT_NAMES = {THROUGHPUT: "Thr", REQUESTS: "Req", PREEMPTIONS: "Pre", LATENCY: "Lat"}
"""Short names for when the full names do not fit, in the order in which they are shortened."""

_OBJECTIVES = {
    "kv_cache_usage": KV_CACHE,
    "preemption_rate": PREEMPTIONS,
    "ttft_p99_seconds": LATENCY,
    "itl_p99_seconds": LATENCY,
}
"""The pane that shows a missed objective."""

FINDING_PANES = {
    "kv_cache_pressure": KV_CACHE,
    "oversubscribed_memory": KV_CACHE,
    "preempting": PREEMPTIONS,
    "slow_first_token": LATENCY,
    "slow_tokens": LATENCY,
    "prefill_contention": LATENCY,
    "oversubscribed_sequences": THROUGHPUT,
    "oversubscribed_compute": THROUGHPUT,
    "not_admitted": THROUGHPUT,
    "uneven_ranks": THROUGHPUT,
    "engine_hung": LOG,
    "gpu_throttled": GPUS,
    "gpu_memory_below_reserve": GPUS,
    "gpu_memory_contended": GPUS,
    "gpu_claimed": GPUS,
    "pcie_narrow": GPUS,
    "tensor_parallel_stalls": GPUS,
}
"""The pane that shows a finding, by code; other findings are about flags or clients."""


LEGEND = "r2 run 2 · ! finding · ✓ ended · b load"
"""The meaning of the markers in charts; help explains more."""


def problem_panes(server: ServerView, snapshot: FleetSnapshot | None) -> frozenset[int]:
    """The numbers of the panes that show a problem."""
    found: set[int] = set()
    if server.state.alive:
        found |= {pane for objective, pane in _OBJECTIVES.items() if server.missed(objective)}
        severe = (Severity.CRITICAL, Severity.WARNING)
        found |= {
            FINDING_PANES[finding.code]
            for finding in server.findings
            if finding.severity in severe and finding.code in FINDING_PANES
        }
    if server.state is State.FAILED:
        found.add(LOG)
    host = snapshot.host if snapshot is not None else None
    if host is not None and host.gpus:
        from vllm_launchers.host.gpu.hardware_warnings import hardware_warnings

        if hardware_warnings(host):
            found.add(GPUS)
    return frozenset(found)


def _names(width: int) -> Mapping[int, str]:
    """The panes' names, shortening only as many as needed to fit ``width`` cells."""
    names = dict(NAMES)
    keys = sum(cell_len(key_of(f"pane_{number}")) + 3 for number in names)
    for number, short in SHORT_NAMES.items():
        if keys + sum(map(len, names.values())) > width:
            names[number] = short
    return names


def pane_bar(
    in_sight: Collection[int],
    large: int,
    problems: Collection[int],
    layout: str,
    width: int,
    *,
    legend: bool = False,
    needed: bool = False,
) -> Strip:
    """The panes with their numbers: visible ones bright, the enlarged one in reverse; the layout at the right.

    ``legend``: there are markers in the charts; explain them if there is room. ``needed``: the layout is shown nowhere
    else, so pane names give way to it rather than the reverse; the enlarged pane keeps its name.
    """
    parts: list[Part] = []
    used = 0
    end = cell_len(key_of("next_layout")) + cell_len(layout) + 3
    names = _names(width - end if needed else width)
    if needed and sum(cell_len(f" {key_of(f'pane_{number}')} {name} ") for number, name in names.items()) > width - end:
        names = {number: name if number == large else "" for number, name in names.items()}
    for number, name in names.items():
        lit = number in in_sight
        mark = "!" if number in problems else " "
        key = key_of(f"pane_{number}")
        text = f" {key} {name}{mark}"
        if used + cell_len(text) > width:
            break
        action = f"screen.pane({number})"
        style = CURSOR if number == large else (STRONG if lit else DIM)
        parts += [
            (f" {key} ", clickable(action, CURSOR if number == large else (KEY if lit else ACCENT + DIM))),
            (name, clickable(action, style)),
            (mark, clickable(action, BAD if mark.strip() else style)),
        ]
        used += cell_len(text)
    key, text = key_of("next_layout"), f" {layout} "
    room = width - used - cell_len(key) - cell_len(text)
    if room < 1:
        return line(*parts)
    action = "screen.next_layout"
    if legend and len(LEGEND) + 4 <= room:
        parts += ["   ", (LEGEND, DIM)]
        room -= len(LEGEND) + 3
    return line(*parts, " " * room, (key, clickable(action, KEY)), (text, clickable(action, DIM)))
