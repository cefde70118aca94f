"""Predicts the effect of a change to a running server from its records and limits; settles earlier predictions."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vllm_console.history.probe_records import EngineStep, FinishedRequest, ProbeReader
from vllm_console.history.store import HISTORY, HistoryError, HistoryReader
from vllm_console.metrics.parse import CacheConfig, cache_config
from vllm_console.metrics.sample import Sample
from vllm_console.metrics.scrape import ScrapeError, Scraper
from vllm_console.prediction.drift import at_speed_of
from vllm_console.prediction.evidence import MOST_REQUESTS, NoEvidenceError, TrafficEvidence, gather
from vllm_console.prediction.fit import fit_step_cost
from vllm_console.prediction.predict import Change, Prediction, measured, predict, unusable, with_kv_bytes
from vllm_console.prediction.reconstruct import reconstruct
from vllm_console.prediction.score import KeptPrediction, TrackRecord, Traffic, settle, track_record
from vllm_console.runs.store import FlagChange, Run, RunName, changes
from vllm_launchers.addresses import base_url
from vllm_launchers.engine_model.gpu_models import find_model, usable_gib
from vllm_launchers.engine_model.roofline import MAX_GRAPH_BATCH
from vllm_launchers.engine_model.scheduler import SchedulerLimits
from vllm_launchers.engine_model.traffic_replay import EngineLimits
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.listeners import Owner
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.memory_flags import batch_sizes, captured_batches
from vllm_launchers.plan.checks.check import errors
from vllm_launchers.plan.flags import BLOCKS, token_count
from vllm_launchers.plan.model import Plan
from vllm_launchers.probe.environment import PROBE
from vllm_launchers.typed_decoding import convert
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Flags, whole_number
from vllm_launchers.vllm.flags.speculation import speculates
from vllm_launchers.vllm.modelfacts.facts import LayerKind
from vllm_launchers.vllm.release_defaults import NEWEST

if TYPE_CHECKING:
    from vllm_console.fleet.runs import RunRecorder
    from vllm_launchers.vllm.modelfacts.facts import ModelFacts

FIT_REQUESTS = 250
"""Number of requests that the fit replays, dozens of times; the prediction itself replays more."""
TRAFFIC = "traffic"
"""Name of the request rate factor in the list of changes."""
_UNLIMITED = 1 << 30
_FEWEST_TO_SETTLE = 100
_FEWEST_BLOCKS = 2
"""Minimum KV cache size; one block is vLLM's null block."""
PROBE_RECORDS = "the probe's records"
METRICS = "metrics"
"""Sources of the evidence."""
RECONSTRUCTIONS = 3
"""Number of traffic reconstructions that agree with the metrics, each with its own fit."""

_BATCH = ("max-num-seqs", "max-num-batched-tokens", "enable-chunked-prefill")
_CACHE = (
    "gpu-memory-utilization",
    "max-model-len",
    "num-gpu-blocks-override",
    "kv-cache-dtype",
    "kv-cache-memory-bytes",
)
COVERED = frozenset({*_BATCH, *_CACHE, "enable-prefix-caching"})
"""Flags whose effect is modeled."""

_NOT_MODELED = {
    "pipeline-parallel-size": 1, "data-parallel-size": 1, "kv-transfer-config": None, "kv-offloading-size": None,
    "scheduling-policy": "fcfs", "long-prefill-token-threshold": 0, "stream-interval": 1, "enable-lora": False,
}  # fmt: skip
"""Flags that affect scheduling in ways that are not modeled, unless they have this value."""


class PredictedChange(msgspec.Struct, frozen=True):
    """A prediction and its basis. ``drift``: how much slower the engine was after the last predicted restart (0.05 is
    5%).
    """

    changed: tuple[FlagChange, ...]
    prediction: Prediction
    requests: int
    minutes: float
    source: str
    record: TrackRecord
    drift: float | None = None
    kept: KeptPrediction | None = None
    """The prediction in the form to be stored, if it has figures."""


