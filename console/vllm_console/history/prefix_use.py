"""What the prefix cache did for requests: hits by prompt length, what resumed requests still found. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from vllm_console.history.probe_records import FinishedRequest, Resumed

SHORTEST = 128
"""Prompts of fewer tokens are one class; from there on each class is twice as wide as the one before."""


class LengthClass(msgspec.Struct, frozen=True):
    """The requests whose prompts have ``least`` to ``most`` tokens.

    ``hits`` is how many of them had any token cached, ``cached_tokens`` how many they had together; of one of them at
    most ``longest_hit``.
    """

    least: int
    most: int
    requests: int
    hits: int
    prompt_tokens: int
    cached_tokens: int
    longest_hit: int

    @property
    def hit_rate(self) -> float:
        """The share of their prompt tokens that was cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class StillCached(msgspec.Struct, frozen=True):
    """Requests that were admitted again after a preemption: how many, how many tokens they looked up (prompt and output
    so far), and how many of these were still cached."""

    requests: int
    tokens: int
    cached_tokens: int


class PrefixUse(msgspec.Struct, frozen=True):
    """The prefix cache over a span of time. ``classes`` have requests, the shortest prompts first.

    ``unknown`` requests are in no class: they ended before their first token, or their release does not report their
    cached tokens. ``resumed`` is None where no request is known to have been resumed.
    """

    classes: tuple[LengthClass, ...] = ()
    unknown: int = 0
    resumed: StillCached | None = None

    @property
    def requests(self) -> int:
        """How many requests are in the classes."""
        return sum(one.requests for one in self.classes)

    @property
    def hits(self) -> int:
        """How many of them had any token cached."""
        return sum(one.hits for one in self.classes)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of their prompts."""
        return sum(one.prompt_tokens for one in self.classes)

    @property
    def cached_tokens(self) -> int:
        """Those that were cached."""
        return sum(one.cached_tokens for one in self.classes)

    @property
    def hit_rate(self) -> float | None:
        """The share of their prompt tokens that was cached; None without requests."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


def prefix_use(requests: Iterable[FinishedRequest], resumed: Sequence[Resumed] = ()) -> PrefixUse:
    """What the cache did for these requests, and what resumed requests found meanwhile."""
    found: dict[int, list[tuple[int, int]]] = {}
    unknown = 0
    for one in requests:
        if not one.prompt_tokens or one.cached_tokens is None or not one.output_tokens:
            unknown += 1
        else:
            found.setdefault(_least(one.prompt_tokens), []).append((one.prompt_tokens, one.cached_tokens))
    classes = tuple(_class(least, found[least]) for least in sorted(found))
    return PrefixUse(classes, unknown, still_cached(resumed))


def _least(tokens: int) -> int:
    """The fewest tokens of the class of a prompt."""
    return 1 if tokens < SHORTEST else 1 << (tokens.bit_length() - 1)


def _class(least: int, lengths: Sequence[tuple[int, int]]) -> LengthClass:
    cached = [found for _, found in lengths]
    return LengthClass(
        least=least,
        most=SHORTEST - 1 if least == 1 else 2 * least - 1,
        requests=len(lengths),
        hits=sum(found > 0 for found in cached),
        prompt_tokens=sum(prompt for prompt, _ in lengths),
        cached_tokens=sum(cached),
        longest_hit=max(cached),
    )


def still_cached(resumed: Sequence[Resumed]) -> StillCached | None:
    """What resumed requests found, added up; None without any."""
    if not resumed:
        return None
    return StillCached(
        sum(one.requests for one in resumed),
        sum(one.tokens for one in resumed),
        sum(one.cached_tokens for one in resumed),
    )
