from __future__ import annotations

import pytest

from vllm_console.fleet.snapshot import UnsetFlags
from vllm_console.fleet.unset_flags import unset_flags
from vllm_launchers.launch.details import Details
from vllm_launchers.vllm.engines import Engine, EngineKind


@pytest.mark.parametrize(
    ("build", "gpu", "flags", "sequences"),
    [
        ("cuda", "RTX A6000", {}, 256),
        ("cuda", "H100 80GB", {}, 1024),
        ("cuda", "H100 80GB", {"max-num-seqs": 8}, 1024),
        ("cuda", "H100 80GB", {"max-num-batched-tokens": 512}, 512),
        ("cuda", "", {}, None),
        ("cpu", "", {"tensor-parallel-size": 2}, 256),
    ],
)
def test_unset_flags_have_vllms_defaults(build: str, gpu: str, flags: dict[str, int], sequences: int | None) -> None:
    engine = Engine(EngineKind.VLLM, (), "0.32.0", build, "")
    details = Details(model="Qwen/Qwen3-8B", engine=engine, gpu_kind=gpu, flags=flags)
    assert unset_flags(details) == UnsetFlags(sequences, 40_960)


def test_unknown_model_has_no_default_context() -> None:
    assert unset_flags(Details(model="org/nobody-knows")).max_model_len is None
