"""What a node reports about others: how their fingerprints differ, and which nodes did not join."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from vllm_launchers.keeper import node_link
from vllm_launchers.keeper.lifecycle import NodeNews, NodeStep
from vllm_launchers.keeper.node_link import NodeLink, fingerprint_difference
from vllm_launchers.keeper.records import NodeSpec

OURS = {"vLLM": "0.32.0", "model configuration": "sha256:aa", "--max-num-seqs": "4", "--enforce-eager": "true"}


def test_equal_fingerprints_do_not_differ() -> None:
    assert fingerprint_difference(OURS, dict(reversed(OURS.items())), 0, 1) == ""


def test_versions_hashes_and_flags_are_named() -> None:
    theirs = {**OURS, "vLLM": "0.31.0", "model configuration": "sha256:bb"}
    assert fingerprint_difference(OURS, theirs, 0, 1) == (
        "node 1 has vLLM 0.31.0, node 0 has vLLM 0.32.0; node 1 and node 0 have different model configurations"
    )
    fewer = {name: value for name, value in OURS.items() if name != "--max-num-seqs"}
    assert fingerprint_difference(OURS, fewer, 0, 3) == "node 3 has no --max-num-seqs, node 0 has --max-num-seqs 4"


def test_unknown_values_are_not_compared() -> None:
    assert fingerprint_difference(OURS, {**OURS, "model configuration": ""}, 0, 1) == ""


def test_text_from_another_machine_is_short_and_printable() -> None:
    many = {f"--flag-{number}\x1b[2J": "x" * 100 for number in range(50)}
    text = fingerprint_difference(OURS, {**OURS, **many}, 0, 1)
    assert text.isprintable()
    assert len(text) <= 300


def test_admitted_node_reports_that_the_others_did_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    now, news = [0.0], list[NodeNews]()

    def post(event: object) -> None:
        assert isinstance(event, NodeNews)
        news.append(event)
        if event.message.startswith("node 0 has answered"):
            now[0] = 1e6  # after the deadline

    monkeypatch.setattr(node_link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = NodeSpec(1, 3, *listener.getsockname(), seconds=5.0)
        link = threading.Thread(target=NodeLink(node, 1, post).run)
        link.start()
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b'{"do": "wait"}\n')
            link.join()
    assert news[-1].step is NodeStep.MISSING
    assert news[-1].message == f"the other nodes did not join node 0 on 127.0.0.1 port {node.port} within 5s"
