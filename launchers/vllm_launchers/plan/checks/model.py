"""The model and its adapters: whether they exist, are accessible, and match the flags. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.addresses import is_loopback
from vllm_launchers.plan.attention import BACKEND_FLAG, FLASH_ATTENTION, FLASHINFER, TRITON, selected_backend
from vllm_launchers.plan.checks.architectures import is_plain
from vllm_launchers.plan.checks.context import config_overrides, context_findings
from vllm_launchers.plan.checks.packages import package_findings
from vllm_launchers.plan.checks.request import on, simulated, variables
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import LORA
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import API_KEY
from vllm_launchers.vllm.flags.changes import Changes, Flags, json_flag
from vllm_launchers.vllm.flags.flag_table import FlagTable
from vllm_launchers.vllm.installed_packages import TORCHAO
from vllm_launchers.vllm.model_folder import RUNTIME_LORA, updates_adapters
from vllm_launchers.vllm.modelfacts.facts import UNKNOWN_FORMAT, ModelFacts
from vllm_launchers.vllm.release_defaults import Release, checked
from vllm_launchers.vllm.removed_flags import NEVER, removed_value

_ADAPTERS = "lora-modules"
_OF_MODALITIES = "default-mm-loras"
HERE = ("folder", "cache")
_VALIDATED_SINCE: Release = (0, 13, 0)
"""First release in which ``AttentionBackend.validate_configuration`` was seen."""
_NOT_LATENT = frozenset({FLASH_ATTENTION, FLASHINFER, TRITON, "FLEX_ATTENTION"})
GATED = (
    "meta-llama/",
    "google/gemma-2",
    "google/gemma-3",
    "mistralai/Mistral-Large",
    "CohereLabs/",
    "black-forest-labs/",
)
"""Publishers whose models need approval on the hub."""

FAMILIES: tuple[frozenset[str], ...] = (
    frozenset({"awq", "awq_marlin", "auto_awq"}),
    frozenset({"gptq", "gptq_marlin", "auto_gptq", "gptq_bitblas", "gptq_marlin_24", "marlin", "bitblas"}),
    frozenset({"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"}),
    frozenset({"auto-round", "inc", "auto_round"}),
    frozenset({"fp8", "deepseek_v4_fp8"}),
    frozenset({"mxfp4", "gpt_oss_mxfp4"}),
)
"""Each group of methods reads the same checkpoints."""

_SELF_EVIDENT = frozenset({"auto-round"})
"""Formats besides Model Optimizer's that vLLM detects regardless of ``--quantization``."""

ANY_4_BIT = frozenset({"moe_wna16", "ipex", "cpu_awq", "cpu_gptq"})
"""Methods that read both AWQ and GPTQ checkpoints."""

IN_FLIGHT = frozenset(
    {"fp8", "bitsandbytes", "experts_int8", "rtn", "ptpc_fp8", "fp8_per_tensor", "fp8_per_block",
     "fp8_per_channel", "nvfp4_per_token", "humming",
     "int8_per_channel", "int8_per_channel_weight_only", "mxfp4", "mxfp8", "gpt_oss_mxfp4", "deepseek_v4_fp8",
     "tpu_int8", "deepspeedfp", "gguf"}
)  # fmt: skip
"""Methods that accept any checkpoint: they quantize while loading, or bring what they need."""

_GPT_OSS = "gpt_oss_mxfp4"
HUMMING = "humming"
"""Kernels for checkpoints in nearly every format."""

DEPRECATED = frozenset({"fbgemm_fp8", "fp_quant"})
_DEPRECATED_SINCE: Release = (0, 16, 0)
"""First release seen to refuse all of these (``DEPRECATED_QUANTIZATION_METHODS``)."""
_DEPRECATED_ALLOWED = "allow-deprecated-quantization"
_GPTQ_LIMITED: Release = (0, 30, 0)
"""First release that requires GPTQ weights of 4 or 8 bits, symmetric and without ``desc_act`` (``AutoGPTQConfig``)."""
_GPTQ_BITS = (4, 8)


