"""Whether flags turn speculative decoding on. Pure."""

from __future__ import annotations

from vllm_launchers.vllm.flags.changes import Flags

SPECULATION = "speculative-config"
"""The JSON flag of speculative decoding; its keys may also be set by themselves."""

METHOD_FLAGS = (SPECULATION, "spec-method", "spec-model")
"""What turns it on."""

SPECULATION_FLAGS = (*METHOD_FLAGS, "spec-tokens")
"""All flags of it. A number of tokens alone is refused."""

_NOTHING = ("", "None", "null")


def speculation_flags(flags: Flags) -> tuple[str, ...]:
    """The flags of speculative decoding that are set, keys of the JSON flag included: those to unset without it."""
    return tuple(name for name in flags if name.partition(".")[0] in SPECULATION_FLAGS)


def speculates(flags: Flags) -> bool:
    """Whether a server drafts tokens: its flags name a method, a draft model, or a configuration of them."""
    return any(name.partition(".")[0] in METHOD_FLAGS and str(flags[name]) not in _NOTHING for name in flags)
