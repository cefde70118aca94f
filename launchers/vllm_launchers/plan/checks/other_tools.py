"""Advice, in one sentence, where another tool, or another way to run vLLM, suits a launch better. Pure.

Each sentence gives its reason and its source. None of them blocks a launch.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.host.gpu.host import Gpu
from vllm_launchers.plan.attention import AMPERE
from vllm_launchers.plan.checks.hardware import LEAST_COMPUTE_CAPABILITY, TURING
from vllm_launchers.plan.checks.request import capability, gpus_of, most_room, names, ranks, simulated, spread
from vllm_launchers.plan.choices.choice import PARALLEL_FLAGS, BudgetFor
from vllm_launchers.plan.choices.nodes import MOST_NODES
from vllm_launchers.plan.choices.pool import is_free
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import PIPELINE, TENSOR, TRANSFER, flag_names
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.tensor_sizes import tensor_sizes
from vllm_launchers.presets.model import Objectives, Workload

MAXWELL = 5.0
"""Lowest compute capability that llama.cpp's CUDA builds are made for."""

SMALL_GIB = 12.5
"""Upper limit of a 12 GB card."""

LONG_PROMPTS = 10
"""Ratio of prompt to answer length from which llm-d's guide recommends separate GPUs for prefill."""

TIGHT = 1.5
"""An objective below this multiple of the estimate for one request leaves little for an engine's overhead."""

MOSTLY_SHARED = 0.8
"""Shared fraction of a prompt from which prefix reuse determines the speed."""

_STRUCTURED = ("structured-outputs-config", "guided-decoding-backend")


def other_tools(
    plan: Plan, inputs: PlanInputs, workload: Workload, budget: BudgetFor, objectives: Objectives
) -> Iterator[PlanFinding]:
    """Yield the first advice that applies, if any; none if the GPUs are unknown."""
    gpus = gpus_of(plan, inputs)
    if simulated(plan) or not gpus or plan.engine.build not in ("cuda", None):
        return
    text = _old(gpus) or _larger(plan, inputs, budget) or _single(gpus, inputs, workload)
    if not text:
        able = capability(gpus)
        text = _separate_prefill(plan, inputs, workload, objectives) or _latency(plan, able, objectives)
        text = text or _shared(plan, able, workload)
    if text:
        yield PlanFinding("other_tool", Level.ADVICE, text)


def _old(gpus: tuple[Gpu, ...]) -> str:
    able = capability(gpus)
    if able is None or not MAXWELL <= able < LEAST_COMPUTE_CAPABILITY[0]:
        return ""
    return (
        f"vLLM does not support {names(gpus)}; llama.cpp does, also as part of Ollama (source: Ollama's documentation, "
        "Hardware support)"
    )


