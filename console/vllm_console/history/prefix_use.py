"""What the prefix cache did for requests: hits by prompt length, what resumed requests still found, evictions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from vllm_console.history.probe_records import CacheEvent, FinishedRequest

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


class Resumed(msgspec.Struct, frozen=True):
    """Requests that were admitted again after a preemption: how many, how many tokens they looked up (prompt and output
    so far), and how many of these were still cached."""

    requests: int
    tokens: int
    cached_tokens: int


class Evicted(msgspec.Struct, frozen=True):
    """Cached blocks that were evicted, as far as vLLM samples them. Times in seconds.

    They had been unused for ``shortest_idle`` to ``longest_idle``. Before, they had been used again ``reuses`` times,
    after ``longest_gap`` at most (None without). Whether their content was asked for later is not known.
    """

    blocks: int
    shortest_idle: float
    longest_idle: float
    reuses: int
    longest_gap: float | None


class PrefixUse(msgspec.Struct, frozen=True):
    """The prefix cache over a span of time. ``classes`` have requests, the shortest prompts first.

    ``unknown`` requests are in no class: they ended before their first token, or their release does not report their
    cached tokens. ``resumed`` and ``evicted`` are None where nothing is known of such.
    """

    classes: tuple[LengthClass, ...] = ()
    unknown: int = 0
    resumed: Resumed | None = None
    evicted: Evicted | None = None

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


def prefix_use(requests: Iterable[FinishedRequest], events: Sequence[CacheEvent] = ()) -> PrefixUse:
    """What the cache did for these requests, and what became of its blocks meanwhile."""
    found: dict[int, list[tuple[int, int]]] = {}
    unknown = 0
    for one in requests:
        if not one.prompt_tokens or one.cached_tokens is None or not one.output_tokens:
            unknown += 1
        else:
            found.setdefault(_least(one.prompt_tokens), []).append((one.prompt_tokens, one.cached_tokens))
    classes = tuple(_class(least, found[least]) for least in sorted(found))
    return PrefixUse(classes, unknown, _resumed(events), _evicted(events))


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


def _resumed(events: Sequence[CacheEvent]) -> Resumed | None:
    known = [one for one in events if one.resumed_requests]
    if not known:
        return None
    sums = ([getattr(one, f"resumed_{name}") or 0 for one in known] for name in ("requests", "tokens", "cached"))
    return Resumed(*map(sum, sums))


def _evicted(events: Sequence[CacheEvent]) -> Evicted | None:
    known = [one for one in events if one.evicted]
    if not known:
        return None
    return Evicted(
        blocks=sum(one.evicted or 0 for one in known),
        shortest_idle=min(one.shortest_idle or 0.0 for one in known),
        longest_idle=max(one.longest_idle or 0.0 for one in known),
        reuses=sum(one.reuses or 0 for one in known),
        longest_gap=max((one.longest_gap for one in known if one.longest_gap is not None), default=None),
    )
