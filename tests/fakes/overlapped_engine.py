"""Records of an engine with or without asynchronous scheduling, which vLLM uses on GPUs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_console.history.probe_records import EngineStep, FinishedRequest
from vllm_launchers.engine_model.step_cost import StepCost
from vllm_launchers.engine_model.traffic_replay import Arrival

BEGAN = 1_000_000.0


@dataclass
class _Request:
    arrival: Arrival
    missing: int
    """Prompt tokens that are not scheduled yet."""
    left: int
    """Output tokens that are not scheduled yet."""
    reached_at: float
    """When it entered the engine."""
    begun: bool = False
    scheduled_at: float = 0.0
    first_at: float = 0.0


@dataclass
class _Step:
    chunks: list[tuple[_Request, int, int]]
    """Request, its tokens in this step, and its tokens before them."""
    decodes: list[_Request]
    seconds: float
    ends: float = 0.0
    """When the GPU finishes it."""
    firsts: list[_Request] = field(default_factory=list)
    last: list[_Request] = field(default_factory=list)


@dataclass
class Run:
    """What was recorded, and the truth: seconds and prompt tokens of each recorded step."""

    requests: list[FinishedRequest] = field(default_factory=list)
    steps: list[EngineStep] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)


class OverlappedEngine:
    """Computes requests with ``budget`` tokens per step, up to ``seqs`` at once. A request holds the ``blocks`` of its
    prompt while it runs.

    With ``ahead``, each step is scheduled when the previous one begins. Launching a prefill then takes ``launch``
    seconds, which delays the previous step's result. Recorded request times are ``skew`` seconds late. A request takes
    ``front`` seconds, give or take a third, to reach the engine.
    """

    def __init__(
        self,
        cost: StepCost,
        budget: int,
        *,
        ahead: bool,
        launch: float = 0.0,
        skew: float = 0.0,
        front: float = 0.0,
        seqs: int = 10_000,
        blocks: int = 10**6,
        block_size: int = 16,
    ) -> None:
        self._cost, self._budget, self._ahead, self._launch, self._skew = cost, budget, ahead, launch, skew
        self._seqs, self._begun, self._free, self._block_size = seqs, 0, blocks, block_size
        self._front, self._dice = front, random.Random(1)
        self._active: list[_Request] = []
        self._unfinished = 0
        self._made = Run()

    def run(self, arrivals: Sequence[Arrival]) -> Run:
        made = (_Request(one, one.prompt_tokens, one.output_tokens, self._reaches(one)) for one in arrivals)
        queue = deque(sorted(made, key=lambda one: one.reached_at))
        now = 0.0
        running: _Step | None = None
        while queue or self._unfinished:
            if running is None and not self._unfinished:
                now = max(now, queue[0].reached_at)
            while queue and queue[0].reached_at <= now:
                self._active.append(queue.popleft())
                self._unfinished += 1
            if running is None:
                running = self._schedule(now)
                running.ends = now + running.seconds
            following = self._schedule(now) if self._ahead else None
            result = running.ends
            if following is not None and (following.chunks or following.decodes):
                launched = now + (self._launch if following.chunks else 0.0)
                result = max(result, launched)
                following.ends = max(running.ends + following.seconds, launched)
            else:
                following = None
            self._record(running, now, result)
            running, now = following, result
        return self._made

    def _reaches(self, one: Arrival) -> float:
        return one.at + self._front * self._dice.uniform(2 / 3, 4 / 3)

    def _schedule(self, now: float) -> _Step:
        decodes = [one for one in self._active if not one.missing]
        room = self._budget - len(decodes)
        self._blocked = False
        step = _Step([], decodes, 0.0)
        for one in self._active:
            if not one.missing:
                one.left -= 1
            elif room > 0 and (one.begun or self._begins(one)):
                count, done = min(room, one.missing), one.arrival.prompt_tokens - one.missing
                one.scheduled_at = one.scheduled_at or now
                one.missing -= count
                room -= count
                step.chunks.append((one, count, done))
                if not one.missing:
                    one.left -= 1
                    step.firsts.append(one)
        step.last = [one for one in self._active if not one.missing and not one.left]
        self._active = [one for one in self._active if one.missing or one.left]
        tokens = len(decodes) + sum(count for _, count, _ in step.chunks)
        step.seconds = self._cost.seconds(len(decodes) + len(step.chunks), tokens, 0.0, 0.0)
        return step

    def _begins(self, one: _Request) -> bool:
        """Start a request if it fits and no earlier request is waiting; returns whether it started."""
        if self._blocked or self._begun >= self._seqs or self._blocks(one) > self._free:
            self._blocked = True
            return False
        self._begun += 1
        self._free -= self._blocks(one)
        one.begun = True
        return True

    def _blocks(self, one: _Request) -> int:
        return -(-one.arrival.prompt_tokens // self._block_size)

    def _record(self, step: _Step, before: float, now: float) -> None:
        for one in step.firsts:
            one.first_at = now
        self._unfinished -= len(step.last)
        self._begun -= len(step.last)
        self._free += sum(map(self._blocks, step.last))
        interval = now - before if step.decodes else None
        prompts = sum(one.arrival.prompt_tokens for one in step.firsts)
        self._made.steps.append(
            EngineStep(
                BEGAN + now, 0, self._unfinished, 0, None, None, None, None, prompts,
                len(step.firsts) + len(step.decodes), 0, len(step.decodes), interval, interval, None, None, None, 0,
            )
        )  # fmt: skip
        self._made.seconds.append(step.seconds)
        self._made.prompts.append(sum(count for _, count, _ in step.chunks))
        for one in step.last:
            self._made.requests.append(
                FinishedRequest(
                    str(len(self._made.requests)), BEGAN + one.arrival.at, BEGAN + now + self._skew, 0,
                    one.arrival.prompt_tokens, one.arrival.output_tokens, 0, 0.0, one.first_at - one.scheduled_at,
                    now - one.first_at, now - one.arrival.at, 0, "length", 0,
                )
            )  # fmt: skip
