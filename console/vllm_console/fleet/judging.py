"""What is the matter with one server of ours: its frames, looks at its GPUs, and its conditions as they come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vllm_console.diagnosis.conditions.cache import hit_rate
from vllm_console.diagnosis.conditions.engine import HUNG_AFTER_SECONDS, in_part, suspected_hang
from vllm_console.diagnosis.conditions.rule import GpuMoment, Situation
from vllm_console.diagnosis.conditions.watch import conditions
from vllm_console.diagnosis.model import Condition
from vllm_console.fleet.details import Details
from vllm_console.fleet.one_token import OneToken
from vllm_console.fleet.watched import Around
from vllm_console.telemetry.frames import FRAMES, STEP_SECONDS, Frame, Frames, total
from vllm_console.telemetry.model import Sample
from vllm_launchers.keeper.records import ServerRecord, State
from vllm_launchers.machine.gpu.catalogue import find_model
from vllm_launchers.machine.gpu.host import Gpu, Host
from vllm_launchers.machine.gpu.links import level_of
from vllm_launchers.machine.gpu.sharing import Share, available_gib
from vllm_launchers.machine.model import EngineKind
from vllm_launchers.machine.modelfacts.model import ModelFactsError
from vllm_launchers.machine.modelfacts.read import model_facts
from vllm_launchers.plan.flags import token_count
from vllm_launchers.simulated.hardware import DEFAULT_GPU

HISTORY_SECONDS = FRAMES * STEP_SECONDS
"""How far back a server is judged by."""

MOMENT_SECONDS = 5.0
"""Between two looks at its GPUs that are kept."""

ENOUGH_LOOKED_UP = 5_000
"""Prompt tokens looked up in the prefix cache, from which on an earlier generation's hit rate says something."""

LARGE_GIB = 70.0

DEFAULT_UTILIZATION = 0.9
"""vLLM's, before 0.20: what is at least there."""


