"""Fixes for settings of speculative decoding that vLLM rejects. Pure."""

from __future__ import annotations

import json

from vllm_console.diagnosis.failure.case import Case
from vllm_console.diagnosis.finding import Fix
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.flags import flag_names
from vllm_launchers.vllm.flags.changes import Changes, json_flag
from vllm_launchers.vllm.flags.speculation import SPECULATION, SPECULATION_FLAGS, speculation_flags

START = 3
"""Default number of draft tokens per step: few, because every rejected token was computed in vain."""

_MULTIPLE = lazy_pattern(r"num_speculative_tokens:(?P<given>\d{1,6}) must be divisible by n_predict=(?P<step>\d{1,6})")
_TOKENS = "num_speculative_tokens"


def speculation(case: Case) -> tuple[Fix, ...]:
    """A number of draft tokens that vLLM accepts, or no speculative decoding."""
    without = _without(case)
    if "without speculative model" in case.text:
        why = 'Name the drafter: a "model", or "method": "ngram" with "prompt_lookup_max".'
        return (Fix(Changes(), why), *without)
    tokens, why = START, f"It needs a number of draft tokens per step; start with {START}."
    if (found := _MULTIPLE.search(case.text)) and int(found["step"]) > 0:
        step = int(found["step"])
        tokens = max(step, int(found["given"]) // step * step)
        why = f"This draft model predicts {step} tokens at a time, so the number must be a multiple of that."
    changes = _with_tokens(case, tokens)
    if changes.empty:
        why = f'{why} Add "{_TOKENS}": {tokens} to --{SPECULATION}.'
    return (Fix(changes, why), *without)


def _with_tokens(case: Case, tokens: int) -> Changes:
    """Set the number in the form that the server's flags use: in one JSON object, by key, or as short flags."""
    flags = case.flags
    if not flag_names(flags).isdisjoint(SPECULATION_FLAGS[1:]):
        return Changes({"spec-tokens": tokens})
    if any(name.startswith(f"{SPECULATION}.") for name in flags):
        return Changes({f"{SPECULATION}.{_TOKENS}": tokens})
    if config := json_flag(flags, SPECULATION):
        return Changes({SPECULATION: json.dumps({**config, _TOKENS: tokens})})
    return Changes()


def _without(case: Case) -> tuple[Fix, ...]:
    names = speculation_flags(case.flags)
    if not names:
        return ()
    return (Fix(Changes(unset=names), "Disables speculative decoding.", "ITL is higher with few requests."),)
