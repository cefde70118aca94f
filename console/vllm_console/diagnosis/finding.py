"""Results of a diagnosis: a failure or a finding, its evidence, and the flag changes that fix it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from vllm_console.text import percent, plain
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.vllm.flags.changes import Changes


class Cause(StrEnum):
    """Why a server failed. `OTHER` if no specific cause is certain enough."""

    WEIGHTS_DO_NOT_FIT = "weights_do_not_fit"
    KV_CACHE_TOO_SMALL = "kv_cache_too_small_for_max_model_len"
    FREE_MEMORY_BELOW_UTILIZATION = "free_memory_below_utilization"
    OOM_RUNTIME = "cuda_oom_runtime"
    OOM_GRAPH_CAPTURE = "cuda_oom_graph_capture"
    PORT_IN_USE = "port_in_use"
    MODEL_NOT_FOUND = "model_not_found"
    GATED = "gated_or_no_hf_token"
    UNKNOWN_FLAG = "unknown_flag"
    INVALID_FLAG_VALUE = "invalid_flag_value"
    TP_NOT_DIVISOR = "tp_not_divisor_of_heads"
    UNSUPPORTED_BY_GPU = "unsupported_quantization_or_dtype_for_gpu"
    NCCL = "nccl_failure"
    ENGINE_DIED = "engine_core_died"
    KILLED = "killed"
    NODES_DIFFER = "nodes_differ"
    TRUST_REMOTE_CODE = "trust_remote_code_needed"
    TOKENIZER = "tokenizer_or_chat_template"
    DRIVER = "driver_or_cuda_mismatch"
    DISK_FULL = "disk_full"
    INTERRUPTED = "interrupted"
    OTHER = "other"


class Fix(msgspec.Struct, frozen=True):
    """A change that fixes a problem. ``why`` and ``tradeoff`` are one sentence each; ``tradeoff`` may be empty.

    ``changes`` is empty for a fix that does not change flags; ``why`` then describes what to do.
    """

    changes: Changes
    why: str
    tradeoff: str = ""


class Diagnosis(msgspec.Struct, frozen=True):
    """Why a server failed. ``confidence`` is from 0 to 1; ``line`` is the number, from 1, of the line that shows it.

    ``evidence`` is that line's text; ``also`` holds other causes in the log, or possible underlying ones.
    """

    cause: Cause
    confidence: float
    line: int | None
    evidence: str
    explanation: str
    fixes: tuple[Fix, ...] = ()
    also: tuple[Cause, ...] = ()


class Severity(StrEnum):
    """Severity of a finding; ``good`` is reported too."""

    CRITICAL = "critical"
    WARNING = "warning"
    NOTE = "note"
    GOOD = "good"


class Measure(msgspec.Struct, frozen=True):
    """A figure that supports a finding: ``KV cache usage``, ``91%``, against ``85%`` from ``the preset's objectives``.

    ``limit`` and ``source`` are empty for a figure without a limit.
    """

    name: str
    value: str
    limit: str = ""
    source: str = ""
    within: bool = False
    """Whether it is within its limit, so that it is no evidence of the finding."""


Span = tuple[float, float]
"""A beginning and an end (Unix seconds)."""


class Finding(msgspec.Struct, frozen=True):
    """A problem of a running server, since when (Unix seconds), and its fixes, best first.

    ``code`` is stable (``kv_cache_pressure``, ``preempting``, …); ``symptom`` is what a user sees, ``cause`` why, one
    short sentence each.
    """

    code: str
    severity: Severity
    since: float
    symptom: str
    cause: str
    measures: tuple[Measure, ...] = ()
    fixes: tuple[Fix, ...] = ()
    recovering: bool = False
    """Whether its figures are back within their objectives; it is kept until that has lasted a while."""
    held: tuple[Span, ...] | None = None
    """When it held, as far back as its figures reach: without recoveries, and for one about traffic, without idle time.
    None: from ``since`` to now."""

    def spans(self, now: float) -> tuple[Span, ...]:
        """When it held, up to ``now``."""
        return ((min(self.since, now), now),) if self.held is None else self.held


OF_THE_NEXT_START = "slow_startup"
"""Advice for the next start, not a problem of this run: neither recorded with the run nor reported."""

_UPPER = {"kv": "KV", "gpu": "GPU", "cuda": "CUDA", "oom": "OOM", "tp": "TP", "pcie": "PCIe", "itl": "ITL"}

_TITLES = {
    "first_request": "first request: compiling",
    "oversubscribed_memory": "KV cache is the bottleneck",
    "oversubscribed_sequences": "max-num-seqs is the bottleneck",
    "oversubscribed_compute": "prefill is the bottleneck",
    "slow_tokens": "ITL above objective",
    "slow_first_token": "TTFT above objective",
    "disturbed_start": "KV cache smaller than planned",
    OF_THE_NEXT_START: "start-up can be shorter",
}


MOST_PREEMPTIONS = 10.0
"""Preemptions per minute that are too many, whatever the fraction of requests."""

WINDOW = "last minute"
"""Time span of a healthy server's figures."""

