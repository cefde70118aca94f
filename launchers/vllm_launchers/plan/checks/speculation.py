"""Speculative decoding against the model and its draft model: what vLLM refuses after reading them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllm_launchers.plan.budget.memory_flags import draft_model
from vllm_launchers.plan.checks.architectures import is_dense, is_plain
from vllm_launchers.plan.checks.packages import package_findings
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes, Flags, json_flag
from vllm_launchers.vllm.flags.speculation import SPECULATION, speculation_flags
from vllm_launchers.vllm.installed_packages import ARCTIC_INFERENCE
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.release_defaults import checked

_KEYS = {"method": "spec-method", "model": "spec-model", "num_speculative_tokens": "spec-tokens"}
_HEADS = {"dflash": (), "eagle": ("Llama", "Mistral"), "eagle3": ("Llama", "Qwen3")}
"""Plain architectures for which vLLM has heads with these methods (``registry.py``)."""
_FROM_THE_NAME = ("eagle-", "eagle3", "dflash", "dspark")
"""Parts of a model's name from which vLLM derives another method."""


def speculation_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """A missing package, a draft without a number of tokens, and a method whose layers the model does not have."""
    settings = _settings(plan.flags)
    yield from _without_package(plan, inputs, settings)
    yield from _uncounted(plan.flags, settings, inputs.draft)
    yield from _without_layers(plan, settings, inputs.facts, inputs.draft)
    yield from _unknown_head(plan, settings, inputs.draft)


def _settings(flags: Flags) -> Mapping[str, object]:
    config = json_flag(flags, SPECULATION)
    named = {key: config.get(key, flags.get(flag)) for key, flag in _KEYS.items()}
    return {key: value for key, value in named.items() if value not in (None, "", "None", "null")}


def _without_package(plan: Plan, inputs: PlanInputs, settings: Mapping[str, object]) -> Iterator[PlanFinding]:
    """Suffix decoding needs a separate package (``_validate_suffix_decoding``)."""
    if settings.get("method") == "suffix":
        why = f"the method suffix needs the package {ARCTIC_INFERENCE}"
        yield from package_findings(plan, inputs, ARCTIC_INFERENCE, why, Changes(unset=speculation_flags(plan.flags)))


def _uncounted(flags: Flags, settings: Mapping[str, object], draft: ModelFacts | None) -> Iterator[PlanFinding]:
    """vLLM takes the number from the draft model's ``n_predict``, which plain language models lack."""
    name = draft_model(flags)
    if not name or draft is None or "num_speculative_tokens" in settings or settings.get("method") == "dspark":
        return
    if not is_dense(draft):
        return
    key = "--spec-tokens" if "spec-model" in flags else f"num_speculative_tokens in --{SPECULATION}"
    text = (
        f"vLLM will refuse the draft model {name} without a number of tokens per step, which its config does not "
        f"have: set {key}"
    )
    yield PlanFinding("draft_uncounted", Level.ERROR, text, surely=draft.certain)


def _without_layers(
    plan: Plan, settings: Mapping[str, object], facts: ModelFacts | None, draft: ModelFacts | None
) -> Iterator[PlanFinding]:
    """A method that needs layers which the named plain language model, or the served one, does not have."""
    method, name = str(settings.get("method", "")), str(settings.get("model", plan.model))
    mtp = method == "mtp" or method.endswith("_mtp")
    read = facts if name == plan.model else draft
    if not (mtp or method == "mlp_speculator") or read is None or not is_plain(read):
        return
    if not {"num_speculative_tokens", "model"} & settings.keys() or any(
        word in name.lower() for word in _FROM_THE_NAME
    ):
        return
    lacks = "layers that predict further tokens (MTP)" if mtp else "an MLP speculator"
    text = f"vLLM will refuse the method {method}: {read.model} has no {lacks}"
    fix = Changes(unset=speculation_flags(plan.flags))
    yield PlanFinding("no_mtp_layers", Level.ERROR, text, fix, surely=read.certain)


def _unknown_head(plan: Plan, settings: Mapping[str, object], draft: ModelFacts | None) -> Iterator[PlanFinding]:
    """A plain language model as a draft head, if vLLM has no head for its architecture."""
    method = str(settings.get("method", ""))
    known = _HEADS.get(method)
    if known is None or draft is None or not is_plain(draft) or not checked(plan.engine.release):
        return
    if str(draft.architecture).removesuffix("ForCausalLM") in known:
        return
    text = f"vLLM will refuse {draft.model} with the method {method}: it has no such head for {draft.architecture}"
    fix = Changes(unset=speculation_flags(plan.flags))
    yield PlanFinding("no_draft_head", Level.ERROR, text, fix, surely=draft.certain)
