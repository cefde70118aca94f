"""Conditions of the server's GPUs: memory that others need or take, throttling, narrow or slow links."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from vllm_console.diagnosis.conditions.cures import present, setting
from vllm_console.diagnosis.conditions.rolling import MINUTE, observed, p50
from vllm_console.diagnosis.conditions.rule import GpuMoment, Situation, Verdict, moments_within
from vllm_console.diagnosis.model import Condition, Measure, Remedy, Severity
from vllm_console.format import UNKNOWN, percent, seconds
from vllm_console.text import plain
from vllm_launchers.machine.gpu.host import Gpu, Holder
from vllm_launchers.machine.gpu.links import Level, level_of
from vllm_launchers.machine.gpu.sharing import is_desktop, owner
from vllm_launchers.plan.model import Changes
from vllm_launchers.secrets import redact

WORKING_PERCENT = 50.0
"""From this utilization on a GPU works: clocks and links of one that rests say nothing."""

LONGEST_COMMAND = 60

_Judge = Callable[[Gpu], Verdict]


def _by_gpu(situation: Situation, judge: _Judge) -> list[Verdict]:
    """Per frame the worst that is said of any GPU in more than half of the looks within it."""
    found = []
    for _, moments in moments_within(situation):
        looks = [_worst(judge(gpu) for gpu in moment.gpus) for moment in moments]
        if not looks:
            found.append(Verdict.UNKNOWN)
        elif 2 * looks.count(Verdict.BAD) > len(looks):
            found.append(Verdict.BAD)
        elif all(look is Verdict.GOOD for look in looks):
            found.append(Verdict.GOOD)
        else:
            unknown = all(look is Verdict.UNKNOWN for look in looks)
            found.append(Verdict.UNKNOWN if unknown else Verdict.BETWEEN)
    return found


def _worst(verdicts: Iterator[Verdict]) -> Verdict:
    all_of = list(verdicts)
    order = (Verdict.BAD, Verdict.BETWEEN, Verdict.GOOD)
    return next((verdict for verdict in order if verdict in all_of), Verdict.UNKNOWN)


def _newest(situation: Situation, judge: _Judge) -> list[Gpu]:
    """The GPUs that the newest look says it of; all of them where it has just changed."""
    gpus = situation.moments[-1].gpus if situation.moments else ()
    return [gpu for gpu in gpus if judge(gpu) is Verdict.BAD] or list(gpus)


class GpuMemoryBelowReserve:
    """Less is free than is kept for other tenants."""

    code = "gpu_memory_below_reserve"
    MARGIN = 0.25
    """GiB above the reserve from which on all is well again."""

    def _judge(self, situation: Situation) -> _Judge:
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
        return _by_gpu(situation, self._judge(situation))

    def describe(self, situation: Situation, since: float) -> Condition:
        """What is missing, and who holds what."""
        short = _newest(situation, self._judge(situation))
        measures = [
            Measure(f"GPU {gpu.index} free", _gib(gpu.free_gib),
                    _gib(situation.reserve_gib.get(gpu.index)), "[reserve] of your settings")
            for gpu in short
        ]  # fmt: skip
        measures += [
            Measure(f"GPU {gpu.index} held by {holder.server or owner(holder)}", _gib(holder.gib))
            for gpu in short
            for holder in gpu.holders
            if not is_desktop(holder)
        ]
        symptom = f"{_named(short, 'has', 'have')} less free memory than is kept for others."
        cause = "This server and the others on it hold more than was planned."
        agree = Remedy(Changes(), "Stop a server on it, or agree with those who hold it: nobody else's is touched.")
        remedies = present((self._less(situation, short), agree))
        return Condition(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), remedies)

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
        who = _who(holders[most]) if most is not None else "another process"
        free = min((gpu.free_gib for gpu in last.gpus if gpu.free_gib is not None), default=None)
        measures = [
            Measure(f"GPU {key[0]}, {_who(holders[key])}", f"{before.get(key, 0.0):.1f} → {gib:.1f} GiB")
            for key, gib in now.items()
        ]
        measures.append(Measure("free", _gib(free)))
        symptom = f"This server's GPU fills: {who} takes more and more; {_gib(free)} are left."
        cause = "The KV cache is safe, for vLLM holds it already; peaks of long prompts need what is left."
        scarce = free is not None and free < self.SCARCE
        talk = Remedy(Changes(), f"Agree with {who} on shares, and write yours down as [shares] and [reserve].")
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
    if holder.server:
        return f"server {holder.server}"
    command = plain(redact(holder.command), LONGEST_COMMAND) if holder.command else "process"
    return f"{holder.user or 'somebody'}'s {command} (pid {holder.pid})"


HOT = ("too hot (driver)", "too hot (hardware)")
FAULTY = ("hardware slowdown", "power brake")
POWER_LIMIT = "power limit"
SLOWED_CLOCK = 0.8
"""Cards run into their power limit under any full load; below this share of the highest clock it costs much."""


def _throttled(gpu: Gpu) -> Verdict:
    if gpu.throttle is None:
        return Verdict.UNKNOWN
    if any(word in gpu.throttle for word in (*HOT, *FAULTY)):
        return Verdict.BAD
    if POWER_LIMIT in gpu.throttle and (gpu.utilization or 0.0) >= WORKING_PERCENT:
        clock, best = gpu.clock_mhz, gpu.clock_max_mhz
        return Verdict.BAD if clock and best and clock < SLOWED_CLOCK * best else Verdict.BETWEEN
    return Verdict.GOOD


class GpuThrottled:
    """The GPU slows itself down: heat, power, or a fault."""

    code = "gpu_throttled"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the reasons that the driver gives."""
        return _by_gpu(situation, _throttled)

    def describe(self, situation: Situation, since: float) -> Condition:
        """Which, why, and how much slower."""
        slowed = _newest(situation, _throttled)
        words = sorted({word for gpu in slowed for word in gpu.throttle or () if word in (*HOT, *FAULTY, POWER_LIMIT)})
        hot, faulty = set(words) & set(HOT), set(words) & set(FAULTY)
        measures = []
        for gpu in slowed:
            watts = f"{gpu.power_w:.0f} W" if gpu.power_w is not None else UNKNOWN
            limit = f"{gpu.power_limit_w:.0f} W" if gpu.power_limit_w is not None else ""
            measures.append(Measure(f"GPU {gpu.index} power", watts, limit, "its power limit" if limit else ""))
            if gpu.clock_mhz and gpu.clock_max_mhz:
                measures.append(Measure(f"GPU {gpu.index} clock", f"{gpu.clock_mhz} MHz of {gpu.clock_max_mhz} MHz"))
            if gpu.temperature_c is not None:
                measures.append(Measure(f"GPU {gpu.index} temperature", f"{gpu.temperature_c:.0f} °C"))
        symptom = f"{_named(slowed, 'slows itself', 'slow themselves')} down: {', '.join(words) or 'throttled'}."
        if hot:
            cause, cure = "It is too hot.", "Look after its fans and the air around it, or lower its power limit."
        elif faulty:
            cause, cure = "Its power supply or its board asks for it.", "Look after its power cables and supply."
        else:
            cause = "It draws as much power as it may."
            cure = "Raise its power limit, where cooling allows it: nvidia-smi -pl, which an administrator may do."
        severity = Severity.WARNING if hot or faulty else Severity.NOTE
        return Condition(self.code, severity, since, symptom, cause, tuple(measures), (Remedy(Changes(), cure),))


