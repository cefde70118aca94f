"""Flags that vLLM refuses together for some models. Pure.

Plans report them as errors, and no proposal may lead to them. Conditions that hold for every model are in
`check_value`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from vllm_launchers.plan.flags import DATA, EXPERTS, LORA, TENSOR
from vllm_launchers.vllm.flags.changes import Flags, whole_number
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.release_defaults import NEWEST, Release


class BrokenCondition(msgspec.Struct, frozen=True):
    """``flag`` is the one to unset; ``sentence`` says why. ``surely`` is False if vLLM may accept it after all."""

    flag: str
    sentence: str
    surely: bool = True


def broken_model_conditions(facts: ModelFacts, flags: Flags, release: Release | None) -> Iterator[BrokenCondition]:
    """What vLLM refuses in these flags for this model; an unknown release counts as the newest."""
    if facts.experts and flags.get(EXPERTS) is True:
        yield from _adapters_of_whole_experts(flags, release)


# -- LoRA adapters on whole experts -----------------------------------------------------------------------------------


_EXPERT_ADAPTERS_SINCE: Release = (0, 11, 1)
"""First release that puts LoRA adapters on experts, which are then wrapped whatever the adapters contain."""

_WHOLE_EXPERT_ADAPTERS_SINCE: Release = (0, 21, 0)
"""First release that can do that with expert parallelism (``FusedMoEWithLoRA._ep_check``)."""

_ALL_TO_ALL, _GATHERED = "all2all-backend", ("allgather_reducescatter", "pplx", "naive")
"""The only all-to-all backend that works with it, and those that vLLM replaces by it."""

_TARGETS = "lora-target-modules"


def _adapters_of_whole_experts(flags: Flags, release: Release | None) -> Iterator[BrokenCondition]:
    tensor, data = whole_number(flags, TENSOR), whole_number(flags, DATA)
    if problem := adapter_problem(flags, release, tensor=tensor, data=data):
        text = f"--{EXPERTS} does not work with --{LORA} {problem}"
        yield BrokenCondition(EXPERTS, text, surely=_TARGETS not in flags)  # experts may not be among the targets


def adapter_problem(flags: Flags, release: Release | None, *, tensor: int, data: int) -> str:
    """Where LoRA adapters prevent expert parallelism, to follow ``with --enable-lora``; empty if they don't."""
    release = release or NEWEST
    if flags.get(LORA) is not True or tensor * data == 1 or release < _EXPERT_ADAPTERS_SINCE:
        return ""
    if release < _WHOLE_EXPERT_ADAPTERS_SINCE:
        return "in this release"
    if tensor > 1 and data > 1:
        return f"and both --{TENSOR} and --{DATA} above 1"
    if flags.get("fully-sharded-loras") is True:
        return "and --fully-sharded-loras"
    backend = str(flags.get(_ALL_TO_ALL, _GATHERED[0]))
    return "" if backend in _GATHERED else f"and --{_ALL_TO_ALL} {backend}"
