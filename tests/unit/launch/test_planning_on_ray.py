"""A launch whose workers run on a Ray cluster: what the cluster lacks, its address, and the GPUs that Ray chooses."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.errors import UsageError
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.keeper.records import LaunchSpec
from vllm_launchers.launch.inputs_reader import PlanInputsReader
from vllm_launchers.launch.launch_plan import LaunchPlan, plan_launch
from vllm_launchers.launch.place import AUTO, OFFERED, GpuFinder
from vllm_launchers.launch.planner import Planner
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.launch.resolved_request import ResolvedRequest
from vllm_launchers.plan.choices.nodes import NodesRequest
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import VISIBLE
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm import ray_cluster
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.flags.releases import release_table
from vllm_launchers.vllm.modelfacts.known import known_facts
from vllm_launchers.vllm.ray_cluster import RayCluster, RayClusters, RayNode

RAY = {"distributed-executor-backend": "ray"}
HERE = RayNode("10.0.0.1", 4, 4, ("H100",), here=True)
THERE = RayNode("10.0.0.2", 4, 4, ("H100",))
CLUSTER = RayCluster("2.60.0", "3.11.7", "10.0.0.1:6379", (HERE,))
SAME = {"ray_version": "2.60.0", "python_version": "3.11.7"}


def launch(
    cluster: RayCluster | None = CLUSTER, flags: Mapping[str, Any] | None = None, *, build: str = "cuda",
    nodes: NodesRequest | None = None, preset: str = "chatbot", place: str = OFFERED, gpus: tuple[int, ...] = (),
) -> LaunchPlan:  # fmt: skip
    engine = Engine(EngineKind.VLLM, ("/opt/vllm",), "0.33.0", build, "/opt/vllm")
    changes = Changes({**RAY, "tensor-parallel-size": 2, **(flags or {})})
    request = ResolvedRequest(
        read_presets(None)[0][preset], engine, changes, "meta-llama/Llama-3.1-8B-Instruct", "127.0.0.1", 8000, {},
        gpu_finder=GpuFinder(place), gpus=gpus, nodes=nodes,
    )  # fmt: skip
    facts = known_facts("meta-llama/Llama-3.1-8B-Instruct")
    inputs = PlanInputs(facts, release_table("0.33.0"), read_host(Path("8xh100")), ray=cluster)
    return plan_launch(request, inputs)


def finding(found: LaunchPlan) -> PlanFinding:
    (one,) = [one for one in found.plan.findings if one.code.startswith("ray_")]
    return one


@pytest.mark.parametrize(
    ("cluster", "code", "level", "words"),
    [
        (RayCluster(missing="No module named 'ray'"), "ray_missing", Level.ERROR, "(/opt/vllm): No module named 'ray'"),
        (
            replace(CLUSTER, nodes=(), problem="Connection refused"), "ray_unreachable", Level.ERROR,
            "no Ray cluster answers at 10.0.0.1:6379: Connection refused",
        ),
        (RayCluster("2.60.0", "3.11.7"), "ray_not_running", Level.WARNING, "RAY_ADDRESS is not set"),
        (RayCluster("2.60.0", "3.11.7", local=True), "ray_not_running", Level.WARNING, "RAY_ADDRESS is 'local': vLLM"),
        (
            replace(CLUSTER, versions={**SAME, "python_version": "3.12.1"}), "ray_version_differs", Level.ERROR,
            "runs Ray 2.60.0 on Python 3.12.1, this vLLM has Ray 2.60.0 on Python 3.11.7",
        ),
        (replace(CLUSTER, nodes=(THERE,)), "ray_not_here", Level.ERROR, "this machine is not a node"),
        (
            replace(CLUSTER, nodes=(replace(HERE, free=1),)), "ray_gpus_busy", Level.WARNING,
            "has 4 GPUs (10.0.0.1 4 H100), of which 1 are free and 2 are needed",
        ),
        (replace(CLUSTER, versions=SAME), "ray_cluster", Level.ADVICE, "4 GPUs (10.0.0.1 4 H100), 4 free"),
        (replace(CLUSTER, nodes=(HERE, THERE)), "ray_cluster", Level.ADVICE, "this machine's GPUs, on each node"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("ray_") else "",
)  # fmt: skip
def test_cluster_finding_names_what_it_has_or_lacks(cluster: RayCluster, code: str, level: Level, words: str) -> None:
    found = [one for one in launch(cluster).plan.findings if one.code == code]
    assert [one.level for one in found] == [level]
    assert words in found[0].message


def test_too_few_gpus_are_refused_with_a_fitting_size() -> None:
    found = finding(launch(flags={"tensor-parallel-size": 8}))
    assert (found.code, found.level, found.surely) == ("ray_gpus_too_few", Level.ERROR, False)
    assert "it needs 8 GPUs" in found.message
    assert found.fix == Changes({"tensor-parallel-size": 4})


def test_tensor_parallelism_over_nodes_is_fixed_by_pipeline_stages() -> None:
    plan = launch(replace(CLUSTER, nodes=(HERE, THERE)), {"tensor-parallel-size": 8}).plan
    (found,) = [one for one in plan.findings if one.code == "ray_tp_over_nodes"]
    assert found.fix == Changes({"tensor-parallel-size": 4, "pipeline-parallel-size": 2})


def test_cpu_build_is_refused_unless_forced() -> None:
    found = [one for one in launch(build="cpu").plan.findings if one.code == "ray_on_cpu"]
    assert [(one.level, one.surely) for one in found] == [(Level.ERROR, False)]


def test_server_gets_the_checked_address_and_no_gpus() -> None:
    found = launch()
    assert found.plan.environment["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert VISIBLE not in found.plan.environment
    assert found.plan.gpus == ()
    assert found.details.environment["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert RAY.items() <= found.plan.flags.items()


def test_ray_server_is_ready_only_after_a_request() -> None:
    on_ray, alone = launch().spec(), launch(None, {"distributed-executor-backend": "mp"}).spec()
    assert isinstance(on_ray, LaunchSpec)
    assert (on_ray.ray, alone.ray) == (True, False)
    unwarmed = launch()
    assert replace(unwarmed, details=replace(unwarmed.details, warm_up=False)).spec().warm_up is not None


def test_local_gpus_are_not_judged_with_several_ray_nodes() -> None:
    codes = {one.code for one in launch(replace(CLUSTER, nodes=(HERE, THERE))).plan.findings}
    assert not codes & {"memory_held", "gpus_too_few", "tp_over_pcie"}


@pytest.mark.parametrize(("place", "gpus"), [("", (0,)), ("MIG-1", ()), ("", (0, 1))])
def test_named_gpus_are_refused_because_ray_chooses(place: str, gpus: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="Ray chooses the GPUs"):
        launch(place=place, gpus=gpus)
    assert launch(place=AUTO).plan.gpus == ()


def test_nodes_of_vllm_and_ray_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="on a Ray cluster, use --distributed-executor-backend ray instead of --nodes"):
        launch(nodes=NodesRequest(2, master_addr="10.0.0.1"))


# -- asking ------------------------------------------------------------------------------------------------------------


def fake_python(folder: Path, answer: Mapping[str, Any]) -> str:
    """A Python that responds to `ray_query` and records the number of calls."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho asked >> {folder}/asked\necho noise\necho '{json.dumps(answer)}'\n")
    path.chmod(0o755)
    return str(path)


