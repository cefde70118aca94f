"""What happened between two samples of a server: rates, shares and quantiles, across restarts and several engines.

Pure: no clock, no files, no network. Counters only grow while an engine lives, so a drop means that the engine
restarted and that everything it counts now happened since.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from vllm_console.metrics.quantile import PARTS, Quantiles, agreeing, quantile
from vllm_console.metrics.sample import (
    ACCEPTED,
    COUNTERS,
    GAUGES,
    LATENCIES,
    EngineSample,
    Histogram,
    Responses,
    Sample,
    Speculation,
    Window,
)


def quantiles(histogram: Histogram) -> Quantiles:
    """Count, exact mean and quantiles of a latency's histogram."""
    count = histogram.count
    if count <= 0:
        return Quantiles(count=0.0, mean=None)
    p50, p90, p99 = (quantile(q, histogram.bounds, histogram.counts) for _, q in PARTS)
    return Quantiles(count=count, mean=histogram.sum / count, p50=p50, p90=p90, p99=p99)


def merge_histograms(histograms: Iterable[Histogram]) -> Histogram | None:
    """Add histograms; None if there are none. If bounds differ, only shared ones are kept: their counts are exact."""
    merged: Histogram | None = None
    for histogram in histograms:
        if merged is None:
            merged = histogram
            continue
        if merged.bounds != histogram.bounds:
            shared = set(merged.bounds) & set(histogram.bounds)
            merged, histogram = _only(merged, shared), _only(histogram, shared)
        counts = tuple(map(operator.add, merged.counts, histogram.counts))
        merged = Histogram(merged.bounds, counts, merged.sum + histogram.sum)
    return merged


def longest_request(prompts: Histogram, answers: Histogram, max_tokens: float = 0.0) -> float:
    """An upper bound, in tokens, of prompt plus answer of every request in two histograms of lengths.

    The ends of their highest buckets with a request; infinite if one of these has no end. ``max_tokens`` is the longest
    answer that a request is known to allow, even if none got as long.
    """
    return _highest_end(prompts) + max(_highest_end(answers), max_tokens)


def known_max_tokens(
    max_tokens: Histogram | None, prompts: Histogram, max_model_len: float | None
) -> tuple[float, bool]:
    """An upper bound of the ``max_tokens`` that requests are known to have set, and whether all requests are known.

    Requests without ``max_tokens`` are counted with what their prompts leave of ``max_model_len``: at least what the
    longest one leaves. So only lower values are known to be set. If ``max_model_len`` is None, the highest finite
    bound counts, since vLLM's bounds do not exceed it.
    """
    if max_tokens is None or not max_tokens.count:
        return 0.0, False
    limit = max_model_len if max_model_len is not None else max(filter(math.isfinite, max_tokens.bounds), default=0.0)
    least_unset = limit - _highest_end(prompts)
    known = _only(max_tokens, {bound for bound in max_tokens.bounds if bound < least_unset})
    return (_highest_end(known) if known.count else 0.0), known.count >= max_tokens.count


def _highest_end(histogram: Histogram) -> float:
    pairs = zip(histogram.bounds, histogram.counts, strict=True)
    return next((bound for bound, count in pairs if count >= histogram.count), 0.0)


def _only(histogram: Histogram, bounds: set[float]) -> Histogram:
    kept = [pair for pair in zip(histogram.bounds, histogram.counts, strict=True) if pair[0] in bounds]
    return Histogram(tuple(bound for bound, _ in kept), tuple(count for _, count in kept), histogram.sum)


def restarted(before: EngineSample, after: EngineSample) -> bool:
    """Whether the engine restarted between two samples: some counter or histogram decreased."""
    for name in COUNTERS:
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None and new < old:
            return True
    for key, histogram in after.histograms.items():
        old_histogram = before.histograms.get(key)
        if old_histogram is not None and histogram.count < old_histogram.count:
            return True
    return False


def restarted_engines(before: Sample, after: Sample) -> set[str]:
    """Labels of the engines that are in both samples and restarted in between."""
    both = before.engines.keys() & after.engines.keys()
    return {label for label in both if restarted(before.engines[label], after.engines[label])}


def growth(before: EngineSample | None, after: EngineSample, keys: Iterable[str] = LATENCIES) -> EngineSample:
    """Growth of an engine's counters between two samples, with the later gauges and only the histograms in ``keys``.

    For a new or restarted engine, everything it reports now.
    """
    before_counters = None if before is None or restarted(before, after) else before
    fields: dict[str, Any] = {name: getattr(after, name) for name in GAUGES}
    for name in COUNTERS:
        value = getattr(after, name)
        if value is not None and before_counters is not None:
            value -= getattr(before_counters, name) or 0.0
        fields[name] = value
    histograms: dict[str, Histogram] = {}
    for key in keys:
        histogram = after.histograms.get(key)
        if histogram is not None:
            old = before_counters.histograms.get(key) if before_counters is not None else None
            histograms[key] = _histogram_growth(old, histogram)
    return EngineSample(**fields, histograms=histograms)


