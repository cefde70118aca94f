"""The memory report of a real start: parsed from vLLM's log (0.8 to 0.33) and merged with the estimate. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.budget.budget import EngineReport, MemoryBudget

if TYPE_CHECKING:
    from vllm_launchers.plan.inputs import EarlierReport

WEIGHTS = lazy_pattern(r"(?:Model loading took|Loading model weights took) ([\d.]+) ?Gi?B")
KV_MEMORY = lazy_pattern(
    r"(?:Available KV cache memory:|memory reserved for KV Cache is|(?:Explicitly|Auto) set \(|GiB, reserved)"
    r" ?(-?[\d.]+) ?(?:GiB|/[\d.]+\) GiB for KV cache)"
)
"""Formats of 0.9.2 and later, of 0.8 with the V0 engine, of the CPU build, and with ``kv-cache-memory-bytes``."""
KV_TOKENS = lazy_pattern(r"KV cache size: ([\d,]+) tokens")
CONCURRENCY = lazy_pattern(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
GRAPHS = lazy_pattern(r"Graph capturing finished in .*?took (-?[\d.]+) GiB")
GRAPHS_EXPECTED = lazy_pattern(r"Estimated CUDA graph memory: ([\d.]+) GiB total")
FITTED_LENGTH = lazy_pattern(r"Auto-fit max_model_len: (?:reduced from \d+ to|full model context length) (\d+)")
KV_PIN = lazy_pattern(r"--kv-cache-memory(?:-bytes)?=(\d+)`?(?: \([\d.]+ GiB\))? to fit into requested memory")
"""0.10.2 and later; some releases log it at DEBUG only."""
NON_TORCH = lazy_pattern(r"(-?[\d.]+) ?GiB for non-torch memory")
"""Growth of the GPU's memory outside PyTorch until the KV cache was sized. Logged by 0.11 and later,
but not by 0.32 and 0.33, which add the weights to it."""
_BLOCKS = lazy_pattern(r"# (?:GPU|CPU|cuda|cpu) blocks: (\d+)")
_OVERRIDDEN = lazy_pattern(r"Overriding num_gpu_blocks=(\d+) with num_gpu_blocks_override=([1-9]\d*)")
_BEGINS = lazy_pattern(r"vLLM (?:API )?server version|Initializing an? (?:V[01] )?LLM engine")
_ANY = lazy_pattern(r"Gi?B|tokens|max_model_len|vLLM |LLM engine")
_LONGEST_LINE = 4000
_V0_BLOCK = 16


class ReportReader:
    """Parses a log line by line. Workers of one engine differ slightly; the one with the least room counts."""

    def __init__(self) -> None:
        self.report = EngineReport()
        self._graphs_captured = False

    def line(self, line: str) -> None:
        """Parse one line; another start in the same log resets the report."""
        if _ANY.search(line) is None and _BLOCKS.search(line) is None:
            return
        text = line[:_LONGEST_LINE]
        if _BEGINS.search(text) and self.report.kv_tokens is not None:
            self.report, self._graphs_captured = EngineReport(), False
        known = self.report
        if (weights := _figure(WEIGHTS, text)) is not None:
            known = replace(known, weights_gib=max(weights, known.weights_gib or 0.0))
        if (kv := _figure(KV_MEMORY, text)) is not None:
            known = replace(known, kv_gib=kv if known.kv_gib is None else min(kv, known.kv_gib))
        if (tokens := _whole(KV_TOKENS, text)) is not None:
            known = replace(known, kv_tokens=tokens if known.kv_tokens is None else min(tokens, known.kv_tokens))
        elif (blocks := _whole(_BLOCKS, text)) is not None and known.kv_tokens is None:
            known = replace(known, kv_tokens=blocks * _V0_BLOCK)
        if found := CONCURRENCY.search(text):
            times = _number(found[2])
            best = times if known.max_concurrency is None or times is None else min(times, known.max_concurrency)
            known = replace(known, max_concurrency=best, max_model_len=_count(found[1]))
        elif (length := _whole(FITTED_LENGTH, text)) is not None:
            known = replace(known, max_model_len=length)
        self.report = self._with_graphs(_with_usage(known, text), text)

    def _with_graphs(self, known: EngineReport, text: str) -> EngineReport:
        """Add the size of CUDA graphs; the measured size takes precedence over the estimated one."""
        if (took := _figure(GRAPHS, text)) is not None:
            best = max(took, known.graphs_gib or 0.0) if self._graphs_captured else took
            self._graphs_captured = True
            return replace(known, graphs_gib=best)
        expected = None if self._graphs_captured else _figure(GRAPHS_EXPECTED, text)
        return known if expected is None else replace(known, graphs_gib=expected)


def _with_usage(known: EngineReport, text: str) -> EngineReport:
    """Add figures from the line on actual usage: memory outside PyTorch, and the cache size that fits."""
    if pin := _whole(KV_PIN, text):
        known = replace(known, kv_pin_bytes=pin if known.kv_pin_bytes is None else min(pin, known.kv_pin_bytes))
    if (others := _figure(NON_TORCH, text)) is not None:
        known = replace(known, non_torch_gib=max(others, known.non_torch_gib or 0.0))
    return known


def read_report(lines: Iterable[str]) -> EngineReport:
    """Parse a log's lines; missing figures are None."""
    reader = ReportReader()
    for line in lines:
        reader.line(line)
    return reader.report


