"""Staged flag changes: by tuning keys, from measured traffic, and per server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from vllm_console.diagnosis.finding import Finding, title_of_code
from vllm_console.diagnosis.opposed import opposed
from vllm_console.fleet.snapshot import ServerView
from vllm_launchers.plan.attention import is_fp8
from vllm_launchers.plan.flags import token_count
from vllm_launchers.vllm.flags.changes import Edits, Flags, FlagValue, same_value, unapplied
from vllm_launchers.vllm.release_defaults import default_utilization

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.plan.choices.choice import Choice

UTILIZATION_STEP = 0.02


class _Size(msgspec.Struct, frozen=True):
    """A flag that keys halve and double: its bounds, and the fallback for an unknown value.

    ``known`` and ``unknown`` describe the starting value of an unset flag.
    """

    least: int
    most: int
    fallback: int
    known: str
    unknown: str


_SIZES = {
    "max-num-seqs": _Size(
        1, 65536, 256, "vLLM's default here", "vLLM's default of 256 (1024 on GPUs with 70 GiB or more)"
    ),
    "max-model-len": _Size(
        16, 4 * 1024 * 1024, 8192, "the model's own limit", "8192 (the model's own limit is unknown)"
    ),
}


class StagedStep(msgspec.Struct, frozen=True):
    """A change to stage. ``value`` None unsets the flag; ``note`` states an assumption, if any."""

    flag: str
    value: FlagValue | None
    note: str = ""


DEFAULTS: Flags = {
    "enable-prefix-caching": True,
    "enable-chunked-prefill": True,
    "kv-cache-dtype": "auto",
}
"""vLLM's defaults with a model that supports them."""


def staged_flags(flags: Flags, staged: Edits) -> Flags:
    """The flags after a restart with these changes."""
    return {flag: value for flag, value in {**flags, **staged}.items() if value is not None}


def stage(flags: Flags, staged: Edits, step: StagedStep) -> Edits:
    """Add a step to ``staged``; a step that restores the running value is removed instead."""
    others = {flag: value for flag, value in staged.items() if flag != step.flag}
    return {**others, **unapplied(flags, {step.flag: step.value})}


def combined_warning(server: ServerView, staged: Edits) -> str:
    """Warning that several changes can't be evaluated separately; empty for a single change or a revert."""
    if len(staged) < 2 or staged_flags(server.flags, staged) == server.previous_flags:
        return ""
    return f"{len(staged)} changes staged: compare can't attribute the effect to one of them."


class Staging:
    """The staged changes of each server. Calls ``changed`` with the server's name after every change."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        self.by_server: dict[str, Edits] = {}
        self._changed = changed

    def of(self, name: str) -> Edits:
        """The staged changes of a server, newest last."""
        return self.by_server.get(name, {})

    def flags_of(self, server: ServerView) -> Flags:
        """The flags of a server after a restart with its staged changes."""
        return staged_flags(server.flags, self.of(server.name))

    def put(self, name: str, staged: Edits) -> None:
        """Replace a server's staged changes."""
        if staged:
            self.by_server[name] = staged
        else:
            self.by_server.pop(name, None)
        self._changed(name)

    def drop(self, name: str) -> None:
        """Drop all staged changes of a server."""
        if name in self.by_server:
            self.put(name, {})

    def drop_last(self, name: str) -> None:
        """Drop the change staged last."""
        if name in self.by_server:
            self.put(name, dict([*self.by_server[name].items()][:-1]))

    def drop_applied(self, servers: Sequence[ServerView]) -> None:
        """Drop changes that servers already run with."""
        for server in servers:
            staged = self.of(server.name)
            left = unapplied(server.flags, staged)
            if left != staged:
                self.put(server.name, left)


def default_value(server: ServerView, flag: str) -> FlagValue | None:
    """vLLM's default for an unset flag that single keys change; None if unknown."""
    if flag == "max-num-seqs":
        return server.unset.max_num_seqs
    return server.unset.max_model_len if flag == "max-model-len" else DEFAULTS.get(flag)