def _histogram_growth(before: Histogram | None, after: Histogram) -> Histogram:
    if before is None or before.bounds != after.bounds:
        return after
    if before is after:
        return Histogram(after.bounds, (0.0,) * len(after.counts), 0.0)
    counts = tuple(map(operator.sub, after.counts, before.counts))
    return Histogram(after.bounds, counts, after.sum - before.sum)


def combine(engines: Iterable[EngineSample]) -> EngineSample:
    """Merge engines into one: counters, running and waiting are summed, histograms merged, KV usage averaged.

    A field that no engine reports stays None; engines that do not report a field are ignored for it.
    """
    parts = list(engines)
    if len(parts) == 1:
        return parts[0]
    fields: dict[str, Any] = {}
    for name in (*GAUGES, *COUNTERS):
        values = [value for part in parts if (value := getattr(part, name)) is not None]
        if values:
            total = math.fsum(values)
            fields[name] = total / len(values) if name == "kv_cache_usage" else total
    keys = dict.fromkeys(key for part in parts for key in part.histograms)
    merged = {key: merge_histograms(part.histograms[key] for part in parts if key in part.histograms) for key in keys}
    histograms = {key: histogram for key, histogram in merged.items() if histogram is not None}
    return EngineSample(**fields, histograms=histograms)


def growths(before: Sample, after: Sample, keys: Iterable[str] = LATENCIES) -> list[EngineSample]:
    """`growth` of every engine in the later sample; engines that are gone are left out."""
    keys = tuple(keys)
    return [growth(before.engines.get(label), engine, keys) for label, engine in after.engines.items()]


def responses_between(before: Sample, after: Sample) -> Responses | None:
    """Responses between two samples; None if either does not report them. A total that fell restarted from zero."""
    old, new = before.responses, after.responses
    if old is None or new is None:
        return None
    grown = {name: _counted_since(getattr(old, name), getattr(new, name)) for name in ("ok", "refused", "failed")}
    known = old.unauthorized is not None and new.unauthorized is not None
    return Responses(**grown, unauthorized=_counted_since(old.unauthorized, new.unauthorized) if known else None)


def _counted_since(before: float | None, after: float | None) -> float:
    old, new = before or 0.0, after or 0.0
    return new - old if new >= old else new


def format_unserved(found: Responses | None) -> str:
    """``118 of 240 requests refused (4xx), 2 failed (5xx)``; empty if all were served or nothing is known."""
    if found is None:
        return ""
    kinds = ((found.all_refused, "refused (4xx)"), (found.failed, "failed (5xx)"))
    parts = [f"{number:,.0f} {kind}" for number, kind in kinds if number]
    if not parts:
        return ""
    number, _, first = parts[0].partition(" ")
    return ", ".join([f"{number} of {found.total:,.0f} requests {first}", *parts[1:]])


def preemptions_per_request(preempted: float | None, finished: float | None, running: float | None) -> float | None:
    """Preemptions per request served in a span: those that finished in it, or those running at its end if more.

    In steady traffic this is per request if requests are shorter than the span, and it never divides by the few that
    happened to finish if they are longer. None if not reported, or if no request is known to be served.
    """
    if preempted is None or finished is None:
        return None
    requests = max(finished, running or 0.0)
    return preempted / requests if requests > 0 else None


