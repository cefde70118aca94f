"""A stub of libnvidia-ml, compiled from a host document and loaded by pynvml in a separate process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_launchers.host.gpu.document import decode_host, recorded_hosts
from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.host.gpu.reader import ANCESTORS, ARCHITECTURES, P2P_STATUS, THROTTLE_REASONS, VERSIONS

SOURCE = Path(__file__).with_suffix(".c")
GIB = 1024**3


def number(value: float | None, scale: float = 1) -> int:
    return -1 if value is None else round(value * scale)


def text(value: str | None) -> str:
    return "0" if value is None else json.dumps(value)


def code(table: dict[int, str], word: str | None) -> int:
    return next((key for key, value in table.items() if value == word), -1)


def affinity(ranges: str | None) -> str:
    mask = 0
    for part in (ranges or "").split(","):
        low, _, high = part.partition("-")
        for bit in range(int(low or -1), int(high or low or -1) + 1):
            mask |= 1 << bit if bit >= 0 else 0
    return ", ".join(f"{mask >> (64 * word) & 0xFFFFFFFFFFFFFFFF}ULL" for word in range(16))


def gpu_arrays(gpu: Gpu) -> str:
    i = gpu.index
    processes = ", ".join(
        f"{{{h.pid}, {'0xFFFFFFFFFFFFFFFFULL' if h.gib is None else round(h.gib * GIB)}, "
        f"{'0xFFFFFFFF' if h.instance is None else h.instance}, {int(h.kind == 'graphics')}}}"
        for h in gpu.holders
    )
    migs = ", ".join(
        f"{{{text(m.uuid)}, {text(f'{gpu.name} MIG {m.profile}')}, {number(m.memory_gib, GIB)}, "
        f"{number(m.free_gib, GIB)}, {number(m.gpu_instance)}, {number(m.compute_instance)}}}"
        for m in gpu.mig
    )
    ports = ", ".join(
        f"{{{int(bool(p.active))}, {code(VERSIONS, p.version)}, {number(p.remote)}, {int(bool(p.switch))}, "
        f"{number(p.sent_kib)}, {number(p.received_kib)}, "
        f"{{{', '.join(str(p.errors.get(name, 0)) for name in ('replay', 'recovery', 'crc'))}}}}}"
        for p in gpu.nvlinks
    )
    empty = {"process": "{0}", "mig": "{0}", "port": "{0}"}
    return "".join(
        f"static struct {kind} {kind}_{i}[] = {{{values or empty[kind]}}};\n"
        for kind, values in (("process", processes), ("mig", migs), ("port", ports))
    )


def gpu_initialiser(gpu: Gpu) -> str:
    major, _, minor = (gpu.compute_capability or "-1.0").partition(".")
    bits = {word: bit for bit, word in THROTTLE_REASONS}
    throttle = -1 if gpu.throttle is None else sum(bits[word] for word in gpu.throttle)
    numbers = [
        *(number(value) for value in (gpu.utilization, gpu.memory_utilization, gpu.temperature_c)),
        number(gpu.power_w, 1000),
        number(gpu.power_limit_w, 1000),
        *map(number, (gpu.clock_mhz, gpu.clock_max_mhz, gpu.memory_clock_mhz, gpu.memory_clock_max_mhz)),
        number(gpu.energy_mj),
        throttle,
        *map(number, (gpu.ecc, gpu.persistence, gpu.mig_mode)),
        code(ARCHITECTURES, gpu.architecture),
        int(major),
        int(minor),
        *map(number, (gpu.pcie_generation, gpu.pcie_generation_max, gpu.pcie_width, gpu.pcie_width_max)),
        *map(number, (gpu.pcie_replays, gpu.numa_node, gpu.temperature_slowdown_c)),
        *(number(value, 1e6) for value in (gpu.pcie_sent_gbs, gpu.pcie_received_gbs)),
    ]
    counts = [
        int(gpu.cpu_affinity is not None),
        number(gpu.nvlink_speed_mbs),
        -1 if gpu.used_by is None else len(gpu.used_by),
        len(gpu.mig),
        len(gpu.nvlinks),
    ]
    memory = [number(value or 0, GIB) for value in (gpu.memory_gib, gpu.free_gib, gpu.used_gib)]
    i = gpu.index
    return (
        f"{{{i}, {text(gpu.uuid)}, {text(gpu.name)}, {text(gpu.pci_bus_id)}, {', '.join(map(str, memory))}, "
        f"{', '.join(map(str, numbers))}, {{{affinity(gpu.cpu_affinity)}}}, {', '.join(map(str, counts))}, "
        f"process_{i}, mig_{i}, port_{i}}}"
    )


def header(host: Host) -> str:
    """The host as C data."""
    major, _, minor = (host.cuda or "0.0").partition(".")
    count = len(host.gpus)

    def square(value: Callable[[int, int], int]) -> str:
        rows = ("{" + ", ".join(str(value(a, b)) for b in range(count)) + "}" for a in range(count))
        return "{" + ", ".join(rows) + "}"

    def ancestor(a: int, b: int) -> int:
        link = host.link(a, b)
        # An NVLink pair also has a PCIe path, which the document does not specify.
        kind = link.kind if link is not None else None
        return 50 if kind is not None and kind.startswith("NV") else {v: k for k, v in ANCESTORS.items()}.get(kind, -1)

    def status(a: int, b: int) -> int:
        link = host.link(a, b)
        return code(P2P_STATUS, link.p2p) if link is not None else -1

    return (
        f"#define DRIVER {text(host.driver)}\n#define CUDA {int(major) * 1000 + int(minor) * 10}\n"
        f"#define N_GPUS {count}\n"
        + "".join(map(gpu_arrays, host.gpus))
        + f"static struct gpu gpus[N_GPUS + 1] = {{{', '.join(map(gpu_initialiser, host.gpus))}}};\n"
        + f"static int ancestors[N_GPUS + 1][N_GPUS + 1] = {square(ancestor)};\n"
        + f"static int p2p[N_GPUS + 1][N_GPUS + 1] = {square(status)};\n"
    )


class Stub:
    """A compiled stub and its control file."""

    def __init__(self, folder: Path, control: Path) -> None:
        self.folder = folder
        self.control = control

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": str(self.folder), "NVML_STUB_CONTROL": str(self.control)}

    def set(self, *lines: str) -> None:
        new = self.control.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.control)

    def run(self, source: str, *words: str) -> Any:
        """Run Python with this driver and parse its output as JSON."""
        done = subprocess.run(
            [sys.executable, "-c", source, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``vllm-console`` with this driver."""
        return subprocess.run(
            [sys.executable, "-m", "vllm_console", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def sample(self, *lines: str) -> Host:
        """The host as `GpuReader` reads it with ``lines`` in the control file."""
        self.set(*lines)
        return decode_host(json.dumps(self.run(SAMPLE)).encode())


SAMPLE = """
import json
from vllm_launchers.host.gpu.document import encode_host
from vllm_launchers.host.gpu.reader import GpuReader
reader = GpuReader()
reader.open()
print(json.dumps(encode_host(reader.sample(1.0))))
reader.close()
"""


@pytest.fixture(scope="session")
def compiler() -> str:
    """The C compiler; without one, these tests are skipped, except in CI."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler: the stub of libnvidia-ml cannot be built")
        pytest.skip("no C compiler")
    return found


@pytest.fixture(scope="session")
def stub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvml")


@pytest.fixture
def make_stub(compiler: str, stub_cache: Path, tmp_path: Path) -> Callable[[Host], Stub]:
    def make_stub(host: Host) -> Stub:
        data = header(host)
        folder = stub_cache / hashlib.sha256(data.encode()).hexdigest()[:16]
        if not folder.exists():
            build = folder.with_suffix(".build")
            build.mkdir()
            (build / "host_data.h").write_text(data)
            words = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-I", str(build)]
            subprocess.run([*words, str(SOURCE), "-o", str(build / "libnvidia-ml.so.1")], check=True, timeout=120)
            build.rename(folder)
        stub = Stub(folder, tmp_path / "control")
        stub.set()
        return stub

    return make_stub


@pytest.fixture
def recorded() -> Callable[[str], Host]:
    return lambda name: decode_host(recorded_hosts()[name].read_bytes())


@pytest.fixture(scope="session")
def stub_functions() -> list[str]:
    source = SOURCE.read_text()
    named = r"\b(nvml[A-Z]\w+)\((?:const|void|struct|unsigned|char|int|u64)|^PROCESSES\((nvml\w+)"
    return sorted({one or other for one, other in re.findall(named, source, re.MULTILINE)})
