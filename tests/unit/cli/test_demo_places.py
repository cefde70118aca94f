"""The GPUs of a recorded host on which the demo's servers are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_console.cli.demo import emptiest
from vllm_launchers.host.gpu.document import read_host


@pytest.mark.parametrize(
    ("name", "first"),
    [("4xa6000", [1, 2, 3, 0]), ("8xh100", [4, 5]), ("2xrtx3090", [1, 0]), ("1xrtx4090", [0]), ("1xa100-mig", [])],
)
def test_emptiest_whole_gpus_come_first(name: str, first: list[int]) -> None:
    assert emptiest(read_host(Path(name)))[: len(first) or 1] == first
    assert emptiest(None) == []