def window(before: Sample, after: Sample) -> Window:
    """What happened between two samples. If no time passed, rates are None, except 0 for what was never counted."""
    seconds = after.at - before.at
    since_start = combine(after.engines.values())
    parts = growths(before, after, (*LATENCIES, ACCEPTED))
    total = combine(parts)
    finished, preempted = total.requests_finished_total, total.preemptions_total

    def rate(name: str) -> float | None:
        never = seconds <= 0 and getattr(since_start, name) == 0
        return 0.0 if never else per_second(getattr(total, name), seconds)

    preemptions_per_second = rate("preemptions_total")
    latencies = {key: quantiles(histogram) for key, histogram in total.histograms.items() if key in LATENCIES}
    return Window(
        start=min(before.at, after.at),
        end=after.at,
        requests_running=total.requests_running,
        requests_waiting=total.requests_waiting,
        kv_cache_usage=total.kv_cache_usage,
        kv_cache_usage_max=highest_usage(parts),
        kv_cache_tokens=after.kv_cache_tokens,
        preemptions_per_minute=None if preemptions_per_second is None else preemptions_per_second * 60,
        preemption_share=preemptions_per_request(preempted, finished, total.requests_running) if seconds > 0 else None,
        prefix_hit_rate=share(total.prefix_cache_hits_total, total.prefix_cache_queries_total),
        prefix_caching=after.prefix_caching,
        prefix_step=after.prefix_step,
        prompt_tokens_per_second=rate("prompt_tokens_total"),
        generation_tokens_per_second=rate("generation_tokens_total"),
        requests_per_second=rate("requests_finished_total"),
        speculation=speculation(total.histograms.get(ACCEPTED), seconds),
        responses=responses_between(before, after),
        latencies=agreeing(latencies),
    )


def speculation(accepted: Histogram | None, seconds: float) -> Speculation | None:
    """Results of speculative decoding over ``seconds``; None without drafts or if no time passed."""
    if accepted is None or accepted.count <= 0 or seconds <= 0:
        return None
    drafts = accepted.count
    by_position = tuple(1.0 - count / drafts for count in accepted.counts[:-1])
    return Speculation(drafts / seconds, 1.0 + accepted.sum / drafts, by_position)


def is_idle(before: Sample, after: Sample) -> bool:
    """Whether nothing runs or waits in the later sample, and nothing was counted since the earlier one."""
    for label, engine in after.engines.items():
        if engine.requests_running or engine.requests_waiting:
            return False
        old = before.engines.get(label)
        if old is None or any(getattr(old, name) != getattr(engine, name) for name in COUNTERS):
            return False
    return True


def without_rates(found: Window) -> Window:
    """A window after traffic ended: reported rates become zero; latencies remain those of its last part.

    ``responses`` stays: requests that are refused before they reach an engine are not traffic.
    """
    names = ("preemptions_per_minute", "prompt_tokens_per_second", "generation_tokens_per_second",
             "requests_per_second")  # fmt: skip
    zeros: dict[str, Any] = {name: 0.0 for name in names if getattr(found, name) is not None}
    return replace(found, preemption_share=None, speculation=None, **zeros)


def load_ended(found: Window) -> bool:
    """Whether the window's latencies are of traffic that has ended: nothing runs, waits or is generated any more."""
    now = (found.generation_tokens_per_second, found.requests_per_second, found.requests_running,
           found.requests_waiting)  # fmt: skip
    quiet = any(value is not None for value in now) and not any(now)
    return quiet and any(one.count for one in found.latencies.values())


def highest_usage(engines: Iterable[EngineSample]) -> float | None:
    """The KV cache usage of the fullest engine, a fraction from 0 to 1; None if none reports it."""
    return max((one.kv_cache_usage for one in engines if one.kv_cache_usage is not None), default=None)


def highest(one: float | None, other: float | None) -> float | None:
    """The greater of two figures; None is ignored."""
    return other if one is None else one if other is None else max(one, other)


def per_second(amount: float | None, seconds: float) -> float | None:
    """``amount`` per second; None if unknown or if no time passed."""
    return amount / seconds if amount is not None and seconds > 0 else None


def share(part: float | None, whole: float | None) -> float | None:
    """``part / whole``; None if either is unknown or ``whole`` is zero."""
    return part / whole if part is not None and whole else None


def in_order(engines: Mapping[str, EngineSample]) -> dict[str, EngineSample]:
    """Engines by label, in numerical order (``"2"`` before ``"10"``)."""
    return dict(sorted(engines.items(), key=lambda item: (len(item[0]), item[0])))


# -- the JSON contract of ``vllm-console metrics`` --------------------------------------------------------------------


_FIGURES = tuple(name for name in (*GAUGES, *COUNTERS) if name != "requests_finished_total")
"""Sample fields that keep their names in the document."""


def metrics_document(sample: Sample) -> dict[str, Any]:
    """A sample as JSON values: counters and latencies since the start, gauges as they are; null means not reported.

    Running, waiting and counters are summed over engines, KV usage (0 to 1) is averaged, latencies (seconds) come from
    the merged histograms. ``engines`` maps each engine's label to the same keys without ``engines``; there
    ``kv_cache_tokens`` is an even share of the sum, since a sample has only the sum (as did vLLM before 0.24).
    """
    engines = in_order(sample.engines)
    tokens = sample.kv_cache_tokens
    share = tokens // len(engines) if tokens is not None and engines else None
    document = _document(combine(engines.values()), tokens)
    document["responses"] = _responses(sample.responses)
    document["engines"] = {label: _document(engine, share) for label, engine in engines.items()}
    return document


