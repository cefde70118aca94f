"""The demo's host: another user holds most of the GPU of ``docs``, which is why its KV cache is small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.cli import demo
from vllm_console.cli.demo_servers import DOCUMENTS, SERVERS
from vllm_console.fleet.local import LocalFleet
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.sharing import DRIVER_GIB, holdings
from vllm_launchers.plan.findings import Level
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.flags.changes import Changes, FlagValue

MEMORY = "gpu-memory-utilization"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LocalFleet]:
    made = LocalFleet(tmp_path, observe=False, interactive=True, host_file=demo.HOST, own_presets=demo.PRESETS)
    yield made
    made.close()


def plan_docs(fleet: LocalFleet, **changed: FlagValue) -> Plan:
    docs = SERVERS[0]
    request = demo.runs_of(docs, fleet.snapshot().host, docs.place)[-1]
    named = {name.replace("_", "-"): value for name, value in changed.items()}
    return fleet.plan(replace(request, changes=Changes({**request.changes.set, **named})))


def test_memory_adds_up() -> None:
    for gpu in read_host(demo.HOST).gpus:
        assert gpu.used_gib + gpu.free_gib == pytest.approx(gpu.memory_gib)
        held = sum(holder.gib for holder in gpu.holders)
        assert held <= gpu.used_gib < held + DRIVER_GIB
    assert holdings(read_host(demo.HOST).gpu(SERVERS[0].place)).others == {"mara": 15.9}


def test_docs_takes_all_that_the_other_user_leaves(fleet: LocalFleet) -> None:
    plan = plan_docs(fleet)
    assert plan.flags[MEMORY] == 0.3
    assert plan.reasons[MEMORY] == "The GPU is shared: the rest is for another user's notebook."
    found = {finding.code: finding for finding in plan.findings}
    assert {finding.level for finding in plan.findings} == {Level.ADVICE}
    assert "mara holds 15.9 GiB" in found["gpu_shared"].message

    more = {finding.code: finding for finding in plan_docs(fleet, gpu_memory_utilization=0.31).findings}
    assert "vLLM will not start" in more["memory_held"].message
    assert more["memory_held"].fix == Changes({MEMORY: 0.3})


def test_preset_is_sized_for_the_traffic_that_docs_gets() -> None:
    presets, problems = read_presets(demo.PRESETS)
    assert not problems
    assert presets[SERVERS[0].preset].workload == DOCUMENTS


def test_presets_of_the_user_do_not_change_the_demo(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "config" / "vllm-console" / "presets"
    own.mkdir(parents=True)
    (own / "code-generation.toml").write_text('extends = "code-generation"\n[flags]\nmax-num-seqs = 3\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert LocalFleet(tmp_path / "other", observe=False).preset("code-generation").flags["max-num-seqs"].value == 3
    assert fleet.preset("code-generation").shipped
