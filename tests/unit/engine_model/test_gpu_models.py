"""The table of GPU models, and vLLM's defaults by GPU."""

from __future__ import annotations

import pytest

from vllm_launchers.engine_model.gpu_models import LARGE_BATCHES, LARGEST_BATCHES, SMALL_BATCHES, batch_defaults


@pytest.mark.parametrize(
    ("name", "memory_gib", "release", "expected"),
    [
        ("NVIDIA Thor", 122.8, (0, 33, 0), LARGE_BATCHES),
        ("NVIDIA Thor", 122.8, (0, 31, 0), SMALL_BATCHES),
        ("NVIDIA Thor", None, (0, 33, 0), SMALL_BATCHES),
        ("NVIDIA GB10", 121.6, (0, 33, 0), SMALL_BATCHES),
        ("NVIDIA GB10", 121.6, (0, 31, 0), SMALL_BATCHES),
        ("NVIDIA B200", 178.0, (0, 28, 0), LARGEST_BATCHES),
        ("NVIDIA B200", 178.0, (0, 24, 0), LARGE_BATCHES),
        ("NVIDIA A100-SXM4-80GB", 79.2, (0, 33, 0), SMALL_BATCHES),
    ],
)
def test_defaults_of_a_step_depend_on_memory_and_release(
    name: str, memory_gib: float | None, release: tuple[int, int, int], expected: tuple[int, int]
) -> None:
    assert batch_defaults(name, memory_gib, release) == expected
