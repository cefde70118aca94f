"""Whether vLLM keeps an FP8 KV cache, by GPU, release and attention backend."""

from __future__ import annotations

import pytest

from vllm_launchers.plan.attention import fp8_cache_support, is_fp8, selected_backend
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.release_defaults import Release

OLD, TRITON, MIDDLE, NEW = (0, 10, 1), (0, 11, 0), (0, 17, 1), (0, 33, 0)


@pytest.mark.parametrize(
    ("capability", "release", "backend", "mla", "works"),
    [
        (7.5, NEW, None, False, False),
        (7.5, NEW, "FLASHINFER", False, False),
        (8.0, NEW, None, False, False),
        (8.6, OLD, None, False, False),
        (8.6, TRITON, None, False, False),
        (8.6, None, None, False, False),
        (8.6, NEW, "TRITON_ATTN", False, False),
        (8.6, NEW, "FLASH_ATTN", False, False),
        (8.6, NEW, "FLASHINFER", False, True),
        (8.6, OLD, "FLASHINFER", False, False),  # it only asks FlashAttention whether it can
        (8.6, NEW, "FLEX_ATTENTION", False, False),
        (8.6, NEW, None, True, False),
        (8.9, NEW, None, False, True),
        (8.9, NEW, "TRITON_ATTN", False, True),
        (8.9, NEW, "FLASH_ATTN", False, False),
        (8.9, MIDDLE, None, True, False),
        (8.9, NEW, None, True, True),
        (9.0, TRITON, None, False, True),
        (9.0, NEW, "FLASH_ATTN", False, True),
        (9.0, MIDDLE, None, True, True),
        (10.0, NEW, None, False, True),
        (12.0, NEW, None, False, True),
        (10.0, NEW, "FLASH_ATTN", False, False),
        (10.3, NEW, "FLASH_ATTN", False, False),
        (12.0, NEW, "FLASH_ATTN", False, False),
        (None, NEW, None, False, None),
    ],
)
def test_fp8_cache_needs_fp8_arithmetic_or_a_backend_without_it(
    capability: float | None, release: tuple[int, int, int] | None, backend: str | None, mla: bool, works: bool | None
) -> None:
    flags: Flags = {"attention-backend": backend} if backend is not None else {}
    verdict = fp8_cache_support(flags, {}, release, capability, mla=mla)
    assert verdict.works is works
    if works is False:
        assert verdict.why
    assert not verdict.native or works


@pytest.mark.parametrize(
    ("release", "shards", "mla", "works"),
    [((0, 24, 0), 8, True, False), ((0, 24, 0), 1, True, True), ((0, 24, 0), 8, False, True),
     ((0, 25, 0), 8, True, True), (None, 8, True, True)],
)  # fmt: skip
def test_fp8_cache_of_latent_attention_could_not_be_split_over_gpus(
    release: Release | None, shards: int, mla: bool, works: bool
) -> None:
    verdict = fp8_cache_support({"decode-context-parallel-size": shards}, {}, release, 9.0, mla=mla)
    assert (verdict.works, verdict.anywhere) == (works, not works)


@pytest.mark.parametrize(
    ("flags", "environment", "release", "backend"),
    [
        ({}, {}, NEW, None),
        ({"attention-backend": "flashinfer"}, {}, NEW, "FLASHINFER"),
        ({"attention-backend": "auto"}, {}, NEW, None),
        ({"attention-config": '{"backend": "TRITON_ATTN"}'}, {}, NEW, "TRITON_ATTN"),
        ({"attention-config": "{broken"}, {}, NEW, None),
        ({"attention-config": "[1]"}, {}, NEW, None),
        ({"attention-config.backend": "FLASH_ATTN"}, {}, NEW, "FLASH_ATTN"),
        ({"attention-config.backend": "null"}, {}, NEW, None),
        ({"attention-config": '{"backend": "TRITON_ATTN"}', "attention-config.use_non_causal": True}, {}, NEW, None),
        ({}, {"VLLM_ATTENTION_BACKEND": "FLASHINFER_VLLM_V1"}, OLD, "FLASHINFER"),
        ({}, {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, NEW, None),  # ignored since 0.15
        ({}, {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, None, None),
    ],
)
def test_requested_backend(
    flags: dict[str, str], environment: dict[str, str], release: tuple[int, int, int] | None, backend: str | None
) -> None:
    assert selected_backend(flags, environment, release) == backend


def test_fp8_values() -> None:
    assert [is_fp8(value) for value in ("fp8", "FP8_E5M2", "fp8_e4m3", "auto", "int8", None, True)] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "release", "expected", "unexpected"),
    [
        (
            8.6,
            NEW,
            "unless FlashInfer is installed and can compile its kernel (nvcc), vLLM falls back to Triton",
            "8.0",
        ),
        (
            8.0,
            None,
            "unless FlashInfer is installed and can compile its kernel (nvcc), vLLM falls back to Triton",
            "8.0",
        ),
        (8.6, TRITON, "vLLM uses its Triton attention backend for it", "FlashInfer"),
        (7.5, NEW, "FlashInfer reads it on compute capability 8.0 and later", "nvcc"),
    ],
)
def test_refusal_names_the_backends_that_vllm_tries(
    capability: float, release: tuple[int, int, int] | None, expected: str, unexpected: str
) -> None:
    why = fp8_cache_support({}, {}, release, capability, mla=False).why
    assert expected in why
    assert unexpected not in why
