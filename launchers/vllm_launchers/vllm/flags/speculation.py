"""Whether flags turn speculative decoding on. Pure."""

from __future__ import annotations

from vllm_launchers.vllm.flags.changes import Flags, json_flag
from vllm_launchers.vllm.release_defaults import NEWEST, Release

SPECULATION = "speculative-config"
"""The JSON flag of speculative decoding; its keys may also be set one by one."""

METHOD_FLAGS = (SPECULATION, "spec-method", "spec-model")
"""Flags that turn speculative decoding on."""

SPECULATION_FLAGS = (*METHOD_FLAGS, "spec-tokens")
"""All flags of speculative decoding. vLLM rejects a number of tokens alone."""

_NOTHING = ("", "None", "null")


def speculation_flags(flags: Flags) -> tuple[str, ...]:
    """Flags of speculative decoding that are set, including keys of the JSON flag. Unset them to turn it off."""
    return tuple(name for name in flags if name.partition(".")[0] in SPECULATION_FLAGS)


def speculates(flags: Flags) -> bool:
    """Whether a server drafts tokens: its flags set a method, a draft model, or a configuration."""
    return any(name.partition(".")[0] in METHOD_FLAGS and str(flags[name]) not in _NOTHING for name in flags)


MOST_DRAFTED = 1000
"""More draft tokens than this are not plausible."""


def draft_tokens(flags: Flags) -> int:
    """Tokens that a server drafts for each sequence in a step, as set by its flags; 0 if none are set."""
    tokens = json_flag(flags, SPECULATION).get("num_speculative_tokens", flags.get("spec-tokens", 0))
    valid = isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens <= MOST_DRAFTED
    return tokens if valid and speculates(flags) else 0


_SLOTS_SINCE: Release = (0, 17, 0)
"""First release in which a draft model's slots count against the tokens of a step."""

_SLOTS_BY_REQUEST: Release = (0, 28, 0)
"""First release that counts them for the requests of a step, instead of setting them aside at startup for all."""

_OWN_PASS: Release = (0, 33, 0)
"""First release in which `_PARALLEL` methods draft in a pass of their own, which takes nothing of the step."""

_PARALLEL = ("dflash", "dspark")
"""Methods that always draft all tokens at once."""


def step_slots(method: str, drafts: int, release: Release, *, parallel: bool) -> int:
    """Slots that a draft model adds for each sequence to the tokens of a step.

    ``parallel``: it drafts all tokens at once. From ``SpeculativeConfig.max_num_new_slots_for_drafting``.
    """
    if release < _SLOTS_SINCE or not drafts:
        return 0
    if method in _PARALLEL and release >= _OWN_PASS:
        return 0
    if method == "dflash" and release >= _SLOTS_BY_REQUEST:
        return drafts
    return (drafts - 1 if parallel or method in _PARALLEL else 0) + (method == "draft_model")


def startup_slots(method: str, drafts: int, release: Release, *, parallel: bool) -> int:
    """The slots of each sequence for which vLLM sets aside tokens of a step when it starts; none in some releases."""
    return step_slots(method, drafts, release, parallel=parallel) if release < _SLOTS_BY_REQUEST else 0


def sequence_tokens(flags: Flags, release: Release | None) -> int:
    """Tokens that a running sequence takes of each step: the next one, its drafts, and a draft model's slots."""
    drafts, config = draft_tokens(flags), json_flag(flags, SPECULATION)
    method = str(config.get("method", flags.get("spec-method", "")) or "")
    slots = step_slots(method, drafts, release or NEWEST, parallel=config.get("parallel_drafting") is True)
    return 1 + drafts + slots
