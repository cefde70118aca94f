"""What a real start says of its memory, read from vLLM's log (0.8 to 0.33), and set beside the estimate. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from vllm_launchers.plan.budget.model import EngineReport, MemoryBudget
from vllm_launchers.plan.knowledge import Learned

WEIGHTS = re.compile(r"(?:Model loading took|Loading model weights took) ([\d.]+) ?Gi?B")
KV_MEMORY = re.compile(
    r"(?:Available KV cache memory:|memory reserved for KV Cache is|(?:Explicitly|Auto) set \(|GiB, reserved)"
    r" ?(-?[\d.]+) ?(?:GiB|/[\d.]+\) GiB for KV cache)"
)
"""0.9.2 and later; 0.8 with the old engine; the CPU build; and where ``kv-cache-memory-bytes`` says it."""
KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
GRAPHS = re.compile(r"Graph capturing finished in .*?took (-?[\d.]+) GiB")
GRAPHS_EXPECTED = re.compile(r"Estimated CUDA graph memory: ([\d.]+) GiB total")
FITTED_LENGTH = re.compile(r"Auto-fit max_model_len: (?:reduced from \d+ to|full model context length) (\d+)")
_BLOCKS = re.compile(r"# (?:GPU|CPU|cuda|cpu) blocks: (\d+)")
_BEGINS = re.compile(r"vLLM (?:API )?server version|Initializing an? (?:V[01] )?LLM engine")
_ANY = re.compile(r"Gi?B|tokens|max_model_len|vLLM |LLM engine")
_LONGEST_LINE = 4000
_V0_BLOCK = 16


class ReportReader:
    """Follows a log line by line. Workers of one engine differ a little: the one with the least room counts."""

    def __init__(self) -> None:
        self.report = EngineReport()
        self._graphs_captured = False

    @property
    def empty(self) -> bool:
        """Whether nothing was said yet."""
        return self.report == EngineReport()

    def line(self, line: str) -> None:
        """Take in one line; a further start in the same log begins anew."""
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
        self.report = self._with_graphs(known, text)

    def _with_graphs(self, known: EngineReport, text: str) -> EngineReport:
        """What capturing took is better than what was expected of it."""
        if (took := _figure(GRAPHS, text)) is not None:
            best = max(took, known.graphs_gib or 0.0) if self._graphs_captured else took
            self._graphs_captured = True
            return replace(known, graphs_gib=best)
        expected = None if self._graphs_captured else _figure(GRAPHS_EXPECTED, text)
        return known if expected is None else replace(known, graphs_gib=expected)


def read_report(lines: Iterable[str]) -> EngineReport:
    """What a log's lines say; each figure None that they do not."""
    reader = ReportReader()
    for line in lines:
        reader.line(line)
    return reader.report


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, estimated and as the engine reported it; None is 'not known'. ``unit`` is ``GiB`` or empty."""

    name: str
    unit: str
    estimate: float | None
    engine: float | None

    @property
    def off(self) -> float | None:
        """By what share of the reported figure the estimate is too high (below zero: too low)."""
        if self.estimate is None or not self.engine:
            return None
        return (self.estimate - self.engine) / abs(self.engine)


def beside(budget: MemoryBudget, report: EngineReport) -> tuple[Row, ...]:
    """Estimate and report side by side; figures that neither has are left out."""
    rows = (
        Row("weights", "GiB", budget.weights_gib, report.weights_gib),
        Row("KV cache", "GiB", budget.kv_gib, report.kv_gib),
        Row("CUDA graphs", "GiB", budget.graphs_gib, report.graphs_gib),
        Row("KV cache tokens", "", budget.kv_tokens, report.kv_tokens),
        Row("context length", "", budget.max_model_len, report.max_model_len),
        Row("full-length requests at once", "", budget.max_concurrency, report.max_concurrency),
    )
    return tuple(row for row in rows if row.estimate is not None or row.engine is not None)


def as_reported(budget: MemoryBudget, report: EngineReport) -> MemoryBudget:
    """The budget with the engine's own figures wherever it gave them; its ``source`` is then ``engine``."""
    if report == EngineReport():
        return budget

    def told(said: float | None, estimated: float) -> float:
        return estimated if said is None else said

    scale = report.weights_gib / budget.weights_gib if report.weights_gib is not None and budget.weights_gib else 1.0
    grown = told(report.kv_gib, budget.kv_gib) - budget.kv_gib
    graphs = max(0.0, told(report.graphs_gib, budget.graphs_gib))
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
    overhead = budget.overhead_gib - grown - budget.weights_gib * (scale - 1) - graphs + budget.graphs_gib
    return replace(
        budget,
        weights_gib=told(report.weights_gib, budget.weights_gib),
        overhead_gib=max(0.0, overhead),
        graphs_gib=graphs,
        kv_gib=told(report.kv_gib, budget.kv_gib),
        kv_tokens=budget.kv_tokens if report.kv_tokens is None else report.kv_tokens,
        max_model_len=budget.max_model_len if report.max_model_len is None else report.max_model_len,
        max_concurrency=budget.max_concurrency if report.max_concurrency is None else report.max_concurrency,
        per_gpu=per_gpu,
        source="engine",
    )


def report_figures(report: EngineReport) -> dict[str, float]:
    """A report as plain figures, to be kept."""
    pairs = ((field.name, getattr(report, field.name)) for field in fields(report))
    return {name: float(value) for name, value in pairs if value is not None}


def budget_figures(budget: MemoryBudget) -> dict[str, float]:
    """What is to be kept of a prediction beside the report."""
    return {"weights_gib": budget.weights_gib, "overhead_gib": budget.overhead_gib, "kv_gib": budget.kv_gib}


def learned_from(reported: Mapping[str, float], predicted: Mapping[str, float]) -> Learned:
    """What was kept (see `report_figures` and `budget_figures`), as a plan takes it."""
    return Learned(
        EngineReport(
            weights_gib=reported.get("weights_gib"),
            kv_gib=reported.get("kv_gib"),
            kv_tokens=_rounded(reported.get("kv_tokens")),
            max_concurrency=reported.get("max_concurrency"),
            graphs_gib=reported.get("graphs_gib"),
            max_model_len=_rounded(reported.get("max_model_len")),
        ),
        predicted_weights_gib=predicted.get("weights_gib"),
        predicted_overhead_gib=predicted.get("overhead_gib"),
        predicted_kv_gib=predicted.get("kv_gib"),
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
    """``1.2.3`` and figures beyond all measure are no numbers of vLLM's."""
    try:
        number = float(digits)
    except ValueError:
        return None
    return number if abs(number) < 1e15 else None
