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


_SLOTS_RESERVED: tuple[Release, Release] = ((0, 17, 0), (0, 28, 0))
"""From the first of these releases, and before the second, room for slots of all sequences is set aside in a step."""


def draft_slots(method: str, drafts: int, release: Release, *, parallel: bool) -> int:
    """Slots that a draft model adds for each sequence, for which vLLM sets aside tokens of a step.

    ``parallel``: it drafts all tokens at once. From ``SpeculativeConfig.max_num_new_slots_for_drafting``.
    """
    first, end = _SLOTS_RESERVED
    if not first <= release < end or not drafts:
        return 0
    return (drafts - 1 if parallel or method == "dflash" else 0) + (method == "draft_model")


def sequence_tokens(flags: Flags, release: Release | None) -> int:
    """Tokens that a running sequence takes of each step: the next one, its drafts, and slots set aside for those."""
    drafts, config = draft_tokens(flags), json_flag(flags, SPECULATION)
    method = str(config.get("method", flags.get("spec-method", "")) or "")
    slots = draft_slots(method, drafts, release or NEWEST, parallel=config.get("parallel_drafting") is True)
    return 1 + drafts + slots
