"""The demo's two servers: their flags before and now, and the traffic they get.

Run with ``-m``, it sends the traffic of one of them: a process of its own, ended with the console that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from vllm_console.load.run import Phase, run_scenario, stop_on_signals
from vllm_console.load.shape import Exact
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.flags.changes import Changes

DOCUMENTS = Workload(input_tokens_p95=1000, output_tokens_p95=500, prefix_reuse=0.05, concurrency=16)
CODE = Workload(input_tokens_p95=12288, output_tokens_p95=1024, prefix_reuse=0.6, concurrency=16)

MOST_IN_FLIGHT = 512
"""Maximum requests in flight. Clients do not wait for answers: a slower server gets as many requests."""

WINDOW_SECONDS = 20.0
"""Length of the windows in which the demo's runs are compared, instead of a minute. The traffic on ``docs`` repeats
with this period, with requests of the same lengths, so that all windows are alike."""


class DemoServer(msgspec.Struct, frozen=True):
    """A simulated server of the demo and the traffic it gets."""

    name: str
    preset: str
    model: str | None
    """A model other than the preset's."""
    place: int
    """The GPU of the recorded host that it is placed on and timed as."""
    gib: float | None
    """GPU memory it may use; None to use the preset's value."""
    changes: Changes
    recorded: Sequence[Sequence[Phase]]
    """The traffic of each of its runs in the recording, 25 minutes in total."""
    traffic: Sequence[Phase]
    """The traffic after the recording, repeated."""
    earlier: Changes | None = None
    """Flags that differed in the previous run, if the recording has one."""


def traffic_on(server: DemoServer, in_flight: int) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """The phases that are played once, and those that are then repeated.

    The requests ``in_flight`` at the end of the recording are sent immediately.
    """
    begin = replace(server.traffic[0], name="in flight", seconds=1.0, rate=float(in_flight))
    return (begin,) if in_flight else (), tuple(server.traffic)


_SUMMARY, _REPORT = Exact(400, 150), Exact(1000, 200)
_SUMMARIES = Phase("summaries", WINDOW_SECONDS, 4.4, DOCUMENTS, _SUMMARY)
_REPORTS = (
    Phase("reports", WINDOW_SECONDS - 6.0, 1 / 7, DOCUMENTS, _REPORT),
    Phase("a burst of reports", 6.0, 7.0, DOCUMENTS, _REPORT),
)
_CODE = Phase("code", WINDOW_SECONDS, 0.2, CODE, Exact(5000, 400))

SERVERS = (
    DemoServer(
        "docs",
        "documents",
        None,
        1,
        7.2,
        Changes(set={"max-num-seqs": 32}),
        recorded=((_SUMMARIES,) * 24, (*(_SUMMARIES,) * 21, *_REPORTS * 30)),
        traffic=_REPORTS,
        earlier=Changes(set={"max-num-seqs": 8}),
    ),
    DemoServer(
        "editor",
        "code-generation",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        0,
        None,
        Changes(),
        recorded=((_CODE,) * 75,),
        traffic=(_CODE,),
    ),
)
"""In the recording ``docs`` writes summaries: with 8 sequences requests wait although the KV cache has room; 32, as the
finding suggests, fixes that. Then it writes reports, which are longer and come in bursts of 42 in 6 seconds. The KV
cache holds 14 of them within its objective, so with 32 sequences requests are preempted and their tokens recomputed.
With 14, none is preempted: requests finish sooner, and the mean TTFT is no higher. In virtual time the server is busy
for 77% of the time before and 76% after, and has no queue when the next burst comes. ``editor`` has room and stays
calm."""


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
