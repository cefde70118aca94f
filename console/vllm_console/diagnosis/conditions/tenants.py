"""Conditions of GPUs that are shared with others: memory that they need or take, and what they claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vllm_console.diagnosis.conditions.cures import present, setting
from vllm_console.diagnosis.conditions.per_gpu import Judge, by_gpu, gib_text, newest
from vllm_console.diagnosis.conditions.rolling import MINUTE
from vllm_console.diagnosis.conditions.rule import GpuMoment, Situation, Verdict, moments_within
from vllm_console.diagnosis.model import Condition, Measure, Remedy, Severity
from vllm_console.text import plain
from vllm_launchers.machine.gpu.host import Gpu, Holder
from vllm_launchers.machine.gpu.sharing import is_desktop, owner
from vllm_launchers.plan.model import Changes
from vllm_launchers.secrets import redact

LONGEST_COMMAND = 32


class GpuMemoryBelowReserve:
    """Less is free than is kept for other tenants."""

    code = "gpu_memory_below_reserve"
    MARGIN = 0.25
    """GiB above the reserve from which on all is well again."""

    def _judge(self, situation: Situation) -> Judge:
        def judge(gpu: Gpu) -> Verdict:
            reserve = situation.reserve_gib.get(gpu.index)
            if not reserve:
                return Verdict.GOOD
            if gpu.free_gib is None:
                return Verdict.UNKNOWN
            if gpu.free_gib < reserve:
                return Verdict.BAD
            return Verdict.GOOD if gpu.free_gib >= reserve + self.MARGIN else Verdict.BETWEEN

        return judge

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By what is free of each GPU."""
        return by_gpu(situation, self._judge(situation))

    def describe(self, situation: Situation, since: float) -> Condition:
        """What is missing, and who holds what."""
        short = newest(situation, self._judge(situation))
        measures = [
            Measure(f"GPU {gpu.index} free", gib_text(gpu.free_gib),
                    gib_text(situation.reserve_gib.get(gpu.index)), "[reserve] of your settings")
            for gpu in short
        ]  # fmt: skip
        measures += [
            Measure(f"GPU {gpu.index} held by {holder.server or owner(holder)}", gib_text(holder.gib))
            for gpu in short
            for holder in gpu.holders
            if not is_desktop(holder)
        ]
        symptom = f"{'; '.join(map(self._words(situation), short))} kept for others."
        cause = "This server and the others on it hold more than was planned."
        agree = Remedy(Changes(), "Stop a server on it, or agree with those who hold it: nobody else's is touched.")
        remedies = present((self._less(situation, short), agree))
        return Condition(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), remedies)

    @staticmethod
    def _words(situation: Situation) -> Callable[[Gpu], str]:
        return lambda gpu: (
            f"GPU {gpu.index} has {gib_text(gpu.free_gib)} free of the {gib_text(situation.reserve_gib.get(gpu.index))}"
        )

    def _less(self, situation: Situation, short: Sequence[Gpu]) -> Remedy | None:
        """Give back what is missing, where this server holds that much."""
        now = situation.flags.get("gpu-memory-utilization")
        if not isinstance(now, float) or "kv-cache-memory-bytes" in situation.flags:
            return None
        missing = 0.0
        for gpu in short:
            if gpu.memory_gib is None or gpu.free_gib is None:
                return None
            lacking = situation.reserve_gib.get(gpu.index, 0.0) + self.MARGIN - gpu.free_gib
            missing = max(missing, math.ceil(100 * lacking / gpu.memory_gib) / 100)
        less = round(now - missing, 2)
        if missing <= 0 or less < 0.5 * now:
            return None
        why = f"Gives {missing:.0%} of the GPU back, which the reserve lacks."
        return setting("gpu-memory-utilization", less, why, "A smaller KV cache.")


class GpuMemoryContended:
    """Another process grows on our GPU."""

    code = "gpu_memory_contended"
    GROWTH, SETTLED, SPAN = 1.0, 0.25, 3 * MINUTE
    """GiB within three minutes that are growth; less than the second number in the last minute is none any more."""

    SCARCE = 1.0
    """GiB: with less left the next peak of either may fail."""

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By what each process of others holds, now and three minutes ago."""
        looks = [moments[-1] if moments else None for _, moments in moments_within(situation)]
        held = [_others(look, situation.server) if look is not None else None for look in looks]
        found = []
        for at, now in enumerate(held):
            if now is None:
                found.append(Verdict.UNKNOWN)
                continue
            earlier = [one for one in held[max(0, at - self.SPAN) : at] if one is not None]
            if _growth(earlier, now) >= self.GROWTH:
                found.append(Verdict.BAD)
            else:
                settled = _growth(earlier[-MINUTE:], now) < self.SETTLED
                found.append(Verdict.GOOD if settled else Verdict.BETWEEN)
        return found

    def describe(self, situation: Situation, since: float) -> Condition:
        """Who grows, and what is left."""
        first = next((one for one in situation.moments if one.at >= since), situation.moments[-1])
        last = situation.moments[-1]
        before, now = _others(first, situation.server), _others(last, situation.server)
        holders = {(gpu.index, holder.pid): holder for gpu in last.gpus for holder in gpu.holders}
        most = max(now, key=lambda key: now[key] - before.get(key, 0.0), default=None)
        grower = holders[most] if most is not None else None
        who = _who(grower) if grower is not None else "another process"
        free = min((gpu.free_gib for gpu in last.gpus if gpu.free_gib is not None), default=None)
        measures = [
            Measure(f"GPU {key[0]}, {_whose(holders[key])}", f"{before.get(key, 0.0):.1f} → {gib:.1f} GiB")
            for key, gib in sorted(now.items(), key=lambda one: before.get(one[0], 0.0) - one[1])
        ]
        measures.append(Measure("free", gib_text(free)))
        symptom = f"This server's GPU fills: {who} takes more and more; {gib_text(free)} are left."
        cause = "The KV cache is safe, for vLLM holds it already; peaks of long prompts need what is left."
        scarce = free is not None and free < self.SCARCE
        whom = _whose(grower) if grower is not None else "its owner"
        talk = Remedy(Changes(), f"Agree with {whom} on shares, and write yours down as [shares] and [reserve].")
        if grower is not None and grower.server:
            talk = Remedy(Changes(), f"It is yours: stop {whom}, or restart it with less of the GPU.")
        severity = Severity.WARNING if scarce else Severity.NOTE
        return Condition(self.code, severity, since, symptom, cause, tuple(measures), (talk,))


def _others(moment: GpuMoment, server: str) -> dict[tuple[int, int], float]:
    """What each process that is not this server's holds, in GiB, by GPU and pid."""
    return {
        (gpu.index, holder.pid): holder.gib
        for gpu in moment.gpus
        for holder in gpu.holders
        if holder.gib is not None and (not holder.server or holder.server != server) and not is_desktop(holder)
    }


def _growth(earlier: Sequence[dict[tuple[int, int], float]], now: dict[tuple[int, int], float]) -> float:
    """The most that one process grew since it held least; one that came meanwhile grew from nothing."""
    if not earlier:
        return 0.0
    return max((gib - min(one.get(key, 0.0) for one in earlier) for key, gib in now.items()), default=0.0)


def _who(holder: Holder) -> str:
    """``anna's python -m lora.train (pid 2210)``."""
    if holder.server:
        return f"server {holder.server}"
    command = plain(redact(holder.command), LONGEST_COMMAND) if holder.command else "process"
    return f"{holder.user or 'somebody'}'s {command} (pid {holder.pid})"


def _whose(holder: Holder) -> str:
    """The same in a few characters: ``anna, pid 2210``."""
    return f"server {holder.server}" if holder.server else f"{holder.user or 'somebody'}, pid {holder.pid}"


class GpuClaimed:
    """Somebody else has claimed the GPU on the shared board."""

    code = "gpu_claimed"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By what the board said at each look."""
        return by_gpu(situation, self._judge)

    def describe(self, situation: Situation, since: float) -> Condition:
        """Who, till when and what for; it is a word among people, so that nothing is done."""
        claimed = newest(situation, self._judge)
        measures = tuple(Measure(f"GPU {gpu.index}", claim.words) for gpu in claimed for claim in gpu.claims
                         if not claim.mine)  # fmt: skip
        symptom = "; ".join(f"GPU {gpu.index} is {gpu.claimed}" for gpu in claimed) + "."
        cause = "Who claims a GPU on the board counts on having it, and this server is on it."
        ask = Remedy(Changes(), "Ask them, or stop it and start it with --gpus auto, which leaves claimed GPUs out.")
        return Condition(self.code, Severity.NOTE, since, symptom, cause, measures, (ask,))

    @staticmethod
    def _judge(gpu: Gpu) -> Verdict:
        return Verdict.BAD if gpu.claimed else Verdict.GOOD
