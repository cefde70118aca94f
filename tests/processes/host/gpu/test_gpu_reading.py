"""What the real pynvml reads from a stub driver: complete, and with one function missing at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from vllm_launchers.host.gpu.document import decode_host, encode_host, recorded_hosts
from vllm_launchers.host.gpu.host import Gpu, Holder, Host, NvLink
from vllm_launchers.host.gpu.nvml import Nvml
from vllm_launchers.host.gpu.reader import LinkReader

NOT_SUPPORTED, NO_PERMISSION, LOST, UNKNOWN = 3, 4, 15, 999
ESSENTIAL = {"nvmlInitWithFlags", "nvmlShutdown", "nvmlDeviceGetHandleByIndex_v2"}
"""Without these functions, no GPU can be read."""

FOUND_ELSEWHERE = {
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlEventSetCreate",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetFree",
    "nvmlEventSetWait_v2",
}
"""Functions whose failure changes nothing on these hosts: another one returns the same, or they return nothing."""

LOSES = {
    "nvmlSystemGetDriverVersion": {"driver"},
    "nvmlDeviceGetUUID": {"uuid", "mig"},
    "nvmlDeviceGetName": {"name", "profile"},
    "nvmlDeviceGetPciInfo_v3": {"pci_bus_id", "remote", "numa_node"},
    "nvmlDeviceGetCudaComputeCapability": {"compute_capability"},
    "nvmlDeviceGetArchitecture": {"architecture"},
    "nvmlDeviceGetCpuAffinity": {"cpu_affinity"},
    "nvmlDeviceGetMemoryAffinity": {"numa_node"},
    "nvmlDeviceGetMaxClockInfo": {"clock_max_mhz", "memory_clock_max_mhz"},
    "nvmlDeviceGetClockInfo": {"clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"pcie_generation_max"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"pcie_width_max"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_width"},
    "nvmlDeviceGetPcieThroughput": {"pcie_sent_gbs", "pcie_received_gbs"},
    "nvmlDeviceGetPcieReplayCounter": {"pcie_replays"},
    "nvmlDeviceGetEccMode": {"ecc"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected", "ecc_uncorrected"},
    "nvmlDeviceGetPersistenceMode": {"persistence"},
    "nvmlDeviceGetMigMode": {"mig_mode", "mig"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_mj"},
    "nvmlDeviceGetUtilizationRates": {"utilization", "memory_utilization"},
    "nvmlDeviceGetMaxMigDeviceCount": {"mig"},
    "nvmlDeviceGetMigDeviceHandleByIndex": {"mig"},
    "nvmlDeviceGetGpuInstanceId": {"gpu_instance"},
    "nvmlDeviceGetComputeInstanceId": {"compute_instance"},
    "nvmlDeviceGetNvLinkState": {"active"},
    "nvmlDeviceGetNvLinkVersion": {"version"},
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": {"remote"},
    "nvmlDeviceGetNvLinkRemoteDeviceType": {"switch"},  # of a port, and whether its pair is connected by a switch
    "nvmlDeviceGetNvLinkErrorCounter": {"errors"},
    "nvmlDeviceGetFieldValues": {"nvlink_speed_mbs", "sent_kib", "received_kib"},
    "nvmlDeviceGetTopologyCommonAncestor": {"links"},
    "nvmlDeviceGetP2PStatus": {"p2p"},
}
"""Keys of the document that only this function provides. (The links derived from them are in the test.)"""

LINKS_COME_FROM = {"active", "version", "nvlink_speed_mbs", "pcie_generation_max", "pcie_width"}
FOLLOWS = {"links", "islands", "kind", "bandwidth_gbs"}
"""Keys derived from others."""

EACH = """
import json, os, sys
from vllm_launchers.host.gpu.document import encode_host
from vllm_launchers.host.gpu.reader import GpuReader
answers = {}
for function in ["", *sys.argv[2:]]:
    with open(os.environ["NVML_STUB_CONTROL"] + ".new", "w") as file:
        file.write(f"{function} -1 {sys.argv[1]} 0\\n" if function else "")
    os.replace(os.environ["NVML_STUB_CONTROL"] + ".new", os.environ["NVML_STUB_CONTROL"])
    reader = GpuReader()
    reader.open()
    answers[function] = encode_host(reader.sample(1.0))
    reader.close()
