"""Values that vLLM's own configuration checks refuse, alone or together. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.plan.checks.asked import LENGTH, UTILIZATION, length, utilization
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.flags import token_count
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Changes, Plan
from vllm_launchers.presets.rules import FLAG_RULES

HIGH_UTILIZATION = 0.95
LONG_CONTEXT = 16_384
"""From here on a prompt's activations need room beside the share that vLLM takes."""

BATCHED = "max-num-batched-tokens"


def value_findings(plan: Plan, knowledge: Knowledge) -> Iterator[Finding]:
    """Each value alone (where no table of flags does that better), then those that contradict each other."""
    if knowledge.flags is None:
        yield from _rules(plan)
    yield from _utilization(plan, knowledge)
    yield from _batching(plan)


def _rules(plan: Plan) -> Iterator[Finding]:
    for name, value in plan.flags.items():
        rule = FLAG_RULES.get(name)
        if rule is not None and not rule.allows(value):
            text = f"vLLM will refuse --{name} {str(value)[:40]}: expected {rule.expected}"
            yield Finding("flag_value", Level.ERROR, text)


def _utilization(plan: Plan, knowledge: Knowledge) -> Iterator[Finding]:
    share = utilization(plan)
    context = length(plan, knowledge)
    long = context is not None and context > LONG_CONTEXT
    if not (HIGH_UTILIZATION < share <= 1 or (share == HIGH_UTILIZATION and long)):
        return
    with_length = f" with contexts of {context:,} tokens" if long else ""
    text = (
        f"--{UTILIZATION} {share:g}{with_length} leaves {1 - share:.0%} of the GPU: a long prompt can run out of "
        f"memory. {HIGH_UTILIZATION} is the most, and only with short contexts"
    )
    fix = Changes(set={UTILIZATION: 0.92 if long else HIGH_UTILIZATION})
    yield Finding("utilization_high", Level.WARNING, text, fix)


def _batching(plan: Plan) -> Iterator[Finding]:
    """vLLM's own two conditions on ``max-num-batched-tokens`` (``SchedulerConfig.verify_max_model_len``)."""
    flags = plan.flags
    batched = token_count(flags.get(BATCHED))
    if batched is None:
        return
    sequences = token_count(flags.get("max-num-seqs"))
    if sequences is not None and batched < sequences:
        text = (
            f"vLLM will refuse --{BATCHED} {batched}: each of {sequences} sequences (--max-num-seqs) "
            "needs room for a token in every step"
        )
        yield Finding("batch_too_small", Level.ERROR, text, Changes(set={BATCHED: max(2048, sequences)}))
    context = token_count(flags.get(LENGTH))
    if flags.get("enable-chunked-prefill") is False and context is not None and batched < context:
        text = (
            f"vLLM will refuse --{BATCHED} {batched} without chunked prefill: a whole prompt of up to "
            f"{context} tokens (--{LENGTH}) must fit into one step"
        )
        yield Finding("batch_too_small", Level.ERROR, text, Changes(set={"enable-chunked-prefill": True}))