def blocks_without_override(lines: Iterable[str]) -> float | None:
    """How many times more KV cache blocks the engine had memory for than ``num-gpu-blocks-override`` allowed.

    The least of several engines or workers; None if not logged.
    """
    found = [_OVERRIDDEN.search(line[:_LONGEST_LINE]) for line in lines]
    return min((int(one[1]) / int(one[2]) for one in found if one is not None), default=None)


def as_reported(budget: MemoryBudget, report: EngineReport, *, limited: bool = False) -> MemoryBudget:
    """Use the engine's own figures in a budget where available; its ``source`` is then ``engine``.

    ``limited``: the number of blocks was set (``--num-gpu-blocks-override``). The engine then reports the memory that
    was available for the KV cache, not what these blocks take.
    """
    if report == EngineReport():
        return budget
    if limited:
        report = replace(report, kv_gib=None)

    def reported_or(reported: float | None, estimated: float) -> float:
        return estimated if reported is None else reported

    scale = report.weights_gib / budget.weights_gib if report.weights_gib is not None and budget.weights_gib else 1.0
    grown = reported_or(report.kv_gib, budget.kv_gib) - budget.kv_gib
    graphs = max(0.0, reported_or(report.graphs_gib, budget.graphs_gib))
    per_gpu = tuple(
        replace(
            gpu,
            weights_gib=gpu.weights_gib * scale,
            graphs_gib=graphs if gpu.graphs_gib or report.graphs_gib is not None else 0.0,
            kv_gib=max(0.0, gpu.kv_gib + grown),
            overhead_gib=max(0.0, gpu.overhead_gib - grown - gpu.weights_gib * (scale - 1) - graphs + gpu.graphs_gib),
        )
        for gpu in budget.per_gpu
    )
    more = report.kv_tokens / budget.kv_tokens if report.kv_tokens is not None and budget.kv_tokens else 1.0
    overhead = budget.overhead_gib - grown - budget.weights_gib * (scale - 1) - graphs + budget.graphs_gib
    return replace(
        budget,
        fixed=budget.fixed and report.kv_gib is None and not limited,  # it started with that size
        weights_gib=reported_or(report.weights_gib, budget.weights_gib),
        overhead_gib=max(0.0, overhead),
        graphs_gib=graphs,
        kv_gib=reported_or(report.kv_gib, budget.kv_gib),
        kv_tokens=budget.kv_tokens if report.kv_tokens is None else report.kv_tokens,
        max_model_len=budget.max_model_len if report.max_model_len is None else report.max_model_len,
        concurrency_p95=None if budget.concurrency_p95 is None else budget.concurrency_p95 * more,
        max_concurrency=budget.max_concurrency if report.max_concurrency is None else report.max_concurrency,
        per_gpu=per_gpu,
        most_sequences=None if budget.most_sequences is None else round(budget.most_sequences * more),
        source="engine",
    )


def report_figures(report: EngineReport) -> dict[str, float]:
    """Convert a report to plain figures, for storage."""
    pairs = ((name, getattr(report, name)) for name in report.__struct_fields__)
    return {name: float(value) for name, value in pairs if value is not None}


def budget_figures(budget: MemoryBudget) -> dict[str, float]:
    """The figures of a prediction that are stored with a report."""
    figures = {"weights_gib": budget.weights_gib, "overhead_gib": budget.overhead_gib, "kv_gib": budget.kv_gib}
    return figures if budget.kv_tokens is None or not budget.fits else {**figures, "kv_tokens": float(budget.kv_tokens)}


def learned_from(reported: Mapping[str, float], predicted: Mapping[str, float]) -> EarlierReport:
    """Convert stored figures (see `report_figures` and `budget_figures`) to a plan's form."""
    from vllm_launchers.plan.inputs import EarlierReport

    return EarlierReport(
        EngineReport(
            weights_gib=reported.get("weights_gib"),
            kv_gib=reported.get("kv_gib"),
            kv_tokens=_rounded(reported.get("kv_tokens")),
            max_concurrency=reported.get("max_concurrency"),
            graphs_gib=reported.get("graphs_gib"),
            max_model_len=_rounded(reported.get("max_model_len")),
            kv_pin_bytes=_rounded(reported.get("kv_pin_bytes")),
        ),
        predicted_weights_gib=predicted.get("weights_gib"),
        predicted_kv_gib=predicted.get("kv_gib"),
        predicted_kv_tokens=_rounded(predicted.get("kv_tokens")),
    )


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _figure(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return _number(found[1]) if found else None


def _whole(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return _count(found[1]) if found else None


def _count(digits: str) -> int | None:
    number = _number(digits.replace(",", ""))
    return None if number is None else int(number)


def _number(digits: str) -> float | None:
    """Parse a number; None if it is malformed (``1.2.3``) or absurdly large."""
    try:
        number = float(digits)
    except ValueError:
        return None
    return number if abs(number) < 1e15 else None
