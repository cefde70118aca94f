"""Cost of the running console, compared with vllmstat in the same run (see `startup_cost.py` for the startup cost).

Run ``python tests/benchmarks/console_cost.py``. It prints medians of five rounds and the ratios; it asserts nothing.
vllmstat 0.9.1 is installed into a temporary virtual environment, unless ``--vllmstat`` gives its path.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import Bench, Usage, bench, median, memory_mb, watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--vllmstat", help="its executable, if it is installed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bench() as box:
        if others := len(box("list")):
            print(f"{others} servers of others run here: the console watches them too, and costs more than alone")
        vllmstat = args.vllmstat or install_vllmstat(Path(folder))
        one_server(box, vllmstat, args.rounds, args.seconds)
        eight_servers(box, args.rounds, args.seconds)


def install_vllmstat(folder: Path) -> str:
    """Install vllmstat into a separate virtual environment; returns its executable."""
    venv.create(folder, with_pip=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "-q", "vllmstat==0.9.1"], check=True)
    return str(folder / "bin" / "vllmstat")


def one_server(box: Bench, vllmstat: str, rounds: int, seconds: float) -> None:
    """Console and vllmstat in turn on one server under load, 120×40, one refresh per second."""
    server = box.start("chat")
    record = box.record("chat")
    recorder, keeper = record["sidecar"]["pid"], record["keeper"]["pid"]
    load = box.load("chat", 4, rounds * (2 * seconds + 30))
    ours: list[Usage] = []
    theirs: list[Usage] = []
    peer = [vllmstat, "--url", f"http://127.0.0.1:{server['port']}", "--no-gpu", "--interval", "1"]
    for _ in range(rounds):
        ours.append(watch(box.words(), box.env, settle=6, seconds=seconds, extra_pids=[recorder]))
        theirs.append(watch(peer, box.env, settle=6, seconds=seconds, extra_pids=[]))
    load.terminate()
    load.wait()
    cpu, peer_cpu = median([u.cpu_percent for u in ours]), median([u.cpu_percent for u in theirs])
    wire, peer_wire = median([u.bytes_per_second for u in ours]), median([u.bytes_per_second for u in theirs])
    print(f"one server under load, 120x40, 1 Hz, medians of {rounds} x {seconds:.0f} s")
    print(f"  CPU       console + recorder {cpu:.2f} %   vllmstat {peer_cpu:.2f} %   ratio {cpu / peer_cpu:.2f}")
    print(f"  processes that the console ran meanwhile, s: {', '.join(f'{u.children_seconds:.1f}' for u in ours)}")
    print(
        f"  terminal  console {wire / 1000:.1f} KB/s   vllmstat {peer_wire / 1000:.1f} KB/s   "
        f"ratio {wire / peer_wire:.2f}"
    )
    print(f"  memory    console {median([u.memory_mb for u in ours]):.0f} MB   vllmstat {theirs[-1].memory_mb:.0f} MB")
    print(f"  beside the server: keeper {memory_mb(keeper):.1f} MB + recorder {memory_mb(recorder):.1f} MB")


def eight_servers(box: Bench, rounds: int, seconds: float) -> None:
    """The console on eight servers, one of them under load."""
    for number in range(2, 9):
        box.start(f"server-{number}", "batch")
    load = box.load("chat", 2, rounds * (seconds + 20))
    used = [watch(box.words(), box.env, settle=6, seconds=seconds, extra_pids=[]) for _ in range(rounds)]
    load.terminate()
    load.wait()
    print(f"eight servers: console {median([u.cpu_percent for u in used]):.2f} % of a core, "
          f"{median([u.bytes_per_second for u in used]) / 1000:.1f} KB/s, {used[-1].memory_mb:.0f} MB")  # fmt: skip
    print(f"  processes that it ran meanwhile, s: {', '.join(f'{u.children_seconds:.1f}' for u in used)}")


if __name__ == "__main__":
    main()