def model_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """Whether the model can be loaded: its files, access, quantization, attention and remote code."""
    if inputs.model_problem:
        yield PlanFinding("model_missing", Level.ERROR, inputs.model_problem)
    facts = inputs.facts
    if facts is None:
        return
    yield from context_findings(plan, inputs, facts, surely=facts.certain)
    if simulated(plan):  # it needs no weights, tokenizer or license
        return
    yield from _there(plan, inputs, facts)
    yield from _without_tokenizer(plan, facts)
    yield from _dropped(plan, facts)
    if not _unknown_method(plan, inputs.flags):
        yield from _quantization(plan, facts)
        yield from _limits_of_formats(plan, inputs, facts)
    yield from _attention(plan, inputs, facts)
    if facts.missing:
        way = " ('plan --hub' queries the hub)" if not facts.certain else ""
        memory = "; memory can't be estimated" if plan.memory is None else "; memory is an estimate"
        text = f"incomplete data on {facts.model}: {'; '.join(facts.missing)}{'' if plan.unestimated else memory}{way}"
        yield PlanFinding("facts_missing", Level.ADVICE, text)
    if facts.needs_remote_code and plan.flags.get("trust-remote-code") is not True:
        text = (
            f"{facts.model} ships its own code; unless vLLM supports the model itself, loading needs "
            "--trust-remote-code, which runs that code as you"
        )
        yield PlanFinding("remote_code", Level.WARNING, text, Changes(set={"trust-remote-code": True}))


def _no_token(inputs: PlanInputs) -> bool:
    return inputs.environment.has_hub_token is False


def _there(plan: Plan, inputs: PlanInputs, facts: ModelFacts) -> Iterator[PlanFinding]:
    settings = variables(plan, inputs)
    offline = on(settings, "HF_HUB_OFFLINE") or on(settings, "TRANSFORMERS_OFFLINE")
    if facts.gated:
        token = inputs.environment.has_hub_token
        way = "ask for access on its page" if token else "ask for access on its page and export HF_TOKEN"
        yield PlanFinding("model_gated", Level.ERROR, f"{facts.model} is gated and its files are not accessible; {way}")
    elif not facts.certain and facts.model.startswith(GATED) and _no_token(inputs) and not offline:
        text = f"{facts.model} is gated on the hub and no token is set; export HF_TOKEN"
        yield PlanFinding("model_gated", Level.WARNING, text)
    elif offline and facts.source not in HERE:
        text = f"{facts.model} is not on this machine and HF_HUB_OFFLINE prevents the download; download it first"
        yield PlanFinding("model_missing", Level.ERROR, text)
    if facts.files_missing and plan.flags.get("load-format") != "dummy":  # which fills in random weights
        few = ", ".join(facts.files_missing[:3])
        more = f" and {len(facts.files_missing) - 3} more" if len(facts.files_missing) > 3 else ""
        if facts.source == "folder" or offline:
            text = f"{facts.folder or facts.model} has no {few}{more}: download incomplete"
            yield PlanFinding("model_incomplete", Level.ERROR, text)
        else:
            text = f"the download of {facts.model} is incomplete ({few}{more} missing); vLLM will resume it first"
            yield PlanFinding("model_incomplete", Level.WARNING, text)


def _attention(plan: Plan, inputs: PlanInputs, facts: ModelFacts) -> Iterator[PlanFinding]:
    """An explicit attention backend for the other kind of attention (``AttentionBackend.validate_configuration``)."""
    release, settings = plan.engine.release, variables(plan, inputs)
    backend = selected_backend(plan.flags, settings, release)
    if backend is None or plan.engine.build != "cuda" or release is None or release < _VALIDATED_SINCE:
        return
    if "MLA" in backend and is_plain(facts):
        why = "serves models with latent attention (MLA) only"
    elif backend in _NOT_LATENT and facts.mla and not on(settings, "VLLM_MLA_DISABLE"):
        why = "does not serve models with latent attention (MLA)"
    else:
        return
    text = f"vLLM will refuse the attention backend {backend} for {facts.model}: it {why}"
    fix = Changes(unset=(BACKEND_FLAG,)) if BACKEND_FLAG in plan.flags else None
    yield PlanFinding("attention_backend", Level.ERROR, text, fix, surely=facts.certain)


