"""What the choices are made from, and which memory budget tells what fits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_launchers.machine.gpu.host import Host
from vllm_launchers.machine.gpu.sharing import Share
from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.budget.model import MemoryBudget
from vllm_launchers.plan.model import Flags
from vllm_launchers.presets.model import Workload

LENGTH = "max-model-len"
SEQUENCES = "max-num-seqs"
BATCHED = "max-num-batched-tokens"
PREFIX = "enable-prefix-caching"
CHUNKED = "enable-chunked-prefill"
KV_DTYPE = "kv-cache-dtype"
QUANTIZATION = "quantization"
TENSOR = "tensor-parallel-size"
PIPELINE = "pipeline-parallel-size"
DATA = "data-parallel-size"
EXPERTS = "enable-expert-parallel"
SPECULATION = "speculative-config"

WORKLOAD_FLAGS = (LENGTH, SEQUENCES, BATCHED, PREFIX, CHUNKED)
"""Flags that follow from traffic alone: what measured traffic may change."""

PARALLEL_FLAGS = (TENSOR, PIPELINE, DATA)

Release = tuple[int, int, int]


class BudgetFor(Protocol):
    """What a launch with these flags holds; None where too little is known. Asked for many sets of flags."""

    def __call__(self, flags: Flags, /) -> MemoryBudget | None:
        """The budget of the GPU with the least room, as one copy of the model (data-parallel rank) has it."""


@dataclass(frozen=True, slots=True)
class Situation:
    """One launch: its traffic, model, machine and engine.

    ``gpus`` are the ones that a person gave it; none leaves the choice open. ``shares`` limit what this person may
    take of a GPU. ``budget`` None takes an estimate in its place.
    """

    workload: Workload
    facts: ModelFacts | None = None
    host: Host | None = None
    release: Release | None = None
    build: str | None = None
    gpus: tuple[int, ...] = ()
    shares: Sequence[Share] = ()
    budget: BudgetFor | None = None

    @property
    def request_tokens(self) -> int:
        """Tokens of a request at the 95th percentile, prompt and answer."""
        return self.workload.input_tokens_p95 + self.workload.output_tokens_p95


def whole(flags: Flags, name: str, otherwise: int = 1) -> int:
    """A flag's whole number; ``otherwise`` where it has none."""
    value = flags.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise
