"""Findings about GPUs shared with others: memory that others need or take, and their claims."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.fixes import present, setting, startable_sequences
from vllm_console.diagnosis.live.frame_sums import MINUTE
from vllm_console.diagnosis.live.gpus import Judge, by_gpu, newest
from vllm_console.diagnosis.live.rule import Evidence, GpuMoment, Judgment, Rule, moments_within
from vllm_console.text import gib, percent, plain
from vllm_launchers.host.gpu.host import Gpu, Holder
from vllm_launchers.host.gpu.sharing import holder_user, is_desktop
from vllm_launchers.secrets import redact
from vllm_launchers.vllm.flags.changes import Changes

LONGEST_COMMAND = 32


class GpuMemoryBelowReserve(Rule):
    """Less memory is free than is reserved for other tenants."""

    code = "gpu_memory_below_reserve"
    MARGIN = 0.25
    """GiB above the reserve at which the finding ends."""

    def _judge(self, evidence: Evidence) -> Judge:
        def judge(gpu: Gpu) -> Judgment:
            reserve = evidence.reserve_gib.get(gpu.index)
            if not reserve:
                return Judgment.FAILS
            if gpu.free_gib is None:
                return Judgment.UNKNOWN
            if gpu.free_gib < reserve:
                return Judgment.HOLDS
            return Judgment.FAILS if gpu.free_gib >= reserve + self.MARGIN else Judgment.UNCLEAR

        return judge

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by the free memory of each GPU."""
        return by_gpu(evidence, self._judge(evidence))

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How much is missing, and who holds how much."""
        short = newest(evidence, self._judge(evidence))
        measures = [
            Measure(f"GPU {gpu.index} free", gib(gpu.free_gib),
                    gib(evidence.reserve_gib.get(gpu.index)), "[reserve] of your settings")
            for gpu in short
        ]  # fmt: skip
        measures += [
            Measure(f"GPU {gpu.index} held by {holder.server or holder_user(holder)}", gib(holder.gib))
            for gpu in short
            for holder in gpu.holders
            if not is_desktop(holder)
        ]
        symptom = f"{'; '.join(map(self._words(evidence), short))} kept for others."
        cause = "This server and the others on the GPU hold more than planned."
        agree = Fix(
            Changes(), "Stop a server on it, or agree with the other users; vllm-console never touches their processes."
        )
        fixes = present((self._less(evidence, short), agree))
        return Finding(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), fixes)

    @staticmethod
    def _words(evidence: Evidence) -> Callable[[Gpu], str]:
        return lambda gpu: (
            f"GPU {gpu.index} has {gib(gpu.free_gib)} free of the {gib(evidence.reserve_gib.get(gpu.index))}"
        )

    def _less(self, evidence: Evidence, short: Sequence[Gpu]) -> Fix | None:
        """Release what is missing, if this server holds that much."""
        now = evidence.flags.get("gpu-memory-utilization")
        if not isinstance(now, float) or "kv-cache-memory-bytes" in evidence.flags:
            return None
        missing = most = 0.0
        for gpu in short:
            if gpu.memory_gib is None or gpu.free_gib is None:
                return None
            lacking = evidence.reserve_gib.get(gpu.index, 0.0) + self.MARGIN - gpu.free_gib
            missing = max(missing, math.ceil(100 * lacking / gpu.memory_gib) / 100)
            most = max(most, gpu.memory_gib)
        less = round(now - missing, 2)
        if missing <= 0 or less < 0.5 * now:
            return None
        why = f"Gives {percent(missing)} of the GPU's memory back to the reserve."
        shrunk = 1 - missing * most / evidence.cache_gib if evidence.cache_gib else 1.0
        states = startable_sequences(evidence, shrunk)
        if states is None or states >= evidence.max_num_seqs:
            return setting("gpu-memory-utilization", less, why, "Smaller KV cache.")
        if states < 1:
            return None
        fewer = Changes({"gpu-memory-utilization": less, "max-num-seqs": states})
        why = f"{why} The KV cache then has a block for the state of each sequence."
        return Fix(fewer, why, "Smaller KV cache; bursts queue.")


class GpuMemoryContended(Rule):
    """Another process grows on our GPU."""

    code = "gpu_memory_contended"
    GROWTH, SETTLED, SPAN = 1.0, 0.25, 3 * MINUTE
    """GiB of growth in three minutes that begin the finding; less than the second figure in the last minute ends it."""

    SCARCE = 1.0
    """With less GiB left, the next peak of either process may fail."""

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by what each foreign process holds, now and up to three minutes ago."""
        held = _held(evidence)
        found = []
        for at, now in enumerate(held):
            if now is None:
                found.append(Judgment.UNKNOWN)
                continue
            earlier = [one for one in held[max(0, at - self.SPAN) : at] if one is not None]
            if _growth(earlier, now) >= self.GROWTH:
                found.append(Judgment.HOLDS)
            else:
                settled = _growth(earlier[-MINUTE:], now) < self.SETTLED
                found.append(Judgment.FAILS if settled else Judgment.UNCLEAR)
        return found

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """Which process grows, and how much is left."""
        last = evidence.moments[-1]
        now = _others(last, evidence.server)
        start = bisect_left(evidence.frames, since, key=lambda frame: frame.start)
        earlier = [one for one in _held(evidence)[max(0, start - self.SPAN) : start] if one is not None]
        before = {key: _least(earlier, key) for key in now}
        holders = {(gpu.index, holder.pid): holder for gpu in last.gpus for holder in gpu.holders}
        most = max(now, key=lambda key: now[key] - before[key], default=None)
        grower = holders[most] if most is not None else None
        who = _who(grower) if grower is not None else "another process"
        free = min((gpu.free_gib for gpu in last.gpus if gpu.free_gib is not None), default=None)
        measures = [
            Measure(f"GPU {key[0]}, {_whose(holders[key])}", f"{before[key]:.1f} → {gib:.1f} GiB")
            for key, gib in sorted(now.items(), key=lambda one: before[one[0]] - one[1])
        ]
        measures.append(Measure("free", gib(free)))
        symptom = f"This server's GPU is filling up: {who} keeps growing; {gib(free)} left."
        cause = "The KV cache is already allocated; what vLLM allocates while it serves needs the rest."
        scarce = free is not None and free < self.SCARCE
        whom = _whose(grower) if grower is not None else "its owner"
        talk = Fix(Changes(), f"Agree on shares with {whom}; set yours as [shares] and [reserve] in config.toml.")
        if grower is not None and grower.server:
            talk = Fix(Changes(), f"It is yours: stop {whom}, or restart it with a smaller share of the GPU.")
        severity = Severity.WARNING if scarce else Severity.NOTE
        return Finding(self.code, severity, since, symptom, cause, tuple(measures), (talk,))


