"""Single keys that change a flag: what the next value is, given what a server runs with. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from vllm_console.fleet.model import Changes, Flags, FlagValue, ServerView
from vllm_launchers.plan.flags import token_count
from vllm_launchers.plan.model import same_value

UTILIZATION_STEP = 0.02
LARGEST_CONTEXT = 4 * 1024 * 1024
FALLBACK_CONTEXT = 8192
"""Taken as the present context when neither a flag nor the server tells it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One staged change. ``value`` None removes the flag; ``note`` says what was assumed, when something was."""

    flag: str
    value: FlagValue | None
    note: str = ""


DEFAULTS: Flags = {
    "max-num-seqs": 256,
    "enable-prefix-caching": True,
    "enable-chunked-prefill": True,
    "kv-cache-dtype": "auto",
}
"""What vLLM does when the flag is not given (on a GPU of less than 70 GiB, with a model that allows it)."""

Staged = tuple[Step, ...]
"""At most one step per flag, the newest last."""


def changes_of(staged: Staged) -> Changes:
    """The staged steps as a difference of flags."""
    return Changes(
        set={step.flag: step.value for step in staged if step.value is not None},
        unset=tuple(step.flag for step in staged if step.value is None),
    )


def staged_of(changes: Changes) -> Staged:
    """A difference of flags as staged steps."""
    return tuple(Step(flag, value) for flag, value in changes.set.items()) + tuple(
        Step(flag, None) for flag in changes.unset
    )


def staged_flags(flags: Flags, staged: Staged) -> Flags:
    """The flags that a restart with these steps would run with."""
    after = dict(flags)
    for step in staged:
        if step.value is None:
            after.pop(step.flag, None)
        else:
            after[step.flag] = step.value
    return after


def stage(flags: Flags, staged: Staged, step: Step) -> Staged:
    """``staged`` with one more step; one that leads back to what the server runs with takes itself out."""
    kept = tuple(other for other in staged if other.flag != step.flag)
    present = flags[step.flag] if step.flag in flags else DEFAULTS.get(step.flag)
    unchanged = same_value(step.value, present) or (step.value is None and step.flag not in flags)
    return kept if unchanged else (*kept, step)


def stands(flags: Flags, step: Step) -> bool:
    """Whether a server has already what a step would change."""
    if step.value is None:
        return step.flag not in flags
    return step.flag in flags and same_value(step.value, flags[step.flag])


def at_once(server: ServerView, staged: Staged) -> str:
    """What to bear in mind of several changes at a time; empty for one, and for the way back to the flags before."""
    if len(staged) < 2 or staged_flags(server.flags, staged) == server.previous_flags:
        return ""
    return f"{len(staged)} changes at once: comparing will not tell them apart. One at a time shows what each one does."


def halve_sequences(_server: ServerView, flags: Flags) -> Step:
    """Half as many sequences at once."""
    present, note = _sequences(flags)
    return Step("max-num-seqs", max(1, present // 2), note)


def double_sequences(_server: ServerView, flags: Flags) -> Step:
    """Twice as many sequences at once."""
    present, note = _sequences(flags)
    return Step("max-num-seqs", min(65536, present * 2), note)


def halve_context(_server: ServerView, flags: Flags) -> Step:
    """Half the context length."""
    present, note = _context(flags)
    return Step("max-model-len", max(16, present // 2), note)


def double_context(_server: ServerView, flags: Flags) -> Step:
    """Twice the context length. Whether the model can do it is for the plan to say."""
    present, note = _context(flags)
    return Step("max-model-len", min(LARGEST_CONTEXT, present * 2), note)


def lower_utilization(server: ServerView, flags: Flags) -> Step:
    """0.02 less of the GPU's memory."""
    return _utilization(server, flags, -UTILIZATION_STEP)


def raise_utilization(server: ServerView, flags: Flags) -> Step:
    """0.02 more of the GPU's memory."""
    return _utilization(server, flags, UTILIZATION_STEP)


def toggle_prefix_caching(_server: ServerView, flags: Flags) -> Step:
    """Prefix caching on or off; vLLM has it on when the model allows it."""
    return _toggle(flags, "enable-prefix-caching")


def toggle_chunked_prefill(_server: ServerView, flags: Flags) -> Step:
    """Chunked prefill on or off; vLLM has it on when the model allows it."""
    return _toggle(flags, "enable-chunked-prefill")


def cycle_kv_dtype(_server: ServerView, flags: Flags) -> Step:
    """KV cache in FP8, or in the model's own type."""
    return Step("kv-cache-dtype", "auto" if str(flags.get("kv-cache-dtype", "auto")).startswith("fp8") else "fp8")


STEPS: dict[str, Callable[[ServerView, Flags], Step]] = {
    "halve_sequences": halve_sequences,
    "double_sequences": double_sequences,
    "halve_context": halve_context,
    "double_context": double_context,
    "lower_utilization": lower_utilization,
    "raise_utilization": raise_utilization,
    "toggle_prefix_caching": toggle_prefix_caching,
    "toggle_chunked_prefill": toggle_chunked_prefill,
    "cycle_kv_dtype": cycle_kv_dtype,
}
"""By the action's id: the next step, from the server and the flags it would have with what is staged already."""


def _sequences(flags: Flags) -> tuple[int, str]:
    present = token_count(flags.get("max-num-seqs"))
    if present:
        return present, ""
    default = int(DEFAULTS["max-num-seqs"])
    return default, "--max-num-seqs was not set; counted from vLLM's default of 256 (1024 on GPUs of 70 GiB or more)"


def _context(flags: Flags) -> tuple[int, str]:
    present = token_count(flags.get("max-model-len"))
    if present:
        return present, ""
    return FALLBACK_CONTEXT, f"--max-model-len was not set (the model's own limit); counted from {FALLBACK_CONTEXT}"


def _utilization(server: ServerView, flags: Flags, step: float) -> Step:
    value, note = flags.get("gpu-memory-utilization"), ""
    if value is None or isinstance(value, bool):
        value = _default_utilization(server)
        note = f"--gpu-memory-utilization was not set; counted from vLLM's default of {value}"
    try:
        present = float(value)
    except ValueError:
        present = _default_utilization(server)
    return Step("gpu-memory-utilization", round(min(0.98, max(0.1, present + step)), 2), note)


def _default_utilization(server: ServerView) -> float:
    """0.9, and 0.92 from vLLM 0.20 on."""
    version = re.match(r"(\d+)\.(\d+)", server.engine.version or "") if server.engine else None
    return 0.9 if version and (int(version[1]), int(version[2])) < (0, 20) else 0.92


def _toggle(flags: Flags, flag: str) -> Step:
    if flag in flags:
        return Step(flag, not flags[flag])
    return Step(flag, False, f"--{flag} was not set; vLLM has it on where the model allows it")