def _larger(plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> str:
    """For a model whose weights exceed the memory that vLLM may take of all GPUs together."""
    assert inputs.machine is not None, "its GPUs are known"
    room = most_room(plan, inputs.machine.gpus)
    if plan.memory is None or not room or plan.nodes is not None:
        return ""
    weights = plan.memory.weights_gib * ranks(plan.flags)
    if weights <= room:
        return ""
    nodes = _fewest_nodes(plan, inputs, budget)
    several = (
        "use several such machines"
        if nodes is None
        else (
            f"{nodes} such machines hold weights, activations and the KV cache of a request of full length, see "
            f"'plan --nodes {nodes}'"
        )
    )
    return (
        f"the weights need about {weights:.0f} GiB, and vLLM can take {room:.0f} of all GPUs of this machine: "
        f"{several} (source: vLLM's documentation, Parallelism and Scaling), or --cpu-offload-gb, which copies weights "
        "from main memory in each step; for few users, llama.cpp can compute layers on the CPU (source: its README)"
    )


def _fewest_nodes(plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> int | None:
    """Number of machines like this one on which it fits, with pipeline stages across them; None if unknown."""
    assert inputs.machine is not None, "its GPUs are known"
    count = len(inputs.machine.gpus)
    base = {name: value for name, value in plan.flags.items() if name not in PARALLEL_FLAGS}
    tensor = max(tensor_sizes(inputs.facts, base, count), default=1)
    for nodes in range(2, MOST_NODES + 1):
        stages = nodes * (count // tensor)
        if inputs.facts is not None and stages > len(inputs.facts.layers):
            return None
        found = budget({**base, TENSOR: tensor, PIPELINE: stages})
        if found is not None and found.fits:
            return nodes
    return None


def _single(gpus: tuple[Gpu, ...], inputs: PlanInputs, workload: Workload) -> str:
    assert inputs.machine is not None, "its GPUs are known"
    size = gpus[0].memory_gib
    if workload.concurrency > 1 or len(inputs.machine.gpus) > 1 or size is None or size > SMALL_GIB:
        return ""
    return (
        f"for one request at a time on a GPU of {size:.0f} GiB llama.cpp or Ollama allow larger models: weights of "
        "fewer than 4 bits, and layers in main memory (source: the README of llama.cpp)"
    )


def _separate_prefill(plan: Plan, inputs: PlanInputs, workload: Workload, objectives: Objectives) -> str:
    """For long prompts that alone push ITL above the objective, if GPUs for a second vLLM are free."""
    full = plan.paces.full if plan.paces is not None else None
    decoding = plan.paces.decoding if plan.paces is not None else None
    if full is None or decoding is None or TRANSFER in flag_names(plan.flags):
        return ""
    limit = objectives.itl_p99_seconds
    long = workload.input_tokens_p95 >= LONG_PROMPTS * workload.output_tokens_p95
    if not (long and decoding.tpot_seconds <= limit < full.tpot_seconds) or _spare(plan, inputs) < ranks(plan.flags):
        return ""
    return (
        f"with {full.concurrency} requests a token takes about {1000 * full.tpot_seconds:.0f} ms, and "
        f"{1000 * decoding.tpot_seconds:.0f} without the prompts of {workload.input_tokens_p95:,} tokens, which are "
        f"computed between the tokens of other requests; the objective is {1000 * limit:.0f} ms: a separate prefill "
        "instance (disaggregated prefill) keeps ITL steady, without more throughput (source: vLLM's documentation, "
        "Disaggregated Prefilling, experimental)"
    )


def _spare(plan: Plan, inputs: PlanInputs) -> int:
    """Number of free GPUs of the plan's model; 0 if it runs on several machines."""
    used = gpus_of(plan, inputs)
    if inputs.host is None or spread(plan.flags):
        return 0
    taken = {gpu.index for gpu in used}
    return sum(
        gpu.index not in taken and gpu.name == used[0].name and is_free(gpu, inputs.shares) for gpu in inputs.host.gpus
    )


def _latency(plan: Plan, able: float | None, objectives: Objectives) -> str:
    """For an objective barely above what these GPUs need for a single request."""
    one = plan.paces.one if plan.paces is not None else None
    if one is None or able is None or able < AMPERE:  # TensorRT-LLM supports none below; SGLang's kernels need `TURING`
        return ""
    if not one.tpot_seconds <= objectives.itl_p99_seconds < TIGHT * one.tpot_seconds:
        return ""
    return (
        f"the objective ITL p99 ≤ {1000 * objectives.itl_p99_seconds:.0f} ms is close to the "
        f"{1000 * one.tpot_seconds:.0f} ms that a token takes with a single request: TensorRT-LLM, which has "
        "kernels made for these GPUs, may need less time per step; compare both on your traffic (source: its "
        "README)"
    )


def _shared(plan: Plan, able: float | None, workload: Workload) -> str:
    """For traffic that suits SGLang's prefix cache or its structured decoding."""
    if able is None or able < TURING:
        return ""
    structured = next((name for name in _STRUCTURED if plan.flags.get(name)), "")
    if workload.prefix_reuse >= MOSTLY_SHARED:
        why = f"{workload.prefix_reuse:.0%} of each prompt is shared with other requests"
    elif structured:
        why = f"--{structured} is for structured output"
    else:
        return ""
    return (
        f"{why}: SGLang is made for such traffic; compare both on yours (source: Zheng et al., SGLang: Efficient "
        "Execution of Structured Language Model Programs, 2024)"
    )
