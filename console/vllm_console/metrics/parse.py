"""Parse a ``/metrics`` body into a `Sample`, fast: each series' text is parsed once and then looked up.

The text format is Prometheus' exposition format 0.0.4, or OpenMetrics where vLLM's exporters use it (timestamps,
exemplars, ``_created``). Only new series are parsed; a known series costs one dictionary lookup per line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import msgspec

from vllm_console.metrics.sample import ACCEPTED, EngineSample, Histogram, Responses, Sample
from vllm_launchers.patterns import lazy_pattern

GAUGE_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "requests_running": ("vllm:num_requests_running",),
    "requests_waiting": ("vllm:num_requests_waiting",),
    # Despite its name a fraction from 0 to 1; the old name was removed in 0.12.
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
"""Gauges by field of `EngineSample`: family names, preferred first."""

COUNTER_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "preemptions_total": ("vllm:num_preemptions_total",),
    "prefix_cache_queries_total": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_cache_hits_total": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "prompt_tokens_total": ("vllm:prompt_tokens_total",),
    "generation_tokens_total": ("vllm:generation_tokens_total",),
    # One series per finished_reason; they are summed.
    "requests_finished_total": ("vllm:request_success_total",),
}
"""Counters by field of `EngineSample`, by full name: a histogram may end in ``_total`` too."""

HISTOGRAM_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    # The old name, too, is the time between tokens; request_time_per_output_token_seconds is a mean per request.
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "e2e": ("vllm:e2e_request_latency_seconds",),
    "queue": ("vllm:request_queue_time_seconds", "vllm:time_in_queue_requests"),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "decode": ("vllm:request_decode_time_seconds",),
    "prompt_tokens": ("vllm:request_prompt_tokens",),
    "generation_tokens": ("vllm:request_generation_tokens",),
    "max_tokens": ("vllm:request_params_max_tokens",),
}
"""Histograms by key of `EngineSample.histograms`: base names, preferred first."""

ACCEPTED_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
"""Counter per draft position: drafts whose token at that position, and hence all tokens before it, was accepted."""

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"

FIRST_BUCKETS: Mapping[str, float] = {
    "ttft": 0.001,
    "itl": 0.01,
    "e2e": 0.3,
    "queue": 0.3,
    "prefill": 0.3,
    "decode": 0.3,
}
"""Upper end of the first bucket of each latency histogram, in seconds (vllm/v1/metrics/buckets.py; flags may change
it).

A value in that bucket is only known to be below this end. For exported queries, which do not know a server's
buckets."""

CACHE_CONFIG = "vllm:cache_config_info"
"""Info metric with the cache settings as labels; its value is meaningless and it has no ``model_name``."""

PREFIX = "vllm:"

RESPONSES = "http_requests_total"
"""Answered HTTP requests by ``handler`` (the route), ``method`` and ``status`` (``2xx``, ``4xx``, ``5xx``).

