"""Cost of a full sample of eight GPUs: CPU time per sample with a stub driver that responds immediately.

    python tests/benchmarks/gpu_sample_cost.py

Objective: at most 0.5% of a core at 1 Hz, excluding the time of a real driver.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes import nvml_stub as stub
from vllm_launchers.host.gpu.document import read_host, recorded_hosts

SAMPLES = 300

MEASURE = """
import json, sys, time
from vllm_launchers.host.gpu.reader import GpuReader
reader = GpuReader()
reader.open()
for at in range(20):
    reader.sample(float(at))
used = time.thread_time()
for at in range(int(sys.argv[1])):
    reader.sample(20.0 + at)
print(json.dumps((time.thread_time() - used) / int(sys.argv[1])))
"""


def main() -> None:
    for name, path in recorded_hosts().items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "host_data.h").write_text(stub.header(read_host(path)))
            words = ["cc", "-shared", "-fPIC", "-O1", "-I", folder, str(stub.SOURCE)]
            subprocess.run([*words, "-o", f"{folder}/libnvidia-ml.so.1"], check=True)
            done = subprocess.run(
                [sys.executable, "-c", MEASURE, str(SAMPLES)],
                env={**os.environ, "LD_LIBRARY_PATH": folder},
                capture_output=True,
                text=True,
                check=True,
            )
        seconds = json.loads(done.stdout)
        print(f"{name:<12} {seconds * 1000:5.2f} ms per sample, {seconds * 100:.2f} % of a core at 1 Hz")


if __name__ == "__main__":
    main()
