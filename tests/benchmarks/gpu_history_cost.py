"""Cost of the GPU history: bytes per hour and GPU, bytes written, CPU per sample, and reading a range.

Each host is recorded for some hours like a recorder does, with every value and link changing.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from vllm_console.fleet import chart_history
from vllm_console.fleet.gpu_charts import GpuCharts
from vllm_console.history.gpu_history import FIVES, GPU_HISTORY, GpuHistoryWriter
from vllm_console.history.time_view import CHART_RANGES, TimeView
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import Gpu, Host

HOSTS = ("1xrtx4090", "4xa6000", "8xh100")


def moving(gpu: Gpu, chance: random.Random) -> Gpu:
    """The GPU under load: every value changes."""
    links = tuple(
        replace(link, sent_gbs=chance.uniform(0, 20), received_gbs=chance.uniform(0, 20)) for link in gpu.nvlinks
    )
    return replace(
        gpu, utilization=chance.randint(0, 100), memory_utilization=chance.randint(0, 100),
        used_gib=chance.uniform(1, 70), temperature_c=chance.randint(30, 90), power_w=chance.uniform(60, 700),
        clock_mhz=chance.randint(200, 2000), memory_clock_mhz=2619, pcie_sent_gbs=chance.uniform(0, 20),
        pcie_received_gbs=chance.uniform(0, 20), nvlinks=links,
        nvlink_sent_gbs=chance.uniform(0, 300) if links else None,
        nvlink_received_gbs=chance.uniform(0, 300) if links else None,
    )  # fmt: skip


def written() -> int:
    """Bytes that this process has written."""
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar"))[7:])


def measure(name: str, hours: float) -> None:
    """Record a host, and read it back."""
    host, chance = read_host(Path(name)), random.Random(7)
    count, end = len(host.gpus), time.time() // 60 * 60
    rows = round(hours * 3600 / FIVES.step)
    samples = [Host(gpus=tuple(moving(gpu, chance) for gpu in host.gpus)) for _ in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        writer = GpuHistoryWriter(state / GPU_HISTORY)
        before, began = written(), time.process_time()
        for number in range(rows):
            writer.append(samples[number % len(samples)], end - FIVES.step * (rows - number))
        cpu, bytes_written = time.process_time() - began, written() - before
        writer.close()
        connection = sqlite3.connect(state / GPU_HISTORY)
        sizes = [
            connection.execute(f"SELECT sum(pgsize) FROM dbstat WHERE name = '{table}'").fetchone()[0] / parts
            for table, parts in (("fives", rows), ("minutes", max(1, rows // 12)))
        ]
        connection.close()
        charts = GpuCharts(state, write=False)
        began = time.perf_counter()
        charts.chart(host.gpus[0], end, TimeView(CHART_RANGES[4], end))
        reading = time.perf_counter() - began
        charts.close()
    fives, minutes = sizes[0] * 720 / count, sizes[1] * 60 / count
    whole = (sizes[0] * FIVES.rows + sizes[1] * 30 * 24 * 60) / 2**20
    print(
        f"{name:<10} {count} GPU{'s' if count > 1 else ' '}, {len(host.gpus[0].nvlinks):>2} links each: "
        f"{fives / 1024:6.1f} + {minutes / 1024:5.1f} KiB/h per GPU (5 s, 1 min) · full after 30 days: {whole:6.1f} MiB"
        f" · written {bytes_written / hours / 2**20:5.1f} MiB/h · {cpu / rows * 1e3:5.2f} ms per sample"
        f" ({cpu / rows / FIVES.step:.3%} of a core) · range 24 h read in {reading:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0, help="how long each is recorded (default 24)")
    options = parser.parse_args()
    chart_history.WAIT_SECONDS = 60.0
    for name in HOSTS:
        measure(name, options.hours)


if __name__ == "__main__":
    main()
