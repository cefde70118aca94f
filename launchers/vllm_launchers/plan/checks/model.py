"""The model: whether it is there, may be had, and is what the flags take it for. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.checks.asked import LENGTH, on, simulated, variables
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.flags import token_count
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Changes, Plan

HERE = ("folder", "cache")
GATED = (
    "meta-llama/",
    "google/gemma-2",
    "google/gemma-3",
    "mistralai/Mistral-Large",
    "CohereLabs/",
    "black-forest-labs/",
)
"""Whose models are given to those only who asked on the hub."""

LONGER_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

FAMILIES: tuple[frozenset[str], ...] = (
    frozenset({"awq", "awq_marlin"}),
    frozenset({"gptq", "gptq_marlin", "gptq_bitblas", "gptq_marlin_24", "marlin", "bitblas"}),
    frozenset({"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"}),
    frozenset({"auto-round", "inc", "auto_round"}),
    frozenset({"fp8", "fbgemm_fp8", "ptpc_fp8", "deepseek_v4_fp8"}),
    frozenset({"mxfp4", "gpt_oss_mxfp4"}),
)
"""Methods that read each other's checkpoints."""

ANY_4_BIT = frozenset({"moe_wna16", "ipex", "cpu_awq", "cpu_gptq"})
"""Methods that read AWQ and GPTQ checkpoints alike."""

IN_FLIGHT = frozenset(
    {"fp8", "bitsandbytes", "torchao", "experts_int8", "rtn", "ptpc_fp8", "fp8_per_tensor", "fp8_per_block",
     "int8_per_channel", "int8_per_channel_weight_only", "mxfp8", "online", "tpu_int8", "deepspeedfp", "gguf"}
)  # fmt: skip
"""Methods that quantize while they load, or bring what they need with them; any checkpoint will do."""


def model_findings(plan: Plan, knowledge: Knowledge) -> Iterator[Finding]:
    """Everything about the model that ends a start."""
    if knowledge.model_problem:
        yield Finding("model_missing", Level.ERROR, knowledge.model_problem)
    facts = knowledge.facts
    if facts is None or simulated(plan):
        return
    yield from _there(plan, knowledge, facts)
    yield from _quantization(plan, facts)
    yield from _context(plan, knowledge, facts)
    if facts.missing:
        way = " ('plan --hub' asks the hub)" if facts.source == "table" else ""
        text = f"not known of {facts.model}: {'; '.join(facts.missing)}; memory is estimated without it{way}"
        yield Finding("facts_missing", Level.ADVICE, text)
    if facts.needs_remote_code and plan.flags.get("trust-remote-code") is not True:
        text = (
            f"{facts.model} brings code of its own; unless vLLM has its own for it, it will not load without "
            "--trust-remote-code, which runs that code as you"
        )
        yield Finding("remote_code", Level.WARNING, text, Changes(set={"trust-remote-code": True}))


def _no_token(knowledge: Knowledge) -> bool:
    return knowledge.surroundings.has_hub_token is False


def _sure(facts: ModelFacts) -> bool:
    """Whether facts come from the model's own files, not from a table or its name."""
    return facts.source in (*HERE, "hub")


def _there(plan: Plan, knowledge: Knowledge, facts: ModelFacts) -> Iterator[Finding]:
    settings = variables(plan, knowledge)
    offline = on(settings, "HF_HUB_OFFLINE") or on(settings, "TRANSFORMERS_OFFLINE")
    if facts.gated:
        token = knowledge.surroundings.has_hub_token
        way = "ask for access on its page" if token else "ask for access on its page and export HF_TOKEN"
        yield Finding("model_gated", Level.ERROR, f"{facts.model} is gated and its files cannot be had; {way}")
    elif facts.source not in (*HERE, "hub") and facts.model.startswith(GATED) and _no_token(knowledge) and not offline:
        text = f"{facts.model} is gated on the hub, and there is no token to ask for it with; export HF_TOKEN"
        yield Finding("model_gated", Level.WARNING, text)
    elif offline and facts.source not in HERE:
        text = f"{facts.model} is not on this machine and HF_HUB_OFFLINE forbids to fetch it; fetch it first"
        yield Finding("model_missing", Level.ERROR, text)
    if facts.files_missing:
        few = ", ".join(facts.files_missing[:3])
        more = f" and {len(facts.files_missing) - 3} more" if len(facts.files_missing) > 3 else ""
        if facts.source == "folder" or offline:
            text = f"{facts.folder or facts.model} lacks {few}{more}; fetch the model again"
            yield Finding("model_incomplete", Level.ERROR, text)
        else:
            text = f"the download of {facts.model} was cut off ({few}{more} missing); vLLM will go on with it first"
            yield Finding("model_incomplete", Level.WARNING, text)


def _quantization(plan: Plan, facts: ModelFacts) -> Iterator[Finding]:
    asked = plan.flags.get("quantization")
    if not isinstance(asked, str) or asked in ("", "None", "auto") or not facts.architecture:
        return
    fix = Changes(unset=("quantization",))
    if facts.quantization is None:
        if asked not in IN_FLIGHT:
            text = (
                f"--quantization {asked} reads checkpoints that were quantized so, and {facts.model} was not; leave "
                f"the flag out, or take a model quantized as {asked}"
            )
            yield Finding("quantization_without_checkpoint", Level.ERROR, text, fix, surely=_sure(facts))
        return
    stored = facts.quantization.method
    if not _reads(asked, stored):
        text = (
            f"{facts.model} is quantized as {stored}, not as --quantization {asked}; vLLM knows it from the checkpoint"
        )
        yield Finding("quantization_mismatch", Level.ERROR, text, fix, surely=_sure(facts))


def _reads(asked: str, stored: str) -> bool:
    one, other = asked.replace("_", "-"), stored.replace("_", "-")
    if one == other or (asked in ANY_4_BIT and stored in FAMILIES[0] | FAMILIES[1]):
        return True
    return any(asked in family and stored in family for family in FAMILIES)


def _context(plan: Plan, knowledge: Knowledge, facts: ModelFacts) -> Iterator[Finding]:
    asked, most = token_count(plan.flags.get(LENGTH)), facts.max_context
    if asked is None or most is None or asked <= most or on(variables(plan, knowledge), LONGER_ALLOWED):
        return
    if any(name.partition(".")[0] in ("hf-overrides", "rope-scaling") for name in plan.flags):
        return  # says itself how it gets there
    text = f"--{LENGTH} {asked:,} is over the {most:,} tokens that {facts.model} was made for, and vLLM will refuse it"
    yield Finding("context_over_model", Level.ERROR, text, Changes(set={LENGTH: most}), surely=_sure(facts))
