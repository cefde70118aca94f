"""What the prefix cache did for requests: hits by prompt length, and what resumed requests still found. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from vllm_console.history.probe_records import FinishedRequest, Resumed

SHORTEST = 128
"""Shorter prompts form one class; from there on each class is twice as wide as the one before."""


class LengthClass(msgspec.Struct, frozen=True):
    """Requests whose prompts have ``least`` to ``most`` tokens.

    ``hits`` is the number of requests with any cached token, ``cached_tokens`` their total number of cached tokens,
    ``longest_hit`` the maximum for one request.
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
        """Fraction of prompt tokens that was cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class StillCached(msgspec.Struct, frozen=True):
    """Requests resumed after preemption, the tokens they looked up, and how many of these were still cached."""

    requests: int
    tokens: int
    cached_tokens: int


class PrefixUse(msgspec.Struct, frozen=True):
    """The prefix cache over a span of time. ``classes`` are the non-empty ones, shortest prompts first.

    ``unknown`` requests are in no class: they ended before their first token, or their release does not report cached
    tokens. ``resumed`` is None if no request is known to have been resumed.
    """

    classes: tuple[LengthClass, ...] = ()
    unknown: int = 0
    resumed: StillCached | None = None

    @property
    def requests(self) -> int:
        """Number of requests in the classes."""
        return sum(one.requests for one in self.classes)

    @property
    def hits(self) -> int:
        """Number of these requests with any cached token."""
        return sum(one.hits for one in self.classes)

    @property
    def prompt_tokens(self) -> int:
        """Total prompt tokens of these requests."""
        return sum(one.prompt_tokens for one in self.classes)

    @property
    def cached_tokens(self) -> int:
        """Total cached tokens of these requests."""
        return sum(one.cached_tokens for one in self.classes)

    @property
    def hit_rate(self) -> float | None:
        """Fraction of prompt tokens that was cached; None without requests."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


def prefix_use(requests: Iterable[FinishedRequest], resumed: Sequence[Resumed] = ()) -> PrefixUse:
    """Summarize what the cache did for these requests, and what resumed requests found meanwhile."""
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
    """Lower bound of the class of a prompt with this many tokens."""
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
    """Sum of what resumed requests found; None if there are none."""
    if not resumed:
        return None
    return StillCached(
        sum(one.requests for one in resumed),
        sum(one.tokens for one in resumed),
        sum(one.cached_tokens for one in resumed),
    )
