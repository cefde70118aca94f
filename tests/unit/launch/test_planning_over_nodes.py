"""A launch over several equal machines: layout, flags per node, memory, network, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.errors import UsageError
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.launch.launch_plan import plan_launch
from vllm_launchers.launch.place import GpuFinder
from vllm_launchers.launch.resolved_request import ResolvedRequest
from vllm_launchers.plan.choices.nodes import NodesRequest
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.nodes import NodesPlan
from vllm_launchers.presets.load import read_presets
from vllm_launchers.units import GIB
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.flags.check_value import problem
from vllm_launchers.vllm.flags.releases import RELEASES, release_table
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts
from vllm_launchers.vllm.modelfacts.known import known_facts
from vllm_launchers.vllm.release_defaults import parse_release

THIRTY = ModelFacts(
    model="/models/thirty", source="folder", architecture="LlamaForCausalLM", layers=(LayerKind.FULL,) * 60,
    hidden_size=6144, intermediate_size=16384, heads=48, kv_heads=8, head_dim=128, vocabulary=32_000,
    max_context=32_768, dtype="bfloat16", weight_bytes=60 * 10**9, bytes_to_download=0,
)  # fmt: skip
EIGHT = replace(THIRTY, model="/models/eight", layers=(LayerKind.FULL,) * 32, weight_bytes=16 * 10**9)
TWO = NodesRequest(2, master_addr="10.0.0.1")
NEW = [name for name in RELEASES if (parse_release(name) or (0, 0, 0)) >= (0, 11, 2)]


def planned(
    nodes: NodesRequest | None = TWO, *, host: str = "2xrtx3090", facts: ModelFacts | None = THIRTY,
    version: str = "0.33.0", build: str = "cuda", changes: Any = None, gpus: tuple[int, ...] = (),
) -> Plan:  # fmt: skip
    """The plan for a recorded host; all machines are equal."""
    engine = Engine(EngineKind.VLLM, ("/opt/vllm",), version, build, "/opt/vllm")
    request = ResolvedRequest(
        read_presets(None)[0]["chatbot"], engine, Changes(changes or {}), "/models/made", "127.0.0.1", 8000, {},
        gpus=gpus, nodes=nodes, gpu_finder=GpuFinder("" if gpus else "offered"),
    )  # fmt: skip
    there = read_host(Path(host)) if host else None
    return plan_launch(request, PlanInputs(facts, release_table(version), there)).plan


def nodes_of(plan: Plan) -> NodesPlan:
    assert plan.nodes is not None
    return plan.nodes


def codes(plan: Plan) -> set[str]:
    return {finding.code for finding in plan.findings}


def test_model_larger_than_a_machine_uses_stages_across_nodes() -> None:
    assert "weights_do_not_fit" in codes(planned(None))
    plan = planned()
    nodes, flags = nodes_of(plan), plan.flags
    assert (flags["tensor-parallel-size"], flags["pipeline-parallel-size"], nodes.gpus_each) == (2, 2, 2)
    assert plan.gpus == (0, 1)  # of each node
    assert plan.memory is not None
    assert plan.memory.fits
    assert [[gpu.index for gpu in node.memory] for node in nodes.nodes] == [[0, 1], [0, 1]]
    weights = sum(gpu.weights_gib for node in nodes.nodes for gpu in node.memory)
    assert weights == pytest.approx(60e9 / GIB, rel=0.02)
    assert not {"gpus_too_few", "nodes_not_needed", "tp_over_nodes"} & codes(plan)


def test_each_node_has_its_rank_and_only_the_first_serves() -> None:
    plan = planned()
    first, second = nodes_of(plan).nodes
    assert first.argv == plan.argv
    assert "--headless" not in first.argv
    assert "--port" not in second.argv
    assert second.argv[-1] == "--headless"
    shared = ("--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "29501")
    for rank, node in enumerate((first, second)):
        words = " ".join(node.argv)
        assert all(" ".join(pair) in words for pair in zip(shared[::2], shared[1::2], strict=True))
        assert f"--node-rank {rank}" in words
    assert planned(replace(TWO, rank=1)).argv == second.argv


@pytest.mark.parametrize("version", NEW)
def test_release_accepts_every_flag_of_every_node(version: str) -> None:
    table = release_table(version)
    for node in nodes_of(planned(version=version)).nodes:
        assert not {name: value for name, value in node.flags.items() if problem(table, name, value)}


def test_single_machine_plan_is_unchanged() -> None:
    plan = planned(None, facts=EIGHT)
    assert plan.nodes is None
    assert not [word for word in plan.argv if word.startswith(("--nnodes", "--master", "--node"))]


def test_required_network_bandwidth_follows_from_the_pace() -> None:
    plan = planned()
    network, workload = nodes_of(plan).network, read_presets(None)[0]["chatbot"].workload
    assert network is not None
    assert network.bytes_per_token == 2 * 6144 * 2
    assert plan.paces is not None
    assert plan.paces.full is not None
    prompts = workload.input_tokens_p95 * (1 - workload.prefix_reuse) / workload.output_tokens_p95
    rate = plan.paces.full.tokens_per_second * (1 + prompts)
    assert network.needed_gbits == pytest.approx(rate * 2 * 6144 * 2 * 8 / 1e9 / 0.1)
    assert "network_slow" not in codes(planned(replace(TWO, network_gbits=100)))
    slow = planned(replace(TWO, network_gbits=0.1))
    assert "network_slow" in codes(slow)
    assert slow.paces is not None
    assert slow.paces.full is not None
    assert slow.paces.full.tokens_per_second < plan.paces.full.tokens_per_second


def test_model_that_fits_one_machine_needs_no_second() -> None:
    assert "nodes_not_needed" in codes(planned(facts=EIGHT))


def test_tensor_parallelism_over_the_network_is_a_warning() -> None:
    plan = planned(changes={"tensor-parallel-size": 4})
    found = next(one for one in plan.findings if one.code == "tp_over_nodes")
    assert found.fix == Changes(set={"tensor-parallel-size": 2, "pipeline-parallel-size": 2})
    assert (nodes_of(plan).across, plan.paces) == ("tensor", None)
    inside = planned(changes={"tensor-parallel-size": 2})
    assert inside.flags["pipeline-parallel-size"] == 2  # a size that fits a node applies to each node


def test_experts_over_all_gpus_are_advised_if_they_hold_more() -> None:
    found = planned(host="8xh100", facts=known_facts("deepseek-ai/DeepSeek-V3"), gpus=tuple(range(8)))
    assert "experts_over_nodes" in codes(found)
    assert "experts_over_nodes" not in codes(planned())


def test_cpu_build_nodes_share_each_layer() -> None:
    plan = planned(host="", build="cpu", version="0.32.0")
    assert (plan.flags["tensor-parallel-size"], "pipeline-parallel-size" in plan.flags) == (2, False)
    staged = planned(None, host="", build="cpu", changes={"pipeline-parallel-size": 2})
    assert "pp_on_cpu" in codes(staged)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"version": "0.10.2"}, "can't run on several nodes without Ray: it has no --nnodes, which came with 0.11.2"),
        ({"nodes": NodesRequest(65)}, "expected 2 to 64"),
        ({"nodes": NodesRequest(2, 2)}, "numbered 0 to 1"),
        ({"nodes": NodesRequest(2, 0, "a b;$(x)")}, "--master-addr"),
        ({"nodes": NodesRequest(2, 0, "a", 0)}, "--master-port"),
        ({"nodes": NodesRequest(2, network_gbits=float("nan"))}, "--network"),
        ({"changes": {"nnodes": 3}}, "--nnodes follows from --nodes"),
        ({"changes": {"data-parallel-size": 2}}, "leave out --data-parallel"),
        ({"changes": {"tensor-parallel-size": 1, "pipeline-parallel-size": 3}}, "are not divisible"),
        ({"facts": None}, "too little is known"),
        ({"changes": {"kv-cache-dtype": "foo"}}, "no layout was chosen, because vLLM refuses --kv-cache-dtype foo"),
        ({"nodes": NodesRequest(61)}, "has 60 layers, fewer than nodes"),
    ],
)
def test_unsupported_node_requests_are_refused_in_one_sentence(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(**words)
