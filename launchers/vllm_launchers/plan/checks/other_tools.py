"""When another tool than vLLM on this machine would be right: one line of advice with its reason and source. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.host.gpu.host import Gpu
from vllm_launchers.plan.checks.hardware import LEAST
from vllm_launchers.plan.checks.request import capability, gpus_of, names, ranks, simulated
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import Workload

MAXWELL = 5.0
"""The oldest compute capability that llama.cpp's CUDA builds are made for."""

SMALL_GIB = 12.5
"""A card of 12 GB at most."""


def other_tools(plan: Plan, inputs: PlanInputs, workload: Workload | None) -> Iterator[Finding]:
    """The first that is true, if any; nothing where GPUs are unknown."""
    gpus = gpus_of(plan, inputs)
    if simulated(plan) or not gpus or plan.engine.build not in ("cuda", None):
        return
    text = _old(gpus) or _larger(plan, inputs) or _single(gpus, inputs, workload)
    if text:
        yield Finding("other_tool", Level.ADVICE, text)


def _old(gpus: tuple[Gpu, ...]) -> str:
    able = capability(gpus)
    if able is None or not MAXWELL <= able < LEAST[0]:
        return ""
    return (
        f"for {names(gpus)}, which vLLM does not support, llama.cpp is made, also as part of Ollama (source: Ollama's "
        "documentation, Hardware support)"
    )


def _larger(plan: Plan, inputs: PlanInputs) -> str:
    """For a model whose weights are larger than all GPUs together."""
    assert inputs.host is not None, "its GPUs are known"
    sizes = [gpu.memory_gib for gpu in inputs.host.gpus]
    if plan.memory is None or None in sizes or plan.nodes is not None:
        return ""
    weights, room = plan.memory.weights_gib * ranks(plan.flags), sum(size or 0.0 for size in sizes)
    if weights <= room:
        return ""
    return (
        f"the weights take about {weights:.0f} GiB and all GPUs of this machine have {room:.0f}: vLLM needs several "
        "nodes for them, see 'plan --nodes 2' (source: vLLM's documentation, Parallelism and Scaling); llama.cpp can "
        "keep layers in main memory, for few users (source: its README)"
    )


def _single(gpus: tuple[Gpu, ...], inputs: PlanInputs, workload: Workload | None) -> str:
    assert inputs.host is not None, "its GPUs are known"
    size = gpus[0].memory_gib
    if workload is None or workload.concurrency > 1 or len(inputs.host.gpus) > 1 or size is None or size > SMALL_GIB:
        return ""
    return (
        f"for one request at a time on a GPU of {size:.0f} GiB llama.cpp or Ollama allow larger models: weights of "
        "fewer than 4 bits, and layers in main memory (source: the README of llama.cpp)"
    )
