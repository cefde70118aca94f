"""Time from a key press to its effect on the screen, with and without each fault, in the same run.

Run ``python tests/benchmarks/key_to_paint.py``. The console runs in a real pseudo-terminal; a key moves the cursor in
the server table, and the time is measured until the emulated screen shows that. Every round opens a console and presses
the keys first without the fault and then with it (a hanging driver gets a separate console). It prints medians over the
rounds of their p50 and p99, and the load of the machine; it asserts nothing. The stalled disk and the driver need a C
compiler. Everything with ``--rounds 1`` takes about five minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import median

from fakes import key_presses as keys
from fakes import terminal

SCAN_SECONDS = 6.0
"""Seconds until other users' servers are found."""


@contextlib.contextmanager
def fault(name: str, scene: keys.Scene, box: Any, console: Any) -> Iterator[Any]:
    """A fault as a context; yields an action to run between keys, or another console for the keys."""
    if name in keys.METRICS:
        scene.strange_server(name)
        settle(console, SCAN_SECONDS)
        yield lambda: None
    elif name == "flood":
        for server in ("s00", "s01"):
            scene.order(box, f"flood {server}")
        yield lambda: None
        scene.order(box, "quiet")
    elif name == "stall":
        with keys.stalled(scene):
            keys.until(console, scene.flag.with_name("stalled.met").exists)
            yield lambda: None
    elif name == "resize":
        yield keys.resizing(console)
    elif name == "driver":
        asked = scene.flag.with_name("asked")
        library = keys.build(shutil.which("cc") or "gcc", keys.HANGING_NVML, asked.with_name("libnvidia-ml.so.1"))
        hung = scene.console(env={"LD_LIBRARY_PATH": str(library.parent), "NVML_ASKED": str(asked)})
        keys.until(hung, asked.exists)
        yield hung
    else:
        yield lambda: None


def settle(console: Any, seconds: float) -> None:
    """Let the console run for that long."""
    until = time.monotonic() + seconds
    keys.until(console, lambda: time.monotonic() > until)


def one_round(name: str, presses: int, seed: int) -> tuple[list[float], list[float]]:
    """Seconds without the fault and with it."""
    with tempfile.TemporaryDirectory() as folder:
        scene = keys.Scene(Path(folder), terminal)
        try:
            box = scene.servers(32 if name == "32 servers" else 3)
            compiler = shutil.which("cc") or "gcc"
            library = keys.build_stalling(compiler, Path(folder)) if name == "stall" else None
            console = scene.console(env=keys.stalling_environment(scene, library) if library else {})
            settle(console, 1.0)
            calm = keys.press(console, presses, seed)
            with fault(name, scene, box, console) as found:
                if name == "driver":
                    return calm, keys.press(found, presses, seed + 1)
                return calm, keys.press(console, presses, seed + 1, found)
        finally:
            scene.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "faults", nargs="*", default=[*keys.METRICS, "flood", "driver", "stall", "resize", "32 servers"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--presses", type=int, default=100)
    args = parser.parse_args()
    print(f"key to paint in ms, medians of {args.rounds} rounds of {args.presses} keys; without the fault, beside it")
    for name in args.faults:
        rounds = [one_round(name, args.presses, 2 * number) for number in range(args.rounds)]
        figures = [
            1000 * median([keys.quantile(found[side], share) for found in rounds])
            for side in (0, 1)
            for share in (0.5, 0.99)
        ]
        calm50, calm99, beside50, beside99 = figures
        load = os.getloadavg()[0]
        figures_said = f"p50 {calm50:4.0f} / {beside50:4.0f}   p99 {calm99:4.0f} / {beside99:4.0f}   load {load:.1f}"
        print(f"  {name:10s}  {figures_said}", flush=True)


if __name__ == "__main__":
    main()
