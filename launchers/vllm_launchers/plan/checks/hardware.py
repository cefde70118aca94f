"""GPUs that an installed vLLM, its PyTorch or a quantization method does not support. Pure.

Limits come from the installation's own files, or else from the table of releases (`vllm_launchers.vllm.flags.limits`).
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.host.gpu.host import Gpu
from vllm_launchers.host.gpu.vendors import vendor_of, vendor_of_build
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.attention import ADA, AMPERE, is_fp8, selected_backend
from vllm_launchers.plan.budget.memory_flags import (
    cache_dtype,
    lacks_float32,
    pools,
    refuses_float16,
    refuses_float32,
    weight_method,
)
from vllm_launchers.plan.checks.architectures import is_plain
from vllm_launchers.plan.checks.request import capability, fp8_cache_of, gpus_of, names, simulated, variables
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import KV_DTYPE, QUANTIZATION, token_count
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.engines import EngineKind
from vllm_launchers.vllm.flags.changes import Changes, apply_changes
from vllm_launchers.vllm.flags.flag_table import FlagTable
from vllm_launchers.vllm.flags.limits import FP8_COMPRESSED
from vllm_launchers.vllm.flags.releases import releases_for
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, Quantization

TURING = 7.5
LEAST_COMPUTE_CAPABILITY = (7, 0)
"""vLLM's own kernels are built for compute capability 7.0 and later (``CUDA_SUPPORTED_ARCHS``, CMakeLists.txt)."""

FP8_METHODS = frozenset({"fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt", "fp8_per_tensor", "fp8_per_block"})
_ARCHITECTURE = lazy_pattern(r"(sm|compute)_(\d{1,2})(\d)([af]?)")


def hardware_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """GPUs on which no start succeeds, whatever the flags; then the requirements of the weights' format."""
    gpus = gpus_of(plan, inputs)
    yield from _other_vendors(plan, inputs, gpus)
    able = capability(gpus)
    if able is None or plan.engine.build not in ("cuda", "simulated", None):
        return
    who = f"{names(gpus)} (compute capability {able:g})"
    unsupported = next(_unsupported(gpus, plan, inputs.flags), None)
    if unsupported is not None:
        yield unsupported
    else:
        yield from _weights(plan, inputs, able, who)


def _other_vendors(plan: Plan, inputs: PlanInputs, gpus: tuple[Gpu, ...]) -> Iterator[PlanFinding]:
    """Devices of vendors other than NVIDIA, or a vLLM built for them."""
    if simulated(plan) or plan.engine.build == "cpu":
        return
    named = dict.fromkeys(vendor for gpu in gpus if (vendor := vendor_of(gpu.name)) is not None)
    built = vendor_of_build(plan.engine.build)
    sentences = [vendor.sentence for vendor in named] or ([built.sentence] if built is not None else [])
    if not sentences and not gpus:
        sentences = list(inputs.environment.accelerators)
    for text in sentences:
        yield PlanFinding("hardware_unsupported", Level.WARNING, text)


def _unsupported(gpus: tuple[Gpu, ...], plan: Plan, table: FlagTable) -> Iterator[PlanFinding]:
    """GPUs that this vLLM or its PyTorch has no code for."""
    architectures = table.limits.architectures
    engine = f"vLLM {table.version if table.assumed else plan.engine.public_version}"
    for gpu in gpus:
        number = tuple(map(int, (gpu.compute_capability or "").split(".")))
        if len(number) != 2:
            continue
        who = f"{names((gpu,))} (compute capability {gpu.compute_capability})"
        if number < LEAST_COMPUTE_CAPABILITY:
            text = f"{who} is too old for vLLM, which needs compute capability 7.0 or later; choose another GPU"
            yield PlanFinding("gpu_unsupported", Level.ERROR, text)
        elif architectures and not runs_on(architectures, (number[0], number[1])):
            installed = table.source == "installation"
            whose = f"the PyTorch of {engine}" if installed else f"the PyTorch published with {engine}"
            built = ", ".join(architectures)
            text = f"{whose} has no code for {who}: it was built for {built}{_other_release(number)}"
            yield PlanFinding("gpu_unsupported", Level.ERROR, text, surely=installed)


