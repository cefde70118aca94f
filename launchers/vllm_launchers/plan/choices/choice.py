"""A choice of a flag's value, what it is made from, and the memory budget that decides what fits. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec

from vllm_launchers.engine_model.gpu_models import Interconnect
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.host.gpu.sharing import GpuShare
from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.plan.flags import (
    BATCHED,
    CHUNKED,
    DATA,
    LENGTH,
    PIPELINE,
    PREFIX,
    SEQUENCES,
    TENSOR,
    normalize_setting,
    spellings,
)
from vllm_launchers.presets.model import FlagSetting, Workload
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue, same_value
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.release_defaults import Release


class Source(StrEnum):
    """Who chose a flag's value."""

    YOU = "you"
    PRESET = "preset"
    WORKLOAD = "workload"
    MODEL = "model"
    MACHINE = "machine"
    CONSOLE = "console"
    """This program, for monitoring or to connect the machines of a launch."""


class Choice(msgspec.Struct, frozen=True):
    """One flag that the plan sets. ``reason`` is one sentence; ``tradeoff`` is its cost, or empty.

    A ``value`` of None means that the flag was considered and left to vLLM.
    """

    flag: str
    value: FlagValue | None
    reason: str
    source: Source
    tradeoff: str = ""


YOU_SET_IT = "set by you"


def overlay(
    preset_flags: Mapping[str, FlagSetting], changes: Changes, sources: Mapping[str, str] | None = None
) -> dict[str, Choice]:
    """Apply a user's changes to a preset's flags. Nothing is derived from traffic, model or machine.

    ``sources`` gives the source of flags that are not the preset's own (for a restart).

    Raises:
        FlagError: a change names an invalid flag, a secret, or a setting chosen elsewhere.
    """
    sources = sources or {}
    unset = {spelling for name in changes.unset for spelling in spellings(name)}
    found = {
        name: Choice(name, setting.value, setting.why, Source(sources.get(name, Source.PRESET)))
        for name, setting in preset_flags.items()
        if name not in unset
    }
    for name, value in dict(normalize_setting(name, value) for name, value in changes.set.items()).items():
        if name not in found or not same_value(found[name].value, value):
            found[name] = Choice(name, value, YOU_SET_IT, Source.YOU)
    return found


WORKLOAD_FLAGS = (LENGTH, SEQUENCES, BATCHED, PREFIX, CHUNKED)
"""Flags that follow only from traffic, so that measured traffic may change them."""

PARALLEL_FLAGS = (TENSOR, PIPELINE, DATA)


BudgetFor = Callable[[Flags], MemoryBudget | None]
"""The memory budget of a launch with these flags, for one copy of the model (data-parallel rank) on the GPU with the
least room; None if too little is known. Called for many sets of flags. It is
`vllm_launchers.launch.plan_budget.FlagBudget.for_flags`."""


def fits_with(budget: BudgetFor, flags: Flags) -> bool | None:
    """Whether a launch with these flags fits in memory; None if unknown."""
    found = budget(flags)
    return found.fits if found is not None else None


def in_eights(count: int) -> int:
    """A number of sequences, from 16 on rounded down to a multiple of eight: CUDA graphs are captured for those."""
    return count - count % 8 if count >= 16 else count


class SeenRoom(msgspec.Struct, frozen=True):
    """How much one engine's KV cache was observed to hold.

    ``each`` is the share of the cache (0 to 1) that a running request held: the 95th percentile over the busy spans.
    ``objective`` is the maximum share that should be used. ``ran`` is the number of requests that ran at once for half
    a minute within that objective and without preemption; 0 if none did. ``cache_tokens`` is None if the size is
    unknown.
    """

    objective: float
    each: float
    ran: int
    cache_tokens: int | None = None

    @property
    def fitting(self) -> int:
        """Concurrent requests that fit, in steps of eight from 16 on; never fewer than were observed to run."""
        return max(1, self.ran, in_eights(math.floor(self.objective / self.each)))

    @property
    def reason(self) -> str:
        """Where that number comes from, as the end of a sentence."""
        if self.fitting == self.ran:
            return f"{self.ran:,} fit in {self.objective:.0%} of the KV cache without preemption."
        held = f"{self.each:.1%} of the KV cache"
        if self.cache_tokens is not None:
            held = f"{self.each * self.cache_tokens:,.0f} of the KV cache's {self.cache_tokens:,} tokens"
        return f"a running request held {held} (p95), so {self.fitting:,} fit in {self.objective:.0%} of it."


class ChoiceInputs(msgspec.Struct, frozen=True):
    """One launch: its traffic, model, machine and engine.

    ``gpus`` are those given by a user; if empty, the choice is open. ``shares`` limit what this user may take of a GPU.
    """

    workload: Workload
    budget: BudgetFor
    facts: ModelFacts | None = None
    host: Host | None = None
    release: Release | None = None
    build: str | None = None
    gpus: tuple[int, ...] = ()
    shares: Sequence[GpuShare] = ()
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The relevant part of the server's environment."""
    seen: SeenRoom | None = None
    """How much its KV cache was observed to hold; None for a server without such a history."""
    longest: float | None = None
    """For a running server: no request had more tokens, prompt plus answer; infinite if that is unknown."""
    nodes: int = 1
    """Number of equal machines that it is spread over; ``host`` and ``gpus`` are those of each."""
    network: Interconnect | None = None
    """The link between the machines, if there are several."""

    @property
    def request_tokens(self) -> int:
        """Tokens of a request at the 95th percentile, prompt plus output."""
        return self.workload.input_tokens_p95 + self.workload.output_tokens_p95
