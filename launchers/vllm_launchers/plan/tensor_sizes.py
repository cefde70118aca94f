"""Tensor-parallel sizes that vLLM supports for a model with given flags. Pure."""

from __future__ import annotations

from vllm_launchers.plan.flags import DATA, DECODE_CONTEXT, EXPERTS, TENSOR
from vllm_launchers.vllm.flags.changes import Flags, whole_number
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, expert_split_problem, split_problem


def tensor_problem(facts: ModelFacts | None, flags: Flags) -> str:
    """Why vLLM can't shard a model as the flags say, in a few words; empty if it can, or if unknown."""
    tensor, shards = whole_number(flags, TENSOR), whole_number(flags, DECODE_CONTEXT)
    if tensor % shards:
        return f"--{DECODE_CONTEXT} {shards} does not divide {tensor}"
    if facts is None:
        return ""
    whole = flags.get(EXPERTS) is True
    return split_problem(facts, tensor) or (
        "" if whole else expert_split_problem(facts, tensor * whole_number(flags, DATA))
    )


def tensor_sizes(facts: ModelFacts | None, flags: Flags, most: int) -> list[int]:
    """The tensor-parallel sizes up to ``most`` that may be proposed; powers of two for an unknown model."""
    sizes = [size for size in range(1, most + 1) if not tensor_problem(facts, {**flags, TENSOR: size})]
    return sizes if facts is not None else [size for size in sizes if size & (size - 1) == 0]