def runs_on(architectures: tuple[str, ...], number: tuple[int, int]) -> bool:
    """Whether code for these architectures runs on a compute capability.

    Code for ``sm_86`` runs on 8.6 and later 8.x, code for ``sm_90a`` only on 9.0; ``compute_90`` is compiled for any
    later GPU when it is loaded.
    """
    for word in architectures:
        found = _ARCHITECTURE.fullmatch(word)
        if found is None:
            continue
        built = int(found[2]), int(found[3])
        if number == built or (found[1] == "compute" and not found[4] and number > built):
            return True
        if found[1] == "sm" and found[4] != "a" and number[0] == built[0] and number[1] > built[1]:
            return True
    return False


def _other_release(number: tuple[int, ...]) -> str:
    """The releases whose published wheels support a compute capability, as the end of a sentence."""
    fitting = releases_for(lambda limits: runs_on(limits.architectures, (number[0], number[1])))
    if not fitting:
        return ""
    first, last = fitting
    if last is not None:
        return f"; the last release that supports it is {last}"
    return f"; releases from {first} on support it"


def _weights(plan: Plan, inputs: PlanInputs, able: float, who: str) -> Iterator[PlanFinding]:
    facts = inputs.facts
    stored = facts.quantization if facts is not None else None
    method = weight_method(facts, plan.flags)
    if not method:
        return
    fp8 = method in FP8_METHODS or (method == "compressed-tensors" and stored is not None and stored.floating)
    least = _least(method, stored, inputs.flags)
    fix = Changes(unset=("quantization",)) if stored is None else None
    form = "FP8" if fp8 else method.upper() if method in ("awq", "gptq") else method
    if least is not None and able * 10 < least - 0.5:
        text = f"vLLM will refuse {form} weights on {who}: they need compute capability {least / 10:g} or later" + (
            "; use an AWQ or GPTQ model" if fp8 and able >= TURING else "; use a GPTQ or an unquantized model"
        )
        code = "fp8_unsupported" if fp8 else "quantization_unsupported"
        yield PlanFinding(code, Level.ERROR, text, fix)
    elif fp8 and able < ADA:
        text = (
            f"{who} has no FP8 arithmetic: vLLM keeps {plan.model if stored else 'the'} weights in FP8, half the "
            "memory, and computes in 16 bits (Marlin kernels), no faster than with 16-bit weights"
        )
        yield PlanFinding("fp8_unsupported", Level.ADVICE if stored else Level.WARNING, text, fix)


def _least(method: str, stored: Quantization | None, table: FlagTable) -> int | None:
    """The compute capability that a method requires (75 for 7.5); None if unknown."""
    known = table.limits.capabilities
    if method == "compressed-tensors" and stored is not None and stored.floating and FP8_COMPRESSED in known:
        return known[FP8_COMPRESSED]
    return known.get(method)


# -- sizes of a KV cache block. Pure -----------------------------------------------------------------------------------


BLOCK = "block-size"
FAST = 32
"""Block sizes that are not multiples of this use a slower kernel (``CpuPlatform.check_and_update_config``)."""

_PREFERRED_SINCE = (0, 11, 0)

GPU_BLOCK = 16
"""Block sizes of all attention backends that vLLM chooses from for plain models on a CUDA GPU are multiples of this."""

_GPU_BLOCK_SINCE = (0, 24, 0)
"""First release in which that is known. In 0.20 FlexAttention accepts any size."""


