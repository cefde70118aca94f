"""Whether a server's KV cache can be in FP8, depending on its real or simulated GPU, release and attention backend."""

from __future__ import annotations

import pytest

from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_launchers.launch.details import Details, pack, unpack
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Flags

REAL = Engine(EngineKind.VLLM, ("/opt/vllm",), "0.33.0", "cuda", "/opt/vllm")
SHORT = (
    "ValueError: To serve at least one request with the model's max seq len (32768), (4.50 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (2.25 GiB)."
)
SIMULATED = Engine(EngineKind.SIMULATED, (), "0.33.0", "simulated", "")


@pytest.mark.parametrize(
    ("engine", "kind", "environment", "flags", "refused"),
    [
        (REAL, "NVIDIA RTX A6000", {}, {}, True),
        (REAL, "NVIDIA RTX A6000", {}, {"attention-backend": "FLASHINFER"}, False),
        (REAL, "NVIDIA GeForce RTX 4090", {}, {}, False),
        (REAL, "", {}, {}, False),  # an unknown GPU
        (SIMULATED, "", {}, {}, True),
        (SIMULATED, "", {"SIMULATED_GPU": "L40S"}, {}, False),
        (Engine(EngineKind.VLLM, ("/opt/vllm",), "0.33.0", "cpu", "/opt/vllm"), "NVIDIA RTX A6000", {}, {}, False),
    ],
)
def test_fp8_cache_is_refused_below_8_9_unless_the_backend_supports_it(
    engine: Engine, kind: str, environment: dict[str, str], flags: Flags, refused: bool
) -> None:
    details = Details(engine=engine, gpu_kind=kind, environment=environment, flags=flags)
    assert bool(details.fp8_cache_problem) == refused


@pytest.mark.parametrize(
    ("kind", "release", "mla", "inherited", "refused"),
    [
        ("NVIDIA L40S", "0.17.1", False, {}, False),
        ("NVIDIA L40S", "0.17.1", True, {}, True),  # Triton MLA reads it since 0.18
        ("NVIDIA RTX A6000", "0.14.1", False, {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, False),
        ("NVIDIA RTX A6000", "0.15.1", False, {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, True),  # ignored now
    ],
)
def test_record_keeps_the_inputs_of_the_fp8_verdict(
    kind: str, release: str, mla: bool, inherited: dict[str, str], refused: bool
) -> None:
    engine = Engine(EngineKind.VLLM, ("/opt/vllm",), release, "cuda", "/opt/vllm")
    details = unpack(pack(Details(engine=engine, gpu_kind=kind, mla=mla, inherited=inherited)))
    assert bool(details.fp8_cache_problem) == refused
    lines = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', f"{SHORT}"]
    version = f"INFO 11-20 10:00:00 [api_server.py:1] vLLM API server version {release}"
    failed = diagnose([version, *lines], 1, {}, kind, mla=mla, environment=inherited)
    assert any("kv-cache-dtype" in one.changes.set for one in failed.fixes) != refused


def test_older_record_does_not_state_latent_attention() -> None:
    packed = pack(Details(engine=REAL, gpu_kind="NVIDIA L40S"))
    del packed["mla"], packed["inherited"]
    assert unpack(packed) == Details(engine=REAL, gpu_kind="NVIDIA L40S")


@pytest.mark.parametrize(
    ("log_line", "offered"),
    [
        ("Using AttentionBackendEnum.TRITON_MLA backend.", False),
        ("Using Triton MLA backend on V1 engine.", False),
        ("Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].", True),
        ("FlashMLA is not supported on this GPU.", True),
    ],
)
def test_log_shows_latent_attention(log_line: str, offered: bool) -> None:
    info = "INFO 11-20 10:00:00 [api_server.py:1] "
    lines = [f"{info}vLLM API server version 0.17.1", f"{info}{log_line}", "Traceback (most recent call last):", SHORT]
    failed = diagnose(lines, 1, {}, "NVIDIA L40S")
    assert any("kv-cache-dtype" in one.changes.set for one in failed.fixes) == offered
