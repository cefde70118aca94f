"""The choices of layout and number formats, with reasons and prices. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.choices.machine_fit import FP8_KV_NATIVE, Fit, held_at_p95, is_mixture
from vllm_launchers.plan.choices.model import Choice, Source
from vllm_launchers.plan.choices.pool import Pool
from vllm_launchers.plan.choices.situation import (
    DATA,
    EXPERTS,
    KV_DTYPE,
    PIPELINE,
    QUANTIZATION,
    TENSOR,
    Situation,
    whole,
)
from vllm_launchers.plan.model import Flags

_KEPT_WHOLE = ("bitsandbytes", "gguf")
"""Ways of quantization whose experts vLLM does not spread."""


def layout_choices(situation: Situation, found: Fit, pool: Pool) -> Iterator[Choice]:
    """Tensor, pipeline and data parallel as they were found."""
    layout = found.layout
    gpus = "one GPU" if pool.memory_gib is None else f"one GPU of {pool.memory_gib:.0f} GiB"
    if not found.fits:
        free = "free GPUs" if pool.all_free and not pool.exact else "GPUs"
        short = f"Even {layout.replica} {free} have" if layout.replica > 1 else f"{gpus[0].upper()}{gpus[1:]} has"
        why = f"{short} no room for the weights and one request of full length: this is the nearest there is."
    else:
        why = f"You gave it {pool.size} GPUs" if pool.exact else f"Weights and KV cache need more than {gpus}"
    if layout.tensor > 1:
        heads = situation.facts.heads if situation.facts is not None else None
        each = f" ({heads // layout.tensor} of {heads} heads each)" if heads else ""
        reason = f"{why}: {layout.tensor} GPUs, joined by {pool.link}, share each layer{each}." if found.fits else why
        yield Choice(TENSOR, layout.tensor, reason, Source.MACHINE, _tensor_price(pool))
    else:
        fits_one = "The model fits on one GPU: cutting it would only add traffic between GPUs."
        reason = why if not found.fits else fits_one if layout.replica == 1 else _no_near(situation, pool)
        yield Choice(TENSOR, None, reason, Source.MACHINE)
    if layout.pipeline > 1:
        yield Choice(
            PIPELINE,
            layout.pipeline,
            why if not found.fits else f"{why}. {_no_near(situation, pool)} So layers are put one after the other.",
            Source.MACHINE,
            "A single stream gets no faster, and stages idle while few requests run.",
        )
    if layout.data > 1:
        yield _copies(situation, found, pool)


def _tensor_price(pool: Pool) -> str:
    if pool.link == "NVLink":
        return "Two short waits for the other GPUs in every layer."
    return f"Every layer waits twice for the other GPUs, over {pool.link}: some of the speed is lost."


def _no_near(situation: Situation, pool: Pool) -> str:
    near = max((len(group) for group in pool.groups), default=1)
    if near >= pool.size:
        heads = situation.facts.heads if situation.facts is not None else None
        return f"No cut of each layer over these GPUs is possible ({heads} heads)." if heads else "No cut is possible."
    if near > 1:
        return f"Only {near} of them are near each other ({pool.link})."
    return "No two of these GPUs are joined by NVLink or one PCIe switch."


def _copies(situation: Situation, found: Fit, pool: Pool) -> Choice:
    layout = found.layout
    held = held_at_p95(found.budget)
    one = "one GPU" if layout.replica == 1 else f"{layout.replica} GPUs"
    if pool.exact:
        reason = f"You gave it {pool.size} GPUs and a copy needs {one}: {layout.data} copies behind one port."
    else:
        number = f"about {held:,.0f}" if held is not None else "few"
        reason = (
            f"A copy on {one} holds {number} requests of p95 length and {situation.workload.concurrency:,} are in "
            f"flight: {layout.data} copies behind one port."
        )
    price = "Each copy holds all weights and has a prefix cache of its own."
    if is_mixture(situation.facts):
        price = "Copies share the experts, so that each step waits for the slowest; each has a prefix cache of its own."
    if not found.serves:
        price = f"{price} Even so some requests will wait."
    return Choice(DATA, layout.data, reason, Source.MACHINE, price)


def expert_choice(situation: Situation, flags: Flags) -> Choice | None:
    """Expert parallel for a mixture of experts over several GPUs; None where there is nothing to say."""
    facts = situation.facts
    spread = whole(flags, TENSOR) * whole(flags, DATA)
    if facts is None or not is_mixture(facts) or spread == 1:
        return None
    if facts.quantization is not None and facts.quantization.method in _KEPT_WHOLE:
        return None
    return Choice(
        EXPERTS,
        True,
        f"{facts.experts} experts are spread whole over {spread} GPUs, instead of each cut into {spread} thin slices.",
        Source.MODEL,
        "A GPU whose experts are asked for most makes the others wait.",
    )


def quantization_choice(situation: Situation, formats: Flags, pool: Pool | None) -> Choice | None:
    """What the checkpoint is; FP8 made at the start only where nothing else fits."""
    facts = situation.facts
    if formats.get(QUANTIZATION) == "fp8":
        return Choice(
            QUANTIZATION,
            "fp8",
            "The 16-bit weights do not fit otherwise: they are made FP8 while they are loaded, which halves them.",
            Source.MACHINE,
            "A little quality and a slower start; a checkpoint that is FP8 or 4-bit already loads sooner.",
        )
    if facts is None or (facts.quantization is None and facts.dtype is None):
        return None
    if facts.quantization is None:
        return Choice(QUANTIZATION, None, _plain(facts, pool), Source.MODEL)
    quantization = facts.quantization
    name = quantization.method.upper() if len(quantization.method) <= 5 else quantization.method
    bits = f", {quantization.bits}-bit" if quantization.bits and "8" not in name and "4" not in name else ""
    reason = f"The checkpoint is {name}{bits}: vLLM reads that itself and picks the fastest kernel."
    return Choice(QUANTIZATION, None, reason, Source.MODEL)


def _plain(facts: ModelFacts, pool: Pool | None) -> str:
    text = f"The checkpoint is {facts.dtype} and not quantized: a flag for AWQ or GPTQ would end the start."
    if pool is not None and pool.memory_gib is not None and (pool.capability or 0.0) >= FP8_KV_NATIVE:
        return f"{text} An FP8 checkpoint of it would be faster here."
    return text


def kv_choice(situation: Situation, found: Fit, pool: Pool) -> Choice | None:
    """FP8 for the KV cache where the traffic needs it; None where there is nothing to say."""
    facts = situation.facts
    scales = bool(facts is not None and facts.kv_cache_quantization)
    if found.formats.get(KV_DTYPE) is None:
        held = held_at_p95(found.budget)
        if held is None or not found.serves:
            return None
        reason = f"The cache holds about {held:,.0f} requests of p95 length in the model's own format: no need for FP8."
        return Choice(KV_DTYPE, None, reason, Source.MACHINE)
    quality = "Next to no quality, since the checkpoint has scales for it" if scales else "A little quality"
    native = (pool.capability or 0.0) >= FP8_KV_NATIVE
    price = f"{quality}." if native else f"{quality}, and speed: this GPU converts the cache in every step."
    held = held_at_p95(found.budget)
    number = f" (about {held:,.0f} requests of p95 length)" if held is not None else ""
    reason = f"In the model's own format the KV cache is too small for the traffic; FP8 holds twice the tokens{number}."
    return Choice(KV_DTYPE, "fp8", reason, Source.MACHINE, price)
