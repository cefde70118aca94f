"""Findings about the server's GPUs: throttling, narrow or slow links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.fixes import present, setting
from vllm_console.diagnosis.live.frame_sums import MINUTE, mean, observed
from vllm_console.diagnosis.live.rule import Evidence, Judgment, Rule, moments_within
from vllm_console.text import UNKNOWN, percent, seconds, temperature
from vllm_launchers.host.gpu.hardware_warnings import HOT
from vllm_launchers.host.gpu.host import Gpu
from vllm_launchers.host.gpu.topology import LinkLevel, link_level
from vllm_launchers.plan.flags import TRANSFER, flag_names
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.flags.speculation import SPECULATION_FLAGS
from vllm_launchers.vllm.release_defaults import default_utilization

Judge = Callable[[Gpu], Judgment]


def by_gpu(evidence: Evidence, judge: Judge) -> list[Judgment]:
    """Per frame, whether it holds for any GPU in more than half of its samples."""
    found = []
    for _, moments in moments_within(evidence):
        judged = [_for_any(judge(gpu) for gpu in moment.gpus) for moment in moments]
        if not judged:
            found.append(Judgment.UNKNOWN)
        elif 2 * judged.count(Judgment.HOLDS) > len(judged):
            found.append(Judgment.HOLDS)
        elif all(one is Judgment.FAILS for one in judged):
            found.append(Judgment.FAILS)
        else:
            unknown = all(one is Judgment.UNKNOWN for one in judged)
            found.append(Judgment.UNKNOWN if unknown else Judgment.UNCLEAR)
    return found


def _for_any(verdicts: Iterator[Judgment]) -> Judgment:
    all_of = list(verdicts)
    order = (Judgment.HOLDS, Judgment.UNCLEAR, Judgment.FAILS)
    return next((verdict for verdict in order if verdict in all_of), Judgment.UNKNOWN)


def newest(evidence: Evidence, judge: Judge) -> list[Gpu]:
    """The affected GPUs in the newest sample that has any: while a finding ends, it already fails in later samples."""
    for moment in reversed(evidence.moments):
        if found := [gpu for gpu in moment.gpus if judge(gpu) is Judgment.HOLDS]:
            return found
    return list(evidence.moments[-1].gpus) if evidence.moments else []


def named(gpus: Sequence[Gpu], one: str, several: str) -> str:
    """``GPU 1 has`` or ``GPUs 1, 3 have``."""
    names = ", ".join(str(gpu.index) for gpu in gpus)
    return f"GPU {names} {one}" if len(gpus) == 1 else f"GPUs {names} {several}"


WORKING_PERCENT = 50.0
"""A GPU is working from this utilization on; clocks and links of an idle one say nothing."""

FAULTY = ("hardware slowdown", "power brake")
POWER_LIMIT = "power limit"
SLOWED_CLOCK = 0.8
"""GPUs reach their power limit under any full load; below this fraction of the maximum clock it costs much."""


def _throttled(gpu: Gpu) -> Judgment:
    if gpu.throttle is None:
        return Judgment.UNKNOWN
    if any(word in gpu.throttle for word in (*HOT, *FAULTY)):
        return Judgment.HOLDS
    if POWER_LIMIT in gpu.throttle and (gpu.utilization or 0.0) >= WORKING_PERCENT:
        clock, best = gpu.clock_mhz, gpu.clock_max_mhz
        return Judgment.HOLDS if clock and best and clock < SLOWED_CLOCK * best else Judgment.UNCLEAR
    return Judgment.FAILS


class GpuThrottled(Rule):
    """The GPU slows itself down: heat, power, or a fault."""

    code = "gpu_throttled"

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by the driver's throttle reasons."""
        return by_gpu(evidence, _throttled)

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """Which GPUs are throttled, why, and by how much."""
        slowed = newest(evidence, _throttled)
        words = sorted({word for gpu in slowed for word in gpu.throttle or () if word in (*HOT, *FAULTY, POWER_LIMIT)})
        hot, faulty = set(words) & set(HOT), set(words) & set(FAULTY)
        measures = [measure for gpu in slowed for measure in _slowness(gpu, hot=bool(hot))]
        symptom = f"{named(slowed, 'is throttled', 'are throttled')}: {', '.join(words) or 'throttled'}."
        if hot:
            cause, fix = "Overheating.", "Check fans and airflow, or lower the power limit."
        elif faulty:
            cause, fix = "The power supply or the board requests it.", "Check power cables and power supply."
        else:
            cause = "It runs at its power limit."
            fix = "Raise the power limit if cooling allows (nvidia-smi -pl, needs root)."
        severity = Severity.WARNING if hot or faulty else Severity.NOTE
        return Finding(self.code, severity, since, symptom, cause, tuple(measures), (Fix(Changes(), fix),))