def _narrow(gpu: Gpu) -> Verdict:
    width, widest = gpu.pcie_width, gpu.pcie_width_max
    generation, newest = gpu.pcie_generation, gpu.pcie_generation_max
    if not (width and widest and generation and newest):
        return Verdict.UNKNOWN
    if width >= widest and generation >= newest:
        return Verdict.GOOD
    # A link that rests is slower, and on some boards narrower, to save power.
    return Verdict.BAD if (gpu.utilization or 0.0) >= WORKING_PERCENT else Verdict.BETWEEN


class PcieNarrow:
    """Under load the PCIe link is narrower or of an older generation than it could be."""

    code = "pcie_narrow"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By width and generation of GPUs that work."""
        return _by_gpu(situation, _narrow)

    def describe(self, situation: Situation, since: float) -> Condition:
        """What it is and what it could be; grave only where GPUs talk over it."""
        narrow = _newest(situation, _narrow)
        measures = tuple(
            Measure(f"GPU {gpu.index} PCIe", f"generation {gpu.pcie_generation} ×{gpu.pcie_width}",
                    f"generation {gpu.pcie_generation_max} ×{gpu.pcie_width_max}", "what GPU and slot can")
            for gpu in narrow
        )  # fmt: skip
        talks = situation.tensor_parallel > 1 and level_of(situation.link) is not Level.NVLINK
        symptom = f"{_named(narrow, 'has', 'have')} a slower PCIe link than could be."
        cause = "The slot, a riser, or a setting of the BIOS: seldom anything that a flag could mend."
        cause += " Tensor parallelism goes over it." if talks else " It costs time while weights are loaded only."
        cure = Remedy(Changes(), "Seat the GPU anew, or put it into a slot that is not shared; check the BIOS.")
        severity = Severity.WARNING if talks else Severity.NOTE
        return Condition(self.code, severity, since, symptom, cause, measures, (cure,))


class TensorParallelStalls:
    """Tensor parallelism over a slow link: the GPUs seem busy and yet hardly read their memory.

    Decoding reads all weights in each step, so a GPU that decodes reads memory most of the time. One that waits for
    others spins in a kernel: 100 % utilization, little memory traffic, little power.
    """

    code = "tensor_parallel_stalls"
    BUSY, READS, READS_WELL = 85.0, 30.0, 45.0
    """Percent of the time: a kernel runs; memory is read; and so much that it is no stall."""

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By memory traffic of GPUs that are split over a slow link while they decode."""
        frames = situation.frames
        if situation.tensor_parallel < 2 or not situation.link or level_of(situation.link) is Level.NVLINK:
            return [Verdict.GOOD] * len(frames)
        found = []
        for frame, moments in moments_within(situation):
            looks = [gpu for moment in moments for gpu in moment.gpus]
            reads = [gpu.memory_utilization for gpu in looks if gpu.memory_utilization is not None]
            busy = [gpu.utilization for gpu in looks if gpu.utilization is not None]
            if not reads or not busy:
                found.append(Verdict.UNKNOWN)
                continue
            read, works = sum(reads) / len(reads), sum(busy) / len(busy)
            decodes = bool(frame.grown.generation_tokens_total)
            if decodes and works >= self.BUSY and read <= self.READS:
                found.append(Verdict.BAD)
            else:
                found.append(Verdict.GOOD if decodes and read >= self.READS_WELL else Verdict.BETWEEN)
        return found

    def describe(self, situation: Situation, since: float) -> Condition:
        """How busy they seem, how little they read, and over what they talk."""
        gpus, split = situation.moments[-1].gpus, situation.tensor_parallel
        reads = [gpu.memory_utilization / 100 for gpu in gpus if gpu.memory_utilization is not None]
        busy = [gpu.utilization / 100 for gpu in gpus if gpu.utilization is not None]
        read, works = (percent(sum(values) / len(values)) if values else UNKNOWN for values in (reads, busy))
        itl = p50(observed(situation.last(MINUTE), "itl")[-1])
        measures = (
            Measure("memory is read", f"{read} of the time", percent(self.READS / 100), "fixed"),
            Measure("GPU utilization", works),
            Measure("ITL p50", seconds(itl)),
            Measure("slowest link", situation.link, "NVLink", "tensor parallelism"),
        )
        symptom = f"The {split} GPUs are busy {works} of the time, but read their memory only {read} of it."
        cause = f"They wait for each other: each layer's results take a slow way, {level_of(situation.link).words}."
        remedies = present((self._half(situation), self._stages(situation)))
        return Condition(self.code, Severity.WARNING, since, symptom, cause, measures, remedies)

    @staticmethod
    def _half(situation: Situation) -> Remedy | None:
        """Half as many GPUs, where twice the weights fit on each and leave half of what is planned for the cache."""
        weights, split = situation.weights_gib, situation.tensor_parallel
        sizes = [gpu.memory_gib for gpu in situation.moments[-1].gpus if gpu.memory_gib is not None]
        utilization = situation.flags.get("gpu-memory-utilization", 0.9)
        if weights is None or not sizes or split % 2 or not isinstance(utilization, float):
            return None
        if 2 * weights > 0.7 * utilization * min(sizes):
            return None
        why = f"On {split // 2} GPU{'s' if split > 2 else ''} less is sent around, and the weights still fit."
        return setting("tensor-parallel-size", split // 2, why, "A smaller KV cache; the plan says how much is left.")

    @staticmethod
    def _stages(situation: Situation) -> Remedy | None:
        if "pipeline-parallel-size" in situation.flags or "data-parallel-size" in situation.flags:
            return None
        split = situation.tensor_parallel
        changes = Changes({"tensor-parallel-size": 1, "pipeline-parallel-size": split})
        why = f"As {split} stages, each GPU sends its result on once per step and not twice per layer."
        return Remedy(changes, why, "A single stream gets no faster by the further GPUs; many at once do.")


def _named(gpus: Sequence[Gpu], one: str, several: str) -> str:
    """``GPU 1 has`` or ``GPUs 1, 3 have``."""
    names = ", ".join(str(gpu.index) for gpu in gpus)
    return f"GPU {names} {one}" if len(gpus) == 1 else f"GPUs {names} {several}"


def _gib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f} GiB"
