"""For accelerators of other vendors, one sentence says what works with them; no name is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_launchers.host.environment import HostEnvironment
from vllm_launchers.host.gpu.document import host_from_topo
from vllm_launchers.host.gpu.host import NO_DRIVER, Gpu, Host, HostError
from vllm_launchers.host.gpu.vendors import no_driver, vendor_of, vendor_of_build, vendors_here
from vllm_launchers.plan.checks.hardware import hardware_findings
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.engines import Engine, EngineKind

TOPO = "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n"


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("AMD Instinct MI300X", "rocm"),
        ("MI300X", "rocm"),
        ("mi325x", "rocm"),
        ("AMD Radeon RX 7900 XTX", "rocm"),
        ("Radeon PRO W7900", "rocm"),
        ("gfx942", "rocm"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "xpu"),
        ("Arc A770", "xpu"),
        ("A310", "xpu"),
        ("B580", "xpu"),
        ("Intel Data Center GPU Max 1550", "xpu"),
        ("Intel Gaudi 3", "hpu"),
        ("HL-325L", "hpu"),
        ("TPU v5e", "tpu"),
        ("tpu_v6e", "tpu"),
        ("Google Trillium", "tpu"),
    ],
)
def test_names_of_other_vendors(name: str, build: str):
    vendor = vendor_of(name)
    assert vendor is not None
    assert vendor.build == build
    assert vendor is vendor_of_build(build)


@pytest.mark.parametrize(
    "name",
    [None, "", "H100", "NVIDIA RTX A6000", "RTX A4000", "NVIDIA A10", "L40S", "Quadro RTX 8000", "Tesla V100-SXM2-16GB",
     "NVIDIA GeForce RTX 4090", "B200", "GB200", "A100-SXM4-80GB", "my card", "RTX 5090", "NVIDIA GB10", "A30", "T4",
     "B300", "B300 SXM6"],
)  # fmt: skip
def test_nvidia_and_unknown_names_have_no_vendor(name: str | None):
    assert vendor_of(name) is None


def test_builds_without_other_devices():
    assert [vendor_of_build(build) for build in ("cuda", "cpu", None)] == [None, None, None]


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "Intel Gaudi 3", "Arc B580", "TPU v5e"])
def test_saved_matrix_with_other_vendors_gpus_is_refused(name: str):
    with pytest.raises(HostError) as caught:
        host_from_topo(TOPO, name)
    assert "not supported" in str(caught.value)
    assert "did you mean" not in str(caught.value)


def device(root: Path, bus: str, vendor: str, kind: str, number: str = "0x0001") -> None:
    folder = root / bus
    folder.mkdir(parents=True)
    for name, value in (("vendor", vendor), ("class", kind), ("device", number)):
        (folder / name).write_text(value + "\n")


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    return tmp_path / "dev"


def found(root: Path, dev: Path) -> list[str]:
    return [vendor.build for vendor in vendors_here(root, dev)]


def test_amd_gpu_counts_with_its_compute_device(tmp_path: Path, dev: Path):
    root = tmp_path / "pci"
    device(root, "0000:c1:00.0", "0x1002", "0x038000")
    assert found(root, dev) == []
    (dev / "kfd").touch()
    assert found(root, dev) == ["rocm"]
    assert "HIP_VISIBLE_DEVICES" in no_driver(root, dev)


@pytest.mark.parametrize(
    ("bus", "vendor", "kind", "number", "builds"),
    [
        ("0000:00:02.0", "0x8086", "0x030000", "0xa780", []),
        ("0000:03:00.0", "0x8086", "0x030000", "0xe20b", ["xpu"]),
        ("0000:33:00.0", "0x1da3", "0x120000", "0x1020", ["hpu"]),
        ("0000:00:05.0", "0x1ae0", "0x088000", "0x0063", ["tpu"]),
        ("0000:00:04.0", "0x1ae0", "0x020000", "0x0042", []),
        ("0000:01:00.0", "0x1002", "0x040300", "0xab38", []),
    ],
)
def test_devices_of_other_vendors(
    tmp_path: Path, dev: Path, bus: str, vendor: str, kind: str, number: str, builds: list[str]
):
    device(tmp_path / "pci", bus, vendor, kind, number)
    (dev / "kfd").touch()
    assert found(tmp_path / "pci", dev) == builds


def test_other_devices_are_not_reported_with_an_nvidia_gpu(tmp_path: Path, dev: Path):
    (dev / "kfd").touch()
    device(tmp_path / "pci", "0000:c1:00.0", "0x1002", "0x030000")
    device(tmp_path / "pci", "0000:c2:00.0", "0x10de", "0x030200")
    assert found(tmp_path / "pci", dev) == []
    assert no_driver(tmp_path / "pci", dev) == NO_DRIVER


def test_no_devices_to_read(tmp_path: Path, dev: Path):
    assert found(tmp_path / "nowhere", dev) == []
    (tmp_path / "pci" / "0000:00:01.0").mkdir(parents=True)
    assert found(tmp_path / "pci", dev) == []


def vendor_messages(build: str | None, inputs: PlanInputs, kind: EngineKind = EngineKind.VLLM) -> list[str]:
    engine = Engine(kind, ("/opt/vllm",), "0.33.0", build, "/opt/vllm")
    plan = Plan("chatbot", "org/model", engine, "127.0.0.1", 8000, (), {}, {}, {}, gpus=(0,))
    return [one.message for one in hardware_findings(plan, inputs) if one.code == "hardware_unsupported"]


def test_plan_mentions_another_vendor_once():
    host = Host(gpus=tuple(Gpu(index, name="AMD Instinct MI300X", memory_gib=191.5) for index in range(2)))
    amd = vendor_of_build("rocm")
    assert amd is not None
    assert vendor_messages("rocm", PlanInputs()) == vendor_messages("cuda", PlanInputs(host=host)) == [amd.sentence]
    here = PlanInputs(environment=HostEnvironment(accelerators=(amd.sentence,)))
    assert vendor_messages("cuda", here) == [amd.sentence]
    assert vendor_messages("cpu", here) == vendor_messages("cuda", PlanInputs()) == []
    assert vendor_messages("simulated", here, EngineKind.SIMULATED) == []
