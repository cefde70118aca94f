"""What the console costs, beside vllmstat and an empty Textual app in the same run.

Run: ``python tests/benchmarks/console_cost.py``. It prints medians of five rounds and the ratios; it asserts nothing.
With ``--quick`` only what is measured within a minute, of ten rounds: the command ``list`` and the first paint.
vllmstat 0.9.1 is installed into a temporary virtual environment (or named with ``--vllmstat``).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import Bench, Usage, bench, cpu_seconds, drain, in_terminal, median, memory_mb, watch

EMPTY_APP = "from textual.app import App; App().run()"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--quick", action="store_true", help="the command and the first paint only")
    parser.add_argument("--vllmstat", help="its executable, if it is installed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bench() as box:
        if others := len(box("list")):
            print(f"{others} servers of others run here: the console watches them too, and costs more than alone")
        if args.quick:
            commands(box, 10)
            first_paint(box, 10)
            return
        vllmstat = args.vllmstat or install_vllmstat(Path(folder))
        one_server(box, vllmstat, args.rounds, args.seconds)
        commands(box, args.rounds)
        first_paint(box, args.rounds)
        eight_servers(box, args.rounds, args.seconds)


def install_vllmstat(folder: Path) -> str:
    """Its executable, in a virtual environment of its own."""
    venv.create(folder, with_pip=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "-q", "vllmstat==0.9.1"], check=True)
    return str(folder / "bin" / "vllmstat")


def one_server(box: Bench, vllmstat: str, rounds: int, seconds: float) -> None:
    """Console and vllmstat in turn on one server under load, 120×40, once a second."""
    server = box.start("chat")
    record = box.record("chat")
    recorder, keeper = record["companion"]["pid"], record["keeper"]["pid"]
    load = box.load("chat", 4, rounds * (2 * seconds + 30))
    ours: list[Usage] = []
    theirs: list[Usage] = []
    peer = [vllmstat, "--url", f"http://127.0.0.1:{server['port']}", "--no-gpu", "--interval", "1"]
    for _ in range(rounds):
        ours.append(watch(box.words(), box.env, settle=6, seconds=seconds, beside=[recorder]))
        theirs.append(watch(peer, box.env, settle=6, seconds=seconds, beside=[]))
    load.terminate()
    load.wait()
    cpu, peer_cpu = median([u.cpu_percent for u in ours]), median([u.cpu_percent for u in theirs])
    wire, peer_wire = median([u.bytes_per_second for u in ours]), median([u.bytes_per_second for u in theirs])
    print(f"one server under load, 120x40, 1 Hz, medians of {rounds} x {seconds:.0f} s")
    print(f"  CPU       console + recorder {cpu:.2f} %   vllmstat {peer_cpu:.2f} %   ratio {cpu / peer_cpu:.2f}")
    print(
        f"  terminal  console {wire / 1000:.1f} KB/s   vllmstat {peer_wire / 1000:.1f} KB/s   "
        f"ratio {wire / peer_wire:.2f}"
    )
    print(f"  memory    console {median([u.memory_mb for u in ours]):.0f} MB   vllmstat {theirs[-1].memory_mb:.0f} MB")
    print(f"  beside the server: keeper {memory_mb(keeper):.1f} MB + recorder {memory_mb(recorder):.1f} MB")


def commands(box: Bench, rounds: int) -> None:
    """CPU of ``list --json`` as a whole process, beside a Python that does nothing."""

    def cpu(words: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, env=box.env, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    cpu(box.words("list", "--json"))  # the first one may compile
    pairs = [(cpu(box.words("list", "--json")), cpu([sys.executable, "-c", ""])) for _ in range(2 * rounds)]
    ours, floor = (1000 * median(column) for column in zip(*pairs, strict=True))
    print(f"list --json: {ours:.0f} ms of CPU; a Python that does nothing: {floor:.0f} ms; ratio {ours / floor:.1f}")


def first_paint(box: Bench, rounds: int) -> None:
    """CPU until the first screen stands, beside an empty Textual app."""

    def paint(words: list[str]) -> float:
        with in_terminal(words, box.env) as (process, master):
            # Painted when something came and then nothing for a while.
            while not drain(master, 0.1):
                pass
            while drain(master, 0.35) > 2000:
                pass
            return cpu_seconds(process.pid)

    paint(box.words())  # the first one may compile
    pairs = [(paint(box.words()), paint([sys.executable, "-c", EMPTY_APP])) for _ in range(rounds)]
    ours, empty = (median(column) for column in zip(*pairs, strict=True))
    print(f"first paint: console {ours:.2f} s of CPU, empty Textual app {empty:.2f} s, ratio {ours / empty:.2f}")


def eight_servers(box: Bench, rounds: int, seconds: float) -> None:
    """The console on eight servers, one of them under load."""
    for number in range(2, 9):
        box.start(f"server-{number}", "batch")
    load = box.load("chat", 2, rounds * (seconds + 20))
    used = [watch(box.words(), box.env, settle=6, seconds=seconds, beside=[]) for _ in range(rounds)]
    load.terminate()
    load.wait()
    print(f"eight servers: console {median([u.cpu_percent for u in used]):.2f} % of a core, "
          f"{median([u.bytes_per_second for u in used]) / 1000:.1f} KB/s, {used[-1].memory_mb:.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
