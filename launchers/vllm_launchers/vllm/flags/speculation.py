"""Whether flags turn speculative decoding on. Pure."""

from __future__ import annotations

from vllm_launchers.vllm.flags.changes import Flags

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