def _slowness(gpu: Gpu, *, hot: bool) -> list[Measure]:
    """How slow it is and why, most informative first: temperature, or clock."""
    found = []
    if gpu.clock_mhz and gpu.clock_max_mhz:
        found.append(Measure(f"GPU {gpu.index} clock", f"{gpu.clock_mhz} of {gpu.clock_max_mhz} MHz"))
    if gpu.temperature_c is not None:
        found.insert(0 if hot else 1, Measure(f"GPU {gpu.index} temperature", temperature(gpu.temperature_c)))
    watts = f"{gpu.power_w:.0f} W" if gpu.power_w is not None else UNKNOWN
    limit = f"{gpu.power_limit_w:.0f} W" if gpu.power_limit_w is not None else ""
    within = (gpu.power_w or 0.0) < (gpu.power_limit_w or 0.0)
    return [*found, Measure(f"GPU {gpu.index} power", watts, limit, "its power limit" if limit else "", within)]


def _narrow(gpu: Gpu) -> Judgment:
    width, widest = gpu.pcie_width, gpu.pcie_width_max
    generation, newest = gpu.pcie_generation, gpu.pcie_generation_max
    if not (width and widest and generation and newest):
        return Judgment.UNKNOWN
    if width >= widest and generation >= newest:
        return Judgment.FAILS
    # An idle link is slower, and on some boards narrower, to save power.
    return Judgment.HOLDS if (gpu.utilization or 0.0) >= WORKING_PERCENT else Judgment.UNCLEAR


def _pcie(gpu: Gpu) -> str:
    """What is less than possible: ``×4 of ×16``."""
    width, widest = gpu.pcie_width, gpu.pcie_width_max
    generation, newest = gpu.pcie_generation, gpu.pcie_generation_max
    parts = [f"×{width} of ×{widest}"] if width and widest and width < widest else []
    parts += [f"generation {generation} of {newest}"] if generation and newest and generation < newest else []
    return " and ".join(parts) or "it fluctuates"


OVER_PCIE = ("cpu-offload-gb", "offload-group-size", "kv-offloading-size", TRANSFER)
"""Flags that move weights or KV cache between a GPU and main memory, or another server."""