def _document(engine: EngineSample, kv_cache_tokens: int | None) -> dict[str, Any]:
    document: dict[str, Any] = {name: _plain_number(getattr(engine, name)) for name in _FIGURES}
    document["kv_cache_tokens"] = kv_cache_tokens
    seen = {key: engine.histograms[key] for key in LATENCIES if key in engine.histograms}
    figures = agreeing({key: quantiles(histogram) for key, histogram in seen.items()})
    for key in LATENCIES:
        document[f"{key}_seconds"] = _latency(seen[key], figures[key]) if key in seen else None
    return document


def _latency(histogram: Histogram, figures: Quantiles) -> dict[str, Any]:
    """Count, sum and exact mean; each quantile with the ends of its bucket.

    A quantile is null if only one end of its bucket is known, ``…_below`` or ``…_above``.
    """
    return {
        "count": _plain_number(histogram.count),
        "sum": histogram.sum,
        "mean": figures.mean,
        **_ends(figures),
    }


def _ends(figures: Quantiles) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, _ in PARTS:
        found = getattr(figures, name)
        document |= {
            name: found.value if found is not None else None,
            f"{name}_below": found.below if found is not None else None,
            f"{name}_above": found.above if found is not None else None,
        }
    return document


def window_document(found: Window) -> dict[str, Any]:
    """A window's latencies as JSON values, with whether they are exact, plus speculative decoding and responses."""
    document: dict[str, Any] = {"start": found.start, "end": found.end}
    for key in LATENCIES:
        latency = found.latencies.get(key)
        counted = {"count": _plain_number(latency.count), "mean": latency.mean} if latency is not None else {}
        document[f"{key}_seconds"] = (
            {**counted, **_ends(latency), "exact": latency.exact} if latency is not None and latency.count else None
        )
    document["speculation"] = found.speculation and structs.asdict(found.speculation)
    document["responses"] = _responses(found.responses)
    return document


def _responses(found: Responses | None) -> dict[str, Any] | None:
    return {name: _plain_number(value) for name, value in structs.asdict(found).items()} if found is not None else None


def _plain_number(value: float | None) -> int | float | None:
    """Counts without a fraction as integers."""
    return int(value) if value is not None and value.is_integer() else value


# -- the first requests of a run --------------------------------------------------------------------------------------

MOST_SECONDS = 300.0
"""This long after the first request arrived, first requests count like any others: that is not compilation."""

COMPILED_SECONDS = 3.0
"""If the first token comes sooner, no significant compilation happened, and first requests count like any others."""


class FirstRequests:
    """The first requests of a run without warm-up: they trigger kernel compilation, so they are not representative.

    Follows one run from its first sample until as many requests have ended as waited for the first token. Over from the
    start for a run that had already served something at the first sample or does not report finished requests.
    """

    def __init__(self) -> None:
        self.over = False
        self.since: float | None = None
        """When one was first seen running (Unix seconds)."""
        self.answered = False
        """Whether a token was generated."""
        self.compiled = False
        """Whether the wait was long enough to indicate compilation."""
        self._held = 1.0
        self._started = False

    def add(self, sample: Sample) -> bool:
        """Add the next sample; return whether the first requests are over."""
        if not self.over:
            self.over = self._ends_with(sample)
        return self.over

    def _ends_with(self, sample: Sample) -> bool:
        total = combine(sample.engines.values())
        ended, tokens = total.requests_finished_total, total.generation_tokens_total
        first, self._started = not self._started, True
        if ended is None or (first and (ended or tokens)):
            return True
        if self.since is None and total.requests_running:
            self.since = sample.at
        waited = sample.at - self.since if self.since is not None else 0.0
        if not tokens and not ended:
            self._held = max(self._held, (total.requests_running or 0.0) + (total.requests_waiting or 0.0))
            self.compiled = waited >= COMPILED_SECONDS
            return waited > MOST_SECONDS
        self.answered = True
        return not self.compiled or ended >= self._held or waited > MOST_SECONDS


def traffic(samples: Iterable[Sample]) -> list[Sample]:
    """The samples of one run, oldest first, without those taken while its first requests triggered compilation."""
    first, kept, rest = FirstRequests(), list[Sample](), iter(samples)
    for sample in rest:
        if first.add(sample):
            kept = [sample, *rest] if first.compiled else [*kept, sample, *rest]
        elif first.compiled:
            kept = [sample]
        else:
            kept.append(sample)
    return kept if first.over or not first.compiled else []
