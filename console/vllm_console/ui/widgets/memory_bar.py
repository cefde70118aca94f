"""A launch's share of each GPU's memory, as bars and figures. Pure.

Each part has its own mark, in Unicode and in ASCII, so that color is not needed to tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.style import Style
from textual.strip import Strip

from vllm_console.text import UNKNOWN, count
from vllm_console.text import size as size_text
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import BAD, DIM, WARN
from vllm_console.ui.widgets.draw import Part, fit, parts_length
from vllm_launchers.host.gpu.topology import spans
from vllm_launchers.plan.budget.budget import GpuBudget, MemoryBudget
from vllm_launchers.units import GIB

LONG_TITLES = 76
"""Minimum columns for the full names in the legend."""

SHORT_BAR, LONG_BAR = 6, 60
LEAST_SHOWN_GIB = 0.05
"""Minimum size that gets at least one cell in the bar: anything that is not shown as 0.0."""


class _Part(msgspec.Struct, frozen=True):
    """A part of a GPU's memory: its mark in the bar, its names in the legend, its color."""

    mark: str
    title: str
    short: str
    style: Style | None


_PARTS = (
    _Part("█", "weights", "wgt", Style(color="cyan")),
    _Part("≡", "overhead", "over", Style(color="bright_blue")),
    _Part("▒", "KV cache", "KV", Style(color="green")),
    _Part("╳", "others", "oth", None),
    _Part("·", "left", "left", DIM),
)
"""In bar order. Overhead is the CUDA context, activations and CUDA graphs; "others" are other processes. "left" is less
than what is free now, since the launch takes the rest."""


def _sizes(gpu: GpuBudget) -> tuple[float, ...]:
    """GiB of each part, in the order of `_PARTS`."""
    return gpu.weights_gib, gpu.overhead_gib + gpu.graphs_gib, gpu.kv_gib, gpu.others_gib, gpu.free_gib


def memory_bar(gpu: GpuBudget, width: int) -> list[Part]:
    """A bar of one GPU to scale, in ``width`` cells; ends in ``!`` if more memory is needed than available."""
    over = gpu.free_gib < -0.05 or gpu.kv_gib < 0
    cells = _cells([max(0.0, gib) for gib in _sizes(gpu)[:-1]], gpu.total_gib, width - over)
    parts: list[Part] = [(part.mark * count, part.style) for part, count in zip(_PARTS, cells, strict=False)]
    free = _PARTS[-1]
    return [*parts, (free.mark * (width - over - sum(cells)), free.style), ("!" * over, BAD)]


def _cells(sizes: Sequence[float], total: float, width: int) -> list[int]:
    """The cells that each size takes of a bar. Any visible size gets at least one, at the expense of the largest."""
    cells: list[int] = []
    reached = 0.0
    for size in sizes:
        reached += size
        end = min(width, round(reached / total * width)) if total > 0 else 0
        cells.append(max(0, end - sum(cells)))
    for index, size in enumerate(sizes):
        if size >= LEAST_SHOWN_GIB and not cells[index]:
            if sum(cells) >= width:
                cells[cells.index(max(cells))] -= 1
            cells[index] = 1
    return cells


def budget_rows(memory: MemoryBudget, width: int, most: int) -> list[Strip]:
    """A legend, and a bar with figures in GiB per GPU; identical GPUs share one if there are more than ``most``."""
    groups = [[gpu] for gpu in memory.per_gpu]
    if len(groups) > most:
        groups = _alike(memory.per_gpu)
    if not groups:
        weights = size_text(memory.weights_gib * GIB)
        return [line(fit(f" weights {weights}; no GPU data to compare with", width))]
    hidden = len(groups) - max(1, most)
    if hidden > 0:
        groups = sorted(groups, key=lambda group: (group[0].kv_gib, group[0].free_gib))[: max(1, most)]
    titles = _titles(width)
    labels = [_label(group) for group in groups]
    label = max(3, *map(len, labels))
    cells = max(SHORT_BAR, min(LONG_BAR, width - label - sum(len(title) + 1 for title, _ in titles) - 2))
    legend: list[Part] = [(" " + fit("GiB", label + 1 + cells), DIM)]
    legend += [(f" {title}", style) for title, style in titles]
    strips = [line(*legend)]
    for group, named in zip(groups, labels, strict=True):
        figures = _figures(group[0], [len(title) for title, _ in titles])
        strips.append(line((f" {fit(named, label)} ", None), *memory_bar(group[0], cells), *figures))
    if hidden > 0:
        strips.append(line((f" and {hidden} more with at least as much room", DIM)))
    return strips