Requests refused by the API key middleware (401) are not counted, and requests to unknown routes have no handler."""

GENERATING = (
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages",
    "/inference/v1/generate", "/generate", "/v1/embeddings", "/v2/embed", "/embed", "/pooling", "/classify", "/score",
    "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/audio/transcriptions", "/v1/audio/translations",
    "/cohere/v2/chat", "/generative_scoring", "/invocations", "/v1/decisions", "/v1/systemone",
)  # fmt: skip
"""Routes whose requests make the model compute. Others (``/v1/models``, scanner probes) are not traffic."""

_CLASSES: Mapping[str, str] = {"2": "ok", "4": "refused", "5": "failed"}
"""Fields of `Responses` by the first digit of a status."""


class Role(NamedTuple):
    """Role of a sample name: kind, field or key, rank (0 is preferred) and, for a histogram, which part."""

    kind: Literal["gauge", "counter", "histogram"]
    key: str
    rank: int
    part: Literal["", "bucket", "beyond", "sum", "count"] = ""
    """A ``beyond`` sample counts observations above its bound; a ``bucket`` counts those at or below it."""


def _roles() -> dict[str, Role]:
    roles: dict[str, Role] = {}
    for key, names in GAUGE_FAMILIES.items():
        roles.update({name: Role("gauge", key, rank) for rank, name in enumerate(names)})
    for key, names in COUNTER_FAMILIES.items():
        roles.update({name: Role("counter", key, rank) for rank, name in enumerate(names)})
    for key, names in HISTOGRAM_FAMILIES.items():
        for rank, name in enumerate(names):
            roles[f"{name}_bucket"] = Role("histogram", key, rank, "bucket")
            roles[f"{name}_sum"] = Role("histogram", key, rank, "sum")
            roles[f"{name}_count"] = Role("histogram", key, rank, "count")
    roles[ACCEPTED_BY_POSITION] = Role("histogram", ACCEPTED, 0, "beyond")
    roles[ACCEPTED_TOKENS] = Role("histogram", ACCEPTED, 0, "sum")
    roles[DRAFTS] = Role("histogram", ACCEPTED, 0, "count")
    return roles


ROLES: Mapping[str, Role] = _roles()
"""Roles of all sample names that are read; others are skipped."""


def kv_cache_tokens(engines: Iterable[Mapping[str, str]]) -> int | None:
    """Number of tokens that the KV cache holds over all engines; None if not reported.

    ``engines`` holds the labels of `CACHE_CONFIG`, one mapping per engine. Since 0.24 each engine reports *its own*
    capacity as ``kv_cache_size_tokens``, correct for hybrid models too; these are summed. Older versions report the
    number of blocks and the block size; ``num_gpu_blocks`` is already the sum over data-parallel engines, repeated on
    each.
    """
    total = 0
    by_blocks = 0
    for labels in engines:
        total += _integer(labels.get("kv_cache_size_tokens")) or 0
        blocks, block_size = _integer(labels.get("num_gpu_blocks")), _integer(labels.get("block_size"))
        by_blocks = max(by_blocks, (blocks or 0) * (block_size or 0))
    return total or by_blocks or None


def prefix_cache(engines: Iterable[Mapping[str, str]]) -> tuple[bool | None, int | None]:
    """Whether prefix caching is on, and its granularity in tokens; each is None if unknown or if engines differ.

    vLLM reports the final setting, after the model and the platform resolved what no flag set. Models with Mamba layers
    have large blocks, which ``prefix_match_unit`` (0.26 and later) may subdivide.
    """
    found = list(engines)
    caching = {labels.get("enable_prefix_caching") for labels in found}
    steps = {_integer(labels.get("prefix_match_unit")) or _integer(labels.get("block_size")) for labels in found}
    on = {"True": True, "False": False}.get(caching.pop() or "") if len(caching) == 1 else None
    return on, steps.pop() if len(steps) == 1 else None


class CacheConfig(NamedTuple):
    """One engine's KV cache as reported by `CACHE_CONFIG`; the block size is in tokens."""

    blocks: int
    block_size: int
    prefix_caching: bool
    engines: int = 1
    """Number of data-parallel engines with the same configuration."""