def test_cluster_is_queried_once_within_the_cache_time(tmp_path: Path) -> None:
    answer = {
        "ray": "2.60.0", "python": "3.11.7", "address": "10.0.0.1:6379", "versions": SAME,
        "nodes": [{"address": "10.0.0.1", "gpus": 4.0, "free": 2.0, "kinds": ["H100"], "here": True}],
    }  # fmt: skip
    clusters, python = RayClusters(), fake_python(tmp_path, answer)
    found = clusters.read(python, {"PATH": "/usr/bin:/bin"})
    assert (found.gpus, found.free, found.versions) == (4, 2, SAME)
    assert clusters.read(python, {"PATH": "/usr/bin:/bin"}) is found
    assert (tmp_path / "asked").read_text() == "asked\n"
    clusters.read(python, {"PATH": "/usr/bin:/bin", "RAY_ADDRESS": "10.0.0.9:6379"})
    assert (tmp_path / "asked").read_text() == "asked\nasked\n"


def test_concurrent_reads_share_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, both = [0.0], list[str](), threading.Barrier(2, timeout=60)

    def slow(python: str, environ: Mapping[str, str]) -> RayCluster:
        asked.append(python)
        clock[0] += ray_cluster.SECONDS
        return RayCluster(problem=f"answer {len(asked)}")

    def read(_: int) -> RayCluster:
        both.wait()
        return clusters.read("python", {})

    monkeypatch.setattr(ray_cluster, "_asked", slow)
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    clusters = RayClusters()
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(read, range(2)))
    assert found[0] is found[1]
    clock[0] += ray_cluster.KEPT_SECONDS
    assert clusters.read("python", {}) is found[0]
    clock[0] += 1
    clusters.read("python", {})
    assert asked == ["python", "python"]