def block_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """Block sizes that the chosen build refuses."""
    size = token_count(plan.flags.get(BLOCK))
    if plan.engine.kind is not EngineKind.VLLM or size is None or size <= 0:
        return
    if plan.engine.build == "cpu":
        yield from _cpu_block(plan, inputs, size)
    elif plan.engine.build == "cuda":
        yield from _gpu_block(plan, inputs, size)


def _gpu_block(plan: Plan, inputs: PlanInputs, size: int) -> Iterator[PlanFinding]:
    """Without a backend for that size, vLLM finds none (``CudaPlatform.get_attn_backend_cls``)."""
    facts, release = inputs.facts, plan.engine.release
    if facts is None or not is_plain(facts) or release is None or release < _GPU_BLOCK_SINCE or size % GPU_BLOCK == 0:
        return
    if pools(plan.flags) or selected_backend(plan.flags, variables(plan, inputs), release) is not None:
        return
    more = -(-size // GPU_BLOCK) * GPU_BLOCK
    text = (
        f"vLLM will refuse --{BLOCK} {size}: no attention backend supports it for {facts.model}; use a multiple of "
        f"{GPU_BLOCK}"
    )
    yield PlanFinding("block_size", Level.ERROR, text, Changes(set={BLOCK: more}), surely=facts.certain, refused=BLOCK)


def _cpu_block(plan: Plan, inputs: PlanInputs, size: int) -> Iterator[PlanFinding]:
    """Since 0.29 only multiples of 32 are accepted, since 0.21 multiples of 16.

    MLA models and those with linear layers get their own size, whatever is requested.
    """
    facts, release = inputs.facts, plan.engine.release
    if facts is not None and (facts.mla or LayerKind.LINEAR in facts.layers):
        return
    step = inputs.flags.limits.cpu_block
    engine = f"vLLM {'.'.join(map(str, release))}" if release else "vLLM"
    if step is not None and size % step:
        more = -(-size // step) * step
        text = f"{engine} will refuse --{BLOCK} {size}: the CPU build needs a multiple of {step}; {more} works"
        yield PlanFinding("block_size", Level.ERROR, text, Changes(set={BLOCK: more}), refused=BLOCK)
    elif size % FAST and release is not None and release >= _PREFERRED_SINCE:
        more = -(-size // FAST) * FAST
        text = f"--{BLOCK} {size} is slow on the CPU: fast kernels need a multiple of {FAST}"
        yield PlanFinding("block_size", Level.WARNING, text, Changes(set={BLOCK: more}))


# -- number formats that a GPU does not support. Pure ------------------------------------------------------------------


def precision_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """Check BF16 and an FP8 KV cache against the oldest of its GPUs, by NVIDIA's compute capabilities."""
    gpus = gpus_of(plan, inputs)
    able = capability(gpus)
    if able is None or plan.engine.build not in ("cuda", "simulated", None):
        return
    who = f"{names(gpus)} (compute capability {able:g})"
    yield from _bf16(plan, inputs, able, who)
    yield from _fp8_cache(plan, inputs, able, who)
    yield from _float_cache(plan, inputs, able)


def _bf16(plan: Plan, inputs: PlanInputs, able: float, who: str) -> Iterator[PlanFinding]:
    if able >= AMPERE:
        return
    asked, facts, method = plan.flags.get("dtype", "auto"), inputs.facts, weight_method(inputs.facts, plan.flags)
    only_wide = facts is not None and refuses_float16(facts, plan.engine.release)
    fix = Changes(set={"dtype": "float32" if only_wide else "float16"})
    if facts is not None and only_wide and lacks_float32(method):
        unquantized = Changes(unset=(QUANTIZATION,)) if facts.quantization is None else None
        text = (
            f"{who} has no BF16 (needs 8.0): vLLM runs the model type {facts.model_type} only in FP32 there, which "
            f"does not work with {method} weights; use a newer GPU or an unquantized checkpoint"
        )
        sure = facts.certain and refuses_float32(method)
        yield PlanFinding("bf16_unsupported", Level.ERROR, text, unquantized, surely=sure)
    elif asked == "bfloat16":
        text = f"{who} has no BF16 (needs 8.0): vLLM will refuse --dtype bfloat16"
        yield PlanFinding("bf16_unsupported", Level.ERROR, text, fix)
    elif asked == "auto" and facts is not None and facts.dtype == "bfloat16":
        instead = "FP16, which has a smaller range"
        if only_wide:
            instead = "FP32, which takes twice the memory, since it does not run this model in FP16"
        text = f"{who} has no BF16, the format of {plan.model}: vLLM uses {instead}"
        yield PlanFinding("bf16_unsupported", Level.WARNING, text, fix)


_CACHE_MATCHES_SINCE = (0, 33, 0)
"""First release that refuses a 16-bit KV cache in another format than the model's."""


def _float_cache(plan: Plan, inputs: PlanInputs, able: float) -> Iterator[PlanFinding]:
    """A 16-bit KV cache in another format than the checkpoint's; one that contradicts ``--dtype`` is found there."""
    asked, facts, release = plan.flags.get(KV_DTYPE), inputs.facts, plan.engine.release
    if facts is None or release is None or release < _CACHE_MATCHES_SINCE or able < AMPERE:
        return
    formats = {"float16", "bfloat16"}
    if asked not in formats or facts.dtype not in formats or plan.flags.get("dtype", "auto") != "auto":
        return
    if asked != facts.dtype:
        text = f"vLLM will refuse --{KV_DTYPE} {asked}: {plan.model} is in {facts.dtype}; leave the flag out"
        yield PlanFinding("flag_value", Level.ERROR, text, Changes(unset=(KV_DTYPE,)), surely=False)


def _fp8_cache(plan: Plan, inputs: PlanInputs, able: float, who: str) -> Iterator[PlanFinding]:
    asked, facts = plan.flags.get(KV_DTYPE), inputs.facts
    if not _keeps_fp8(plan, facts, Changes()):
        return
    by_flag = is_fp8(asked)
    what = f"--{KV_DTYPE} {asked}" if by_flag else f"the FP8 KV cache that {plan.model} has scales for"
    fix = next((fix for fix in _cache_changes(plan, facts, able) if not _keeps_fp8(plan, facts, fix)), None)
    verdict = fp8_cache_of(plan, inputs)
    if not verdict.works:
        certain = able < AMPERE or verdict.anywhere
        # What works nowhere fails in a decode step, of which CUDA graphs may be captured at startup.
        when = ", at the latest in the first decode step" if verdict.anywhere else f" startup on {who}"
        text = f"{what} {'will' if certain else 'may'} fail{when}: {verdict.why}"
        level = Level.ERROR if certain else Level.WARNING
        yield PlanFinding("fp8_unsupported", level, text, fix, surely=False)
    elif verdict.why and by_flag:
        text = f"{what} on {who}: {verdict.why}; outputs can differ slightly"
        yield PlanFinding("fp8_kv_slow", Level.ADVICE, text)


def _cache_changes(plan: Plan, facts: ModelFacts | None, able: float) -> Iterator[Changes]:
    """Ways to a KV cache in the model's format, the simplest first."""
    if KV_DTYPE in plan.flags:
        yield Changes(unset=(KV_DTYPE,))
    dtype = plan.flags.get("dtype", "auto")
    if able >= AMPERE and "bfloat16" in (dtype, facts.dtype if facts is not None and dtype == "auto" else None):
        yield Changes(set={KV_DTYPE: "bfloat16"})


def _keeps_fp8(plan: Plan, facts: ModelFacts | None, changes: Changes) -> bool:
    """Whether vLLM keeps the KV cache in FP8 after these changes."""
    flags = apply_changes(plan.flags, changes)
    return is_fp8(flags.get(KV_DTYPE) if facts is None else cache_dtype(facts, flags, plan.engine.release))