def predict_change(
    state: Path,
    record: ServerRecord,
    plans: tuple[Plan, Plan],
    facts: ModelFacts | None,
    runs: RunRecorder,
    traffic_scale: float,
    *,
    keep: bool,
) -> PredictedChange:
    """Predict a restart of a running server; ``plans`` are its restart without and with the change.

    Raises:
        OperationError: too little is recorded, or the server does not answer.
        UsageError: nothing is changed.
    """
    details, (before, after) = unpack(record.current.spec.details), plans
    cache = reported_cache(record)
    limits = limits_of(details.flags, details, facts, cache)
    seen = present_run(state, record)
    evidence, fitted_to = evidence_of(seen, record.name, limits)
    limits = replace(limits, ahead=evidence.ahead)
    changed = changes(details.flags, after.flags)
    if not changed and traffic_scale == 1:
        raise UsageError("nothing would change: name another value with --set, or another --traffic-scale")
    kept = settled_predictions(state, record, runs, cache.block_size)
    drifts = [one.drift for one in kept if one.drift is not None]
    fronts = [one.front_drift for one in kept if one.front_drift is not None]
    cost, change = None, None
    outside = then = limits_after(details, facts, cache, before, after)
    if not isinstance(then, str):
        change = Change(
            limits, replace(then, ahead=evidence.ahead), traffic_scale, _kv_bytes(details.flags, after.flags)
        )
        outside = unusable(evidence, change)
    if change is None or outside:
        prediction = replace(measured(evidence), outside=str(outside))
    else:
        others = [evidence_of(seen, record.name, limits, seed) for seed in range(1, seen.versions)]
        fitted = fit_step_cost(fitted_to, limits)
        prediction = predict(
            evidence, fitted, change, [(one, fit_step_cost(part, limits)) for one, part in others], drifts, fronts
        )
        then_cost = with_kv_bytes(at_speed_of(fitted.start, evidence), change.kv_bytes)
        cost = replace(then_cost, graphs=change.after.graphs)
    new = None
    if cost is not None and prediction.predicted.ttft_seconds.p50.value is not None:
        new = KeptPrediction(
            at=time.time(),
            changed={one.flag: one.after for one in changed},
            predicted=prediction.predicted,
            traffic=Traffic.of(evidence, traffic_scale),
            cost=cost,
            outside=bool(prediction.outside),
            front=evidence.front,
        )
        if keep:
            keep_prediction(record, runs, new)
    shown = changed if traffic_scale == 1 else (*changed, FlagChange(TRAFFIC, 1.0, traffic_scale))
    return PredictedChange(
        changed=shown,
        prediction=prediction,
        requests=evidence.requests,
        minutes=evidence.seconds / 60,
        source=seen.source,
        record=track_record(kept),
        drift=drifts[-1] if drifts else None,
        kept=new,
    )


# -- evidence and limits -----------------------------------------------------------------------------------------------


def evidence_of(
    seen: RunRecording, name: str, limits: EngineLimits, seed: int = 0
) -> tuple[TrafficEvidence, TrafficEvidence]:
    """The traffic of a run: all that a prediction uses, and the part that a step cost is fitted to.

    ``limits`` are the server's. If the traffic is reconstructed, each ``seed`` gives a different reconstruction.

    Raises:
        OperationError: too little is recorded, or the records do not determine the step cost.
    """
    one = limits.scheduler
    try:
        whole = seen.evidence(one.block_size, one.max_num_batched_tokens, one.max_model_len, seed=seed)
        part = seen.evidence(one.block_size, one.max_num_batched_tokens, one.max_model_len, FIT_REQUESTS, seed)
    except NoEvidenceError as error:
        raise OperationError(f"{name}: {error}") from error
    if not part.steps:
        why = part.flaw or "no recorded step ran without a preempted request"
        raise OperationError(f"{name}: {why}, so the cost of a step is unknown")
    return whole, part


