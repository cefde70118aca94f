"""Recorded requests as a stream to send again: their arrivals and lengths, with synthetic tokens. Pure and seeded."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from vllm_console.load.shape import ANY_VOCABULARY, LoadRequest, fit
from vllm_console.text import duration

PROMPTS_KEPT = 512
"""A request shares its prefix with one of so many before it."""


class RecordedRequest(msgspec.Struct, frozen=True):
    """A request that was served: its arrival (Unix seconds) and lengths in tokens.

    ``cached_tokens`` of its prompt were in the prefix cache, None if unknown.
    """

    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


class RecordedTraffic:
    """Requests to send again, ``speed`` times as fast. Two of equal arguments yield equal requests.

    Which requests had a prefix in common was not recorded, only how much of a prompt was in the cache. So a prompt
    begins with that many tokens of the newest one before it that is long enough: the cache of a server that keeps it
    then serves as much as it did. Prompts that were cached before the first recorded request find nothing.
    """

    def __init__(self, requests: Sequence[RecordedRequest], *, speed: float = 1.0, seed: int = 0) -> None:
        self._requests = sorted(requests, key=lambda one: one.arrived_at)
        self._seed = seed
        begin = self._requests[0].arrived_at if self._requests else 0.0
        self.due = [(one.arrived_at - begin) / speed for one in self._requests]
        """When each is due, in seconds from the start."""
        self._speed = speed

    def words(self) -> str:
        """For people: how many requests over which time."""
        pace = "" if self._speed == 1 else f", {self._speed:g} times as fast as recorded"
        return f"{len(self.due):,} recorded requests over {duration(self.due[-1] if self.due else 0.0)}{pace}"

    def stream(self, vocabulary: Sequence[int] = (), max_model_len: int | None = None) -> Iterator[LoadRequest]:
        """The requests in order, cut to a context; prompts are made lazily, of tokens of this vocabulary."""
        known = vocabulary or ANY_VOCABULARY
        token_of = [known[byte % len(known)] for byte in range(256)]
        rng = random.Random(self._seed)
        before: deque[list[int]] = deque(maxlen=PROMPTS_KEPT)
        for at, one in zip(self.due, self._requests, strict=True):
            length, output = fit(max(1, one.prompt_tokens), max(1, one.output_tokens), max_model_len)
            shared = min(one.cached_tokens or 0, length)
            parent = next((prompt for prompt in reversed(before) if len(prompt) >= shared), []) if shared else []
            prompt = parent[:shared]
            prompt += [token_of[byte] for byte in rng.randbytes(length - len(prompt))]
            before.append(prompt)
            yield LoadRequest(at, prompt, output)
