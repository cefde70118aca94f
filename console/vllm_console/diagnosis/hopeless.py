"""Failures of a start that another start cannot mend, as a keeper is told them: as data, before anything fails. Pure.

A keeper knows nothing of vLLM. It gets these expressions with what it launches, and does not start again what ended
before it was ever ready with such a line in its log. What may pass is left out: memory or a port that others hold, a
hub that cannot be reached, a disk that is full, crashes.
"""

from __future__ import annotations

from vllm_console.diagnosis.causes import Cause
from vllm_console.diagnosis.rules import RULES
from vllm_launchers.keeper.records import Hopeless

HOPELESS_CAUSES = frozenset(
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
"""How surely its words alone must mean a rule's cause."""

_NETWORK_DOWN = (
    r"couldn't connect to|LocalEntryNotFoundError|OfflineModeIsEnabled|ConnectionError|Max retries exceeded"
    r"|Name or service not known|Temporary failure in name resolution|Read timed out|50[0234] Server Error"
)
"""Where the log shows this, a model or tokenizer that is not found may be found at the next start."""

_FROM_THE_HUB = frozenset({Cause.MODEL_NOT_FOUND, Cause.TOKENIZER})

_LINE = r"^(?!(?:\x1b\[[\d;]*m|\([^)\n]*\)|\s)*(?:TRACE|DEBUG|INFO|WARNING)\b).*?"
"""The beginning of a line whose writer did not say that it is no error."""


def _hopeless() -> tuple[Hopeless, ...]:
    found = []
    for rule in RULES:
        if rule.cause in HOPELESS_CAUSES and rule.confidence >= SURE:
            pattern = rf"{_LINE}(?:{rule.pattern.pattern})"
            if rule.cause in _FROM_THE_HUB:
                pattern = rf"\A(?![\s\S]*(?:{_NETWORK_DOWN}))[\s\S]*?{pattern}"
            found.append(Hopeless(pattern, rule.explanation.removesuffix(".")))
    return tuple(found)


HOPELESS: tuple[Hopeless, ...] = _hopeless()
"""Expressions, found anywhere in the log of a start, each with one sentence for people (without its full stop)."""
