"""The demo's traffic on one server: a process of its own, ended with the console that started it."""

from __future__ import annotations

import argparse
import asyncio
import os

from msgspec.structs import replace

from vllm_console.load.run import Phase, demo_phases, run_scenario, stop_on_signals
from vllm_launchers.presets.load import find_preset, read_presets
from vllm_launchers.presets.model import Workload


def first_phases(workload: Workload, rate: float, in_flight: int) -> tuple[Phase, ...]:
    """With requests ``in_flight`` the demo goes on in the rush that was recorded; without, it begins anew."""
    if not in_flight:
        return ()
    *_, rush, after = demo_phases(workload, rate)
    return replace(rush, name="in flight", seconds=1.0, rate=float(in_flight)), rush, after


async def play(url: str, preset: str, rate: float, pid: int, in_flight: int) -> None:
    """Play the demo's phases until a signal comes or process ``pid`` ends."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    console = os.pidfd_open(pid)
    asyncio.get_running_loop().add_reader(console, stop.set)
    presets, problems = read_presets()
    workload = find_preset(preset, presets, problems).workload
    first = first_phases(workload, rate, in_flight)
    await run_scenario(url, demo_phases(workload, rate), first=first, stop=stop)


def main() -> None:
    """Parse the arguments and play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("preset")
    parser.add_argument("rate", type=float)
    parser.add_argument("pid", type=int)
    parser.add_argument("in_flight", type=int, help="requests to send at once at first")
    args = parser.parse_args()
    asyncio.run(play(args.url, args.preset, args.rate, args.pid, args.in_flight))


if __name__ == "__main__":
    main()
