"""The demo's traffic on one server: a process of its own, ended with the console that started it."""

from __future__ import annotations

import argparse
import asyncio
import os

from vllm_console.cli.demo_servers import MOST_IN_FLIGHT, SERVERS, traffic_on
from vllm_console.load.run import run_scenario, stop_on_signals


async def play(url: str, name: str, pid: int, in_flight: int) -> None:
    """Play the traffic of the demo's server ``name`` until a signal comes or process ``pid`` ends."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    console = os.pidfd_open(pid)
    asyncio.get_running_loop().add_reader(console, stop.set)
    server = next(server for server in SERVERS if server.name == name)
    first, phases = traffic_on(server, in_flight)
    await run_scenario(url, phases, first=first, max_in_flight=MOST_IN_FLIGHT, stop=stop)


def main() -> None:
    """Parse the arguments and play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("name", help="the demo's server that it is for")
    parser.add_argument("pid", type=int)
    parser.add_argument("in_flight", type=int, help="requests to send at once at first")
    args = parser.parse_args()
    asyncio.run(play(args.url, args.name, args.pid, args.in_flight))


if __name__ == "__main__":
    main()
