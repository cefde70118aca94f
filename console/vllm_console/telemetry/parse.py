"""A body of ``/metrics`` to a `Sample`, fast: a series' text is understood once and then only looked up.

The text format is Prometheus' exposition format 0.0.4, and OpenMetrics where vLLM's exporters use it (timestamps,
exemplars, ``_created``). A steady body costs a dictionary lookup per line; only new lines are taken apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from vllm_console.telemetry import families
from vllm_console.telemetry.model import EngineSample, Histogram, Sample

_SERIES = re.compile(
    r"\s*(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    r"(?:\s*\{(?P<labels>(?:[^\"{}]|\"(?:[^\"\\]|\\.)*\")*)\})?"
    r"[ \t]+(?P<value>[^\s#]+)(?P<rest>(?:[ \t].*)?)$",
    re.DOTALL,
)
_LABEL = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*\"((?:[^\"\\]|\\.)*)\"")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)

_SKIP = -1
_COMMENT = -2
_MAX_KNOWN_SERIES = 80_000
_MAX_KNOWN_CHARACTERS = 8 * 1024 * 1024
_MAX_ENGINES = 1024
_MAX_LINES = 200_000
_SLICE = 64 * 1024


class NotMetricsError(ValueError):
    """The text is not a whole ``/metrics`` body. The message is one sentence; ``kind`` names the fault in a word."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class _HistogramSlots:
    """Where a histogram's parts stand: (bound, slot) pairs as they came, and the slots of sum and count."""

    buckets: list[tuple[float, int]] = field(default_factory=list)
    sum: int | None = None
    count: int | None = None
    bounds: tuple[float, ...] = ()
    pick: Callable[[list[str | None]], tuple[str | None, ...]] | None = None
    seen: tuple[str | None, ...] = ()
    made: Histogram | None = None

    def compile(self) -> None:
        """Settle the order of buckets after new ones came, so that one look picks all the values at once."""
        self.buckets.sort()
        self.bounds = tuple(bound for bound, _ in self.buckets)
        slots = [slot for _, slot in self.buckets]
        tail = [slot if slot is not None else 0 for slot in (self.sum, self.count)]
        self.pick = itemgetter(*slots, *tail)
        self.seen, self.made = (), None


@dataclass(slots=True)
class _EngineSlots:
    """Where one engine's values stand: by field, for each name's rank, the slots to add."""

    scalars: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    histograms: dict[str, dict[int, _HistogramSlots]] = field(default_factory=dict)


class Parser:
    """Turns bodies of one server into samples. Keep one per server: what it learned makes the next body cheap.

    Memory is bounded: when more series (or longer ones, or more engines) were seen than any vLLM has, all of it is
    learned anew; of one body, engines beyond that number are left out.
    Not for use from several threads at once.
    """

    def __init__(self, max_series: int = _MAX_KNOWN_SERIES) -> None:
        self._max_series = max_series
        self._forget()

    def parse(self, text: str, at: float) -> Sample:
        """Read a whole body, looked at at ``at`` (Unix seconds).

        Families that are not in `families` are skipped, and so are single lines that make no sense. A body without
        any ``vllm:`` family gives a sample without engines. Raises `NotMetricsError` when the text as a whole is not
        metrics: empty, HTML, cut off, or garbage.
        """
        _check_shape(text)
        if (
            len(self._slots) > self._max_series
            or self._characters > _MAX_KNOWN_CHARACTERS
            or self._engines >= _MAX_ENGINES
        ):
            self._forget()
        values: list[str | None] = [None] * self._used
        known = self._slots
        understood = 0
        for line in _lines(text):
            series, _, value = line.rpartition(" ")
            slot = known.get(series)
            if slot is None:
                if not understood or families.PREFIX in line:
                    understood += self._learn(line, values)
            elif slot >= 0:
                values[slot] = value
                understood += 1
            elif slot == _SKIP:
                understood += 1
        if not understood:
            raise NotMetricsError("garbage", "The answer is not in the metrics format: no line of it could be read.")
        return self._assemble(values, at)

    def _forget(self) -> None:
        self._slots: dict[str, int] = {}
        self._used = 1  # slot 0 stays empty: it stands for parts that a histogram does not have
        self._characters = 0
        self._models: dict[str, dict[str, _EngineSlots]] = {}
        self._engines = 0
        self._configs: dict[int, tuple[str, dict[str, str]]] = {}
        self._stale: list[_HistogramSlots] = []

    def _remember(self, series: str, slot: int) -> None:
        if len(self._slots) <= self._max_series:
            self._slots[series] = slot
            self._characters += len(series)

    def _learn(self, line: str, values: list[str | None]) -> bool:
        """Take a line apart that is not known as it stands; returns whether it is a sample or a comment."""
        stripped = line.strip()
        if not stripped:
            return False
        if stripped[0] == "#":
            # A comment's last word is no value, but what stands before it comes again each time.
            self._remember(line.rpartition(" ")[0], _COMMENT)
            return False
        line = line.rstrip("\r")
        match = _SERIES.match(line)
        if match is None:
            return False
        value = match["value"]
        if _number(value) is None and value.lower().lstrip("+-") not in ("nan", "inf", "infinity"):
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
        """Give a new series its slot, or `_SKIP` when nobody asks for it."""
        if not name.startswith(families.PREFIX) or self._used > self._max_series:
            return _SKIP
        role = families.ROLES.get(name)
        if role is None and name != families.CACHE_CONFIG:
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

    def _place_in_histogram(self, slots: _EngineSlots, role: families.Role, labels: dict[str, str], slot: int) -> bool:
        histogram = slots.histograms.setdefault(role.key, {}).setdefault(role.rank, _HistogramSlots())
        if role.part == "bucket":
            bound = _number(labels.get("le", ""), infinite=True)
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
        # A body with several model names tells the same engines under each; the first that reports is enough.
        for model, slots_by_engine in self._models.items():
            for engine, slots in slots_by_engine.items():
                sample = _engine_sample(slots, values)
                if sample is not None:
                    engines[engine] = sample
            if engines:
                model_name = model or None
                break
        configs = dict(config for slot, config in self._configs.items() if values[slot] is not None)
        tokens = families.kv_cache_tokens(configs.values())
        return Sample(at=at, engines=engines, kv_cache_tokens=tokens, model_name=model_name)


