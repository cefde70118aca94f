"""Features of vLLM's newer model runner (V2), which the CPU build does not use, and what else they need. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.plan.checks.architectures import is_dense, is_plain
from vllm_launchers.plan.checks.request import variables
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import DECODE_CONTEXT, PIPELINE, PREFIX
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes, json_flag, whole_number
from vllm_launchers.vllm.release_defaults import checked

_PREFILL_CONTEXT = "prefill-context-parallel-size"
_ROUTED, _OUTPUT, _KEY = "enable-return-routed-experts", "aux-output-config", "enable_return_routed_experts"
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def model_runner_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """Prefill context parallelism and returned experts where vLLM refuses them."""
    if plan.engine.build not in ("cpu", "cuda") or not checked(plan.engine.release):
        return
    if whole_number(plan.flags, _PREFILL_CONTEXT) > 1:
        why, sure = _no_prefill_context(plan, inputs)
        if why:
            text = f"vLLM will refuse --{_PREFILL_CONTEXT} {plan.flags[_PREFILL_CONTEXT]}: {why}"
            yield PlanFinding("flag_value", Level.ERROR, text, Changes(unset=(_PREFILL_CONTEXT,)), surely=sure)
    if plan.flags.get(_ROUTED) is True or json_flag(plan.flags, _OUTPUT).get(_KEY) is True:
        why, sure = _no_routed_experts(plan, inputs)
        if why:
            names = tuple(name for name in plan.flags if name == _ROUTED or name.partition(".")[0] == _OUTPUT)
            text = f"vLLM will refuse --{names[0]}: {why}"
            yield PlanFinding("flag_value", Level.ERROR, text, Changes(unset=names), surely=sure)


def _older_runner(plan: Plan, inputs: PlanInputs) -> str:
    """Why it uses the older runner (``VllmConfig.use_v2_model_runner``); empty if it does not."""
    chosen = variables(plan, inputs).get(_RUNNER)
    if chosen is not None:
        return f"the model runner that {_RUNNER}={chosen} selects lacks it" if chosen.strip() == "0" else ""
    return "the CPU build's model runner lacks it" if plan.engine.build == "cpu" else ""


def _no_prefill_context(plan: Plan, inputs: PlanInputs) -> tuple[str, bool]:
    """``PCPManager.validate_config``: only models with latent attention."""
    facts = inputs.facts
    if why := _older_runner(plan, inputs):
        return why, True
    if facts is not None and is_plain(facts):
        return f"it serves models with latent attention (MLA) only, unlike {facts.model}", facts.certain
    return "", True


def _no_routed_experts(plan: Plan, inputs: PlanInputs) -> tuple[str, bool]:
    """``VllmConfig._verify_aux_output_compatibility``."""
    flags, facts = plan.flags, inputs.facts
    if why := _older_runner(plan, inputs):
        return why, True
    if facts is not None and is_dense(facts):
        return f"{facts.model} has no experts", facts.certain
    if flags.get(PREFIX) is False:
        return f"it needs --{PREFIX}", True
    for name in (PIPELINE, DECODE_CONTEXT, _PREFILL_CONTEXT):
        if whole_number(flags, name) > 1:
            return f"it does not work with --{name} {flags[name]}", True
    return "", True