print(json.dumps(answers))
"""


def without_machine(document: dict[str, Any]) -> dict[str, Any]:
    """The parts of a document that come from the driver."""
    return {key: document[key] for key in ("driver", "cuda", "gpus", "links", "islands")}


def differing(one: Any, other: Any, key: str = "") -> set[str]:
    """The innermost keys whose values differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return set().union(*(differing(one[name], other[name], name) for name in one))
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return set().union(set(), *(differing(a, b, key) for a, b in zip(one, other, strict=True)))
    return set() if one == other else {key}


@pytest.mark.parametrize("name", recorded_hosts())
def test_recorded_host_is_read_as_recorded(
    name: str, recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    host = recorded(name)
    read = make_stub(host).sample()
    unseen = [replace(gpu, used_by=bare(gpu.holders)) for gpu in host.gpus]
    assert [replace(gpu, used_by=bare(gpu.holders)) for gpu in read.gpus] == [
        replace(gpu, nvlink_speed_mbs=gpu.nvlink_speed_mbs and float(gpu.nvlink_speed_mbs)) for gpu in unseen
    ]
    assert (read.driver, read.cuda) == (host.driver, host.cuda)
    assert read.links == host.links
    assert read.islands == host.islands
    assert read.hostname
    assert read.memory_gib


def bare(holders: tuple[Holder, ...]) -> tuple[Holder, ...]:
    """What NVML itself knows about processes."""
    return tuple(Holder(h.pid, gib=h.gib, kind=h.kind, instance=h.instance) for h in holders)


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN])
@pytest.mark.parametrize("name", ["4xa6000", "8xh100", "1xa100-mig"])
def test_failing_function_loses_only_its_own_values(
    name: str, code: int, recorded: Callable[[str], Host], make_stub: Callable[[Host], Any], stub_functions: list[str]
) -> None:
    functions = [function for function in stub_functions if function not in ESSENTIAL and function != "nvmlErrorString"]
    assert set(functions) <= FOUND_ELSEWHERE | LOSES.keys()
    answers = make_stub(recorded(name)).run(EACH, str(code), *functions)
    whole = without_machine(answers[""])
    for function in functions:
        lost = differing(whole, without_machine(answers[function]))
        allowed = LOSES.get(function, set())
        if allowed & LINKS_COME_FROM:
            allowed = allowed | FOLLOWS
        assert lost <= allowed, function
        assert len(answers[function]["gpus"]) == len(whole["gpus"])


def test_memory_shared_with_the_cpu_is_the_machines(make_stub: Callable[[Host], Any]) -> None:
    machine = psutil.virtual_memory().total / 2**30
    for name, size in (("NVIDIA GB10", machine), ("NVIDIA L4", None)):
        (gpu,) = make_stub(Host(driver="580.1", cuda="13.0", gpus=(Gpu(0, "GPU-0", name),))).sample().gpus
        assert gpu.memory_gib == (size and pytest.approx(size, abs=0.001))
        assert (gpu.free_gib is not None) is (size is not None)
        assert gpu.used_gib is None


def test_host_without_any_values_keeps_its_gpus(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any], stub_functions: list[str]
) -> None:
    functions = [function for function in stub_functions if function not in ESSENTIAL | {"nvmlErrorString"}]
    host = make_stub(recorded("4xa6000")).sample(*(f"{function} -1 3 0" for function in functions))
    assert [gpu.index for gpu in host.gpus] == [0, 1, 2, 3]
    assert {gpu.free_gib for gpu in host.gpus} == {None}
    assert {gpu.used_by for gpu in host.gpus} == {None}