def _without_tokenizer(plan: Plan, facts: ModelFacts) -> Iterator[PlanFinding]:
    if (
        facts.tokenizer_missing
        and not plan.flags.get("tokenizer")
        and plan.flags.get("skip-tokenizer-init") is not True
    ):
        text = (
            f"{facts.folder or facts.model} has no tokenizer, and vLLM will not start without one: add its files, or "
            "name another model's with --tokenizer"
        )
        yield PlanFinding("tokenizer_missing", Level.ERROR, text, surely=checked(plan.engine.release))


def _unknown_method(plan: Plan, table: FlagTable) -> bool:
    """Whether the flag table lacks the method, which is reported with the flag."""
    asked, spec = plan.flags.get("quantization"), table.get("quantization")
    return isinstance(asked, str) and spec is not None and bool(spec.words) and asked.lower() not in spec.words


def _quantization(plan: Plan, facts: ModelFacts) -> Iterator[PlanFinding]:
    asked = plan.flags.get("quantization")
    if not isinstance(asked, str) or asked in ("", "None", "auto") or not facts.architecture:
        return
    fix = Changes(unset=("quantization",))
    if facts.quantization is None:
        if asked.lower() not in IN_FLIGHT and not _described(plan.flags, asked.lower()):
            text = (
                f"--quantization {asked} needs a checkpoint in that format, and {facts.model} is not quantized; leave "
                f"the flag out or use a model quantized as {asked}"
            )
            code = "quantization_without_checkpoint"
            yield PlanFinding(code, Level.ERROR, text, fix, surely=facts.certain, refused="quantization")
        return
    stored = facts.quantization.method
    if stored == UNKNOWN_FORMAT or _reads(asked.lower(), stored, plan, facts):
        return
    detected = f"{facts.model} is quantized as {stored}, not {asked} (--quantization)"
    evident = stored.startswith("modelopt") or stored in _SELF_EVIDENT or _is_gpt_oss(facts)
    if evident and asked.lower() != HUMMING and (plan.engine.release is None or checked(plan.engine.release)):
        text = f"{detected}; vLLM detects that and ignores the flag"
        yield PlanFinding("quantization_mismatch", Level.WARNING, text, fix)
    else:
        text = f"{detected}; vLLM detects it automatically"
        code = "quantization_mismatch"
        yield PlanFinding(code, Level.ERROR, text, fix, surely=facts.certain, refused="quantization")


def _described(flags: Flags, asked: str) -> bool:
    """Whether flags may specify how the weights are quantized, or will be (``get_quant_config``)."""
    changed = config_overrides(flags)
    if changed is None or "quantization_config" in changed or "compression_config" in changed:
        return True
    if asked == TORCHAO:
        return "quantization_config_file" in changed or "quantization_config_dict_json" in changed
    return asked == "online" and any(name.partition(".")[0] == "quantization-config" for name in flags)


def _limits_of_formats(plan: Plan, inputs: PlanInputs, facts: ModelFacts) -> Iterator[PlanFinding]:
    """Formats that need a flag or a package, and GPTQ weights that recent releases reject."""
    asked, stored = str(plan.flags.get("quantization", "")).lower(), facts.quantization
    method = stored.method if stored is not None else asked
    if asked == HUMMING:
        return
    release = plan.engine.release
    refused = method in DEPRECATED and release is not None and release >= _DEPRECATED_SINCE
    if refused and plan.flags.get(_DEPRECATED_ALLOWED) is not True:
        text = f"vLLM will refuse the quantization {method}, which is deprecated, without --{_DEPRECATED_ALLOWED}"
        fix = Changes(set={_DEPRECATED_ALLOWED: True})
        yield PlanFinding("quantization_deprecated", Level.ERROR, text, fix, surely=facts.certain)
    described = stored is not None or _described(plan.flags, asked)  # otherwise that is what vLLM refuses
    if method == TORCHAO and described:
        why = f"it reads weights in the format of {TORCHAO} with that package"
        yield from package_findings(plan, inputs, TORCHAO, why, surely=facts.certain)
    if stored is None or stored.method != "gptq" or (release is not None and release < _GPTQ_LIMITED):
        return
    if stored.ordered:
        why = "are ordered by their activations (desc_act)"
    elif not stored.symmetric:
        why = "are not symmetric"
    elif stored.bits not in (None, *_GPTQ_BITS):
        why = f"have {stored.bits} bits"
    else:
        return
    text = f"{facts.model} has GPTQ weights that {why}, which vLLM no longer reads: use another checkpoint"
    level = Level.ERROR if release is not None else Level.WARNING
    yield PlanFinding("quantization_dropped", level, text, surely=facts.certain)