class PcieNarrow(Rule):
    """Under load the PCIe link is narrower or of an older generation than it could be."""

    code = "pcie_narrow"

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by link width and generation of working GPUs."""
        return by_gpu(evidence, _narrow)

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """The present and the possible link; a warning only if it is used while serving."""
        narrow = newest(evidence, _narrow)
        measures = tuple(
            Measure(f"GPU {gpu.index} PCIe", f"generation {gpu.pcie_generation} ×{gpu.pcie_width}",
                    f"generation {gpu.pcie_generation_max} ×{gpu.pcie_width_max}", "maximum of GPU and slot")
            for gpu in narrow
        )  # fmt: skip
        moving = flag_names({name: value for name, value in evidence.flags.items() if value}).intersection(OVER_PCIE)
        user = f"--{min(moving)}" if moving else ""
        if evidence.tensor_parallel > 1 and link_level(evidence.link) is not LinkLevel.NVLINK:
            user = "Tensor parallelism"
        symptom = f"{named(narrow, 'has', 'have')} a degraded PCIe link: {', '.join(map(_pcie, narrow))}."
        cause = "Slot, riser or BIOS setting; no vLLM flag changes it."
        cause += f" {user} uses this link." if user else " It only slows weight loading."
        fix = Fix(Changes(), "Reseat the GPU, or move it to a slot that is not shared; check the BIOS.")
        severity = Severity.WARNING if user else Severity.NOTE
        return Finding(self.code, severity, since, symptom, cause, measures, (fix,))


NO_STAGES = (
    "pipeline-parallel-size", "data-parallel-size", "async-scheduling", *SPECULATION_FLAGS, "enable-eplb", TRANSFER,
)  # fmt: skip
"""Flags that exclude pipeline stages: sizes already set, and features that some releases reject with stages."""


class TensorParallelStalls(Rule):
    """Tensor parallelism over a slow link: the GPUs seem busy but hardly read their memory.

    Decoding reads all weights in each step, so a decoding GPU reads memory most of the time. One that waits for others
    spins in a kernel: 100% utilization, little memory traffic, little power.
    """

    code = "tensor_parallel_stalls"
    of_traffic = True
    BUSY, READS, READS_WELL = 85.0, 30.0, 45.0
    """Percent of the time: running a kernel; reading memory; and reading memory so much that it is not a stall."""

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by memory traffic, during decode, of GPUs that are split over a slow link."""
        frames = evidence.frames
        if evidence.tensor_parallel < 2 or not evidence.link or link_level(evidence.link) is LinkLevel.NVLINK:
            return [Judgment.FAILS] * len(frames)
        found = []
        for frame, moments in moments_within(evidence):
            samples = [gpu for moment in moments for gpu in moment.gpus]
            reads = [gpu.memory_utilization for gpu in samples if gpu.memory_utilization is not None]
            busy = [gpu.utilization for gpu in samples if gpu.utilization is not None]
            if not reads or not busy:
                found.append(Judgment.UNKNOWN)
                continue
            read, works = sum(reads) / len(reads), sum(busy) / len(busy)
            decodes = bool(frame.grown.generation_tokens_total)
            if decodes and works >= self.BUSY and read <= self.READS:
                found.append(Judgment.HOLDS)
            else:
                found.append(Judgment.FAILS if decodes and read >= self.READS_WELL else Judgment.UNCLEAR)
        return found

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How busy they seem, how little they read, and which link they use."""
        gpus, split = evidence.moments[-1].gpus, evidence.tensor_parallel
        reads = [gpu.memory_utilization / 100 for gpu in gpus if gpu.memory_utilization is not None]
        busy = [gpu.utilization / 100 for gpu in gpus if gpu.utilization is not None]
        read, works = (percent(sum(values) / len(values)) if values else UNKNOWN for values in (reads, busy))
        itl = mean(observed(evidence.last(MINUTE), "itl")[-1])
        step = seconds(itl)
        if itl is not None and reads:
            step += f", {seconds(itl * sum(reads) / len(reads))} of it reading memory"
        measures = (
            Measure("memory access", f"{read} of the time", percent(self.READS / 100), "built-in"),
            Measure("GPU utilization", works),
            Measure("ITL mean", step),
            Measure("slowest link", evidence.link, "NVLink", "tensor parallelism"),
        )
        symptom = f"The {split} GPUs are busy {works} of the time, but access memory only {read} of it."
        cause = (
            f"They wait for each other: each layer's all-reduce crosses a slow link, {link_level(evidence.link).words}."
        )
        fixes = present((self._half(evidence), self._stages(evidence)))
        return Finding(self.code, Severity.WARNING, since, symptom, cause, measures, fixes)

    @staticmethod
    def _half(evidence: Evidence) -> Fix | None:
        """Half as many GPUs, if twice the weights fit on each with enough memory left for the KV cache."""
        weights, split = evidence.weights_gib, evidence.tensor_parallel
        sizes = [gpu.memory_gib for gpu in evidence.moments[-1].gpus if gpu.memory_gib is not None]
        utilization = evidence.flags.get("gpu-memory-utilization", default_utilization(evidence.release))
        if weights is None or not sizes or split % 2 or not isinstance(utilization, float):
            return None
        if 2 * weights > 0.7 * utilization * min(sizes):
            return None
        why = "One GPU needs no communication" if split == 2 else f"{split // 2} GPUs communicate less"
        why += ", and the weights still fit."
        return setting("tensor-parallel-size", split // 2, why, "Smaller KV cache (see the plan).")

    @staticmethod
    def _stages(evidence: Evidence) -> Fix | None:
        if not flag_names(evidence.flags).isdisjoint(NO_STAGES):
            return None
        split = evidence.tensor_parallel
        changes = Changes({"tensor-parallel-size": 1, "pipeline-parallel-size": split})
        why = f"With {split} pipeline stages each GPU sends once per step, not twice per layer."
        return Fix(changes, why, "A single stream gets no faster; many concurrent ones do.")