class Judge:
    """Judges one server. Its conditions are worked out anew once per frame, not at every look."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._frames = Frames()
        self._latest: Sample | None = None
        self._moments: deque[GpuMoment] = deque(maxlen=int(HISTORY_SECONDS / MOMENT_SECONDS))
        self._link = ""
        self._request = OneToken()
        self._facts: tuple[object, _Facts] | None = None
        self._found: tuple[tuple[object, ...], tuple[Condition, ...]] | None = None

    def append(self, sample: Sample, generation: int) -> None:
        """Take in the next look at its metrics."""
        self._frames.append(sample, generation)
        self._latest = sample

    def look(self, host: Host | None, gpus: Iterable[int], now: float) -> None:
        """Take in a look at its GPUs; one of before a driver's fault says nothing of now."""
        if host is None or host.problem or (self._moments and 0 <= now - self._moments[-1].at < MOMENT_SECONDS):
            return
        found = [gpu for index in gpus if (gpu := host.gpu(index)) is not None]
        if found:
            self._moments.append(GpuMoment(now, tuple(found)))
            self._link = slowest_link(host, [gpu.index for gpu in found])

    def conditions(
        self, record: ServerRecord, details: Details, around: Around, now: float, *, wait: bool = False
    ) -> tuple[Condition, ...]:
        """What holds as of ``now`` (Unix seconds); ``wait`` for the answer of a server that seems to hang."""
        if record.state not in (State.READY, State.UNRESPONSIVE):
            self._request.forget()
            return ()
        generation = record.current.number
        ready_at = record.current.ready_at or record.state_since
        frames = self._frames.since(ready_at, generation)
        unasked = self._ask_if_hanging(record, frames, around, wait=wait)
        silent = self._request.silent_seconds
        newest = frames[-1].end if frames else None
        hung = silent is not None and silent >= HUNG_AFTER_SECONDS
        key = (generation, record.state, newest, hung, int(now // STEP_SECONDS))
        if self._found is None or self._found[0] != key:
            situation = self._situation(record, details, around, frames, now)
            self._found = (key, conditions(replace(situation, unasked=unasked)))
        return self._found[1]

    def _ask_if_hanging(self, record: ServerRecord, frames: Sequence[Frame], around: Around, *, wait: bool) -> str:
        """Send a server that seems to hang a request; why it was not confirmed by one, where it cannot be."""
        if record.state is not State.READY or suspected_hang(frames) is None:
            self._request.forget()
            return ""
        if in_part(frames):
            self._request.forget()
            return "an engine that goes on would answer it"
        model = self._latest.model_name if self._latest is not None else None
        if model is None:
            return "its metrics do not name its model"
        if not around.may_ask:
            return "read-only sends none"
        spec = record.current.spec
        self._request.ask(spec.host, spec.port, model, tls=spec.tls)
        if wait:
            self._request.wait(HUNG_AFTER_SECONDS + 0.1)
        return self._request.refused

    def _situation(
        self, record: ServerRecord, details: Details, around: Around, frames: Sequence[Frame], now: float
    ) -> Situation:
        gpus = self._moments[-1].gpus if self._moments else ()
        reserve = {gpu.index: limit for gpu in gpus if (limit := _reserve(gpu, around.reserves)) is not None}
        free = {gpu.index: gib for gpu in gpus if (gib := available_gib(gpu, around.shares)) is not None}
        facts = self._known(record, details)
        silent = record.state is State.UNRESPONSIVE
        return Situation(
            now=now,
            ready_at=record.current.ready_at or record.state_since,
            frames=frames,
            flags=details.flags,
            objectives=details.objectives,
            workload=details.workload,
            preset=details.preset,
            release=details.engine.release if details.engine else None,
            max_model_len=token_count(details.flags.get("max-model-len")),
            health_problem=record.reason if silent else "",
            health_since=record.state_since,
            moments=tuple(self._moments),
            link=self._link,
            server=self._name,
            reserve_gib=reserve,
            spare_gib={index: gib - reserve.get(index, 0.0) for index, gib in free.items()},
            build=details.engine.build if details.engine else None,
            compute_capability=facts.compute_capability,
            large_gpu=facts.large_gpu,
            quantized=facts.quantized,
            weights_gib=details.predicted.get("weights_gib"),
            cache_gib=details.predicted.get("kv_gib"),
            cache_free_gib=_cache_free(details, facts.memory_gib),
            silent_seconds=self._request.silent_seconds,
            earlier_reuse=self._earlier_reuse(record),
        )

    def _known(self, record: ServerRecord, details: Details) -> _Facts:
        """Looked up once per generation, and again when GPUs come in sight."""
        gpu = self._moments[-1].gpus[0] if self._moments else None
        key = (record.current.number, gpu.name if gpu else None)
        if self._facts is None or self._facts[0] != key:
            self._facts = (key, _facts(details, gpu))
        return self._facts[1]

    def _earlier_reuse(self, record: ServerRecord) -> float | None:
        frames = self._frames.since(0.0, record.current.number - 1)
        looked_up = total(frames, "prefix_cache_queries_total") or 0.0
        return hit_rate(frames) if looked_up >= ENOUGH_LOOKED_UP else None


@dataclass(frozen=True, slots=True)
class _Facts:
    memory_gib: float | None = None
    compute_capability: tuple[int, int] | None = None
    large_gpu: bool = False
    quantized: bool | None = None


def _facts(details: Details, gpu: Gpu | None) -> _Facts:
    """What decides which remedies there are: of the GPU as seen, as told or as simulated, and of the model."""
    name = (gpu.name if gpu else None) or details.gpu_kind
    if details.engine is not None and details.engine.kind is EngineKind.SIMULATED:
        name = details.environment.get("SIMULATED_GPU") or DEFAULT_GPU
    model = find_model(name) if name else None
    told = gpu.compute_capability if gpu is not None and gpu.name == name else None
    capability = told or (model.compute_capability if model else None)
    numbers = tuple(int(part) for part in capability.split(".")[:2]) if capability else ()
    memory = model.memory_gib if model else (gpu.memory_gib if gpu else None)
    return _Facts(
        memory_gib=memory,
        compute_capability=(numbers[0], numbers[1]) if len(numbers) == 2 else None,
        large_gpu=memory is not None and memory >= LARGE_GIB and "A100" not in (name or ""),
        quantized=_quantized(details),
    )


def _cache_free(details: Details, memory_gib: float | None) -> float | None:
    """What the KV cache would take of a GPU if no flag made it of one size; by what was estimated at the launch."""
    taken = [details.predicted.get(name) for name in ("weights_gib", "overhead_gib")]
    utilization = details.flags.get("gpu-memory-utilization", DEFAULT_UTILIZATION)
    if memory_gib is None or None in taken or not isinstance(utilization, int | float):
        return None
    return utilization * memory_gib - sum(filter(None, taken))


def _quantized(details: Details) -> bool | None:
    if "quantization" in details.flags:
        return True
    try:
        facts = model_facts(details.model)
    except (ModelFactsError, OSError):
        return None
    if facts.quantization is not None:
        return True
    return False if facts.layers and facts.dtype != "float32" else None


def slowest_link(host: Host, gpus: Sequence[int]) -> str:
    """How the two of these GPUs that are farthest from each other reach each other; empty where that is not known."""
    pairs = [(a, b) for at, a in enumerate(gpus) for b in gpus[at + 1 :]]
    kinds = [link.kind for a, b in pairs if (link := host.link(a, b)) is not None]
    return max(kinds, key=level_of, default="") if len(kinds) == len(pairs) else ""


def _reserve(gpu: Gpu, reserves: Sequence[Share]) -> float | None:
    limits = [share.limit(gpu) for share in reserves if share.gpu == gpu.index]
    return max((limit for limit in limits if limit is not None), default=None)
