"""What would make a server's next start faster, judging by its last one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from vllm_console.diagnosis.finding import OF_THE_NEXT_START, Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.fixes import setting
from vllm_console.logs.startup_facts import Stage, StartupFacts
from vllm_console.text import count, duration, gib, seconds
from vllm_launchers.plan.budget.budget import NEIGHBORS_GIB, EngineReport
from vllm_launchers.plan.flags import BLOCKS, BYTES
from vllm_launchers.units import GIB
from vllm_launchers.vllm.fast_loaders import FastLoader
from vllm_launchers.vllm.flags.changes import Changes, Flags

WORTH_SECONDS = 20.0
"""Shorter starts are not worth a finding."""
LEAST_COMPILE, LEAST_MEASURE, LEAST_WEIGHTS = 5.0, 5.0, 10.0
"""Minimum seconds of compilation, memory measurement and weight loading that are worth a fix."""
MEASURE_SHARE = 0.1
"""Minimum fraction of the start for measuring memory: a fixed size can run a server out of memory later."""
WEIGHTS_SHARE = 0.2
"""Minimum fraction of the start for reading weights."""

PLAN_VARIABLE, PLAN_SINCE = "VLLM_ENABLE_STARTUP_PLAN", (0, 26, 0)

_NOT_COUNTED = ("download", "first request")

PINNED = (
    "Valid for this model, these flags and GPUs, as long as neighbors take no more GPU memory than at that start; "
    "otherwise the server runs out of memory. vLLM then ignores gpu-memory-utilization for the cache's size."
)


class LastStart(msgspec.Struct, frozen=True):
    """The start of a server that became ready at ``ready_at`` (Unix seconds).

    ``pin_bytes`` is the KV cache size that vLLM suggested, None if it can't be set; ``loaders`` are the usable load
    formats.
    """

    ready_at: float
    stages: Sequence[Stage]
    facts: StartupFacts
    flags: Flags
    release: tuple[int, int, int] | None = None
    pin_bytes: int | None = None
    loaders: tuple[FastLoader, ...] = ()
    cache_off: bool = False
    """Whether its environment disables the compile cache, which not every log shows."""

    def took(self, name: str) -> float | None:
        """The duration of a stage in seconds."""
        return next((stage.seconds for stage in self.stages if stage.name == name), None)

    @property
    def whole(self) -> float:
        """Total seconds, without stages that the next start does not have."""
        return sum(stage.seconds or 0.0 for stage in self.stages if stage.name not in _NOT_COUNTED)


def slow_startup(start: LastStart) -> Finding | None:
    """The finding that the next start can be faster, and how; None if nothing worthwhile is known."""
    if start.whole < WORTH_SECONDS:
        return None
    parts = [*_compile_cache(start), *_kv_cache(start), *_weights(start)]
    if not parts:
        return None
    measures = tuple(measure for measure, _ in parts if measure is not None)
    symptom = f"The last start took {duration(start.whole)}."
    cause = "Parts of it can be skipped at the next start."
    fixes = tuple(fix for _, fix in parts)
    return Finding(OF_THE_NEXT_START, Severity.NOTE, start.ready_at, symptom, cause, measures, fixes)


def disturbed_start(report: EngineReport, planned_tokens: float | None, ready_at: float) -> Finding:
    """The finding that other processes took GPU memory while vLLM sized its KV cache.

    ``planned_tokens`` is from the launch's plan. vLLM counts any growth of non-PyTorch memory as its own
    (``MemoryProfilingResult.non_torch_increase``).
    """
    measures = [Measure("non-torch memory", gib(report.non_torch_gib), gib(NEIGHBORS_GIB), "usual at most")]
    if report.kv_tokens is not None:
        planned = count(planned_tokens) if planned_tokens is not None else ""
        measures.append(Measure("KV cache tokens", count(report.kv_tokens), planned, "planned" if planned else ""))
    why = "Restart it while nothing else starts on its GPUs: vLLM measures again."
    return Finding(
        "disturbed_start",
        Severity.WARNING,
        ready_at,
        "The KV cache is smaller than it could be.",
        "Other processes took GPU memory while vLLM measured how much is left for the cache.",
        tuple(measures),
        (Fix(Changes(), why),),
    )


_Part = tuple[Measure | None, Fix]


def _compile_cache(start: LastStart) -> Iterator[_Part]:
    known = start.facts.compile_seconds
    took = known if known is not None else start.took("compile")
    off = start.facts.compile_cache == "disabled" or (start.cache_off and not start.facts.compile_cache)
    if off and took is not None and took >= LEAST_COMPILE:
        why = (
            "vLLM's compile cache is off, so each start compiles again: start it without VLLM_DISABLE_COMPILE_CACHE"
            " (or force_disable_caches in compilation-config)."
        )
        yield Measure("compiling", seconds(took)), Fix(Changes(), why)


def _kv_cache(start: LastStart) -> Iterator[_Part]:
    took, size = start.facts.kv_measure_seconds, start.pin_bytes
    if size is None or start.facts.kv_pinned or {BLOCKS, BYTES} & start.flags.keys():
        return
    if took is not None and took < max(LEAST_MEASURE, MEASURE_SHARE * start.whole):
        return
    spent = f", which took {seconds(took)}" if took is not None else ""
    why = f"Skips measuring memory{spent}: {size / GIB:.1f} GiB is the KV cache size that vLLM suggested then."
    measure = Measure("measuring memory", seconds(took)) if took is not None else None
    yield measure, setting(BYTES, size, why, PINNED)
    if start.release is not None and start.release >= PLAN_SINCE:
        yield (
            None,
            Fix(
                Changes(),
                f"Or restart it with --env {PLAN_VARIABLE}=1: vLLM keeps that size itself, and measures again if"
                " flags changed or less memory is free.",
            ),
        )


def _weights(start: LastStart) -> Iterator[_Part]:
    known = start.facts.weights_seconds
    took = known if known is not None else start.took("weights")
    if took is None or took < max(LEAST_WEIGHTS, WEIGHTS_SHARE * start.whole):
        return
    for loader in start.loaders[:1]:
        why = f"Reading weights took {seconds(took)} of {duration(start.whole)}; its package is installed."
        yield Measure("reading weights", seconds(took)), setting("load-format", loader.name, why, loader.tradeoff)
