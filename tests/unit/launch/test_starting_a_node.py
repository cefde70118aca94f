"""What a node's keeper receives, and what can't be started on or done to a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_launchers.errors import RefusedError, UsageError
from vllm_launchers.keeper.node_link import fingerprint_difference
from vllm_launchers.keeper.records import Generation, LaunchSpec, NodeSpec, ServerRecord, State
from vllm_launchers.launch.node_start import fingerprint, refuse_node, startable
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.choices.nodes import NodesRequest
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.engines import Engine, EngineKind

NODES = NodesRequest(2, master_addr="10.0.0.1")
REQUEST = LaunchRequest("chatbot", port=8402)
ENGINE = Engine(EngineKind.VLLM, ("/opt/vllm",), "0.32.0", "cuda", "/opt/vllm")
CONFIG = {"hidden_size": 64, "_name_or_path": "here", "transformers_version": "5.19.0"}


def plan(folder: Path, **flags: object) -> Plan:
    given = {"max-num-seqs": 4, "node-rank": 0, "download-dir": "/here", **flags}
    return Plan("chatbot", str(folder), ENGINE, "127.0.0.1", 8402, (), given, {}, {})  # type: ignore[arg-type]


def model(folder: Path, weights: bytes = b"weights", **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}, indent=len(folder.name)))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_only_node_0_keeps_its_port() -> None:
    assert startable(REQUEST, NODES).port == 8402
    assert startable(REQUEST, replace(NODES, rank=1)).port is None


@pytest.mark.parametrize(
    ("nodes", "request_", "message"),
    [
        (replace(NODES, master_addr=""), REQUEST, "--master-addr"),
        (replace(NODES, master_addr="0.0.0.0"), REQUEST, "one address"),
        (replace(NODES, master_port=65535), REQUEST, "65534"),
        (NODES, replace(REQUEST, restart="on-failure"), "--restart"),
        (NODES, replace(REQUEST, warm_up=False), "--no-warm-up"),
    ],
)
def test_unsupported_node_options_are_usage_errors(nodes: NodesRequest, request_: LaunchRequest, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        startable(request_, nodes)


def test_nodes_are_not_joined_over_a_public_address() -> None:
    with pytest.raises(RefusedError, match="public"):
        startable(REQUEST, replace(NODES, master_addr="8.8.8.8"))
    for address in ("127.0.0.1", "192.168.1.2", "100.64.3.4", "fd00::1", "169.254.1.1"):
        startable(REQUEST, replace(NODES, master_addr=address))


def test_single_node_is_not_restarted_alone() -> None:
    spec = LaunchSpec(("vllm",), "127.0.0.1", 0)
    refuse_node(ServerRecord("chat", State.READY, 0.0, 0.0, (Generation(1, spec, 0.0),)))
    spec = LaunchSpec(("vllm",), "127.0.0.1", 0, node=NodeSpec(1, 2, "10.0.0.1", 29502))
    with pytest.raises(RefusedError, match=r"chat is node 1 of 2, headless: .* alone"):
        refuse_node(ServerRecord("chat", State.READY, 0.0, 0.0, (Generation(1, spec, 0.0),)))


def test_same_model_in_another_folder_is_equal(tmp_path: Path) -> None:
    one, other = model(tmp_path / "a"), model(tmp_path / "other", _name_or_path="there")
    ours, theirs = fingerprint(plan(one), one), fingerprint(plan(other, **{"node-rank": 1}), other)
    assert fingerprint_difference(ours, theirs, 0, 1) == ""


def test_different_configuration_weights_or_flags_differ(tmp_path: Path) -> None:
    one, config = model(tmp_path / "a"), model(tmp_path / "b", hidden_size=128)
    weights = model(tmp_path / "c", weights=b"WEIGHTS")
    ours = fingerprint(plan(one), one)
    assert fingerprint_difference(ours, fingerprint(plan(config), config), 0, 1) == (
        "node 1 and node 0 have different model configurations"
    )
    assert (
        fingerprint_difference(ours, fingerprint(plan(weights), weights), 0, 1)
        == "node 1 and node 0 have different model weights"
    )
    flags = fingerprint(plan(one, **{"max-num-seqs": 8, "enforce-eager": True}), one)
    assert fingerprint_difference(ours, flags, 0, 1) == (
        "node 1 has --max-num-seqs 8, node 0 has --max-num-seqs 4; "
        "node 1 has --enforce-eager true, node 0 has no --enforce-eager"
    )


def test_missing_model_is_compared_by_its_name(tmp_path: Path) -> None:
    ours, theirs = (fingerprint(plan(tmp_path / name), None) for name in ("a", "b"))
    assert "model" in fingerprint_difference(ours, theirs, 0, 1)


def test_fingerprint_contains_no_secret(tmp_path: Path) -> None:
    found = fingerprint(plan(tmp_path, **{"api-key": "sk-1234567890", "hf-token": "hf_abcdefghijklmnop"}), None)
    assert not any("sk-1234" in value or "hf_abc" in value for value in found.values())