def limits_after(
    details: Details, facts: ModelFacts | None, cache: CacheConfig, before: Plan, after: Plan
) -> EngineLimits | str:
    """The server's limits after a change; a sentence if it would not start, or if the change is not modeled."""
    changed = changes(details.flags, after.flags)
    outside = _refused(before, after) or _uncovered(details.flags, changed)
    if outside := outside or _bounded_layers(facts, changed) or _unknown_cache(before, after, changed):
        return outside
    then = _cache_after(cache, before, after, changed)
    if then.blocks < _FEWEST_BLOCKS:
        return f"It would not start: its KV cache would have {counted(then.blocks, 'block')}."
    limits = limits_of(after.flags, details, facts, then)
    sequences = limits.scheduler.max_num_seqs
    if after.memory is not None and after.memory.most_sequences is not None and sequences > then.blocks:
        return f"It would not start: its KV cache has {then.blocks:,} blocks for the states of {sequences:,} sequences."
    return limits


def reported_cache(record: ServerRecord) -> CacheConfig:
    """The KV cache as reported by the running server, if it has one engine. Raises OperationError."""
    spec, server = record.current.spec, record.server
    if server is None or not record.state.alive:
        raise OperationError(f"{record.name} is {record.state}: a prediction needs a server that is up")
    flags = unpack(spec.details).flags
    url = base_url(spec.host, spec.port, tls=bool(flags.get("ssl-certfile") or flags.get("ssl-keyfile")))
    try:
        with contextlib.closing(Scraper(url, owner=Owner(server.pid, server.start_time))) as scraper:
            found = cache_config(scraper.metrics_text())
    except ScrapeError as error:
        raise OperationError(f"{record.name}: {error}") from error
    if found is None:
        raise OperationError(f"{record.name} does not report the size of its KV cache, so it can't be modeled")
    if found.engines > 1:
        many = f"{record.name} has {found.engines} data-parallel engines"
        raise OperationError(f"{many}, and how requests are spread over them is not modeled")
    return found


def limits_of(flags: Flags, details: Details, facts: ModelFacts | None, cache: CacheConfig) -> EngineLimits:
    """The engine limits of a server with these flags and this KV cache."""
    release = details.engine.release if details.engine is not None else None
    gpu = _gpu(details)
    seqs, batched = batch_sizes(facts, flags, release, gpu)
    length = token_count(flags.get("max-model-len"))
    if length is None and facts is not None:
        length = facts.longest_context(release)
    caching = flags.get("enable-prefix-caching")
    return EngineLimits(
        SchedulerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            max_model_len=length or _UNLIMITED,
            block_size=cache.block_size,
            chunked_prefill=flags.get("enable-chunked-prefill") is not False,
        ),
        cache.blocks,
        caching if isinstance(caching, bool) else cache.prefix_caching,
        # Without CUDA graphs, all steps are alike.
        graphs=max(captured_batches(flags, seqs, batched, gpu, release or NEWEST), default=MAX_GRAPH_BATCH),
    )


def _gpu(details: Details) -> GpuShape | None:
    """The GPU from which vLLM derives its defaults; None for a CPU."""
    if details.engine is not None and details.engine.build == "cpu":
        return None
    model = find_model(details.gpu_name)
    return GpuShape(details.gpu_name, usable_gib=usable_gib(model.memory_gib) if model is not None else None)


def _kv_bytes(before: Flags, after: Flags) -> float:
    """The factor by which the bytes of a cached token change."""
    one, other = (1 if _eight_bits(flags) else 2 for flags in (before, after))
    return other / one


def _eight_bits(flags: Flags) -> bool:
    return str(flags.get("kv-cache-dtype", "auto")).startswith(("fp8", "int8"))


