"""The demo's two servers: their flags before and now, and the traffic they get."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from vllm_console.fleet.snapshot import Changes
from vllm_console.load.run import Phase
from vllm_launchers.presets.model import Workload

SUMMARIES = Workload(input_tokens_p95=1000, output_tokens_p95=500, prefix_reuse=0.05, concurrency=16)
REPORTS = Workload(input_tokens_p95=2000, output_tokens_p95=2600, prefix_reuse=0.05, concurrency=16)
CODE = Workload(input_tokens_p95=12288, output_tokens_p95=1024, prefix_reuse=0.6, concurrency=16)


MOST_IN_FLIGHT = 48
"""Requests that clients have in flight at most; then they wait for answers."""


class DemoServer(msgspec.Struct, frozen=True):
    """A simulated server of the demo and the traffic it gets."""

    name: str
    preset: str
    model: str | None
    """Another model than the preset's."""
    place: int
    """The GPU of the recorded host that it is put on, and timed as."""
    gib: float | None
    """How much of the GPU's memory it may take; None is what the preset says."""
    changes: Changes
    recorded: Sequence[Sequence[Phase]]
    """The traffic of each of its runs in the recording, 25 minutes in all."""
    traffic: Sequence[Phase]
    """What it gets from then on, again and again."""
    earlier: Changes | None = None
    """What of the flags was otherwise in the run before, if the recording has one."""


def traffic_on(server: DemoServer, in_flight: int) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """The phases that are played once, and those that follow again and again.

    The requests ``in_flight`` at the end of the recording are sent at once.
    """
    begin = replace(server.traffic[0], name="in flight", seconds=1.0, rate=float(in_flight))
    return (begin,) if in_flight else (), tuple(server.traffic)


_SUMMARIES = Phase("summaries", 430.0, 2.5, SUMMARIES)
_REPORTS = (Phase("a burst of reports", 12.0, 1.9, REPORTS), Phase("reports", 48.0, 0.41, REPORTS))
"""A minute."""
_FIRST_REPORTS = (replace(_REPORTS[0], rate=4.0), _REPORTS[1])
_CODE = Phase("code", 1500.0, 0.2, CODE)

SERVERS = (
    DemoServer(
        "docs",
        "long-document",
        "Qwen/Qwen3-8B-AWQ",
        1,
        11.8,
        Changes(set={"max-num-seqs": 32, "max-num-batched-tokens": 384, "max-model-len": 8192}),
        recorded=((replace(_SUMMARIES, seconds=470.0),), (_SUMMARIES, *_FIRST_REPORTS, *_REPORTS * 9)),
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
        recorded=((_CODE,),),
        traffic=(_CODE,),
    ),
)
"""In the recording ``docs`` writes summaries: 8 sequences make requests wait although the KV cache has room; 32, which
the finding names, end that. Then it writes reports, which are longer and come in bursts: the KV cache holds fewer than
32, so requests are preempted, and computing their tokens again takes the time that others wait for. With as many
sequences as fit, each burst is over before the next. On a GPU with more FLOP/s for its bandwidth than this one,
computing again costs less, and the two hardly differ. ``editor`` has room and stays calm."""