def test_processes_are_named_and_foreign_container_pids_stay_pids(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    host = recorded("1xrtx4090")
    here, elsewhere = Holder(os.getpid(), gib=2.0), Holder(4_190_001, gib=1.5)
    silent = Holder(1, gib=None)
    stub = make_stub(replace(host, gpus=(replace(host.gpus[0], used_by=(here, elsewhere, silent)),)))
    by_pid = {holder.pid: holder for holder in stub.sample().gpus[0].holders}
    own = by_pid[os.getpid()]
    assert own.seen
    assert own.command
    assert "python" in own.command or "pytest" in own.command
    assert own.gib == 2.0
    assert own.started_at is not None
    assert by_pid[4_190_001] == elsewhere
    assert not by_pid[4_190_001].seen
    assert by_pid[1].gib is None


def test_child_processes_of_a_server_are_named_as_its_own(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    host = recorded("1xrtx4090")
    stub = make_stub(replace(host, gpus=(replace(host.gpus[0], used_by=(Holder(os.getpid(), gib=2.0),)),)))
    code = """
import json, sys
from vllm_launchers.host.gpu.reader import GpuReader
reader = GpuReader(lambda: {int(sys.argv[1]): "chat"})
reader.open()
print(json.dumps(reader.sample(1.0).gpus[0].used_by[0].server))
"""
    assert stub.run(code, str(os.getpid())) == "chat"
    assert stub.run(code, str(os.getppid())) == "chat"
    assert stub.run(code, "4190001") is None


def test_processes_are_looked_up_only_when_pids_change(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    code = """
import json
from vllm_launchers.host.gpu import reader as processes
from vllm_launchers.host.gpu.reader import GpuReader
looked = []
describe = processes.describe_process
processes.describe_process = lambda pid: looked.append(pid) or describe(pid)
reader = GpuReader()
reader.open()
for at in range(5):
    reader.sample(float(at))
print(json.dumps(looked))
"""
    assert sorted(make_stub(recorded("8xh100")).run(code)) == [48211, 51830, 51831]


@pytest.mark.parametrize("lines", [("counter_step 1000000",), ("counter_step 1000000", "bytes_only")])
def test_nvlink_traffic_is_a_rate_between_two_samples(
    lines: tuple[str, ...], recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    code = """
import json
from vllm_launchers.host.gpu.reader import GpuReader
reader = GpuReader()
reader.open()
first, second = reader.sample(10.0), reader.sample(12.0)
rates = [[[gpu.nvlink_sent_gbs, gpu.nvlink_received_gbs] for gpu in host.gpus] for host in (first, second)]
ports = [[[port.sent_gbs, port.received_gbs] for port in host.gpus[0].nvlinks] for host in (first, second)]
print(json.dumps([rates, ports]))
"""
    stub = make_stub(recorded("2xrtx3090"))
    stub.set(*lines)
    (first, second), (ports_first, ports_second) = stub.run(code)
    # Four ports with a million KiB each in two seconds.
    port = pytest.approx(1_000_000 * 1024 / 1e9 / 2, rel=2e-3)
    assert ports_first == [[None, None]] * 4
    assert ports_second == [[port, port]] * 4
    assert first == [[None, None]] * 2
    assert second == [[pytest.approx(4 * 1_000_000 * 1024 / 1e9 / 2, rel=2e-3)] * 2] * 2


def test_decreased_counter_gives_no_rate_for_its_link_only() -> None:
    ask: list[list[int | float | None]] = [[100.0, 100.0, 500.0, 500.0], [90.0, 100.0, 1_000_000.0, 500.0]]
    links = LinkReader(Nvml())
    links._links, links._wanted = (NvLink(0, True), NvLink(1, True)), [(1, 0), (2, 0), (1, 1), (2, 1)]
    links._nvml.fields = lambda handle, wanted: ask.pop(0)  # type: ignore[method-assign]
    links.often(None, 10.0)
    links.often(None, 11.0)
    assert [link.sent_gbs for link in links.links] == [None, pytest.approx(1.023, rel=1e-2)]
    assert links.traffic == (pytest.approx(1.023, rel=1e-2), 0.0)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (9, "not loaded"),
        (4, "no permission"),
        (18, "differ in version"),
        (999, "can't be queried"),
        (17, "blocked"),
    ],
)
def test_driver_that_cannot_be_opened_is_one_sentence(
    code: int, message: str, recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    stub = make_stub(recorded("4xa6000"))
    stub.set(f"nvmlInitWithFlags -1 {code} 0")
    source = (
        "import json; from vllm_launchers.host.gpu.monitor import read_once; print(json.dumps(read_once().problem))"
    )
    problem = stub.run(source)
    assert message in problem
    assert "\n" not in problem


def test_build_is_not_chosen_without_the_driver_that_is_installed(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    stub = make_stub(recorded("4xa6000"))
    source = "import json; from vllm_launchers.host.gpu.nvml import driver_version; print(json.dumps(driver_version()))"
    assert stub.run(source) == recorded("4xa6000").driver
    for function, message in (("nvmlInitWithFlags", "differ in version"), ("nvmlSystemGetDriverVersion", "not report")):
        stub.set(f"{function} -1 18 0")
        refused = stub.command("engines", "install", "--dry-run")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert message in refused.stderr
        assert refused.stderr.endswith("For the CPU build use --cpu\n")


def test_without_a_driver_the_rest_of_the_machine_is_known() -> None:
    source = (
        "import json; from vllm_launchers.host.gpu.monitor import read_once\n"
        "from vllm_launchers.host.gpu.document import encode_host; print(json.dumps(encode_host(read_once())))"
    )
    # On a machine with a real driver, its GPUs are found instead.
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    host = decode_host(done.stdout.encode())
    assert host.memory_gib
    assert host.cpu_cores
    assert bool(host.gpus) != bool(host.problem)


def test_gpu_lost_at_startup_does_not_hide_the_others(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    host = make_stub(recorded("4xa6000")).sample("* 2 15 0")
    assert [bool(gpu.lost) for gpu in host.gpus] == [False, False, True, False]
    assert host.gpus[3].free_gib == pytest.approx(47.588)
    assert host.islands == ((0, 1), (2,), (3,))


def test_commands_read_this_machine_through_its_driver(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    stub = make_stub(recorded("4xa6000"))
    assert stub.command("gpus", "--free", "2").stdout == "2,3\n"
    assert len(json.loads(stub.command("host", "--json").stdout)["gpus"]) == 4
    stub.set("* 3 15 0")
    answer = stub.command("gpus", "--free", "2")
    assert answer.stdout == "1,2\n"
    assert "crosses the CPU interconnect" in answer.stderr
    assert "! GPU 3" in stub.command("topology").stdout
    assert "fell off the bus" in stub.command("host").stdout


def test_host_documents_round_trip(recorded: Callable[[str], Host]) -> None:
    for name in recorded_hosts():
        host = recorded(name)
        assert decode_host(json.dumps(encode_host(host)).encode()) == host


PCIE = """
import json, os
from pathlib import Path
from vllm_launchers.host.gpu.reader import GpuReader
control = Path(os.environ["NVML_STUB_CONTROL"])
reader = GpuReader()
reader.open()
seen = []
for at, rate in ((100.0, 1_000_000), (101.0, 2_000_000), (105.0, 3_000_000)):
    control.write_text(f"set 0 pcie_sent {rate}\\nset 0 pcie_received {rate // 2}\\nset 0 clock {int(at)}\\n")
    gpu = reader.sample(at).gpus[0]
    seen.append([gpu.pcie_sent_gbs, gpu.pcie_received_gbs, gpu.clock_mhz])
print(json.dumps(seen))
"""


def test_pcie_traffic_is_measured_every_five_seconds(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    """Reading both directions of a GPU takes the driver 40 ms."""
    seen = make_stub(recorded("1xrtx4090")).run(PCIE)
    assert seen == [[1.0, 0.5, 100], [1.0, 0.5, 101], [3.0, 1.5, 105]]