def _cache_after(now: CacheConfig, before: Plan, after: Plan, changed: Sequence[FlagChange]) -> CacheConfig:
    if override := whole_number(after.flags, BLOCKS, 0):
        return now._replace(blocks=override)
    names = {change.flag for change in changed}
    one, other = before.memory, after.memory
    if BLOCKS in names:
        return now._replace(blocks=((other and other.kv_tokens) or 0) // now.block_size)
    if one is None or other is None or one.kv_gib <= 0 or other.kv_gib <= 0:
        return now
    # Scale by bytes: the token count assumes full-length requests, and a windowed layer keeps less of longer ones.
    blocks = now.blocks * other.kv_gib / one.kv_gib
    if "kv-cache-dtype" in names and one.kv_bytes_per_token and other.kv_bytes_per_token:
        blocks *= one.kv_bytes_per_token / other.kv_bytes_per_token
    return now._replace(blocks=round(blocks))


# -- limits of the model -----------------------------------------------------------------------------------------------


def _refused(before: Plan, after: Plan) -> str:
    """A sentence if the server would not start with the change."""
    known = {(finding.code, finding.message) for finding in errors(before.findings)}
    new = [finding.message for finding in errors(after.findings) if (finding.code, finding.message) not in known]
    if not new:
        return ""
    return f"{new[0]}." if "will not start" in new[0] else f"It would not start: {new[0]}."


def _uncovered(flags: Flags, changed: Sequence[FlagChange]) -> str:
    """A sentence if a changed or set flag is not modeled."""
    names = [one.flag for one in changed if one.flag not in COVERED]
    if names:
        effect = f"The effect of {' and '.join(names)} on speed is not modeled"
        return f"{effect}: it is outside what this server has shown."
    special = "speculative decoding" if speculates(flags) else ""
    for name, value in flags.items():
        plain = name.partition(".")[0]
        if plain in _NOT_MODELED and value not in (_NOT_MODELED[plain], None):
            special = plain
    if special:
        return f"It runs with {special}, and how that schedules requests is not modeled."
    dtypes = {
        str(value or "auto") for one in changed if one.flag == "kv-cache-dtype" for value in (one.before, one.after)
    }
    if not all(dtype in ("auto", "bfloat16", "float16") or dtype.startswith("fp8") for dtype in dtypes):
        return "The speed of this kv-cache-dtype is not modeled."
    return ""


def _bounded_layers(facts: ModelFacts | None, changed: Sequence[FlagChange]) -> str:
    """A sentence if the KV cache or request sizes change and some layers don't keep all tokens of a request."""
    sizes = [one.flag for one in changed if one.flag in _CACHE]
    if facts is None or not sizes or set(facts.layers) <= {LayerKind.FULL, LayerKind.NONE}:
        return ""
    layers = "layers that keep a window or a state of a request instead of all its tokens"
    return f"The effect of {' and '.join(sizes)} on models with {layers} is not modeled."


def _unknown_cache(before: Plan, after: Plan, changed: Sequence[FlagChange]) -> str:
    """A sentence if the KV cache's size after the change is unknown."""
    if whole_number(after.flags, BLOCKS, 0):
        return ""
    sizes = [one.flag for one in changed if one.flag in _CACHE and one.flag != "max-model-len"]
    known = all(plan.memory is not None and plan.memory.kv_tokens for plan in (before, after))
    if not sizes or known:
        return ""
    return f"The size of the KV cache with another {' and '.join(sizes)} is unknown before the start."


# -- records, and earlier predictions ----------------------------------------------------------------------------------


class RunRecording(msgspec.Struct, frozen=True):
    """The records of a run: the probe's, or else only its metrics."""

    requests: Sequence[FinishedRequest]
    steps: Sequence[EngineStep]
    samples: Sequence[Sample] = ()

    @property
    def source(self) -> str:
        """The source of the traffic."""
        return PROBE_RECORDS if self.requests else METRICS

    @property
    def versions(self) -> int:
        """Number of traffic reconstructions to consider."""
        return 1 if self.requests else RECONSTRUCTIONS

    def evidence(
        self, block_size: int, budget: int, longest: int, most: int = MOST_REQUESTS, seed: int = 0
    ) -> TrafficEvidence:
        """Evidence from about the newest ``most`` requests. Raises NoEvidenceError."""
        if self.requests:
            return gather(self.requests, self.steps, block_size, budget, most=most)
        return reconstruct(self.samples, budget, longest, seed=seed, most=most)


def present_run(state: Path, record: ServerRecord) -> RunRecording:
    """The records of the current run. Raises OperationError."""
    current = record.current
    return _seen(state, record, current.number, current.ready_at or current.started_at)


def _seen(state: Path, record: ServerRecord, generation: int, begin: float, until: float | None = None) -> RunRecording:
    """The records of a run in a time span (Unix seconds). Raises OperationError."""
    folder, end = folders.server_folder(state, record.name), until or math.inf
    try:
        reader = ProbeReader(folder / PROBE)
        requests = [one for one in reader.requests() if begin <= one.arrived_at and one.finished_at <= end]
        steps = [one for one in reader.steps() if begin <= one.at <= end]
    except OSError as error:
        raise OperationError(f"the records of {record.name} can't be read: {error.strerror}") from error
    if requests:
        return RunRecording(requests, steps)
    with contextlib.closing(HistoryReader(folder / HISTORY)) as history:
        try:
            rows = [one for one in history.since(begin) if one.generation == generation and one.at <= end]
        except HistoryError as error:
            raise OperationError(
                f"{record.name} has no probe's records, and its metrics can't be read: {error}"
            ) from error
    return RunRecording((), (), [one.sample for one in rows])


def settled_predictions(state: Path, record: ServerRecord, runs: RunRecorder, block_size: int) -> list[KeptPrediction]:
    """A server's stored predictions, oldest first, with the outcome of those whose restart followed."""

    store = runs.open()
    found: list[KeptPrediction] = []
    after: Run | None = None
    for run, noted in store.predictions(record.name):
        kept = [one for one in map(_decoded, noted) if one is not None]
        new = [_settle(state, record, one, run, after, block_size) for one in kept]
        if new != kept and not runs.read_only:
            store.note_predictions(RunName(run.key, run.server, run.generation), run.started_at, _packed(new))
        found = [*new, *found]
        after = run
    return found


def outcome(state: Path, record: ServerRecord, runs: RunRecorder, before: Run, after: Run) -> KeptPrediction | None:
    """The prediction for the restart from one run to the next, with its outcome; None if there is no prediction, or too
    little data yet.

    Raises:
        OperationError: the run database cannot be read.
    """

    with contextlib.suppress(OperationError):  # the server is not up: use only what is stored
        settled_predictions(state, record, runs, reported_cache(record).block_size)
    noted = next((noted for run, noted in runs.open().predictions(record.name) if run.id == before.id), [])
    changed = {one.flag: one.after for one in after.changed}
    kept = [one for one in map(_decoded, noted) if one is not None and dict(one.changed) == changed]
    return next((one for one in kept if one.settled), None) if after.before == before.id else None


def _settle(
    state: Path, record: ServerRecord, kept: KeptPrediction, run: Run, after: Run | None, block_size: int
) -> KeptPrediction:
    """Add the outcome to a prediction, if the next run has exactly the flags that it was made for."""
    if kept.settled or after is None or after.ready_at is None or after.before != run.id:
        return kept
    if {one.flag: one.after for one in after.changed} != dict(kept.changed):
        return kept
    details = unpack(record.current.spec.details)
    _, budget = batch_sizes(None, after.flags, details.engine.release if details.engine else None, _gpu(details))
    longest = token_count(after.flags.get("max-model-len")) or _UNLIMITED
    seen = _seen(state, record, after.generation, after.ready_at, after.ended_at)
    try:
        evidence = seen.evidence(block_size, budget, longest)
    except NoEvidenceError:
        return kept
    if evidence.requests < _FEWEST_TO_SETTLE and after.ended_at is None:
        return kept
    return settle(kept, evidence)


def keep_prediction(record: ServerRecord, runs: RunRecorder, new: KeptPrediction) -> None:
    """Store a prediction with the server's current run; only the newest of each change is kept.

    Raises:
        OperationError: the run database cannot be read.
    """

    if runs.read_only:
        return
    store, name = runs.open(), runs.name(record)
    noted = next((noted for run, noted in store.predictions(name.server) if run.key == name.key), [])
    others = [one for one in map(_decoded, noted) if one is not None and dict(one.changed) != dict(new.changed)]
    store.note_predictions(name, new.at, _packed([*others, new]))


def _decoded(noted: Mapping[str, object]) -> KeptPrediction | None:
    try:
        return convert(dict(noted), KeptPrediction)
    except (TypeError, ValueError):  # written by another version
        return None


def _packed(kept: Sequence[KeptPrediction]) -> list[dict[str, object]]:
    packed: list[dict[str, object]] = msgspec.to_builtins(kept)
    return packed
