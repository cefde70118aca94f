"""Models and hosts for flag choices, modeled on well-known ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.choice_inputs import choice_inputs
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import Gpu, Host, Link
from vllm_launchers.plan.choices.choice import Choice
from vllm_launchers.plan.choices.choose import choose
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, Quantization

Chosen = dict[str, Choice]


def dense(gb: float, layers: int, heads: int, kv_heads: int = 8, **other: Any) -> ModelFacts:
    values: dict[str, Any] = {"dtype": "bfloat16", "max_context": 131_072, "intermediate_size": 28_672} | other
    return ModelFacts(
        model="made/model",
        layers=(LayerKind.FULL,) * layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        weight_bytes=int(gb * 1e9),
        vocabulary=128_256,
        hidden_size=heads * 128,
        **values,
    )


MODELS = {
    "4b": dense(8.0, 36, 32),
    "8b": dense(16.1, 32, 32),
    "8b-awq": dense(6.1, 36, 32, quantization=Quantization("awq", 4, 128), intermediate_size=12_288, dtype="float16"),
    "14b": dense(29.5, 48, 40),
    "32b": dense(65.5, 64, 64),
    "70b": dense(141.1, 80, 64),
    "70b-fp8-blocks": dense(72.0, 80, 64, quantization=Quantization("fp8", 8, block=(128, 128))),
    "30b-a3b": dense(61.1, 48, 32, 4, experts=128, experts_per_token=8, intermediate_size=768),
    "odd-heads": dense(60.0, 60, 25, 5),
}


def gpus(count: int, gib: float, capability: str, name: str, *, joined: str | None = None) -> Host:
    """A host with idle GPUs and equal links (``NV18``, ``PIX``, ``SYS``; None: unknown)."""
    members = tuple(
        Gpu(index, f"GPU-{index}", name, gib, gib - 0.4, (), compute_capability=capability) for index in range(count)
    )
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)] if joined else []
    links = tuple(Link(a, b, joined or "") for a, b in pairs)
    islands = (tuple(range(count)),) if joined and joined.startswith("NV") else tuple((i,) for i in range(count))
    return Host(gpus=members, links=links, islands=islands)


H100 = ("9.0", "NVIDIA H100 80GB HBM3")
HOSTS: dict[str, Callable[[], Host]] = {
    "h100": lambda: gpus(1, 79.6, *H100),
    "2xh100": lambda: gpus(2, 79.6, *H100, joined="NV18"),
    "8xh100": lambda: gpus(8, 79.6, *H100, joined="NV18"),
    "a6000": lambda: gpus(1, 48.0, "8.6", "NVIDIA RTX A6000"),
    "2xa6000": lambda: gpus(2, 48.0, "8.6", "NVIDIA RTX A6000", joined="NV4"),
    "2xa6000-apart": lambda: gpus(2, 48.0, "8.6", "NVIDIA RTX A6000", joined="SYS"),
    "4xa6000": lambda: read_host(Path("4xa6000")),
    "l40s": lambda: gpus(1, 45.0, "8.9", "NVIDIA L40S"),
    "2xl40s": lambda: gpus(2, 45.0, "8.9", "NVIDIA L40S", joined="PIX"),
    "8xl40s": lambda: read_host(Path("8xl40s")),
    "4090": lambda: read_host(Path("1xrtx4090")),
    "2xt4": lambda: gpus(2, 15.0, "7.5", "Tesla T4", joined="PIX"),
    "mig": lambda: read_host(Path("1xa100-mig")),
}

CHAT = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=64)


def by_flag(choices: tuple[Choice, ...]) -> Chosen:
    found = {choice.flag: choice for choice in choices}
    assert len(found) == len(choices), "a flag was chosen twice"
    return found


@pytest.fixture
def models() -> dict[str, ModelFacts]:
    return MODELS


@pytest.fixture
def hosts() -> dict[str, Callable[[], Host]]:
    return HOSTS


@pytest.fixture
def chosen() -> Callable[..., Chosen]:
    """``chosen("70b", "8xh100", workload, set={…}, preset={…}, …)``: the choices by flag."""

    def chosen(model: str | None, host: str | Host | None, workload: Workload = CHAT, **other: Any) -> Chosen:
        changes = Changes(other.pop("set", {}), other.pop("unset", ()))
        preset, release = other.pop("preset", {}), other.pop("release", (0, 33, 0))
        build = other.pop("build", "cuda")
        facts = other.pop("facts", None) or (MODELS[model] if model else None)
        machine = HOSTS[host]() if isinstance(host, str) else host
        over_preset = other.pop("over_preset", False)
        inputs = choice_inputs(workload, facts, machine, release, build, **other)
        return by_flag(choose(preset, changes, inputs, over_preset=over_preset))

    return chosen
