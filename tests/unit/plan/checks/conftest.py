from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from fakes.plans import plan_with
from vllm_launchers.host.environment import HostEnvironment
from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.checks.check import check_plan
from vllm_launchers.plan.checks.request import gpus_of
from vllm_launchers.plan.findings import PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.flags.releases import known_or_assumed
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, Quantization

ROOMY = HostEnvironment(
    open_files=65_535,
    shm_free_gib=30.0,
    memory_free_gib=100.0,
    model_disk="/models",
    model_disk_free_gib=500.0,
    has_hub_token=True,
)

AN_8B_IN_AWQ = ModelFacts(
    model="/models/eight",
    source="folder",
    folder="/models/eight",
    architecture="LlamaForCausalLM",
    model_type="llama",
    layers=(LayerKind.FULL,) * 32,
    hidden_size=4096,
    intermediate_size=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128_256,
    max_context=131_072,
    dtype="float16",
    quantization=Quantization("awq", 4, 128),
    weight_bytes=57 * 10**8,
    bytes_to_download=0,
)

A_HOST = Host(gpus=(Gpu(0, "GPU-0", "NVIDIA RTX A6000", 48.0, 47.6, compute_capability="8.6"),))


@pytest.fixture(scope="session")
def find() -> Callable[..., list[PlanFinding]]:
    """Findings of a launch: ``find(set={…}, facts=…, gpus=(0,), host=…, host_environment={…})``; valid by default."""
    presets = read_presets(None)[0]

    def find(
        preset: str = "chatbot",
        *,
        set: Flags | None = None,
        unset: tuple[str, ...] = (),
        version: str | None = "0.33.0",
        build: str | None = "cuda",
        note: str = "",
        plugins: tuple[str, ...] = (),
        lacks: tuple[str, ...] = (),
        facts: ModelFacts | None = AN_8B_IN_AWQ,
        host: Host | None = A_HOST,
        host_address: str = "127.0.0.1",
        host_environment: dict[str, Any] | None = None,
        model_problem: str = "",
        **more: Any,
    ) -> list[PlanFinding]:
        kind = EngineKind.SIMULATED if build == "simulated" else EngineKind.VLLM
        engine = Engine(kind, ("/opt/vllm",), version, build, "/opt/vllm", note, plugins, lacks)
        chosen, changes = presets[preset], Changes(set or {}, unset)
        plan = plan_with(chosen, engine, changes, host=host_address, model="/models/eight", **more)
        environment = replace(ROOMY, **(host_environment or {}))
        table = known_or_assumed(version)
        inputs = PlanInputs(facts, table, host, environment=environment, model_problem=model_problem)

        def budget(flags: Flags, /) -> MemoryBudget | None:
            if facts is None:
                return None
            gpus = gpus_of(plan, inputs) or (host.gpus if host is not None else ())
            return estimate(
                facts,
                flags,
                gpus,
                release=engine.release,
                workload=chosen.workload,
                build=build,
                environment=plan.environment,
            )

        plan = replace(plan, memory=budget(plan.flags))
        return list(check_plan(plan, inputs, chosen.workload, budget, chosen.objectives))

    return find
