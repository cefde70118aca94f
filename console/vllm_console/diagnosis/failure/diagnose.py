"""From a dead server's log to a named cause, its evidence, and the changes that would fix it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_console.diagnosis.failure.case import case_of
from vllm_console.diagnosis.failure.failure_line import SIGKILL_CODES, failure_in
from vllm_console.diagnosis.failure.fixes import fixes_for
from vllm_console.diagnosis.failure.fixes.advice import ADVICE
from vllm_console.diagnosis.failure.rules import RULES
from vllm_console.diagnosis.finding import Cause, Diagnosis
from vllm_console.logs.vllm_lines import parse_lines
from vllm_launchers.keeper.records import NotRetryable
from vllm_launchers.vllm.flags.changes import Flags

KILLED = "SIGKILL from outside ended its process; its log names no cause."
UNNAMED = "The line shows what failed; it matches no known cause."
NOTHING_SEEN = "No failure found in this log."


def diagnose(
    lines: Sequence[str],
    exit_code: int | None = None,
    flags: Flags | None = None,
    gpu: str = "",
    *,
    mla: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Name why the server that wrote this log failed; `Cause.OTHER` if no cause is certain enough.

    ``exit_code`` is Python's (negative: the signal), None if unknown. ``flags`` are the server's; without them they are
    read from the log, if vLLM printed them. ``gpu`` is the GPU model. ``mla`` means that its model is known to use
    multi-head latent attention; ``environment`` holds the known variables.
    """
    parsed = list(parse_lines(lines))
    found = failure_in(parsed, exit_code)
    if found is None:
        if exit_code in SIGKILL_CODES:
            return Diagnosis(Cause.KILLED, 1.0, None, "", KILLED, ADVICE[Cause.KILLED])
        return Diagnosis(Cause.OTHER, 0.0, None, "", NOTHING_SEEN)
    fixes = fixes_for(case_of(found, parsed, flags, gpu, mla=mla, environment=environment))
    explanation = found.explanation or UNNAMED
    return Diagnosis(found.cause, found.confidence, found.number, found.text, explanation, fixes, found.also)


# -- start failures that are not retryable, as regular expressions for a keeper ---------------------------------------


NOT_RETRYABLE_CAUSES = frozenset(
    {
        Cause.UNKNOWN_FLAG,
        Cause.INVALID_FLAG_VALUE,
        Cause.KV_CACHE_TOO_SMALL,
        Cause.WEIGHTS_DO_NOT_FIT,
        Cause.UNSUPPORTED_BY_GPU,
        Cause.TP_NOT_DIVISOR,
        Cause.GATED,
        Cause.TRUST_REMOTE_CODE,
        Cause.TOKENIZER,
        Cause.MODEL_NOT_FOUND,
    }
)

SURE = 0.8
"""Minimum confidence that a rule's pattern alone implies its cause."""

_NETWORK_DOWN = (
    r"couldn't connect to|LocalEntryNotFoundError|OfflineModeIsEnabled|ConnectionError|Max retries exceeded"
    r"|Name or service not known|Temporary failure in name resolution|Read timed out|50[0234] Server Error"
)
"""If the log shows this, a model or tokenizer that was not found may be found at the next start."""

_FROM_THE_HUB = frozenset({Cause.MODEL_NOT_FOUND, Cause.TOKENIZER})

_LINE = r"^(?!(?:\x1b\[[\d;]*m|\([^)\n]*\)|\s)*(?:TRACE|DEBUG|INFO|WARNING)\b).*?"
"""The beginning of a line whose level does not mark it as harmless."""


def _not_retryable() -> tuple[NotRetryable, ...]:
    found = []
    for rule in RULES:
        if rule.cause in NOT_RETRYABLE_CAUSES and rule.confidence >= SURE:
            pattern = rf"{_LINE}(?:{rule.pattern.pattern})"
            if rule.cause in _FROM_THE_HUB:
                pattern = rf"\A(?![\s\S]*(?:{_NETWORK_DOWN}))[\s\S]*?{pattern}"
            found.append(NotRetryable(pattern, rule.explanation.removesuffix(".")))
    return tuple(found)


NOT_RETRYABLE: tuple[NotRetryable, ...] = _not_retryable()
"""Expressions, matched anywhere in the log of a start, each with one sentence for users (without its period)."""
