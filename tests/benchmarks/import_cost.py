"""Import cost of our modules, most expensive first, for ``--help``, ``list`` and the console.

    python tests/benchmarks/import_cost.py [--rounds 5] [--top 15] [--libraries]

Milliseconds of each module itself (``python -X importtime``), best of the rounds. With ``--libraries``, includes
modules of Python and of other packages. Modules stand out if they define dataclasses, compile regular expressions, or
import what few callers need.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import Bench, bench

LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
OURS = ("vllm_console", "vllm_launchers")
CONSOLE = "import vllm_console.cli.main, vllm_console.cli.console, vllm_console.ui.app"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=15)
    parser.add_argument("--libraries", action="store_true")
    args = parser.parse_args()
    with bench() as box:
        box.start("chat")
        for title, words in (
            ("--help", ["-m", "vllm_console", "--help"]),
            ("list --json, one server", ["-m", "vllm_console", "list", "--ours", "--json"]),
            ("the console", ["-c", CONSOLE]),
        ):
            show(title, imports(box, words, args.rounds), args.top, libraries=args.libraries)


def imports(box: Bench, words: list[str], rounds: int) -> dict[str, float]:
    """Milliseconds of each module itself, best of the rounds."""
    best: dict[str, float] = {}
    for number in range(rounds + 1):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *words], env=box.env, capture_output=True, text=True, check=True
        )
        if number:  # the first one may compile bytecode
            for cost, name in LINE.findall(done.stderr):
                best[name] = min(best.get(name, 1e9), int(cost) / 1000)
    return best


def show(title: str, found: dict[str, float], top: int, *, libraries: bool) -> None:
    """Print the most expensive modules and the totals."""
    ours = {name: cost for name, cost in found.items() if name.startswith(OURS)}
    total, own = sum(found.values()), sum(ours.values())
    print(f"{title}: {own:.1f} ms for {len(ours)} modules of ours, {total:.1f} ms for all {len(found)}")
    shown = found if libraries else ours
    for name in sorted(shown, key=lambda name: -shown[name])[:top]:
        print(f"  {shown[name]:6.2f}  {name}")


if __name__ == "__main__":
    main()
