"""A model on this machine as table cells: size on disk, weight format, parameters, context; and plans for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_console.text import UNKNOWN, count, plain, size

if TYPE_CHECKING:
    from vllm_launchers.plan.model import MemoryFit, Plan
    from vllm_launchers.vllm.modelfacts.local import LocalModel

COLUMNS = (("ON DISK", 11), ("WEIGHTS", 14), ("PARAMS", 8), ("CONTEXT", 9))
"""Titles and widths of `model_cells`."""

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def model_cells(one: LocalModel) -> tuple[str, str, str, str]:
    """Size on disk, quantization or number format, parameters, context in tokens."""
    facts = one.facts
    context = facts.max_context if facts is not None else None
    return (
        size(one.disk_bytes),
        weights_text(one),
        parameters_text(facts.parameters if facts is not None else None),
        f"{context:,}" if context is not None else UNKNOWN,
    )


def weights_text(one: LocalModel) -> str:
    """The format of its weights: ``awq 4-bit``, ``fp8``, ``bf16``."""
    facts = one.facts
    if facts is None:
        return UNKNOWN
    found = facts.quantization
    if found is None:
        return _SHORT.get(facts.dtype or "", facts.dtype or UNKNOWN)
    if found.method == "compressed-tensors":
        return "fp8" if found.floating else f"int{found.bits}" if found.bits is not None else found.method
    bits = f" {found.bits}-bit" if found.bits is not None and str(found.bits) not in found.method else ""
    return f"{found.method}{bits}"


def parameters_text(number: int | None) -> str:
    """``8.2B``, ``494M``: as in model names."""
    if number is None:
        return UNKNOWN
    if number >= 1e9:
        return f"{number / 1e9:.1f}B" if number < 1e11 else f"{number / 1e9:.0f}B"
    return f"{number / 1e6:.0f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"


def fit_text(fit: MemoryFit | None) -> str:
    """A plan's verdict in a word or two; a dash if unknown.

    ``✓ 54.8k tokens`` (KV cache capacity), ``✗ too large``, ``! error`` (it fits, or that is unknown, and another error
    blocks it), ``! incomplete`` (some of its files are missing).
    """
    if fit is None:
        return UNKNOWN
    if fit.fits is False:
        return "✗ too large"
    if fit.error:
        return "! error"
    if fit.incomplete:
        return "! incomplete"
    if fit.fits is None:
        return UNKNOWN
    return f"✓ {count(fit.kv_tokens)} tokens" if fit.kv_tokens is not None else "✓ fits"


def no_estimate(plan: Plan) -> str:
    """Why a plan has no memory estimate."""
    if plan.unestimated:
        return f"No memory estimate: {plain(plan.unestimated)}"
    if plan.engine.build == "cpu":
        return "Memory: a CPU build uses RAM, VLLM_CPU_KVCACHE_SPACE GiB for its KV cache, and no GPU"
    if not plan.sets and not plan.gpus:
        return "Memory unknown: no GPU here to plan for"
    return f"Memory unknown: no model data for {plain(plan.model)}"