def _titles(width: int) -> list[tuple[str, Style | None]]:
    """The legend's columns, each wide enough for a figure. "usable" is what CUDA sees, less than the card's total."""
    long = width >= LONG_TITLES
    named = [(f"{part.mark} {part.title if long else part.short}", part.style) for part in _PARTS]
    return [(fit(title, max(6, len(title)), ">"), style) for title, style in [*named, ("usable", DIM)]]


def _figures(gpu: GpuBudget, widths: Sequence[int]) -> list[Part]:
    figures = [*_sizes(gpu), gpu.total_gib]
    parts: list[Part] = []
    for position, (gib, width) in enumerate(zip(figures, widths, strict=True)):
        text = f"{gib:.1f}" if gib or position not in (1, 3) else UNKNOWN if position == 1 else "0"
        parts.append((" " + fit(text, width, ">"), BAD if gib < -0.05 else None))
    return parts


def _alike(gpus: Sequence[GpuBudget]) -> list[list[GpuBudget]]:
    """Group GPUs whose parts are equal to a tenth of a GiB."""
    groups: dict[tuple[float, ...], list[GpuBudget]] = {}
    for gpu in gpus:
        groups.setdefault(tuple(round(gib, 1) for gib in (*_sizes(gpu), gpu.total_gib)), []).append(gpu)
    return list(groups.values())


def _label(gpus: Sequence[GpuBudget]) -> str:
    runs: list[list[int]] = []
    for index in sorted(gpu.index for gpu in gpus if gpu.index is not None):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(map(spans, runs)) or "each"


def room_words(memory: MemoryBudget, width: int) -> list[Part]:
    """What fits into the KV cache: tokens, requests of full length, requests of the workload's p95 length.

    Uses a shorter form if it would take more than ``width`` cells.
    """
    if memory.lacks_memory:
        return [(f"does not fit: {-memory.kv_gib:.1f} GiB short, before any KV cache", BAD)]
    if not memory.cached:
        return [("no KV cache: an encoder", None)]
    parts: list[Part] = []
    for short in (False, True):
        tokens = UNKNOWN if memory.kv_tokens is None else count(memory.kv_tokens) if short else f"{memory.kv_tokens:,}"
        parts = [(f"KV {memory.kv_gib:.1f} GiB · {tokens} tokens", None), *_concurrency(memory, short)]
        if parts_length(parts) <= width:
            break
    return parts


def _concurrency(memory: MemoryBudget, short: bool) -> list[Part]:
    parts: list[Part] = []
    if memory.max_concurrency is not None:
        length = f"{memory.max_model_len:,}" if memory.max_model_len else "full length"
        at = length if short or not memory.max_model_len else f"{length} tokens"
        text = f" · {times(memory.max_concurrency)} {'at' if short else 'concurrent at'} {at}"
        parts.append((text if memory.fits else f"{text}: not one request", None if memory.fits else BAD))
    if (held := memory.served_p95) is not None:
        named = "at p95" if short else "at the workload's p95 length"
        parts.append((f" · {times(held)} {named}", None if held >= 1 else WARN))
    return parts


def times(value: float) -> str:
    """A concurrency as in vLLM's log, without meaningless digits: ``0.83×``, ``8.2×``, ``107×``."""
    digits = 2 if value < 1 else 1 if value < 20 else 0
    whole = 10**digits
    return f"{int(value * whole) / whole:,.{digits}f}×"  # rounded down: 0.999 requests are not one


def budget_line(memory: MemoryBudget, width: int) -> Strip:
    """The budget in one line: a small bar of the GPU with the least room, and what fits into its KV cache."""
    tightest = min(memory.per_gpu, key=lambda gpu: (gpu.kv_gib, gpu.free_gib), default=None)
    words = room_words(memory, width - LONG_BAR // 2)
    length = parts_length(words)
    bar: list[Part] = []
    if tightest is not None and (cells := min(24, width - length - 3)) >= SHORT_BAR:
        bar = [*memory_bar(tightest, cells), " "]
    return line(" ", *bar, *words)
