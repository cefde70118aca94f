"""Energy and its cost per token and request of a server, from its GPUs' energy counters. Pure.

A GPU's counter covers all of its processes. So there is a figure only if every process on it is the server's at every
reading, and none across a counter reset, a gap between readings, or a change of GPUs. Idle time counts like any other.
Nothing is estimated from power.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vllm_console.metrics.sample import Sample
from vllm_console.text import UNKNOWN, count, duration
from vllm_launchers.units import three_digits

if TYPE_CHECKING:
    from vllm_launchers.host.gpu.host import Gpu, Host

LONGEST_GAP = 16.0
"""Maximum seconds between two GPU readings; they are taken every five seconds."""

LONGEST_PAUSE = 5.0
"""Maximum seconds between two samples of the server, taken every second; totals between them are interpolated."""

_JOULES_PER_KWH = 3.6e6


class Tariff(msgspec.Struct, frozen=True):
    """Price of energy: ``per_kwh`` in a currency."""

    per_kwh: float
    currency: str

    def per_million(self, joules: float | None) -> float | None:
        """Cost of a million units that take ``joules`` each."""
        return None if joules is None else joules * 1e6 / _JOULES_PER_KWH * self.per_kwh


class Totals(NamedTuple):
    """A server's counts up to ``at`` (Unix seconds): generated tokens, prompt tokens, requests that ended."""

    at: float
    output: float | None
    prompt: float | None
    requests: float | None


class Energy(msgspec.Struct, frozen=True):
    """Energy used by a server's GPUs in ``seconds`` from ``since`` (Unix seconds), its counts then, and the price."""

    since: float
    seconds: float
    gpus: tuple[int, ...]
    joules: float
    output_tokens: float | None
    prompt_tokens: float | None
    requests: float | None
    tariff: Tariff | None = None

    @property
    def end(self) -> float:
        """Time of the last reading (Unix seconds)."""
        return self.since + self.seconds

    @property
    def per_output_token(self) -> float | None:
        """Joules per generated token; None if none was generated."""
        return _per(self.joules, self.output_tokens)

    @property
    def per_token(self) -> float | None:
        """Joules per token, including prompt tokens."""
        known = self.output_tokens is not None and self.prompt_tokens is not None
        return _per(self.joules, (self.output_tokens or 0.0) + (self.prompt_tokens or 0.0)) if known else None

    @property
    def per_request(self) -> float | None:
        """Joules per request that ended."""
        return _per(self.joules, self.requests)

    @property
    def figures(self) -> dict[str, float]:
        """The known per-unit figures, by their JSON names."""
        named = zip(FIGURES, (self.per_output_token, self.per_token, self.per_request), strict=True)
        return {name: value for name, value in named if value is not None}

    def document(self) -> dict[str, Any]:
        """The JSON contract; costs only with a price."""
        tariff = self.tariff
        return {
            "since": self.since,
            "seconds": self.seconds,
            "gpus": list(self.gpus),
            "joules": self.joules,
            **{name: self.figures.get(name) for name in FIGURES},
            **({**energy_costs(self.figures, tariff), "currency": tariff.currency} if tariff is not None else {}),
        }


FIGURES = ("joules_per_output_token", "joules_per_token", "joules_per_request")


def _per(joules: float, number: float | None) -> float | None:
    return joules / number if number else None


def energy_costs(figures: Mapping[str, float | None], tariff: Tariff) -> dict[str, float | None]:
    """Cost of a million tokens, from the joules per token."""
    return {
        "cost_per_million_output_tokens": tariff.per_million(figures.get("joules_per_output_token")),
        "cost_per_million_tokens": tariff.per_million(figures.get("joules_per_token")),
    }


