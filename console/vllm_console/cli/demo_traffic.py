"""The demo's traffic on one server: a process of its own, ended with the console that started it."""

from __future__ import annotations

import argparse
import asyncio
import os

from vllm_console.load.run import stop_on_signals
from vllm_console.load.scenario import demo_phases, run_scenario
from vllm_launchers.presets.load import find_preset, read_presets


async def play(url: str, preset: str, rate: float, pid: int) -> None:
    """Play the demo's phases until a signal comes or process ``pid`` ends."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    console = os.pidfd_open(pid)
    asyncio.get_running_loop().add_reader(console, stop.set)
    presets, problems = read_presets()
    await run_scenario(url, demo_phases(find_preset(preset, presets, problems).workload, rate), stop=stop)


def main() -> None:
    """Read the words and play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("preset")
    parser.add_argument("rate", type=float)
    parser.add_argument("pid", type=int)
    args = parser.parse_args()
    asyncio.run(play(args.url, args.preset, args.rate, args.pid))


if __name__ == "__main__":
    main()
