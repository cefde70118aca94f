"""Keepers of a multi-node server: compared before start, ready together, ended together."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
from typing import Any

import pytest

from fakes.keeper_bench import Bench, until
from fakes.ports import free_port
from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.diagnosis.finding import Cause
from vllm_launchers.keeper import processes
from vllm_launchers.keeper.records import LaunchSpec, NodeSpec, ServerRecord, State, WarmUp

MODELS = {"object": "list", "data": [{"id": "served", "max_model_len": 4096, "parent": None}]}
COMPLETION = {"choices": [{"index": 0, "text": " a b", "finish_reason": "length"}], "usage": {"completion_tokens": 2}}
ERROR = {"error": {"message": "intermediate_tensors is not None", "type": "InternalServerError", "code": 500}}
SAME = {"vLLM": "0.32.0", "model configuration": "sha256:aa", "--max-num-seqs": "4"}


class Nodes:
    """A multi-node server on 127.0.0.1; each node has its own record: ``node0``, ``node1``, …"""

    def __init__(self, bench: Bench, count: int = 2) -> None:
        self.bench, self.count, self.link = bench, count, free_port()

    def spec(self, rank: int, answer: Any = None, seconds: float = 60.0, options: Any = (), **other: str) -> LaunchSpec:
        node = NodeSpec(rank, self.count, "127.0.0.1", self.link, seconds, {**SAME, **other})
        if rank:
            spec = self.bench.spec(*options, node=node)
            return LaunchSpec(spec.argv, spec.host, 0, node=node)
        known = {"GET /v1/models": [200, MODELS], "GET /metrics": [200, ""]}
        known["POST /v1/completions"] = answer or [200, COMPLETION]
        return self.bench.spec("--answers", json.dumps(known), *options, node=node, warm_up=WarmUp())

    def start(self, rank: int, *more: Any, **other: Any) -> None:
        self.bench.launch(self.spec(rank, *more, **other), f"node{rank}")

    def wait(self, rank: int, state: State) -> ServerRecord:
        return self.bench.wait(state, f"node{rank}")

    def ready(self) -> None:
        for rank in range(self.count):
            self.start(rank)
        for rank in range(self.count):
            self.wait(rank, State.READY)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        server = self.bench.read(f"node{rank}").server
        assert server is not None
        processes.send(server, number)

    def why(self, rank: int) -> tuple[Cause, str]:
        """Result of ``diagnose`` on a node's log."""
        found = diagnose(self.bench.log(f"node{rank}").splitlines())
        return found.cause, found.evidence


@pytest.fixture
def nodes(bench: Bench) -> Nodes:
    return Nodes(bench)


def test_nodes_start_together_and_are_ready_after_one_request(nodes: Nodes) -> None:
    nodes.start(0)
    waiting = nodes.bench.until(lambda record: "waiting for node 1" in record.reason, "node0")
    assert (waiting.state, waiting.server) == (State.STARTING, None)
    nodes.start(1)
    assert nodes.wait(0, State.READY).current.warm_up is not None
    headless = nodes.wait(1, State.READY)
    assert headless.server is not None  # its process runs, but has no port to query
    assert headless.current.spec.port == 0


def test_headless_node_logs_each_start(nodes: Nodes) -> None:
    nodes.ready()
    assert nodes.bench.log("node1").startswith("vllm-console: all nodes have joined and are equal\n")


@pytest.mark.parametrize("lost", [0, 1])
def test_lost_node_ends_the_other_which_reports_it(nodes: Nodes, lost: int) -> None:
    nodes.ready()
    nodes.kill(lost)
    ended = nodes.wait(1 - lost, State.FAILED)
    assert ended.reason.startswith(f"node {lost} is gone: killed by signal SIGKILL")
    assert ended.exit is not None
    assert not ended.exit.requested
    cause, evidence = nodes.why(1 - lost)
    assert (cause, evidence.partition(":")[0]) == (Cause.ENGINE_DIED, "vllm-console")
    assert f"node {lost} is gone" in evidence
    nodes.wait(lost, State.FAILED)