def _resize(server: ServerView, flags: Flags, flag: str, *, double: bool) -> StagedStep:
    """Double or halve a size; the plan checks whether the model can handle it."""
    size, note = _SIZES[flag], ""
    present = token_count(flags.get(flag))
    if not present:
        known = token_count(default_value(server, flag))
        present = known or size.fallback
        note = f"--{flag} was unset; starting from {f'{size.known}, {known:,}' if known else size.unknown}"
    return _step(server, flag, min(size.most, present * 2) if double else max(size.least, present // 2), note)


def _toggle(server: ServerView, flags: Flags, flag: str) -> StagedStep:
    """Toggle a switch; unset, it is on if the model supports it."""
    if flag in flags:
        return _step(server, flag, not flags[flag])
    return StagedStep(flag, False, f"--{flag} was unset; vLLM enables it where the model supports it")


def _cycle_kv_dtype(server: ServerView, flags: Flags) -> StagedStep:
    """Toggle between an FP8 KV cache and the model's own type."""
    return _step(server, "kv-cache-dtype", "auto" if is_fp8(flags.get("kv-cache-dtype")) else "fp8")


def _utilization(server: ServerView, flags: Flags, by: float) -> StagedStep:
    value, note = flags.get("gpu-memory-utilization"), ""
    if value is None or isinstance(value, bool):
        value = _default_utilization(server)
        note = f"--gpu-memory-utilization was unset; starting from vLLM's default of {value}"
    if "kv-cache-memory-bytes" in flags:
        note = "--kv-cache-memory-bytes fixes the KV cache's size: this only changes how much must be free at startup"
    try:
        present = float(value)
    except ValueError:
        present = _default_utilization(server)
    lowest, highest = min(0.1, present), max(0.98, present)  # a step up never lowers a manual value
    return StagedStep("gpu-memory-utilization", round(min(highest, max(lowest, present + by)), 2), note)


def _default_utilization(server: ServerView) -> float:
    return default_utilization(server.engine.release if server.engine else None)


def _step(server: ServerView, flag: str, value: FlagValue, note: str = "") -> StagedStep:
    """A step to a value; an unset flag that returns to its starting value becomes unset again."""
    start = default_value(server, flag)
    if start is None and flag in _SIZES:
        start = _SIZES[flag].fallback
    back = flag not in server.flags and same_value(value, start)
    return StagedStep(flag, None if back else value, note)


def refused(server: ServerView, step: StagedStep) -> str:
    """Why a step can't be staged because vLLM could fail on it; empty if it can."""
    if step.flag == "kv-cache-dtype" and is_fp8(step.value) and server.fp8_cache_problem:
        return f"FP8 KV cache not staged. {server.fp8_cache_problem}."
    if step.flag == "gpu-memory-utilization" and server.engine is not None and server.engine.build == "cpu":
        return "--gpu-memory-utilization not staged: on a CPU build VLLM_CPU_KVCACHE_SPACE sizes the KV cache."
    return ""


class TuningKey(msgspec.Struct, frozen=True):
    """A key that stages a step: action id, key, title, and a function that creates the step.

    The function gets the server and its flags including staged changes.
    """

    id: str
    key: str
    title: str
    step: Callable[[ServerView, Flags], StagedStep]


class Tuned(msgspec.Struct, frozen=True):
    """A flag that single keys change: its labels, and the keys that lower and raise or toggle it."""

    flag: str
    label: str
    short: str
    keys: tuple[TuningKey, ...]
    hint: str = ""
    """What the keys change, in one word; empty for ``short``."""


_SEQUENCES, _CONTEXT, _MEMORY = "max-num-seqs", "max-model-len", "gpu-memory-utilization"
_PREFIX, _CHUNKED = "enable-prefix-caching", "enable-chunked-prefill"

TUNED = (
    Tuned(_SEQUENCES, "sequences", "seqs", (
        TuningKey("halve_sequences", "left_square_bracket", "Halve --max-num-seqs",
                  partial(_resize, flag=_SEQUENCES, double=False)),
        TuningKey("double_sequences", "right_square_bracket", "Double --max-num-seqs",
                  partial(_resize, flag=_SEQUENCES, double=True)),
    )),
    Tuned(_CONTEXT, "context", "context", (
        TuningKey("halve_context", "left_curly_bracket", "Halve --max-model-len",
                  partial(_resize, flag=_CONTEXT, double=False)),
        TuningKey("double_context", "right_curly_bracket", "Double --max-model-len",
                  partial(_resize, flag=_CONTEXT, double=True)),
    )),
    Tuned(_MEMORY, "GPU memory", "memory", (
        TuningKey("lower_utilization", "less_than_sign", "Lower --gpu-memory-utilization by 0.02",
                  partial(_utilization, by=-UTILIZATION_STEP)),
        TuningKey("raise_utilization", "greater_than_sign", "Raise --gpu-memory-utilization by 0.02",
                  partial(_utilization, by=UTILIZATION_STEP)),
    )),
    Tuned(_PREFIX, "prefix cache", "prefix", (
        TuningKey("toggle_prefix_caching", "p", "Toggle prefix caching", partial(_toggle, flag=_PREFIX)),
    )),
    Tuned(_CHUNKED, "chunked prefill", "chunks", (
        TuningKey("toggle_chunked_prefill", "P", "Toggle chunked prefill", partial(_toggle, flag=_CHUNKED)),
    )),
    Tuned("kv-cache-dtype", "KV dtype", "kv", (
        TuningKey("cycle_kv_dtype", "v", "Toggle FP8 KV cache", _cycle_kv_dtype),
    ), hint="fp8"),
)  # fmt: skip
"""The flags that single keys change, in the order of the tuning bar."""

TUNING_KEYS = {key.id: key for tuned in TUNED for key in tuned.keys}


class MeasuredTraffic(msgspec.Struct, frozen=True):
    """The traffic in one sentence, and suggested flags; none if data is insufficient or the flags fit."""

    sentence: str
    choices: tuple[Choice, ...] = ()


def measured_traffic(fleet: LocalFleet, server: ServerView) -> MeasuredTraffic:
    """Analyze a server's traffic; blocks briefly. Flags whose change would worsen an open finding are kept.

    Raises:
        OperationError: there is no such server, or it is not ours.
    """
    name = server.name
    seen = fleet.seen_workload(name)
    if seen is None or seen.workload is None:
        return MeasuredTraffic(seen.sentence if seen is not None else "No traffic recorded yet.")
    choices = _changes(fleet.suggest(name, seen))
    held = _held_back(server, choices)
    if held:
        choices = _changes(fleet.suggest(name, seen, tuple(held)))
        held = {**_held_back(server, choices), **held}
        choices = tuple(choice for choice in choices if choice.flag not in held)
    said = [f"--{flag} stays: {title_of_code(held[flag].code)}." for flag in held]
    if not choices:
        said = [f"Its {'other ' if held else ''}flags fit its traffic.", *said]
    return MeasuredTraffic(" ".join((*said, seen.sentence)), choices)


def _changes(suggested: Sequence[Choice]) -> tuple[Choice, ...]:
    return tuple(choice for choice in suggested if choice.value is not None)


def _held_back(server: ServerView, choices: Sequence[Choice]) -> Mapping[str, Finding]:
    """Flags to keep, and the open finding that changing each would worsen."""
    wanted = {choice.flag: choice.value for choice in choices if choice.value is not None}
    present = {flag: value for flag in wanted if (value := default_value(server, flag)) is not None}
    return opposed(server.findings, {**present, **server.flags}, wanted)