def totals_of(sample: Sample) -> Totals:
    """Totals of a sample over all engines."""
    engines = sample.engines.values()
    return Totals(
        sample.at,
        _sum([one.generation_tokens_total for one in engines]),
        _sum([one.prompt_tokens_total for one in engines]),
        _sum([one.requests_finished_total for one in engines]),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


class _Reading(NamedTuple):
    """Energy counters of a server's GPUs at one moment, in millijoules by GPU index."""

    at: float
    counters: Mapping[int, int]


def _reading(host: Host, pid: int) -> _Reading | None:
    """None if no GPU is seen, a GPU is shared, lost or without a counter, or the server may use another GPU unseen."""
    if host.at is None or host.problem or any(gpu.lost or gpu.used_by is None for gpu in host.gpus):
        return None
    held = [gpu for gpu in host.gpus if any(_own(gpu, pid))]
    counters = {gpu.index: gpu.energy_mj for gpu in held if gpu.energy_mj is not None}
    if not held or len(counters) < len(held) or any(gpu.mig_mode or _is_shared(gpu, pid) for gpu in held):
        return None
    return _Reading(host.at, counters)


def _is_shared(gpu: Gpu, pid: int) -> bool:
    """Whether another process uses the GPU, or holds memory unseen, as from another container."""
    from vllm_launchers.host.gpu.sharing import holdings  # only now: most recorders see no GPU

    return not all(_own(gpu, pid)) or holdings(gpu).unseen > 0


def _own(gpu: Gpu, pid: int) -> list[bool]:
    return [pid in (holder.pid, *holder.ancestors) for holder in gpu.holders]


def _follows(before: _Reading, after: _Reading) -> bool:
    """Whether the difference between two readings is meaningful: no gap, the same GPUs, no counter reset."""
    return (
        0 < after.at - before.at <= LONGEST_GAP
        and before.counters.keys() == after.counters.keys()
        and all(after.counters[index] >= value for index, value in before.counters.items())
    )


def newest_energy(hosts: Sequence[Host], pid: int, totals: Sequence[Totals]) -> Energy | None:
    """Energy of the server whose process is ``pid``, over the newest uninterrupted readings; None if the newest of them
    is unusable.

    ``hosts`` are the readings and ``totals`` the server's own counts, both oldest first; only readings within the time
    range of ``totals`` are used.
    """
    if len(totals) < 2:
        return None
    within = [host for host in hosts if host.at is not None and totals[0].at <= host.at <= totals[-1].at]
    last = first = _reading(within[-1], pid) if within else None
    if first is None or last is None:
        return None
    for host in reversed(within[:-1]):
        found = _reading(host, pid)
        if found is None or not _follows(found, first):
            break
        first = found
    return _between(first, last, totals)


def energy_within(
    hosts: Sequence[Host], pid: int, totals: Sequence[Totals], start: float, end: float, edge: float = LONGEST_GAP / 2
) -> Energy | None:
    """Energy in a window, if readings cover it without a break except for ``edge`` seconds at either end; else None."""
    within = [host for host in hosts if host.at is not None and start <= host.at <= end]
    found = newest_energy(within, pid, totals)
    if found is None or found.since - start > edge or end - found.end > edge:
        return None
    return found if found.since == within[0].at else None


def _between(first: _Reading, last: _Reading, totals: Sequence[Totals]) -> Energy | None:
    one, other = _totals_at(totals, first.at), _totals_at(totals, last.at)
    if last.at <= first.at or one is None or other is None:
        return None
    joules = sum(last.counters[index] - value for index, value in first.counters.items()) / 1000
    output, prompt, requests = (_increase(before, after) for before, after in zip(one[1:], other[1:], strict=True))
    if joules <= 0:
        return None
    return Energy(first.at, last.at - first.at, tuple(sorted(first.counters)), joules, output, prompt, requests)


def _increase(before: float | None, after: float | None) -> float | None:
    """Increase between two counts; None if unknown or after a reset."""
    return after - before if before is not None and after is not None and after >= before else None


def _totals_at(totals: Sequence[Totals], at: float) -> Totals | None:
    """Totals at a moment, interpolated between the samples around it; None in a gap between samples."""
    after = next((place for place, one in enumerate(totals) if one.at >= at), None)
    if after is None or (after == 0 and totals[0].at > at):
        return None
    later = totals[after]
    if later.at == at:
        return later
    earlier = totals[after - 1]
    if not 0 < later.at - earlier.at <= LONGEST_PAUSE:
        return None
    share = (at - earlier.at) / (later.at - earlier.at)
    values = [
        None if one is None or other is None or other < one else one + share * (other - one)
        for one, other in zip(earlier[1:], later[1:], strict=True)
    ]
    return Totals(at, *values)


# -- as text ----------------------------------------------------------------------------------------------------------


def joules_text(value: float | None) -> str:
    """``0.42 J``, ``3.1 kJ``."""
    if value is None:
        return UNKNOWN
    if value >= 1000:
        return f"{count(value / 1000) if value >= 1e5 else three_digits(value / 1000)} kJ"
    return f"{three_digits(value)} J" if value >= 0.1 else f"{three_digits(value * 1000)} mJ"


def cost_text(cost: float | None, currency: str) -> str:
    """``0.035 EUR``."""
    return UNKNOWN if cost is None else f"{three_digits(cost)} {currency}"


def energy_text(found: Energy) -> str:
    """``0.42 J per output token, 31 mJ per token, 84 J per request``; empty if nothing was counted."""
    words = zip(FIGURES, ("output token", "token", "request"), strict=True)
    return ", ".join(f"{joules_text(found.figures[name])} per {word}" for name, word in words if name in found.figures)


def cost_line(found: Energy) -> str:
    """Cost of a million tokens; empty without a price."""
    tariff = found.tariff
    if tariff is None or found.per_output_token is None:
        return ""
    output = cost_text(tariff.per_million(found.per_output_token), tariff.currency)
    total = cost_text(tariff.per_million(found.per_token), tariff.currency)
    more = f", {total} with prompts" if found.per_token is not None else ""
    return f"{output} per million output tokens{more}"


def energy_lines(found: Energy) -> list[str]:
    """Energy per token and request so far, with the cost if known, in one or two lines; empty without counts."""
    if not (figures := energy_text(found)):
        return []
    gpus = f"GPU{'s' if len(found.gpus) > 1 else ''} {','.join(map(str, found.gpus))}"
    total = f"{figures}: {gpus} in the last {duration(found.seconds)}, idle time included"
    return [total, *filter(None, [cost_line(found)])]