def test_node_exit_with_code_0_counts_as_lost(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.start(1, options=("--exit-after", "0.3"))
    assert "node 1 is gone: exited with code 0" in nodes.wait(0, State.FAILED).reason
    assert nodes.wait(1, State.FAILED).reason == "exited with code 0"


@pytest.mark.parametrize("asked", [0, 1])
def test_stopping_one_node_stops_the_other(nodes: Nodes, asked: int) -> None:
    nodes.ready()
    nodes.bench.stopped(f"node{asked}")
    other = nodes.wait(1 - asked, State.STOPPED)
    assert other.reason.startswith(f"node {asked} was stopped by a request on that node")
    assert other.exit is not None
    assert other.exit.requested


def test_healthy_server_without_completions_is_never_ready(nodes: Nodes) -> None:
    nodes.start(0, [500, ERROR])
    nodes.start(1)
    first = nodes.wait(0, State.FAILED)
    assert first.current.ready_at is None
    assert "the first request failed" in first.reason
    second = nodes.wait(1, State.FAILED)
    assert second.current.ready_at is None
    assert "node 0 is gone: /health answered, but the first request failed" in second.reason


def test_server_refusing_the_request_is_never_ready(nodes: Nodes) -> None:
    nodes.start(0, [401, {"error": "Unauthorized"}])
    nodes.start(1)
    assert nodes.wait(0, State.FAILED).current.ready_at is None
    assert nodes.wait(1, State.FAILED).current.ready_at is None


def test_restarted_node_can_be_stopped_while_it_waits_for_the_others(nodes: Nodes) -> None:
    nodes.ready()
    nodes.bench.restart(nodes.spec(0), "node0")
    nodes.wait(1, State.STOPPED)
    nodes.bench.until(lambda record: record.current.number == 2 and "waiting for node 1" in record.reason, "node0")
    stopped = nodes.bench.stopped("node0")
    assert stopped.current.number == 2
    assert not stopped.start_pending


def test_mismatched_node_is_refused_and_may_retry(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.start(1, vLLM="0.31.0")
    refused = nodes.wait(1, State.FAILED)
    assert refused.reason == "node 1 has vLLM 0.31.0, node 0 has vLLM 0.32.0"
    assert refused.server is None
    assert nodes.why(1)[0] is Cause.NODES_DIFFER
    nodes.bench.until(lambda record: record.reason.startswith("node 1 has vLLM 0.31.0"), "node0")
    nodes.bench.restart(nodes.spec(1), "node1")
    nodes.wait(0, State.READY)
    nodes.wait(1, State.READY)


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_node_is_named(nodes: Nodes, rank: int) -> None:
    nodes.start(rank, seconds=0.5)
    record = nodes.wait(rank, State.FAILED)
    assert f"node {1 - rank} did not" in record.reason
    assert record.server is None
    assert nodes.why(rank)[0] is Cause.NCCL


def test_keeper_kill_ends_other_nodes_and_adopting_keeper_ends_its_own(nodes: Nodes) -> None:
    nodes.ready()
    nodes.bench.orphaned(nodes.bench.read("node1"))
    assert "node 1 is gone: the connection to its keeper ended" in nodes.wait(0, State.FAILED).reason
    assert nodes.bench.adopt() == ["node1"]
    adopted = nodes.wait(1, State.FAILED)
    assert "its keeper ended, and with it the link to the other nodes" in adopted.reason


def test_stop_while_waiting_for_nodes(nodes: Nodes) -> None:
    nodes.start(0)
    assert nodes.bench.stopped("node0").reason == "stopped as requested before its process was started"


def test_three_nodes_end_together(bench: Bench) -> None:
    nodes = Nodes(bench, 3)
    nodes.ready()
    nodes.kill(2)
    assert nodes.wait(0, State.FAILED).reason.startswith("node 2 is gone: killed by signal SIGKILL")
    assert nodes.wait(1, State.FAILED).reason.startswith("node 2 is gone: killed by signal SIGKILL")


def test_foreign_connections_on_port_are_ignored(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.bench.until(lambda record: "waiting for node 1" in record.reason, "node0")
    held = []
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"[" * 70_000, b'{"rank": 1}\n', b"\xff" * 2000 + b"\n", b""):
        stranger = socket.create_connection(("127.0.0.1", nodes.link))
        held.append(stranger)
        with contextlib.suppress(OSError):
            stranger.sendall(said)
    nodes.start(1)
    nodes.wait(0, State.READY)
    nodes.wait(1, State.READY)
    with pytest.raises(ConnectionRefusedError):
        until(lambda: socket.create_connection(("127.0.0.1", nodes.link)).close(), "the port's end")
    for stranger in held:
        stranger.close()


def test_port_used_by_another_program_is_named(nodes: Nodes) -> None:
    with socket.create_server(("127.0.0.1", nodes.link)):
        nodes.start(0)
        reason = nodes.wait(0, State.FAILED).reason
    assert reason == f"can't wait for the other nodes on 127.0.0.1 port {nodes.link}: {os.strerror(errno.EADDRINUSE)}"
