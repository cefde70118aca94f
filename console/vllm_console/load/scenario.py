"""Traffic that tells a story: phases of load on one server, over and over, until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from vllm_console.load.client import LoadError, Sender, Target, check_url, find_target, open_client, wait
from vllm_console.load.report import LoadReport, Tally
from vllm_console.load.shape import Shape, suggested_rate
from vllm_launchers.presets.model import Workload

PATIENCE_SECONDS = 1.0
"""How long to wait before a server that does not answer is asked again: it may be on its way up."""

IN_FLIGHT = 256


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a scenario: its name, how long it lasts, requests per second, and their shape."""

    name: str
    seconds: float
    rate: float
    workload: Workload


def demo_phases(workload: Workload, rate: float | None = None) -> tuple[Phase, ...]:
    """A calm stretch, a rush of short questions with long answers, and calm again (4 minutes in all).

    The rush strains the KV cache as prompts cannot: many requests fit when they are let in, and grow until they do not.
    So fewer sequences, or a KV cache of half the size per token, visibly help. ``rate`` is the calm one; left out, it
    keeps about half of the workload's concurrency busy.
    """
    calm = rate if rate is not None else suggested_rate(workload) / 2
    talk = _scaled(workload, 0.5, 2.4)
    return (
        Phase("calm", 60.0, calm, workload),
        Phase("filling up", 20.0, calm * 3.0, talk),
        Phase("rush of long answers", 100.0, calm * 2.7, talk),
        Phase("after the rush", 60.0, calm * 0.8, workload),
    )


def _scaled(workload: Workload, input_factor: float, output_factor: float) -> Workload:
    """The same workload with shorter or longer prompts and outputs."""
    return Workload(
        input_tokens_p95=max(1, round(workload.input_tokens_p95 * input_factor)),
        output_tokens_p95=max(1, round(workload.output_tokens_p95 * output_factor)),
        prefix_reuse=workload.prefix_reuse,
        concurrency=workload.concurrency,
    )


async def run_scenario(
    url: str,
    phases: Sequence[Phase],
    *,
    model: str | None = None,
    api_key: str | None = None,
    repeat: bool = True,
    max_in_flight: int = IN_FLIGHT,
    seed: int = 0,
    allow_remote: bool = False,
    stop: asyncio.Event | None = None,
    on_phase: Callable[[Phase], None] | None = None,
) -> LoadReport:
    """Play the phases one after another, for ever or once, until ``stop`` is set; returns what it all came to.

    Phases run into each other: what one has sent goes on in the next. A server that does not answer is waited for, so
    that a restart with other flags only interrupts the story.

    Raises:
        LoadError: the URL is not one of this machine, or there are no phases.
    """
    base = check_url(url, allow_remote=allow_remote)
    if not phases:
        raise LoadError("a scenario needs at least one phase")
    stop = stop or asyncio.Event()
    tally = Tally(seed)
    begin = time.perf_counter()
    async with open_client(base, api_key or os.environ.get("VLLM_API_KEY"), max_in_flight) as client:
        sender = Sender(client, "", tally, max_in_flight)
        story = _Story(client, sender, model, seed, on_phase)
        try:
            while not stop.is_set():
                for phase in phases:
                    await story.play(phase, stop)
                if not repeat:
                    await sender.drain(stop)
                    break
        finally:
            await sender.cancel("stopped before the answer was complete")
    return tally.report(time.perf_counter() - begin, tally.sent)


class _Story:
    """Plays phases on one server, which may go away and come back with another context."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        sender: Sender,
        model: str | None,
        seed: int,
        on_phase: Callable[[Phase], None] | None,
    ) -> None:
        self._client = client
        self._sender = sender
        self._model = model
        self._seed = seed
        self._on_phase = on_phase
        self._shapes: dict[tuple[Phase, int | None], Shape] = {}

    async def play(self, phase: Phase, stop: asyncio.Event) -> None:
        """One phase, once the server answers; a phase that comes again goes on with the same shared prefixes."""
        target = await self._wait_for_server(stop)
        if target is None:
            return
        if self._on_phase is not None:
            self._on_phase(phase)
        self._sender.model = target.model
        key = (phase, target.max_model_len)
        if key not in self._shapes:
            self._shapes[key] = Shape(phase.workload, seed=self._seed, max_model_len=target.max_model_len)
        await self._sender.play(self._shapes[key].stream(phase.rate, phase.seconds), stop)

    async def _wait_for_server(self, stop: asyncio.Event) -> Target | None:
        """What it serves, as soon as it answers; None when stopped."""
        while not stop.is_set():
            try:
                return await find_target(self._client, self._model)
            except LoadError:
                await wait(stop, PATIENCE_SECONDS)
        return None
