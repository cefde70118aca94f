"""The open findings of one of our servers, from frames of its metrics and samples of its GPUs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vllm_console.attached import endpoint_of
from vllm_console.diagnosis.accepted import accepted
from vllm_console.diagnosis.finding import Finding, Fix
from vllm_console.diagnosis.live.engine import HUNG_AFTER_SECONDS, in_part, suspected_hang
from vllm_console.diagnosis.live.findings import OF_TRAFFIC, findings, with_minute
from vllm_console.diagnosis.live.fixes import with_experience
from vllm_console.diagnosis.live.latency import ABOUT_STEPS, contention_span
from vllm_console.diagnosis.live.prefix_cache import hit_rate
from vllm_console.diagnosis.live.refused import answered
from vllm_console.diagnosis.live.rule import Evidence, GpuMoment
from vllm_console.diagnosis.opposed import with_conflicts
from vllm_console.history.frames import FRAMES, STEP_SECONDS, Frame, Frames, merged, total
from vllm_console.history.prefix_use import still_cached
from vllm_console.history.probe_records import EngineStep, ProbeReader
from vllm_console.history.timeline import IDLE_SECONDS
from vllm_console.logs.refusals import Refusals, read_refusals
from vllm_console.metrics.sample import LENGTHS, Sample, Window
from vllm_console.metrics.window import is_idle, longest_request
from vllm_console.text import plain
from vllm_launchers.engine_model.gpu_models import SMALL_BATCHES, find_model
from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.host.gpu.sharing import GpuShare, available_gib
from vllm_launchers.host.gpu.topology import link_level
from vllm_launchers.keeper.records import ServerRecord, State
from vllm_launchers.launch.details import Details
from vllm_launchers.launch.earlier_starts import start_of_log
from vllm_launchers.plan.attention import is_fp8
from vllm_launchers.plan.budget.budget import GpuShape, MemoryBudget
from vllm_launchers.plan.budget.engine_report import as_reported, blocks_without_override, read_report
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.budget.memory_flags import batch_sizes, cache_dtype, draft_model, max_tokens_per_mm_item
from vllm_launchers.plan.choices.pool import is_free
from vllm_launchers.plan.flags import BLOCKS, BYTES, token_count
from vllm_launchers.secrets import API_KEY
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, ModelFactsError
from vllm_launchers.vllm.modelfacts.read import model_facts

if TYPE_CHECKING:
    from vllm_console.fleet.watched_server import JudgeContext
    from vllm_console.history.probe_records import Resumed
    from vllm_console.runs.store import PastRun
    from vllm_launchers.keeper.server_client import ServerClient


DEADLINE_SECONDS = 20.0
REST_SECONDS = 60.0
"""Minimum interval between the starts of two requests."""


class OneToken:
    """One server's test request. `silent_seconds` is its result; all methods must be called from the same thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._asked_at = float("-inf")
        self._silent_since: float | None = None
        self._answered: bool | None = None
        self.refused = ""
        """The API server's response if it answered itself (which shows nothing about the engine); else empty."""

    def ask(self, client: ServerClient, model: str) -> None:
        """Send the request, unless one is in flight or was sent within the last minute."""
        if self._busy or time.monotonic() - self._asked_at < REST_SECONDS:
            return
        self._asked_at = time.monotonic()
        if self._silent_since is None:
            self._silent_since = self._asked_at
        self._answered = None
        self._thread = threading.Thread(target=self._run, args=(client, model), name="one-token", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for the answer, at most this long."""
        if self._thread is not None:
            self._thread.join(seconds)

    @property
    def silent_seconds(self) -> float | None:
        """How long the request has been unanswered; 0 if the engine answered, None if unknown."""
        if self._silent_since is None:
            return None
        if self._busy or self._answered is False:
            return time.monotonic() - self._silent_since
        return 0.0 if self._answered else None

    def forget(self) -> None:
        """Reset after progress or a restart; the minimum interval between requests still applies."""
        if not self._busy:
            self._silent_since = self._answered = None
            self.refused = ""

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, client: ServerClient, model: str) -> None:
        from vllm_launchers.keeper.health import TEXT  # these imports take a tenth of a console's start
        from vllm_launchers.keeper.server_client import RequestTimeoutError

        key = os.environ.get(API_KEY, "")
        if not (key.isascii() and key.isprintable()):
            self._refuse(f"it could not be sent: {API_KEY} has characters that no HTTP header can carry")
            return
        body = {"model": model, "prompt": TEXT, "max_tokens": 1}
        try:
            status = client.ask("POST", "/v1/completions", body, seconds=DEADLINE_SECONDS).status
        except RequestTimeoutError:
            self._answered, self.refused = False, ""
        except OSError as error:  # no connection, or cut off: not an answer from the engine
            self._refuse(f"it could not be sent: {plain(str(error), 120) or type(error).__name__}")
        else:
            if status == 200:
                self._answered, self.refused = True, ""
            else:
                # A refusal (an API key, a model that completes nothing) comes from the API server, not from the engine.
                self._refuse(f"the API server answered it with {status}")

    def _refuse(self, why: str) -> None:
        self._silent_since, self.refused = None, why


HISTORY_SECONDS = FRAMES * STEP_SECONDS
"""How much history findings are based on."""

MOMENT_SECONDS = 5.0
"""Interval between two stored samples of its GPUs."""

FRAME_DELAY_SECONDS = STEP_SECONDS / 2
"""How late a frame may be. After that, findings are recomputed without it, once per step."""

ENOUGH_LOOKED_UP = 5_000
"""Prompt tokens looked up in the prefix cache before an earlier generation's hit rate is meaningful."""


class Judge:
    """Computes the findings of one server, once per frame instead of at every sample."""

    def __init__(
        self,
        name: str,
        earlier_runs: Callable[[ServerRecord], Sequence[PastRun]] = lambda _: (),
        log: Path | None = None,
        probe: Path | None = None,
    ) -> None:
        """``earlier_runs`` returns the runs before the record's current run, newest first; called only if a finding has
        a fix that changes flags. ``log`` is read only if requests were refused, or if the
        number of KV cache blocks is set. ``probe`` is the folder in which its
        probe may have recorded; its steps are read only if tokens come late.
        """
        self._name = name
        self._log, self._probe = log, probe
        self._earlier_runs = earlier_runs
        self._frames = Frames()
        self._latest: Sample | None = None
        self._busy_at: float | None = None
        self._moments: deque[GpuMoment] = deque(maxlen=int(HISTORY_SECONDS / MOMENT_SECONDS))
        self._resumed: Sequence[Resumed] = ()
        self._link = ""
        self._request = OneToken()
        self._facts: tuple[object, _Facts] | None = None
        self._found: tuple[tuple[object, ...], Evidence, tuple[Finding, ...]] | None = None
        """The findings of the newest frame, with their cache key and evidence."""
        self._stuck: tuple[Sequence[Frame], Sequence[Frame]] | None = None
        """The frames of the newest snapshot, and those of them that suggest a hang."""

    def append(self, sample: Sample, generation: int) -> None:
        """Add the next sample of its metrics."""
        self._frames.append(sample, generation)
        if self._latest is None or not is_idle(self._latest, sample):
            self._busy_at = sample.at
        self._latest = sample

    @property
    def _idle_seconds(self) -> float:
        if self._latest is None or self._busy_at is None:
            return 0.0
        return max(0.0, self._latest.at - self._busy_at)

    def add_gpus(self, host: Host | None, gpus: Iterable[int], now: float) -> None:
        """Add a sample of its GPUs; samples from before a driver fault are skipped."""
        if host is None or host.problem or (self._moments and 0 <= now - self._moments[-1].at < MOMENT_SECONDS):
            return
        found = [gpu for index in gpus if (gpu := host.gpu(index)) is not None]
        if found:
            self._moments.append(GpuMoment(now, tuple(found)))
            self._link = slowest_link(host, [gpu.index for gpu in found])

    def set_resumed(self, resumed: Sequence[Resumed]) -> None:
        """Set the requests that were resumed in the last minutes, as its probe recorded them."""
        self._resumed = resumed

    def findings(
        self,
        record: ServerRecord,
        details: Details,
        context: JudgeContext,
        now: float,
        *,
        minute: Window | None = None,
        wait: bool = False,
    ) -> tuple[Finding, ...]:
        """The findings as of ``now`` (Unix seconds), with the figures of the last ``minute`` as panes show them.

        ``wait`` for the answer of a server that seems to hang.
        """
        if record.state not in (State.READY, State.UNRESPONSIVE):
            self._request.forget()
            return ()
        generation = record.current.number
        ready_at = record.current.ready_at or record.state_since
        frames = self._frames.since(ready_at, generation)
        unasked = self._ask_if_hanging(record, frames, context, wait=wait)
        silent = self._request.silent_seconds
        newest = frames[-1].end if frames else None
        hung = silent is not None and silent >= HUNG_AFTER_SECONDS
        idle = self._idle_seconds >= IDLE_SECONDS
        missing = max(0.0, now - newest - FRAME_DELAY_SECONDS) // STEP_SECONDS if newest is not None else None
        key = (generation, record.state, newest, hung, idle, missing, unasked)
        if self._found is None or self._found[0] != key:
            evidence = self._evidence(record, details, context, frames, now)
            evidence = replace(evidence, minute=minute, unasked=unasked)
            found = findings(evidence)
            if any(one.code in ABOUT_STEPS for one in found) and (steps := self._steps(evidence)):
                evidence = replace(evidence, steps=steps)
                found = findings(evidence)
            if any(not fix.changes.empty for finding in found for fix in finding.fixes):
                found = tuple(replace(one, fixes=self._accepted(one.fixes, record, details)) for one in found)
                earlier = self._earlier_runs(record)
                found = tuple(with_experience(one, details.flags, earlier, OF_TRAFFIC) for one in found)
            self._found = (key, evidence, found)
        elif self._found[1].minute != minute:
            evidence = replace(self._found[1], minute=minute)
            self._found = (key, evidence, with_minute(self._found[2], evidence))
        return with_conflicts(self._found[2], self._found[1].sizes)

    def _accepted(self, fixes: Sequence[Fix], record: ServerRecord, details: Details) -> tuple[Fix, ...]:
        """The fixes that its vLLM accepts with its model on its GPUs."""
        known, engine = self._known(record, details), details.engine
        version = engine.version if engine is not None else None
        return accepted(fixes, details.flags, version, known.model, known.gpu, on_cpu=_on_cpu(details))

    def _ask_if_hanging(
        self, record: ServerRecord, frames: Sequence[Frame], context: JudgeContext, *, wait: bool
    ) -> str:
        """Send a test request to a server that seems to hang; return why that is not possible, if so.

        No request is sent while its first requests are served, because it is still compiling kernels.
        """
        if self._stuck is None or self._stuck[0] is not frames:  # once per frame
            served = [frame for frame in frames if not frame.compiling]
            self._stuck = frames, served if suspected_hang(served) is not None else ()
        stuck = self._stuck[1]
        if record.state is not State.READY or not stuck:
            self._request.forget()
            return ""
        if in_part(stuck):
            self._request.forget()
            return "a working engine would answer it"
        model = self._latest.model_name if self._latest is not None else None
        if model is None:
            return "its metrics do not name its model"
        if not context.may_ask:
            return "a read-only console sends none"
        if record.server is None:
            return "its process is unknown"
        from vllm_launchers.keeper.server_client import client_of

        self._request.ask(client_of(record, record.server), model)
        if wait:
            self._request.wait(HUNG_AFTER_SECONDS + 0.1)
        return self._request.refused

    def _evidence(
        self, record: ServerRecord, details: Details, context: JudgeContext, frames: Sequence[Frame], now: float
    ) -> Evidence:
        gpus = self._moments[-1].gpus if self._moments else ()
        reserve = {gpu.index: limit for gpu in gpus if (limit := _reserve(gpu, context.reserves)) is not None}
        free = {gpu.index: gib for gpu in gpus if (gib := available_gib(gpu, context.shares)) is not None}
        facts = self._known(record, details)
        silent = record.state is State.UNRESPONSIVE
        begun = record.current.ready_at or record.state_since
        return Evidence(
            now=now,
            ready_at=begun,
            frames=frames,
            flags=details.flags,
            flags_known=endpoint_of(record) is None,
            preset_objectives=details.objectives,
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
            gpus=len(details.gpus),
            free_gpus=_free_gpus(details, context),
            build=details.engine.build if details.engine else None,
            simulated=details.simulated,
            compute_capability=facts.compute_capability,
            environment=details.variables,
            mla=facts.mla,
            linear_layers=LayerKind.LINEAR in facts.layers,
            sliding_layers=bool(facts.layers & {LayerKind.SLIDING, LayerKind.CHUNKED}),
            attention_free=facts.model is not None and facts.model.attention_free,
            most_sequences=facts.most_sequences,
            batch_sizes=facts.batch_sizes,
            max_tokens_per_mm_item=facts.max_tokens_per_mm_item,
            quantized=facts.quantized,
            own_fp8_cache=facts.own_fp8_cache,
            weights_gib=details.predicted.get("weights_gib"),
            cache_gib=details.predicted.get("kv_gib"),
            cache_free_gib=facts.cache_free_gib,
            blocks_without_override=facts.blocks_without_override,
            silent_seconds=self._request.silent_seconds,
            idle_seconds=self._idle_seconds,
            earlier_reuse=self._earlier_reuse(record),
            longest_seen=self._longest(),
            max_context=facts.max_context,
            model_name=self._latest.model_name if self._latest is not None else None,
            refusals=self._refusals(frames),
            resumed=still_cached([one for one in self._resumed if one.at >= begun]),
        )

    def _steps(self, evidence: Evidence) -> Sequence[EngineStep]:
        """The recorded steps of the time over which prefill contention is judged; none if they cannot be read."""
        if self._probe is None:
            return ()
        try:
            return ProbeReader(self._probe, *contention_span(evidence)).steps()
        except OSError:
            return ()

    def _refusals(self, frames: Sequence[Frame]) -> Refusals:
        """The reasons in the log for the requests refused in the last minute; read only if there are any."""
        refused = round(answered(frames, len(frames) - 1).all_refused) if frames else 0
        return read_refusals(self._log, refused) if refused and self._log is not None else Refusals()

    def _known(self, record: ServerRecord, details: Details) -> _Facts:
        """Cached per generation; recomputed when GPUs become known."""
        gpu = self._moments[-1].gpus[0] if self._moments else None
        key = (record.current.number, gpu.name if gpu else None)
        if self._facts is None or self._facts[0] != key:
            facts = _facts(details, gpu)
            linear = LayerKind.LINEAR in facts.layers
            if self._log is not None and (linear or BLOCKS in details.flags):
                facts = _with_log(facts, details, start_of_log(self._log, record))
            self._facts = (key, facts)
        return self._facts[1]

    def _earlier_reuse(self, record: ServerRecord) -> float | None:
        frames = self._frames.since(0.0, record.current.number - 1)
        looked_up = total(frames, "prefix_cache_queries_total") or 0.0
        return hit_rate(frames) if looked_up >= ENOUGH_LOOKED_UP else None

    def _longest(self) -> float:
        """The longest request of the last half hour, also of earlier runs and while this one compiled kernels.

        Each run counts by itself: with another context, its lengths have other buckets.
        """
        longest = 0.0
        for generation in {frame.generation for frame in self._frames.since(0.0)}:
            prompts, answers = (merged(self._frames.since(0.0, generation), key) for key in LENGTHS)
            if prompts is not None and answers is not None:
                longest = max(longest, longest_request(prompts, answers))
        return longest


class _Facts(msgspec.Struct, frozen=True):
    model: ModelFacts | None = None
    gpu: GpuShape | None = None
    """One of its GPUs, if its model is known."""
    cache_free_gib: float | None = None
    blocks_without_override: float | None = None
    most_sequences: int | None = None
    max_context: int | None = None
    compute_capability: tuple[int, int] | None = None
    batch_sizes: tuple[int, int] = SMALL_BATCHES
    max_tokens_per_mm_item: int = 0
    quantized: bool | None = None
    own_fp8_cache: bool = False
    mla: bool = False
    layers: frozenset[LayerKind] = frozenset()


def _on_cpu(details: Details) -> bool:
    return details.engine is not None and details.engine.build == "cpu"


def _facts(details: Details, gpu: Gpu | None) -> _Facts:
    """The facts that decide which fixes are possible: the GPU as seen, recorded or simulated, and the model."""
    name = (gpu.name if gpu and not details.simulated else None) or details.gpu_name
    model = find_model(name) if name else None
    reported = gpu.compute_capability if gpu is not None and gpu.name == name else None
    capability = reported or (model.compute_capability if model else None)
    numbers = tuple(int(part) for part in capability.split(".")[:2]) if capability else ()
    model_known = _model_facts(details.model)
    memory = model.memory_gib if model else (gpu.memory_gib if gpu else None)
    release = details.engine.release if details.engine is not None else None
    on_cpu = _on_cpu(details)
    shape = GpuShape(name, memory)
    return _Facts(
        model=model_known,
        gpu=shape if model is not None and not on_cpu else None,
        cache_free_gib=None if on_cpu else _cache_free(details, model_known, shape),
        max_context=model_known.longest_context(release) if model_known is not None else None,
        compute_capability=(numbers[0], numbers[1]) if len(numbers) == 2 else None,
        batch_sizes=batch_sizes(model_known, details.flags, release, None if on_cpu else shape),
        max_tokens_per_mm_item=max_tokens_per_mm_item(model_known, details.flags),
        quantized=_quantized(details, model_known),
        own_fp8_cache=model_known is not None and is_fp8(cache_dtype(model_known, {}, release)),
        mla=details.mla or (model_known is not None and model_known.mla),
        layers=frozenset(model_known.layers) if model_known is not None else frozenset(),
    )


def _cache_free(details: Details, facts: ModelFacts | None, gpu: GpuShape) -> float | None:
    """GPU memory for the KV cache without the flag that fixes its size, by the plan's estimate.

    None if no flag fixes it, or if the estimate is unknown.
    """
    flags = {name: value for name, value in details.flags.items() if name not in (BLOCKS, BYTES)}
    if facts is None or len(flags) == len(details.flags):
        return None
    found = _estimated(details, facts, gpu, flags)
    return found.kv_gib if found is not None else None


def _with_log(facts: _Facts, details: Details, start: Sequence[str]) -> _Facts:
    """The facts with what the log of its start tells about blocks of the KV cache."""
    limited = BLOCKS in details.flags
    if limited:
        facts = replace(facts, blocks_without_override=blocks_without_override(start))
    if facts.model is None or facts.gpu is None:
        return facts
    if (found := _estimated(details, facts.model, facts.gpu, details.flags)) is None:
        return facts
    return replace(facts, most_sequences=as_reported(found, read_report(start), limited=limited).most_sequences)


def _estimated(details: Details, facts: ModelFacts, gpu: GpuShape, flags: Flags) -> MemoryBudget | None:
    engine, draft = details.engine, draft_model(flags)
    return estimate(
        facts,
        flags,
        [gpu],
        release=engine.release if engine is not None else None,
        build=engine.build if engine is not None else None,
        environment=details.variables,
        draft=_model_facts(draft) if draft else None,
    )


def _model_facts(model: str) -> ModelFacts | None:
    try:
        return model_facts(model)
    except (ModelFactsError, OSError):
        return None


def _quantized(details: Details, facts: ModelFacts | None) -> bool | None:
    if "quantization" in details.flags:
        return True
    if facts is None:
        return None
    if facts.quantization is not None:
        return True
    wide = facts.dtype == "float32" or details.flags.get("dtype") in ("float32", "float")
    return False if facts.layers and not wide else None


def _free_gpus(details: Details, context: JudgeContext) -> tuple[int, ...] | None:
    """The free GPUs like its own, of this machine or of the recorded host it was planned for; None if unknown."""
    source = context.gpus
    host = source.host() if source is not None else None
    taken = details.gpus_on(source.recorded_host) if source is not None else ()
    own = host.gpu(taken[0]) if host is not None and not host.problem and taken else None
    if host is None or own is None or own.mig_mode:
        return None
    shares = tuple(context.shares)
    alike = (gpu for gpu in host.gpus if gpu.name == own.name and gpu.index not in taken and not gpu.mig_mode)
    return tuple(gpu.index for gpu in alike if not gpu.lost and not gpu.claimed and is_free(gpu, shares))


def slowest_link(host: Host, gpus: Sequence[int]) -> str:
    """The connection between the two GPUs that are farthest apart; empty if unknown."""
    pairs = [(a, b) for at, a in enumerate(gpus) for b in gpus[at + 1 :]]
    kinds = [link.kind for a, b in pairs if (link := host.link(a, b)) is not None]
    return max(kinds, key=link_level, default="") if len(kinds) == len(pairs) else ""


def _reserve(gpu: Gpu, reserves: Sequence[GpuShare]) -> float | None:
    limits = [share.limit(gpu) for share in reserves if share.gpu == gpu.index]
    return max((limit for limit in limits if limit is not None), default=None)