def _lines(text: str) -> Iterator[str]:
    """The lines, a few at once: cutting up a long body in one go would keep all other threads from running."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + _SLICE)
        end = len(text) if end < 0 else end
        yield from text[begin:end].split("\n")
        begin = end + 1


def _check_shape(text: str) -> None:
    """Refuse what is no whole body before a line is looked at."""
    if not text or text.isspace():
        raise NotMetricsError("empty", "The answer is empty: there are no metrics in it.")
    if text[:64].lstrip("\ufeff \t\r\n")[:1] == "<":
        raise NotMetricsError("html", "The answer is a web page (HTML), not metrics.")
    if text.count("\n") > _MAX_LINES:
        raise NotMetricsError("garbage", f"The answer has more than {_MAX_LINES:,} lines: these are no metrics.")
    if text[-1] != "\n" and not text.endswith("# EOF"):
        raise NotMetricsError("cut off", "The metrics are cut off: the last line has no end.")


def _engine_sample(slots: _EngineSlots, values: list[str | None]) -> EngineSample | None:
    """One engine's values of this body, or None when it reports nothing any more."""
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
    """A histogram's values of this body; the same object as before when nothing moved."""
    if slots.pick is None:
        return None
    picked = slots.pick(values)
    if picked == slots.seen:
        return slots.made
    pairs = [
        (bound, count)
        for bound, text in zip(slots.bounds, picked, strict=False)
        if (count := _number(text)) is not None
    ]
    total = _number(picked[-1])
    if (not pairs or pairs[-1][0] != math.inf) and total is not None:
        pairs.append((math.inf, total))
    made: Histogram | None = None
    if pairs and pairs[-1][0] == math.inf:
        bounds = tuple(bound for bound, _ in pairs)
        if bounds == slots.bounds:
            bounds = slots.bounds  # one tuple for all looks, instead of one for each
        made = Histogram(bounds, tuple(count for _, count in pairs), _number(picked[-2]) or 0.0)
    slots.seen, slots.made = picked, made
    return made


def _number(text: str | None, *, infinite: bool = False) -> float | None:
    """A finite number (or +Inf where it is a bucket's bound); None for everything that says nothing."""
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    if math.isfinite(number):
        return number
    return number if infinite and number == math.inf else None


def _labels(text: str) -> dict[str, str]:
    return {name: _ESCAPED.sub(_unescape, value) for name, value in _LABEL.findall(text)}


def _unescape(match: re.Match[str]) -> str:
    character = match[1]
    return "\n" if character == "n" else character if character in '\\"' else match[0]


def parse(text: str, at: float) -> Sample:
    """Read one body once; see `Parser.parse`, which is quicker for a server that is looked at again and again."""
    return Parser().parse(text, at)
