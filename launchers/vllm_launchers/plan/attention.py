"""The attention backend that a launch selects, and whether vLLM can keep an FP8 KV cache with it. Pure.

From ``vllm/platforms/cuda.py`` and ``vllm/v1/attention/backends`` of 0.8.5 to 0.33:

- FlashAttention is the default from compute capability 8.0, but supports an FP8 cache only on 9.x (FlashAttention 3).
- On other GPUs, 0.11.0 uses Triton for an FP8 cache; later releases use FlashInfer if it can be imported, else Triton.
- Triton supports FP8 arithmetic from 8.9. Below, its kernels do not compile; vLLM reports that at startup since 0.24
  ("native FP8 (fp8e4nv) requires SM89+"), for MLA models since 0.26.
- FlashInfer supports an FP8 cache from 8.0. It compiles the kernel at the first start and needs nvcc for that.
- MLA models support one from 9.0, and from 8.9 since 0.18 (Triton MLA).
- Releases before 0.11 fall back from the V1 engine to V0 for it, except with FlashAttention 3.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vllm_launchers.plan.flags import DECODE_CONTEXT
from vllm_launchers.vllm.flags.changes import Flags, FlagValue, json_flag, whole_number
from vllm_launchers.vllm.release_defaults import Release

BACKEND_FLAG = "attention-backend"
BACKEND_CONFIG = "attention-config"
BACKEND_VARIABLE = "VLLM_ATTENTION_BACKEND"
VARIABLE_READ_BEFORE = (0, 15, 0)

FLASH_ATTENTION, FLASHINFER, TRITON = "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"

V1_ONLY_SINCE = (0, 11, 0)
FLASHINFER_READS_IT_SINCE = (0, 10, 2)
"""Earlier releases considered only FlashAttention when they checked whether an FP8 cache is possible."""
FLASHINFER_TRIED_SINCE = (0, 11, 1)
"""First release that prefers FlashInfer over Triton if FlashAttention does not support an FP8 cache."""
TRITON_MLA_SINCE = (0, 18, 0)
SHARDED_FP8_MLA_SINCE = (0, 25, 0)
"""Earlier releases fail at the first decode step ("DCP not support fp8 kvcache now")."""

AMPERE, ADA, HOPPER, BLACKWELL = 8.0, 8.9, 9.0, 10.0


class Fp8Cache(msgspec.Struct, frozen=True):
    """Whether vLLM can keep its KV cache in FP8.

    ``works`` is None if the GPU is unknown. ``native``: attention itself computes in FP8. ``why`` says why it does not
    work, or gives a caveat (a phrase without a subject); may be empty. ``anywhere``: it does not work on any GPU.
    """

    works: bool | None
    native: bool = False
    why: str = ""
    anywhere: bool = False


def is_fp8(kv_dtype: FlagValue | None) -> bool:
    """Whether a value of ``kv-cache-dtype`` is an FP8 format."""
    return isinstance(kv_dtype, str) and kv_dtype.lower().startswith("fp8")


def selected_backend(flags: Flags, environment: Mapping[str, str], release: Release | None) -> str | None:
    """The attention backend that is selected explicitly (``FLASHINFER``), or None if vLLM chooses."""
    asked = flags.get(BACKEND_FLAG) or json_flag(flags, BACKEND_CONFIG).get("backend")
    if not asked and release is not None and release < VARIABLE_READ_BEFORE:
        asked = environment.get(BACKEND_VARIABLE)
    name = str(asked).upper().removesuffix("_VLLM_V1") if asked else ""
    return name if name not in ("", "AUTO", "NONE", "NULL") else None


def fp8_cache_support(
    flags: Flags, environment: Mapping[str, str], release: Release | None, capability: float | None, *, mla: bool
) -> Fp8Cache:
    """Whether a launch could keep its KV cache in FP8, whether or not it requests that.

    ``environment`` includes inherited variables. ``capability`` is the compute capability of the oldest GPU (8.6). An
    unknown release counts as a new one. ``mla``: the model uses multi-head latent attention.
    """
    backend = selected_backend(flags, environment, release)
    if mla and whole_number(flags, DECODE_CONTEXT) > 1 and release is not None and release < SHARDED_FP8_MLA_SINCE:
        why = f"vLLM before 0.25 does not support it with multi-head latent attention and --{DECODE_CONTEXT}"
        return Fp8Cache(False, why=why, anywhere=True)
    if capability is None:
        return Fp8Cache(None)
    if mla:
        return _mla(capability, release)
    if backend is not None and (asked := _asked_for(capability, release, backend)) is not None:
        return asked
    if capability < ADA:
        return Fp8Cache(False, why=_refusal(capability, release))
    if HOPPER <= capability < BLACKWELL + 1:
        return Fp8Cache(True, native=True)
    if release is not None and release < V1_ONLY_SINCE:
        return Fp8Cache(True, why="vLLM before 0.11 falls back from its V1 engine for it")
    return Fp8Cache(True, why="vLLM reads it with FlashInfer, which compiles a kernel with nvcc at the first start")


def _refusal(capability: float, release: Release | None) -> str:
    """Why it may not work below 8.9 if vLLM chooses the backend (``_get_backend_priorities`` in ``cuda.py``)."""
    if release is not None and release < V1_ONLY_SINCE:
        return "vLLM before 0.11 supports it there in its old V0 engine at most"
    if capability < AMPERE:
        return (
            "FlashInfer reads it on compute capability 8.0 and later, vLLM's Triton attention backend on 8.9 and later"
        )
    if release is not None and release < FLASHINFER_TRIED_SINCE:
        return "vLLM uses its Triton attention backend for it, which refuses it there ('requires SM89+')"
    return (
        "unless FlashInfer is installed and can compile its kernel (nvcc), vLLM falls back to Triton, which refuses it "
        "there ('requires SM89+')"
    )


def _asked_for(capability: float, release: Release | None, backend: str) -> Fp8Cache | None:
    """The verdict for an explicitly selected backend; None if it is unknown or does not decide."""
    if backend == FLASHINFER:
        if capability >= AMPERE and (release is None or release >= FLASHINFER_READS_IT_SINCE):
            native = HOPPER <= capability < BLACKWELL + 1
            return Fp8Cache(True, native, "" if native else "FlashInfer compiles a kernel for it with nvcc")
        return Fp8Cache(False, why="FlashInfer has no kernel for it there")
    if backend == FLASH_ATTENTION and not HOPPER <= capability < BLACKWELL:
        return Fp8Cache(False, why="FlashAttention, as requested, supports it on compute capability 9.x only")
    if backend == TRITON and capability < ADA:
        return Fp8Cache(False, why="vLLM's Triton attention backend, as requested, refuses it ('requires SM89+')")
    return None


def _mla(capability: float, release: Release | None) -> Fp8Cache:
    if HOPPER <= capability < BLACKWELL + 1:
        return Fp8Cache(True, native=True)
    if capability >= ADA and (release is None or release >= TRITON_MLA_SINCE):
        return Fp8Cache(True)
    if capability >= ADA:
        return Fp8Cache(False, why="vLLM before 0.18 has no kernel for it there with multi-head latent attention")
    return Fp8Cache(False, why="vLLM's Triton backend for multi-head latent attention refuses it ('requires SM89+')")