def _dropped(plan: Plan, facts: ModelFacts) -> Iterator[PlanFinding]:
    """A checkpoint in a format that this release no longer reads."""
    stored, engine = facts.quantization, plan.engine
    gone = removed_value("quantization", stored.method) if stored is not None else None
    if stored is None or gone is None or gone.new_value is not None or not gone.dropped(engine.release, engine.plugins):
        return
    since = f" since {gone.since[0]}.{gone.since[1]}" if gone.since != NEVER else ""
    reads = (
        f"reads only with {gone.plugin}{since}: install that alongside it"
        if gone.plugin
        else f"no longer reads{since}:"
    )
    text = (
        f"{facts.model} is stored as {stored.method}, which vLLM {reads}{',' if gone.plugin else ''} use a checkpoint "
        "in another format, such as AWQ or FP8, or an older vLLM"
    )
    yield PlanFinding("quantization_dropped", Level.ERROR, text, surely=facts.certain)


def _is_gpt_oss(facts: ModelFacts) -> bool:
    return facts.model_type == "gpt_oss" and facts.quantization is not None and facts.quantization.method == "mxfp4"


def _reads(asked: str, stored: str, plan: Plan, facts: ModelFacts) -> bool:
    if asked == HUMMING:
        return not _is_gpt_oss(facts)
    if plan.engine.build == "cpu" and stored == "awq" and checked(plan.engine.release):
        return asked == stored
    if asked == _GPT_OSS and asked != stored and checked(plan.engine.release):
        return _is_gpt_oss(facts)
    one, other = asked.replace("_", "-"), stored.replace("_", "-")
    if one == other or (asked in ANY_4_BIT and stored in FAMILIES[0] | FAMILIES[1]):
        return True
    return any(asked in family and stored in family for family in FAMILIES)


def adapter_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """Adapters that vLLM does not load, and who can load others into this server."""
    if plan.flags.get(LORA) is not True and plan.flags.get(_ADAPTERS, "None") not in ("", "None"):
        # ``create_engine_config`` accepts it; the API server loads them after the model (``init_static_loras``)
        text = f"vLLM will not start: --{_ADAPTERS} needs --{LORA}"
        yield PlanFinding("adapters_off", Level.ERROR, text, Changes(set={LORA: True}))
    yield from _modalities(plan, inputs.facts)
    if not updates_adapters({**inputs.environment.variables, **plan.environment}):
        return
    if plan.flags.get(LORA) is not True:
        text = f"{RUNTIME_LORA} has no effect without --{LORA}"
        yield PlanFinding("adapters_off", Level.WARNING, text)
        return
    local, keyed = is_loopback(plan.host), API_KEY in plan.secrets
    if not local or (inputs.environment.shared and not keyed):
        who = f"anyone who can reach {plan.host}" if not local else "other people with accounts on this machine"
        key = " and has its API key" if keyed else ", without an API key,"
        text = (
            f"with {RUNTIME_LORA} {who}{key} can change its answers by loading adapters from any folder that it can "
            "read; vLLM intends this for development only: unset the variable and list adapters in --lora-modules"
        )
        yield PlanFinding("adapters_exposed", Level.WARNING if keyed or local else Level.ERROR, text)


def _modalities(plan: Plan, facts: ModelFacts | None) -> Iterator[PlanFinding]:
    """Adapters for modalities that the model does not accept (``EngineArgs.create_engine_config``)."""
    if not json_flag(plan.flags, _OF_MODALITIES):
        return
    fix = Changes(unset=tuple(name for name in plan.flags if name.partition(".")[0] == _OF_MODALITIES))
    if facts is not None and is_plain(facts) and not facts.multimodal:
        text = f"vLLM will refuse --{_OF_MODALITIES}: {facts.model} takes text only"
        yield PlanFinding("adapters_of_modalities", Level.ERROR, text, fix, surely=facts.certain)
    elif plan.flags.get(LORA) is not True:
        text = f"--{_OF_MODALITIES} has no effect without --{LORA}"
        yield PlanFinding("adapters_off", Level.WARNING, text, fix)
