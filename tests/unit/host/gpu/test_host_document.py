"""Host documents from outside: validated, with errors in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_launchers.engine_model.gpu_models import find_model
from vllm_launchers.host.gpu.document import decode_host, read_host, recorded_hosts
from vllm_launchers.host.gpu.host import Holder, HostError, with_servers

FOREIGN: dict[str, Any] = {
    "hostname": "big",
    "driver": "580.95",
    "cuda": "13.0",
    "cpu": "two of them",
    "memory_gib": 512,
    "gpus": [
        {"index": 0, "uuid": "GPU-a", "name": "NVIDIA RTX A6000", "memory_gib": 48, "free_gib": 40.5, "colour": "red",
         "used_by": [{"pid": 5, "user": "anna", "gib": 7.5, "server": None}], "utilization": 93},
        {"index": 1, "uuid": "GPU-b", "name": "NVIDIA RTX A6000", "memory_gib": 48, "free_gib": 48, "used_by": []},
    ],
    "links": [{"a": 0, "b": 1, "kind": "NV4"}],
    "weather": "fine",
}  # fmt: skip


KEYS = [
    "gpus",
    "index",
    "links",
    "islands",
    "a",
    "b",
    "kind",
    "used_by",
    "pid",
    "gib",
    "memory_gib",
    "free_gib",
    "errors",
]


def changed(**changes: Any) -> bytes:
    return json.dumps(FOREIGN | changes).encode()


def test_documented_format_is_read() -> None:
    host = decode_host(changed(islands=[[0, 1]]))
    assert host.gpus[0].holders == (Holder(5, user="anna", gib=7.5),)
    assert host.gpus[0].used_gib == 7.5
    assert host.links[0].bandwidth_gbs == 112.5


def test_derivable_values_may_be_omitted() -> None:
    assert decode_host(changed()).islands == ((0, 1),)
    assert decode_host(b'{"gpus": [{"index": 0}]}').gpus[0].free_gib is None
    assert decode_host(b"{}").gpus == ()


@pytest.mark.parametrize(
    ("data", "message_pattern"),
    [
        (b"", "not JSON"),
        (b"[1]", "not a host document"),
        (b"\xff\xfe\x00", "not JSON"),
        pytest.param(b'{"x": ' + b"[" * 100_000, "JSON", id="deep"),
        (b'{"gpus": {"0": 1}}', "gpus"),
        (b'{"gpus": [{"index": "first"}]}', r"gpus\[0?\.*\]?"),
        (b'{"gpus": [{"index": 0, "memory_gib": 1e999}]}', "JSON|out of range|range"),
        (b'{"gpus": [{"index": 0}, {"index": 0}]}', "unique index"),
        (b'{"gpus": [{"index": -3}]}', "index"),
        (b'{"gpus": [{"index": 0, "memory_gib": -1.5}]}', "out of range"),
        *(
            (b'{"gpus": [{"index": 0, "%s": %s}]}' % (key, number), "out of range|range|too big|number")
            for key in (b"clock_mhz", b"ecc_corrected", b"memory_gib")
            for number in (b"9" * 400, b"-" + b"9" * 400)
        ),
        (b'{"gpus": [{"index": 0, "memory_gib": 24, "free_gib": 25}]}', "more than its total memory"),
        (b'{"gpus": [{"index": 0}], "links": [{"a": 0, "b": 9, "kind": "PIX"}]}', "0 to 9"),
        (b'{"gpus": [{"index": 0}], "links": [{"a": 0, "b": 0, "kind": "PIX"}]}', "0 to 0"),
        (b'{"gpus": [{"index": 0}], "islands": [[0, 4]]}', "islands"),
        pytest.param(json.dumps({"gpus": [{"index": i} for i in range(65)]}).encode(), "65 GPUs", id="many"),
        pytest.param(json.dumps({"hostname": "x" * 5000}).encode(), "longer than", id="long"),
        pytest.param(b'{"hostname": "' + b"x" * 9_000_000 + b'"}', "larger than", id="huge"),
    ],
)
def test_errors_are_reported_in_one_sentence(data: bytes, message_pattern: str) -> None:
    with pytest.raises(HostError, match=message_pattern) as caught:
        decode_host(data)
    assert "\n" not in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
        max_leaves=30,
    )
)
def test_any_json_gives_a_host_or_a_message(document: object) -> None:
    message = ""
    try:
        decode_host(json.dumps(document).encode())
    except HostError as error:
        message = str(error)
    assert "\n" not in message


def test_error_messages_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"no such file; recorded hosts: .*8xh100"):
        read_host(tmp_path / "missing.json")
    with pytest.raises(HostError, match="is not a file"):
        read_host(tmp_path)
    (tmp_path / "host.json").write_text("nonsense")
    with pytest.raises(HostError, match=r"host\.json: is not JSON"):
        read_host(tmp_path / "host.json")


def test_recorded_hosts_are_found_by_name() -> None:
    shipped = "8xh100 1xh100 1xh200 4xa6000 2xrtx3090 8xl40s 1xrtx4090 1xa100-mig"
    assert set(recorded_hosts()) == set(shipped.split())
    assert read_host(Path("8xh100")).hostname == "h100-box"


def test_servers_are_matched_to_processes_by_ancestors() -> None:
    host = decode_host(changed(gpus=[{"index": 0, "used_by": [{"pid": 5, "ancestors": [4, 3]}, {"pid": 9}]}], links=[]))
    assert [h.server for h in with_servers(host, {3: "chat"}).gpus[0].holders] == ["chat", None]
    assert [h.server for h in with_servers(host, {9: "coder"}).gpus[0].holders] == [None, "coder"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("H100", "NVIDIA H100 PCIe"),
        ("h100 80gb hbm3", "NVIDIA H100 80GB HBM3"),
        ("RTX A6000", "NVIDIA RTX A6000"),
        ("a6000", "NVIDIA RTX A6000"),
        ("L4", "NVIDIA L4"),
        ("l40s", "NVIDIA L40S"),
        ("rtx 3090", "NVIDIA GeForce RTX 3090"),
        ("NVIDIA H100 80 GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("GTX 970", None),
        ("", None),
    ],
)
def test_gpu_models_are_found_by_common_names(typed: str, expected: str | None) -> None:
    found = find_model(typed)
    assert (found.name if found else None) == expected