def _held(evidence: Evidence) -> list[dict[tuple[int, int], float] | None]:
    """`_others` at the end of each frame; None without a sample."""
    within = [moments for _, moments in moments_within(evidence)]
    return [_others(moments[-1], evidence.server) if moments else None for moments in within]


def _others(moment: GpuMoment, server: str) -> dict[tuple[int, int], float]:
    """GiB held by each process that is not this server's, by GPU and PID."""
    return {
        (gpu.index, holder.pid): holder.gib
        for gpu in moment.gpus
        for holder in gpu.holders
        if holder.gib is not None and (not holder.server or holder.server != server) and not is_desktop(holder)
    }


def _growth(earlier: Sequence[dict[tuple[int, int], float]], now: dict[tuple[int, int], float]) -> float:
    """The largest growth of one process since its minimum; a new one grew from nothing."""
    if not earlier:
        return 0.0
    return max((gib - _least(earlier, key) for key, gib in now.items()), default=0.0)


def _least(earlier: Sequence[dict[tuple[int, int], float]], key: tuple[int, int]) -> float:
    return min((one.get(key, 0.0) for one in earlier), default=0.0)


def _who(holder: Holder) -> str:
    """``anna's python -m lora.train (pid 2210)``."""
    if holder.server:
        return f"server {holder.server}"
    command = plain(redact(holder.command), LONGEST_COMMAND) if holder.command else "process"
    return f"{holder.user or 'another user'}'s {command} (pid {holder.pid})"


def _whose(holder: Holder) -> str:
    """Without the command: ``anna (pid 2210)``."""
    return f"server {holder.server}" if holder.server else f"{holder.user or 'another user'} (pid {holder.pid})"


class GpuClaimed(Rule):
    """Another user has claimed the GPU on the shared board."""

    code = "gpu_claimed"

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by the board at each sample."""
        return by_gpu(evidence, self._judge)

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """Who claimed it, until when and what for; claims are advisory, so there is no fix."""
        claimed = newest(evidence, self._judge)
        measures = tuple(Measure(f"GPU {gpu.index}", claim.words) for gpu in claimed for claim in gpu.claims
                         if not claim.mine)  # fmt: skip
        symptom = "; ".join(f"GPU {gpu.index} is {gpu.claimed}" for gpu in claimed) + "."
        cause = "Someone else claimed this GPU on the board and expects to use it."
        ask = Fix(Changes(), "Ask them, or restart the server with --gpus auto, which skips claimed GPUs.")
        return Finding(self.code, Severity.NOTE, since, symptom, cause, measures, (ask,))

    @staticmethod
    def _judge(gpu: Gpu) -> Judgment:
        return Judgment.HOLDS if gpu.claimed else Judgment.FAILS
