"""LoRA adapters that are loaded while the server runs: what allows that, and whom it exposes the server to. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.addresses import is_loopback
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import API_KEY
from vllm_launchers.vllm.adapter_folder import RUNTIME_LORA, updates_adapters

LORA = "enable-lora"


def adapter_findings(plan: Plan, inputs: PlanInputs) -> Iterator[Finding]:
    """Who could load adapters into this server."""
    if not updates_adapters({**inputs.environment.variables, **plan.environment}):
        return
    if plan.flags.get(LORA) is not True:
        text = f"{RUNTIME_LORA} has no use without --{LORA}: no adapter can be loaded"
        yield Finding("adapters_off", Level.WARNING, text)
        return
    local, keyed = is_loopback(plan.host), API_KEY in plan.secrets
    if not local or (inputs.environment.shared and not keyed):
        who = f"whoever reaches {plan.host}" if not local else "other people with accounts on this machine"
        key = " and has its API key" if keyed else ", without an API key,"
        text = (
            f"with {RUNTIME_LORA} {who}{key} can replace what it answers by loading adapters from any folder that it "
            "can read; vLLM means this for development only: leave the variable out, and name adapters in "
            "--lora-modules"
        )
        yield Finding("adapters_exposed", Level.WARNING if keyed or local else Level.ERROR, text)
