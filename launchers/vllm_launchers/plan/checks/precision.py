"""Number formats that a GPU does not have. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.plan.checks.asked import KV_DTYPE, capability, gpus_of, names, simulated
from vllm_launchers.plan.choices.model import Source
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Changes, Plan

VOLTA, TURING, AMPERE, ADA, HOPPER = 7.0, 7.5, 8.0, 8.9, 9.0
FP8_METHODS = frozenset({"fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt", "fp8_per_tensor", "fp8_per_block"})


def precision_findings(plan: Plan, knowledge: Knowledge) -> Iterator[Finding]:
    """BF16, FP8 weights, FP8 KV cache and AWQ against the oldest of its GPUs. NVIDIA's compute capabilities."""
    gpus = gpus_of(plan, knowledge)
    able = capability(gpus)
    if able is None or plan.engine.build not in ("cuda", "simulated", None):
        return
    who = f"{names(gpus)} (compute capability {able:g})"
    yield from _bf16(plan, knowledge, able, who)
    yield from _fp8_cache(plan, able, who)
    yield from _weights(plan, knowledge, able, who)


def _bf16(plan: Plan, knowledge: Knowledge, able: float, who: str) -> Iterator[Finding]:
    if able >= AMPERE:
        return
    asked = plan.flags.get("dtype", "auto")
    fix = Changes(set={"dtype": "float16"})
    if asked == "bfloat16":
        text = f"{who} has no BF16, which begins with 8.0: vLLM will refuse --dtype bfloat16"
        yield Finding("bf16_unsupported", Level.ERROR, text, fix)
    elif asked == "auto" and knowledge.facts is not None and knowledge.facts.dtype == "bfloat16":
        text = f"{who} has no BF16, in which {plan.model} is stored: vLLM takes FP16, whose range is smaller"
        yield Finding("bf16_unsupported", Level.WARNING, text, fix)


def _fp8_cache(plan: Plan, able: float, who: str) -> Iterator[Finding]:
    asked = plan.flags.get(KV_DTYPE)
    if not isinstance(asked, str) or not asked.startswith("fp8") or able >= HOPPER:
        return
    fix = Changes(unset=(KV_DTYPE,))
    if able < AMPERE:
        text = f"{who} has no FP8 and no kernel for --{KV_DTYPE} {asked}"
        yield Finding("fp8_unsupported", Level.ERROR, text, fix, surely=False)
    elif able < ADA:
        text = (
            f"{who} has no FP8: --{KV_DTYPE} {asked} is converted at every step, half the memory for slower attention"
        )
        if _chosen_here(plan, KV_DTYPE):
            yield Finding("fp8_unsupported", Level.ADVICE, text)
        else:
            yield Finding("fp8_unsupported", Level.WARNING, text, fix)
    else:
        text = f"on {who} attention over an FP8 KV cache is not native and may be slower; Hopper and later have it"
        yield Finding("fp8_kv_slow", Level.ADVICE, text)


def _chosen_here(plan: Plan, name: str) -> bool:
    """Whether nobody asked for a flag: it was chosen for this machine, in view of its price."""
    return any(choice.flag == name and choice.source is Source.MACHINE for choice in plan.choices)


def _weights(plan: Plan, knowledge: Knowledge, able: float, who: str) -> Iterator[Finding]:
    facts = knowledge.facts
    stored = facts.quantization.method if facts is not None and facts.quantization is not None else None
    method = stored or plan.flags.get("quantization")
    if not isinstance(method, str):
        return
    if method in FP8_METHODS and able < ADA:
        fix = Changes(unset=("quantization",)) if stored is None else None
        if able < AMPERE:
            text = f"{who} has no FP8: weights in {method} will not run there; take an AWQ or GPTQ model"
            yield Finding("fp8_unsupported", Level.ERROR, text, fix, surely=able < TURING)
        else:
            text = f"{who} has no FP8: {method} weights save memory there but compute in 16 bits, no faster than those"
            yield Finding("fp8_unsupported", Level.WARNING, text, fix)
    if method in ("awq", "awq_marlin") and able < TURING and not simulated(plan):
        text = f"AWQ needs compute capability 7.5 and {who} is older; take a GPTQ model"
        yield Finding("quantization_unsupported", Level.ERROR, text)
