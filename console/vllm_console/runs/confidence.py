"""Confidence intervals for a difference of medians: a deterministic bootstrap over windows. Pure.

Consecutive windows are correlated, so ten of them carry less information than ten independent ones. The bootstrap's
standard error is widened by the windows' autocorrelation, and the interval is based on Student's t.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, median

import msgspec

RESAMPLES = 400
LONGER = 2
"""A series this many times as long as the other shows the drift of both."""
WILDER = 3.0
"""An earlier series with more than this many times the scatter is not comparable."""
_MULTIPLIER, _INCREMENT, _MASK = 6364136223846793005, 1442695040888963407, 2**64 - 1


def difference(
    before: Sequence[float],
    after: Sequence[float],
    level: float,
    earlier: Sequence[float] = (),
    *,
    counts: bool = False,
) -> tuple[float, float, float]:
    """The median of ``after`` minus that of ``before``, and the bounds of its confidence interval at ``level``.

    Values are in time order, at least three of each. If one series is at least twice as long as the other, it shows
    drift that the short one hides: its autocorrelation and scatter are the minimum for the short one. So does an
    ``earlier`` series of the same server, unless it scatters far more than either. ``counts``: values are counts of
    events, or proportional to them. Their variance is proportional to their level (Poisson), so the scatter of a series
    at a higher level is reduced accordingly: without any events, nothing scatters.
    """
    change = median(after) - median(before)
    both = (before, after)
    sides = [_SeriesStatistics.of(values, seed, counts) for seed, values in enumerate(both, 1)]
    references = list(sides)
    if len(earlier) >= LONGER * min(map(len, both)):
        known = _SeriesStatistics.of(earlier, 3, counts)
        if known.scatter <= WILDER * max(side.scatter for side in sides):
            references.append(known)
    found = [side.beside(references) for side in sides]
    reach = student(0.5 + level / 2, max(3.0, sum(freedom for _, freedom in found) - 2))
    reach *= math.hypot(*(error for error, _ in found))
    return change, change - reach, change + reach


class _SeriesStatistics(msgspec.Struct, frozen=True):
    """Statistics of a series: its length, its number of effectively independent values, and its scatter.

    ``level`` is its median if values are counts of events; None if their scatter does not depend on it.
    """

    length: int
    independent: float
    scatter: float
    level: float | None

    @classmethod
    def of(cls, values: Sequence[float], seed: int, counts: bool) -> _SeriesStatistics:
        count = len(values)
        scatter = standard_error(values, seed) * math.sqrt(count)
        return cls(count, max(2.0, count * worth(values)), scatter, median(values) if counts else None)

    def beside(self, references: Sequence[_SeriesStatistics]) -> tuple[float, float]:
        """The standard error of its median and its degrees of freedom, with the longer series' autocorrelation."""
        longer = [other for other in references if other.length >= LONGER * self.length]
        fewest = min([self.independent, *(other.independent * self.length / other.length for other in longer)])
        scatter = max([self.scatter, *(other.scatter_at(self.level) for other in longer)])
        return scatter / math.sqrt(max(2.0, fewest)), max([self.independent, *(other.independent for other in longer)])

    def scatter_at(self, level: float | None) -> float:
        """The scatter expected of a series at this level, at most its own."""
        if level is None or self.level is None or self.level <= level:
            return self.scatter
        return self.scatter * math.sqrt(level / self.level)


def worth(*series: Sequence[float]) -> float:
    """The effective number of independent values as a share of all values, over all series together.

    The smaller of two estimates: from the autocorrelations up to the first insignificant one (Geyer 1992), and for an
    AR(1) process, (1 - r) / (1 + r).
    """
    means = [math.fsum(values) / len(values) for values in series]
    deviation = math.fsum((value - mean) ** 2 for values, mean in zip(series, means, strict=True) for value in values)
    if deviation <= 0:
        return 1.0
    total, first = 1.0, 0.0
    for lag in range(1, 1 + min(map(len, series)) // 4):
        together = math.fsum(
            (one - mean) * (other - mean)
            for values, mean in zip(series, means, strict=True)
            for one, other in zip(values, values[lag:], strict=False)
        )
        # Correct for short series, which hide correlation.
        found = together / deviation + len(series) / sum(map(len, series))
        if found <= 0:
            break
        total += 2 * found
        first = first or min(0.9, found)
    return min(1 / total, (1 - first) / (1 + first))


def standard_error(values: Sequence[float], seed: int) -> float:
    """The standard error of the median of independent values, at least two."""
    count = len(values)
    ordered = sorted(values)
    medians = [((ordered[low] + ordered[high]) / 2, times) for low, high, times in _resampled_medians(count, seed)]
    mean = math.fsum(value * times for value, times in medians) / RESAMPLES
    variance = math.fsum((value - mean) ** 2 * times for value, times in medians) / (RESAMPLES - 1)
    # A sample's spread underestimates the population's by this factor.
    return math.sqrt(variance * count / (count - 1))


@cache
def _resampled_medians(count: int, seed: int) -> tuple[tuple[int, int, int], ...]:
    """The medians of `RESAMPLES` resamples of ``count`` ordered values: for each, the two (often equal) ranks whose
    values average to it, and how often it occurred.

    Resampling ranks is equivalent to resampling values. A linear congruential generator (Knuth's MMIX) makes it
    reproducible.
    """
    state = seed * 0x9E3779B97F4A7C15 & _MASK
    found = Counter[tuple[int, int]]()
    for _ in range(RESAMPLES):
        picked = []
        for _ in range(count):
            state = (state * _MULTIPLIER + _INCREMENT) & _MASK
            picked.append((state >> 33) % count)
        picked.sort()
        found[picked[(count - 1) // 2], picked[count // 2]] += 1
    return tuple((low, high, times) for (low, high), times in found.items())


def student(share: float, freedom: float) -> float:
    """A quantile of Student's t for 3 degrees or more (Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom ** (power + 1) for power, term in enumerate(terms))