def cache_config(text: str) -> CacheConfig | None:
    """The KV cache in a ``/metrics`` body, or None. Each engine reports ``num_gpu_blocks`` summed over all engines."""
    lines = [line for line in text.splitlines() if line.startswith(f"{CACHE_CONFIG}{{")]
    if not lines:
        return None
    labels = _labels(lines[0])
    blocks, block_size = _integer(labels.get("num_gpu_blocks")), _integer(labels.get("block_size"))
    if blocks is None or block_size is None:
        return None
    return CacheConfig(blocks // len(lines), block_size, labels.get("enable_prefix_caching") == "True", len(lines))


def _integer(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 15:
        return None
    return int(text) or None


_SERIES = lazy_pattern(
    r"\s*(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    r"(?:\s*\{(?P<labels>(?:[^\"{}]|\"(?:[^\"\\]|\\.)*\")*)\})?"
    r"[ \t]+(?P<value>[^\s#]+)(?P<rest>(?:[ \t].*)?)$",
    re.DOTALL,
)
_LABEL = lazy_pattern(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*\"((?:[^\"\\]|\\.)*)\"")
_ESCAPED = lazy_pattern(r"\\(.)", re.DOTALL)

_SKIP = -1
_COMMENT = -2
_MAX_KNOWN_SERIES = 80_000
_MAX_KNOWN_CHARACTERS = 8 * 1024 * 1024
_MAX_ENGINES = 1024
_MAX_LINES = 200_000
_SLICE = 64 * 1024
_MOST_KEPT = 4 * _SLICE
"""Maximum number of characters of a body that is kept for comparison with the next one."""


class NotMetricsError(ValueError):
    """The text is not a complete ``/metrics`` body. The message is one sentence; ``kind`` names the fault briefly."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _HistogramSlots(msgspec.Struct):
    """Slots of a histogram's parts: (bound, slot) pairs in order of appearance, and the slots of sum and count.

    If ``beyond``, the pairs' values count observations above their bound.
    """

    buckets: list[tuple[float, int]] = msgspec.field(default_factory=list)
    beyond: bool = False
    sum: int | None = None
    count: int | None = None
    bounds: tuple[float, ...] = ()
    pick: Callable[[list[str | None]], tuple[str | None, ...]] | None = None
    seen: tuple[str | None, ...] = ()
    made: Histogram | None = None

    def compile(self) -> None:
        """Sort the buckets after new ones appeared, so that one itemgetter reads all values at once."""
        self.buckets.sort()
        self.bounds = tuple(bound for bound, _ in self.buckets)
        slots = [slot for _, slot in self.buckets]
        tail = [slot if slot is not None else 0 for slot in (self.sum, self.count)]
        self.pick = itemgetter(*slots, *tail)
        self.seen, self.made = (), None


class _EngineSlots(msgspec.Struct):
    """Slots of one engine's values, by field and name rank; the values of several slots are summed."""

    scalars: dict[str, dict[int, list[int]]] = msgspec.field(default_factory=dict)
    histograms: dict[str, dict[int, _HistogramSlots]] = msgspec.field(default_factory=dict)


class Parser:
    """Turns bodies of one server into samples. Keep one per server: known series make the next body cheap to parse.

    Memory is bounded: with more series, longer series or more engines than any vLLM has, the parser starts over;
    within one body, engines beyond the limit are left out. Not thread-safe.
    """

    def __init__(self, max_series: int = _MAX_KNOWN_SERIES) -> None:
        self._max_series = max_series
        self._forget()

    def parse(self, text: str, at: float) -> Sample:
        """Parse a whole body, scraped at ``at`` (Unix seconds).

        Families not in `ROLES` are skipped, and so are single invalid lines. A body without any ``vllm:`` family gives
        a sample without engines. Raises `NotMetricsError` if the text as a whole is not metrics: empty, HTML, cut off,
        or garbage.
        """
        _check_shape(text)
        if (
            len(self._slots) > self._max_series
            or self._characters > _MAX_KNOWN_CHARACTERS
            or self._engines >= _MAX_ENGINES
        ):
            self._forget()
        values = self._changed_values(text) or self._all_values(text)
        return self._assemble(values, at)

    def _forget(self) -> None:
        self._before: tuple[list[str], list[str | None]] | None = None
        """Lines and values by slot of the previous body, if each vLLM line in it was known and occurred once."""
        self._slots: dict[str, int] = {}
        self._used = 1  # slot 0 stays empty: it stands for missing parts of a histogram
        self._characters = 0
        self._models: dict[str, dict[str, _EngineSlots]] = {}
        self._engines = 0
        self._configs: dict[int, tuple[str, dict[str, str]]] = {}
        self._responses: list[tuple[str, int]] = []
        self._stale: list[_HistogramSlots] = []

    def _all_values(self, text: str) -> list[str | None]:
        """The values of a body by slot. Raises `NotMetricsError` if no line can be parsed."""
        values: list[str | None] = [None] * self._used
        known = self._slots
        understood, each_known_once = 0, True
        for line in _lines(text):
            series, _, value = line.rpartition(" ")
            slot = known.get(series)
            if slot is None:
                if not understood or _of_interest(line):
                    each_known_once = False
                    understood += self._learn(line, values)
            elif slot >= 0:
                each_known_once = each_known_once and values[slot] is None
                values[slot] = value
                understood += 1
            elif slot == _SKIP:
                understood += 1
        if not understood:
            raise NotMetricsError("garbage", "The answer is not in the metrics format: no line of it could be read.")
        self._before = (text.split("\n"), values) if each_known_once and len(text) <= _MOST_KEPT else None
        return values

    def _changed_values(self, text: str) -> list[str | None] | None:
        """Like `_all_values`, but parse only lines that differ from the previous body: most stay the same each second.

        None if there is no previous body, or if this one does not have exactly its series, each on the same line.
        """
        if self._before is None or len(text) > _MOST_KEPT:
            return None
        before, lines = self._before[0], text.split("\n")
        if len(lines) != len(before):
            return None
        values = self._before[1].copy()
        for old, new in zip(before, lines, strict=True):
            if old == new:
                continue
            series, _, value = new.rpartition(" ")
            slot = self._slots.get(series)
            if slot is None and not (_of_interest(new) or _of_interest(old)):
                continue
            if slot is None or slot == _COMMENT or old.rpartition(" ")[0] != series:
                return None
            if slot >= 0:
                values[slot] = value
        self._before = (lines, values)
        return values

    def _remember(self, series: str, slot: int) -> None:
        if len(self._slots) <= self._max_series:
            self._slots[series] = slot
            self._characters += len(series)

    def _learn(self, line: str, values: list[str | None]) -> bool:
        """Parse a line with unknown text; return whether it is a sample."""
        stripped = line.strip()
        if not stripped:
            return False
        if stripped[0] == "#":
            # A comment's last word is not a value, but the text before it recurs each time.
            self._remember(line.rpartition(" ")[0], _COMMENT)
            return False
        line = line.rstrip("\r")
        match = _SERIES.match(line)
        if match is None:
            return False
        value = match["value"]
        if _float(value) is None:
            return False
        series = line[: match.start("value")].rstrip(" \t")
        slot = self._slots.get(series)
        if slot is None:
            slot = self._place(match["name"], match["labels"] or "")
            self._remember(series, slot)
        if slot >= 0:
            values.extend([None] * (self._used - len(values)))
            values[slot] = value
        return True

    def _place(self, name: str, label_text: str) -> int:
        """Assign a slot to a new series, or `_SKIP` if it is not needed."""
        if self._used > self._max_series:
            return _SKIP
        if name == RESPONSES:
            return self._place_responses(_labels(label_text))
        if not name.startswith(PREFIX):
            return _SKIP
        role = ROLES.get(name)
        if role is None and name != CACHE_CONFIG:
            return _SKIP
        labels = _labels(label_text)
        engine = labels.get("engine", "0")
        slot = self._used
        if role is None:
            self._configs[slot] = (engine, labels)
        else:
            engines = self._models.setdefault(labels.get("model_name", ""), {})
            slots = engines.get(engine)
            if slots is None:
                if self._engines >= _MAX_ENGINES:
                    return _SKIP
                self._engines += 1
                slots = engines[engine] = _EngineSlots()
            if role.kind == "histogram":
                if not self._place_in_histogram(slots, role, labels, slot):
                    return _SKIP
            else:
                slots.scalars.setdefault(role.key, {}).setdefault(role.rank, []).append(slot)
        self._used += 1
        return slot

    def _place_responses(self, labels: dict[str, str]) -> int:
        field = _CLASSES.get(labels.get("status", "")[:1])
        if field is None or labels.get("method") != "POST" or labels.get("handler") not in GENERATING:
            return _SKIP
        slot = self._used
        self._responses.append((field, slot))
        self._used += 1
        return slot

    def _place_in_histogram(self, slots: _EngineSlots, role: Role, labels: dict[str, str], slot: int) -> bool:
        histogram = slots.histograms.setdefault(role.key, {}).setdefault(role.rank, _HistogramSlots())
        if role.part in ("bucket", "beyond"):
            histogram.beyond = role.part == "beyond"
            bound = _number(labels.get("position" if histogram.beyond else "le", ""), infinite=True)
            if bound is None or any(bound == known for known, _ in histogram.buckets):
                return False
            histogram.buckets.append((bound, slot))
        elif role.part == "sum":
            histogram.sum = slot
        else:
            histogram.count = slot
        self._stale.append(histogram)
        return True

    def _assemble(self, values: list[str | None], at: float) -> Sample:
        for histogram in self._stale:
            histogram.compile()
        self._stale.clear()
        engines: dict[str, EngineSample] = {}
        model_name: str | None = None
        # A body with several model names has the same engines under each; the first name with values is enough.
        for model, slots_by_engine in self._models.items():
            for engine, slots in slots_by_engine.items():
                sample = _engine_sample(slots, values)
                if sample is not None:
                    engines[engine] = sample
            if engines:
                model_name = model or None
                break
        configs = dict(config for slot, config in self._configs.items() if values[slot] is not None)
        tokens = kv_cache_tokens(configs.values())
        caching, step = prefix_cache(configs.values())
        return Sample(at, engines, tokens, model_name, caching, step, self._answered(values) if engines else None)

    def _answered(self, values: list[str | None]) -> Responses | None:
        found: dict[str, float] = {}
        for field, slot in self._responses:
            if (number := _number(values[slot])) is not None:
                found[field] = found.get(field, 0.0) + number
        return Responses(**found) if found else None


def _of_interest(line: str) -> bool:
    """Whether a line that is not known yet may be a series that is read, or a comment on vLLM's series."""
    return PREFIX in line or line.startswith(RESPONSES)


def _lines(text: str) -> Iterator[str]:
    """Yield the lines, splitting a slice at a time: splitting a long body at once would block all other threads."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + _SLICE)
        end = len(text) if end < 0 else end
        yield from text[begin:end].split("\n")
        begin = end + 1


def _check_shape(text: str) -> None:
    if not text or text.isspace():
        raise NotMetricsError("empty", "The answer is empty: there are no metrics in it.")
    if text[:64].lstrip("\ufeff \t\r\n")[:1] == "<":
        raise NotMetricsError("html", "The answer is a web page (HTML), not metrics.")
    if text.count("\n") > _MAX_LINES:
        raise NotMetricsError("garbage", f"The answer has more than {_MAX_LINES:,} lines, so it is not metrics.")
    if text[-1] != "\n" and not text.endswith("# EOF"):
        raise NotMetricsError("cut off", "The metrics are truncated: the last line is incomplete.")


def _engine_sample(slots: _EngineSlots, values: list[str | None]) -> EngineSample | None:
    """One engine's values of this body, or None if it no longer reports any."""
    found: dict[str, Any] = {}
    for key, ranks in slots.scalars.items():
        for rank in sorted(ranks) if len(ranks) > 1 else ranks:
            picked = [number for slot in ranks[rank] if (number := _number(values[slot])) is not None]
            if picked:
                found[key] = max(picked) if key == "kv_cache_usage" else math.fsum(picked)
                break
    histograms: dict[str, Histogram] = {}
    for key, by_rank in slots.histograms.items():
        for rank in sorted(by_rank) if len(by_rank) > 1 else by_rank:
            histogram = _histogram(by_rank[rank], values)
            if histogram is not None:
                histograms[key] = histogram
                break
    return EngineSample(**found, histograms=histograms) if found or histograms else None


def _histogram(slots: _HistogramSlots, values: list[str | None]) -> Histogram | None:
    """A histogram's values in this body; the same object as before if nothing changed."""
    if slots.pick is None:
        return None
    picked = slots.pick(values)
    if picked == slots.seen:
        return slots.made
    numbers = _numbers(picked)
    pairs = [(bound, count) for bound, count in zip(slots.bounds, numbers, strict=False) if count is not None]
    total = numbers[-1]
    if slots.beyond:
        pairs = [(bound, max(0.0, (total or 0.0) - count)) for bound, count in pairs]
    if (not pairs or pairs[-1][0] != math.inf) and total is not None:
        pairs.append((math.inf, total))
    made: Histogram | None = None
    if pairs and pairs[-1][0] == math.inf:
        bounds = tuple(bound for bound, _ in pairs)
        if bounds == slots.bounds:
            bounds = slots.bounds  # one tuple shared by all samples
        made = Histogram(bounds, tuple(count for _, count in pairs), numbers[-2] or 0.0)
    slots.seen, slots.made = picked, made
    return made


LARGEST_FIGURE, SMALLEST_FIGURE = 1e15, 1e-15
"""Bounds of plausible nonzero figures: sums and ratios of numbers within them stay finite."""


def _number(text: str | None, *, infinite: bool = False) -> float | None:
    """Parse a number within bounds (or +Inf as a bucket's bound); None for anything else."""
    number = _float(text)
    if number is None:
        return None
    if abs(number) <= LARGEST_FIGURE:  # False for NaN
        return number if abs(number) >= SMALLEST_FIGURE else 0.0
    return number if infinite and number == math.inf else None


def _numbers(texts: Sequence[str | None]) -> Sequence[float | None]:
    """Apply `_number` to each text, in one go if all are plain counts."""
    try:
        numbers = list(map(float, texts))  # type: ignore[arg-type] # None raises TypeError
    except (TypeError, ValueError):
        return list(map(_number, texts))
    least = min(filter(None, numbers), default=LARGEST_FIGURE)
    plain = least >= SMALLEST_FIGURE and max(numbers) <= LARGEST_FIGURE and not math.isnan(sum(numbers))
    return numbers if plain else list(map(_number, texts))


def _float(text: str | None) -> float | None:
    """Parse any number, including NaN and infinities."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _labels(text: str) -> dict[str, str]:
    return {name: _ESCAPED.sub(_unescape, value) for name, value in _LABEL.findall(text)}


def _unescape(match: re.Match[str]) -> str:
    character = match[1]
    return "\n" if character == "n" else character if character in '\\"' else match[0]


def parse_metrics(text: str, at: float) -> Sample:
    """Parse a single body. For a server that is scraped repeatedly, `Parser.parse` is faster."""
    return Parser().parse(text, at)