SECOND_SERVER = "Start a second server"
"""Beginning of the advice for which the console has a key."""

PAIR_ASLEEP = "pair_asleep"
"""Code of the finding about a standby pair in which neither server is serving."""


def title_of_code(code: str) -> str:
    """A finding's or cause's code in words: ``kv_cache_pressure`` is ``KV cache pressure``."""
    return _TITLES.get(code) or " ".join(_UPPER.get(word, word) for word in plain(code).split("_"))


# -- diagnoses and findings as JSON documents, and as lines of text ---------------------------------------------------


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """``cause``, ``confidence``, ``line``, ``evidence``, ``explanation``, ``fixes``, ``also``."""
    return {**msgspec.to_builtins(diagnosis), "fixes": [fix_document(fix) for fix in diagnosis.fixes]}


def fix_document(fix: Fix) -> dict[str, Any]:
    """``set``, ``unset``, ``why``, ``tradeoff``."""
    return {**msgspec.to_builtins(fix.changes), "why": fix.why, "tradeoff": fix.tradeoff}


def finding_document(finding: Finding) -> dict[str, Any]:
    """``code``, ``severity``, ``since`` (Unix seconds), ``symptom``, ``cause``, ``measures``, ``fixes``."""
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "since": finding.since,
        "symptom": finding.symptom,
        "cause": finding.cause,
        "measures": [
            {"name": one.name, "value": one.value, "limit": one.limit or None, "source": one.source or None}
            for one in finding.measures
        ],
        "fixes": [fix_document(fix) for fix in finding.fixes],
    }


def format_finding(finding: Finding, since: str) -> list[str]:
    """For users: the finding, since when (formatted), its figures, and its fixes."""
    lines = [f"{finding.code} ({finding.severity}, {since}): {finding.symptom} {finding.cause}"]
    for measure in finding.measures:
        limit = f", limit {measure.limit}" if measure.limit else ""
        source = f" ({measure.source})" if measure.source else ""
        lines.append(f"  {measure.name} {measure.value}{limit}{source}")
    return lines + [f"  {line}" for fix in finding.fixes for line in fix_lines(fix)]


def fix_lines(fix: Fix) -> list[str]:
    """For users: the change, or what to do if there is none; the reason; the trade-off."""
    words = change_text(fix.changes)
    lines = [words, f"    {fix.why}"] if words else [fix.why]
    return [*lines, f"    Trade-off: {fix.tradeoff}"] if fix.tradeoff else lines


def change_text(changes: Changes) -> str:
    """A change as flags on a command line: ``--max-num-seqs 128``, ``without --swap-space``."""
    parts = [" ".join(flag_words(changes.set))] if changes.set else []
    parts += [f"without --{name}" for name in changes.unset]
    return ", ".join(parts)


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    """For users: the failure, the line that shows it, and its fixes."""
    if diagnosis.cause is Cause.OTHER and not diagnosis.confidence:
        return [diagnosis.explanation]
    sure = "" if diagnosis.confidence >= 0.9 else f" (confidence {percent(diagnosis.confidence)})"
    lines = [f"{diagnosis.cause}{sure}: {diagnosis.explanation}"]
    if diagnosis.evidence:
        lines += ["", f"line {diagnosis.line}: {diagnosis.evidence}"]
    if diagnosis.fixes:
        lines += ["", "Fixes, best first:"]
    lines += [f"  {line}" for fix in diagnosis.fixes for line in fix_lines(fix)]
    if diagnosis.also:
        lines += ["", f"Possibly also: {', '.join(diagnosis.also)}"]
    return lines
