"""Saved matrices as copied from terminals, logs and web pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_launchers.host.gpu.document import host_from_topo
from vllm_launchers.host.gpu.host import Gpu, Host, HostError

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection that leaves the socket
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""

BRIDGED = (
    "\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV4\tSYS\tPHB\t0-7,16-23\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tSYS\tPHB\t0-7,16-23\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t8-15,24-31\t1\t\tN/A\n"
    "NIC0\tPHB\tPHB\tSYS\t X \t\t\t\n" + LEGEND
)


def kinds(host: Host) -> dict[tuple[int, int], str]:
    return {(link.a, link.b): link.kind for link in host.links}


EXPECTED = {(0, 1): "NV4", (0, 2): "SYS", (1, 2): "SYS"}


def test_links_affinity_and_islands_are_read() -> None:
    host = host_from_topo(BRIDGED)
    assert kinds(host) == EXPECTED
    assert host.islands == ((0, 1), (2,))
    assert [gpu.numa_node for gpu in host.gpus] == [0, 0, 1]
    assert host.gpus[2].cpu_affinity == "8-15,24-31"
    assert [gpu.memory_gib for gpu in host.gpus] == [None] * 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("\tGPU0\tGPU1", "\t\x1b[4mGPU0\tGPU1").replace("NUMA ID\n", "NUMA ID\x1b[0m\n"),
        lambda text: text.replace("\tGPU0\tGPU1", "\t\ufffd[4mGPU0\tGPU1").replace("NUMA ID\n", "NUMA ID\ufffd[0m\n"),
        lambda text: text.replace("\tGPU0\tGPU1", "\t^[[4mGPU0\tGPU1").replace("NUMA ID\n", "NUMA ID^[[0m\n"),
        lambda text: text.replace("\tGPU0\tGPU1", "\t[4mGPU0\tGPU1").replace("NUMA ID\n", "NUMA ID[0m\n"),
        lambda text: text.replace("\tGPU0\tGPU1", "\t\\x1b[4mGPU0\tGPU1").replace("NUMA ID\n", "NUMA ID\\x1b[0m\n"),
        lambda text: text.replace("\t", "    "),
        lambda text: text.lstrip(),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "$ nvidia-smi topo -m\n" + text,
        lambda text: "a log line about GPU0 and GPU1\n\n" + text + "\nafterwards\n" + text.replace("NV4", "PIX"),
        lambda text: text.replace("SYS\tPHB\t0-7", "SYSPHB\t0-7"),
        lambda text: text.replace("\tNIC0\tCPU", "\n\tNIC0\tCPU").replace("\tSYS\tPHB\t", "\tSYS\n\tPHB\t"),
        lambda text: text.replace("GPU", "| GPU").replace("\t", " | "),
        lambda text: text.replace("NIC0", "mlx5_0"),
        lambda text: text.split("\nLegend")[0],
        lambda text: text.replace("GPU0\t X ", "  GPU0\t X "),
        lambda text: text.replace("\n", "\n\n"),
        lambda text: text.replace("\n", "\r\r\n"),
        lambda text: "\n".join(f"> {line}" for line in text.splitlines()),
        lambda text: "\n".join(f"2026-01-02 03:04:05 (rank 0) [1,0]: {line}" for line in text.splitlines()),
        lambda text: "GPU0 GPU1 are busy\n" + text,
    ],
)
def test_matrix_is_read_in_every_saved_form(spoil: object) -> None:
    assert kinds(host_from_topo(spoil(BRIDGED))) == EXPECTED  # type: ignore[operator]


def test_one_gpu_among_network_cards_has_no_links() -> None:
    text = (
        "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tNODE\t3,67\t0\t\tN/A\n"
        "NIC0\tNODE\t X \t\t\t\n"
    )
    host = host_from_topo(text)
    assert [gpu.index for gpu in host.gpus] == [0]
    assert host.links == ()
    assert host.gpus[0].cpu_affinity == "3,67"


def test_model_name_gives_memory_and_bandwidth() -> None:
    host = host_from_topo(BRIDGED, "a6000", hostname="saved")
    assert {gpu.name for gpu in host.gpus} == {"NVIDIA RTX A6000"}
    assert {gpu.free_gib for gpu in host.gpus} == {48.0}
    assert {link.bandwidth_gbs for link in host.links if link.kind == "NV4"} == {112.5}
    assert {link.bandwidth_gbs for link in host.links if link.kind == "SYS"} == {63.0}


def test_many_gpus_with_equal_links_are_on_a_switch() -> None:
    names = [f"GPU{i}" for i in range(8)]
    rows = [f"{a}\t" + "\t".join(" X " if a == b else "NV18" for b in names) + "\t0-3\t0" for a in names]
    text = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\n" + "\n".join(rows)
    host = host_from_topo(text, "H100 80GB HBM3")
    assert {(link.kind, link.switch, link.bandwidth_gbs) for link in host.links} == {("NV18", True, 900.0)}


def test_asymmetric_links_use_the_farther_kind() -> None:
    assert kinds(host_from_topo(BRIDGED.replace("GPU1\tNV4", "GPU1\tPHB")))[0, 1] == "PHB"


@pytest.mark.parametrize(
    ("text", "message_pattern"),
    [
        ("", "no matrix"),
        ("nvidia-smi has failed because it couldn't communicate with the driver", "no matrix"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-3\n", "no row for GPU1"),
        ("\tGPU0\tNIC0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\tPIX\nGPU1\tNV4\t X \tPIX\n", "does not fit its heading"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tWIFI\t0-3\nGPU1\tWIFI\t X \t0-3\n", "row GPU0"),
        pytest.param("x" * 2_000_000, "larger than", id="huge"),
        pytest.param("\tGPU0\tGPU0\nGPU0\tX\tX\n", "a GPU twice", id="twice"),
        pytest.param("\tGPU0\tNIC0\tGPU1\nGPU0\tX\tNV4 0\nGPU1\tNV4\tX 0\n", "has 2 links, then", id="short"),
        pytest.param("\t" + "\t".join(f"GPU{i}" for i in range(200)) + "\tCPU Affinity\n", "200 GPUs", id="many"),
    ],
)
def test_invalid_matrix_is_reported_in_one_sentence(text: str, message_pattern: str) -> None:
    with pytest.raises(HostError, match=message_pattern) as caught:
        host_from_topo(text)
    assert "\n" not in str(caught.value)


def test_unknown_model_is_reported_with_a_similar_one() -> None:
    with pytest.raises(HostError, match="did you mean 'NVIDIA"):
        host_from_topo(BRIDGED, "RTX 4091 4090")


@given(st.text(alphabet="GPU01NIC\tX VS4YHB-,\n\x1b[m", max_size=300))
def test_any_text_gives_a_host_or_a_message(text: str) -> None:
    message, host = "", Host(gpus=(Gpu(0),))
    try:
        host = host_from_topo(text)
    except HostError as error:
        message = str(error)
    assert "\n" not in message
    assert host.gpus