FAKE_RAY = {
    "ray/__init__.py": "__version__ = '2.60.0'",
    "ray/_private/__init__.py": "",
    "ray/_private/services.py": "import os\ndef canonicalize_bootstrap_address(_):\n"
    "    return os.environ.get('RAY_ADDRESS')\n",
    "ray/_private/state.py": "class GlobalState:\n"
    "    def _initialize_global_state(self, options): pass\n"
    "    def available_resources_per_node(self): return {'a': {'GPU': 3.0}, 'c': {'CPU': 1.0}}\n"
    "    def node_table(self):\n"
    "        return [{'NodeID': one, 'NodeManagerAddress': '127.0.0.1', 'Alive': True, 'Resources': {'GPU': 4.0}}\n"
    "                for one in 'abc']\n",
    "ray/_raylet.py": "class GcsClient:\n"
    "    def __init__(self, address): pass\n"
    "    def internal_kv_get(self, key, namespace): return b'{}'\n"
    "class GcsClientOptions:\n"
    "    @staticmethod\n"
    "    def create(*_, **__): return None\n",
}
"""A package with the parts of Ray that `ray_query` uses. It reports no free resources of node b; node c has no free
GPU."""


@pytest.fixture
def fake_ray(tmp_path: Path) -> Callable[[str], RayCluster]:
    """Query the fake Ray at an address."""
    for name, text in FAKE_RAY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return lambda address: RayClusters().read(sys.executable, {"PYTHONPATH": str(tmp_path), "RAY_ADDRESS": address})


def test_free_gpus_not_reported_by_ray_are_unknown(fake_ray: Callable[[str], RayCluster]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as control_store:
        found = fake_ray(f"127.0.0.1:{control_store.getsockname()[1]}")
    assert found.problem == ""
    assert [node.free for node in found.nodes] == [3.0, None, 0.0]
    assert found.free is None


def test_address_needs_a_port_and_local_is_no_address(
    fake_ray: Callable[[str], RayCluster],
) -> None:
    assert fake_ray("head-node").problem == "'head-node' is not an address of the form HOST:PORT"
    found = fake_ray("local")
    assert (found.local, found.address, found.problem) == (True, "", "")


def test_python_without_ray_or_an_answer_is_reported(tmp_path: Path) -> None:
    found = RayClusters().read(sys.executable, {"PATH": "/usr/bin:/bin"})
    assert "No module named 'ray'" in found.missing
    assert "No such file" in RayClusters().read(str(tmp_path / "nothing"), {}).problem
    assert "can't be read" in RayClusters().read(fake_python(tmp_path, {"nodes": 3}), {}).problem
    assert "can't be read" in RayClusters().read("/bin/true", {}).problem


def test_only_a_ray_launch_queries_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def read(_: RayClusters, python: str, environ: Mapping[str, str]) -> RayCluster:
        asked.append(environ.get("RAY_ADDRESS", ""))
        return CLUSTER

    monkeypatch.setattr(RayClusters, "read", read)
    vllm = tmp_path / "vllm"
    vllm.write_text(
        f"#!{sys.executable}\nimport sys\nfrom vllm.entrypoints.cli.main import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    vllm.chmod(0o755)
    planner = Planner(tmp_path, PlanInputsReader(), reports=None)  # type: ignore[arg-type]
    engine = Engine(EngineKind.VLLM, (str(vllm),), "0.33.0", "cuda", str(vllm))
    monkeypatch.setattr(planner, "engine", lambda kind, path: engine)
    request = LaunchRequest("chatbot", changes=Changes(RAY), environment={"RAY_ADDRESS": "10.0.0.1:6379"}, port=8123)
    plan = planner.plan(request, ()).plan
    assert asked == ["10.0.0.1:6379"]
    assert any(one.code == "ray_cluster" for one in plan.findings)
    planner.plan(replace(request, changes=Changes()), ())
    assert len(asked) == 1
    with pytest.raises(UsageError, match="omit --gpus"):
        planner.plan(replace(request, gpus=(0,)), ())
