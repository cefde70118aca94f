"""Conditions of the server's GPUs: throttling, narrow or slow links."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.conditions.cures import present, setting
from vllm_console.diagnosis.conditions.per_gpu import by_gpu, named, newest
from vllm_console.diagnosis.conditions.rolling import MINUTE, observed, p50
from vllm_console.diagnosis.conditions.rule import Situation, Verdict, moments_within
from vllm_console.diagnosis.model import Condition, Measure, Remedy, Severity
from vllm_console.format import UNKNOWN, percent, seconds
from vllm_launchers.machine.gpu.concerns import HOT
from vllm_launchers.machine.gpu.host import Gpu
from vllm_launchers.machine.gpu.links import Level, level_of
from vllm_launchers.plan.model import Changes

WORKING_PERCENT = 50.0
"""From this utilization on a GPU works: clocks and links of one that rests say nothing."""

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
        return by_gpu(situation, _throttled)

    def describe(self, situation: Situation, since: float) -> Condition:
        """Which, why, and how much slower."""
        slowed = newest(situation, _throttled)
        words = sorted({word for gpu in slowed for word in gpu.throttle or () if word in (*HOT, *FAULTY, POWER_LIMIT)})
        hot, faulty = set(words) & set(HOT), set(words) & set(FAULTY)
        measures = [measure for gpu in slowed for measure in _slowness(gpu, hot=bool(hot))]
        symptom = f"{named(slowed, 'slows itself', 'slow themselves')} down: {', '.join(words) or 'throttled'}."
        if hot:
            cause, cure = "It is too hot.", "Look after its fans and the air around it, or lower its power limit."
        elif faulty:
            cause, cure = "Its power supply or its board asks for it.", "Look after its power cables and supply."
        else:
            cause = "It draws as much power as it may."
            cure = "Raise its power limit, where cooling allows it: nvidia-smi -pl, which an administrator may do."
        severity = Severity.WARNING if hot or faulty else Severity.NOTE
        return Condition(self.code, severity, since, symptom, cause, tuple(measures), (Remedy(Changes(), cure),))


def _slowness(gpu: Gpu, *, hot: bool) -> list[Measure]:
    """How slow it is and why, what tells most first: how hot it is, or how fast."""
    found = []
    if gpu.clock_mhz and gpu.clock_max_mhz:
        found.append(Measure(f"GPU {gpu.index} clock", f"{gpu.clock_mhz} of {gpu.clock_max_mhz} MHz"))
    if gpu.temperature_c is not None:
        found.insert(0 if hot else 1, Measure(f"GPU {gpu.index} temperature", f"{gpu.temperature_c:.0f} °C"))
    watts = f"{gpu.power_w:.0f} W" if gpu.power_w is not None else UNKNOWN
    limit = f"{gpu.power_limit_w:.0f} W" if gpu.power_limit_w is not None else ""
    return [*found, Measure(f"GPU {gpu.index} power", watts, limit, "its power limit" if limit else "")]


def _narrow(gpu: Gpu) -> Verdict:
    width, widest = gpu.pcie_width, gpu.pcie_width_max
    generation, newest = gpu.pcie_generation, gpu.pcie_generation_max
    if not (width and widest and generation and newest):
        return Verdict.UNKNOWN
    if width >= widest and generation >= newest:
        return Verdict.GOOD
    # A link that rests is slower, and on some boards narrower, to save power.
    return Verdict.BAD if (gpu.utilization or 0.0) >= WORKING_PERCENT else Verdict.BETWEEN


def _pcie(gpu: Gpu) -> str:
    """What is less than it could be: ``×4 of ×16``."""
    width, widest = gpu.pcie_width, gpu.pcie_width_max
    generation, newest = gpu.pcie_generation, gpu.pcie_generation_max
    parts = [f"×{width} of ×{widest}"] if width and widest and width < widest else []
    parts += [f"generation {generation} of {newest}"] if generation and newest and generation < newest else []
    return " and ".join(parts) or "it changes"


class PcieNarrow:
    """Under load the PCIe link is narrower or of an older generation than it could be."""

    code = "pcie_narrow"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By width and generation of GPUs that work."""
        return by_gpu(situation, _narrow)

    def describe(self, situation: Situation, since: float) -> Condition:
        """What it is and what it could be; grave only where GPUs talk over it."""
        narrow = newest(situation, _narrow)
        measures = tuple(
            Measure(f"GPU {gpu.index} PCIe", f"generation {gpu.pcie_generation} ×{gpu.pcie_width}",
                    f"generation {gpu.pcie_generation_max} ×{gpu.pcie_width_max}", "what GPU and slot can")
            for gpu in narrow
        )  # fmt: skip
        talks = situation.tensor_parallel > 1 and level_of(situation.link) is not Level.NVLINK
        symptom = f"{named(narrow, 'has', 'have')} a slower PCIe link than could be: {', '.join(map(_pcie, narrow))}."
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
        step = seconds(itl)
        if itl is not None and reads:
            step += f", {seconds(itl * sum(reads) / len(reads))} of it reading memory"
        measures = (
            Measure("memory is read", f"{read} of the time", percent(self.READS / 100), "fixed"),
            Measure("GPU utilization", works),
            Measure("ITL p50", step),
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
        why = "On one GPU nothing is sent around" if split == 2 else f"Among {split // 2} GPUs less is sent around"
        why += ", and the weights still fit."
        return setting("tensor-parallel-size", split // 2, why, "A smaller KV cache; the plan says how much is left.")

    @staticmethod
    def _stages(situation: Situation) -> Remedy | None:
        if "pipeline-parallel-size" in situation.flags or "data-parallel-size" in situation.flags:
            return None
        split = situation.tensor_parallel
        changes = Changes({"tensor-parallel-size": 1, "pipeline-parallel-size": split})
        why = f"As {split} stages, each GPU sends its result on once per step and not twice per layer."
        return Remedy(changes, why, "A single stream gets no faster by the further GPUs; many at once do.")
