"""Traffic to send: a workload's lengths, arrival times and shared prefixes, or recorded requests. Pure and seeded."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec

from vllm_console.text import duration
from vllm_launchers.presets.model import Workload

if TYPE_CHECKING:
    from vllm_console.history.probe_records import FinishedRequest

ANY_VOCABULARY = range(20, 276)
"""Token ids for prompts if the server's tokenizer is unknown: beyond the special ids at the start of most."""

SPREAD = 0.7
"""Standard deviation of a length's logarithm; the median is then 0.32 of the 95th percentile."""

Z95 = 1.6448536269514722
"""95th percentile of the standard normal distribution."""

STRATA = 128
"""Every block of this many lengths has one in each of as many equally likely parts of the distribution."""

USUAL_ITL_SECONDS = 0.03
"""Assumed time per token before a server has shown it."""

MOST_TIMES_P95 = 3.0
"""Lengths are capped at this multiple of their 95th percentile (about the 99.93rd percentile)."""

LONGEST_DRAWN = 1 << 62
"""Longer than all lengths, to find where a length would be cut."""

PREFIXES = 4
"""Number of different prefixes that the requests share."""


FEWEST_RECORDED = 20
"""With fewer recorded requests, the preset's traffic is sent instead."""


class Exact(msgspec.Struct, frozen=True):
    """Fixed lengths in tokens that replace a workload's distributions; None keeps the distribution."""

    input_tokens: int | None = None
    output_tokens: int | None = None


class LoadRequest(msgspec.Struct, frozen=True):
    """One request: when it is due (seconds after the start), its prompt as token ids, and its output tokens."""

    at: float
    prompt: list[int]
    output_tokens: int


def request_count(rate: float, seconds: float) -> int:
    """Number of requests at ``rate`` per second in ``seconds``: at least one."""
    return max(1, math.ceil(rate * seconds))


def arrivals(rng: random.Random, count: int, seconds: float) -> list[float]:
    """Times of a Poisson process with exactly ``count`` arrivals, in seconds from 0 to ``seconds``.

    Given their number, the arrivals of a Poisson process are distributed as sorted uniform draws.
    """
    return sorted(rng.uniform(0, seconds) for _ in range(count))


def length_at(share: float, p95: int) -> int:
    """The quantile ``share`` (from 0 to 1) of log-normal lengths with this 95th percentile, in tokens; at least 1."""
    mean_log = math.log(max(1, p95)) - Z95 * SPREAD
    return max(1, round(min(math.exp(NormalDist(mean_log, SPREAD).inv_cdf(share)), p95 * MOST_TIMES_P95)))


class Stratified:
    """Stratified uniform draws between 0 and 1: each block of `STRATA` has one in every stratum.

    Latin hypercube sampling (McKay, Beckman and Conover, 1979): the few long prompts that decide a p99 are as frequent
    in minutes of traffic as in hours. Within a block their order is random.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left: list[int] = []

    def draw(self) -> float:
        """The next draw."""
        if not self._left:
            self._left = list(range(STRATA))
            self._rng.shuffle(self._left)
        return (self._left.pop() + min(0.999, max(0.001, self._rng.random()))) / STRATA


def mean_length(p95: int) -> float:
    """The mean of lengths with this 95th percentile, in tokens."""
    return p95 * math.exp(SPREAD * SPREAD / 2 - Z95 * SPREAD)


def suggested_rate(workload: Workload) -> float:
    """A rate (requests per second) that keeps about ``workload.concurrency`` requests in flight, by Little's law.

    Assumes that a request lasts as long as the mean output at `USUAL_ITL_SECONDS` per token.
    """
    return round(workload.concurrency / max(mean_length(workload.output_tokens_p95) * USUAL_ITL_SECONDS, 0.01), 3)


def fit_lengths(prompt: int, output: int, max_model_len: int | None) -> tuple[int, int]:
    """Limit lengths to a context: the output to at most half of it, the prompt to the rest."""
    if max_model_len is None:
        return prompt, output
    output = max(1, min(output, max_model_len // 2))
    return max(1, min(prompt, max_model_len - output)), output


class TrafficShape:
    """Draws requests of a workload. Two shapes with equal arguments draw equal requests.

    Prompts are token ids, which every vLLM accepts unchanged, so a prompt has exactly the length drawn for it. A share
    ``prefix_reuse`` of every prompt is the beginning of one of a few common prefixes, so a prefix cache that holds them
    serves about that share of the prompt tokens. Lengths drawn from a distribution are limited to ``max_model_len``;
    exact ones must fit (`misfit`).
    """

    def __init__(
        self,
        workload: Workload,
        *,
        exact: Exact | None = None,
        seed: int = 0,
        max_model_len: int | None = None,
        vocabulary: Sequence[int] = (),
    ) -> None:
        self.workload = workload
        self.exact = exact or Exact()
        self.max_model_len = max_model_len
        known = vocabulary or ANY_VOCABULARY
        self._token_of = [known[byte % len(known)] for byte in range(256)]
        self._rng = random.Random(seed)
        self._prompts, self._outputs = Stratified(self._rng), Stratified(self._rng)
        self._prefix_rngs = [random.Random(f"{seed} prefix {index}") for index in range(PREFIXES)]
        self._prefixes: list[list[int]] = [[] for _ in range(PREFIXES)]

    def words(self) -> str:
        """The shape as text, with lengths and the shared part of prompts."""
        wanted, known = self.workload, self.exact
        prompt = known.input_tokens or self._words_of(wanted.input_tokens_p95, self._cut(LONGEST_DRAWN, 1)[0])
        output = known.output_tokens or self._words_of(wanted.output_tokens_p95, self._cut(1, LONGEST_DRAWN)[1])
        return f"prompt tokens {prompt}, output tokens {output}, {wanted.prefix_reuse:.0%} of each prompt shared"

    def _words_of(self, p95: int, most: int) -> str:
        if p95 <= most:
            return f"up to {p95:,} (95%)"
        return f"up to {most:,} (cut to the server's context; {p95:,} for 95% without)"

    def misfit(self) -> str:
        """A sentence explaining why exact lengths do not fit into the context; empty if they do."""
        context, known = self.max_model_len, self.exact
        least = (known.input_tokens or 1) + (known.output_tokens or 1)
        if context is None or least <= context or known == Exact():
            return ""
        words = {"prompt": known.input_tokens, "output": known.output_tokens}
        asked = " and ".join(f"{tokens} {kind} tokens" for kind, tokens in words.items() if tokens)
        return f"{asked} do not fit into the server's context of {context:,} tokens"

    def stream(self, rate: float, seconds: float) -> Iterator[LoadRequest]:
        """The requests of ``seconds`` at ``rate`` per second, in order; prompts are made lazily."""
        return self.at(self.arrivals(request_count(rate, seconds), seconds))

    def arrivals(self, count: int, seconds: float) -> list[float]:
        """When ``count`` requests are due, in seconds from 0 to ``seconds``."""
        return arrivals(self._rng, count, seconds)

    def at(self, times: Iterable[float]) -> Iterator[LoadRequest]:
        """One request for each of these times, in order; prompts are made lazily."""
        for at in times:
            yield self._request(at)

    def _request(self, at: float) -> LoadRequest:
        workload = self.workload
        prompt, output = self._lengths()
        shared = round(prompt * min(1.0, max(0.0, workload.prefix_reuse)))
        tokens = self._prefix(self._rng.randrange(PREFIXES), shared)
        return LoadRequest(at, tokens + self._tokens(self._rng, prompt - shared), output)

    def _lengths(self) -> tuple[int, int]:
        """Prompt and output tokens of the next request; exact lengths replace drawn ones."""
        prompt = self.exact.input_tokens or length_at(self._prompts.draw(), self.workload.input_tokens_p95)
        output = self.exact.output_tokens or length_at(self._outputs.draw(), self.workload.output_tokens_p95)
        return self._cut(prompt, output)

    def _cut(self, prompt: int, output: int) -> tuple[int, int]:
        """Lengths cut to the context, except for exact ones."""
        known, context = self.exact, self.max_model_len
        prompt, output = known.input_tokens or prompt, known.output_tokens or output
        if context is None:
            return prompt, output
        if known.input_tokens is not None:
            return prompt, max(1, min(output, context - prompt))
        if known.output_tokens is not None:
            return max(1, min(prompt, context - output)), output
        return fit_lengths(prompt, output, context)

    def _prefix(self, index: int, length: int) -> list[int]:
        prefix = self._prefixes[index]
        if len(prefix) < length:
            prefix += self._tokens(self._prefix_rngs[index], length - len(prefix))
        return prefix[:length]

    def _tokens(self, rng: random.Random, length: int) -> list[int]:
        return [self._token_of[byte] for byte in rng.randbytes(length)]


PROMPTS_KEPT = 512
"""A request shares its prefix with one of this many before it."""


def served_requests(found: Iterable[FinishedRequest]) -> list[FinishedRequest]:
    """Requests that can be sent again: those with known lengths."""
    return [one for one in found if one.prompt_tokens and one.output_tokens]


class RecordedTraffic:
    """Recorded requests to send again, ``speed`` times as fast. Equal arguments yield equal requests.

    The recording does not show which requests had a common prefix, only how much of a prompt was cached. So a prompt
    begins with that many tokens of the newest earlier prompt that is long enough: a prefix cache then serves as much as
    it did. Prompts that were cached before the first recorded request find nothing.
    """

    def __init__(self, requests: Sequence[FinishedRequest], *, speed: float = 1.0, seed: int = 0) -> None:
        self._requests = sorted(requests, key=lambda one: one.arrived_at)
        self._seed = seed
        begin = self._requests[0].arrived_at if self._requests else 0.0
        self.due = [(one.arrived_at - begin) / speed for one in self._requests]
        """When each is due, in seconds from the start."""
        self._speed = speed

    def words(self) -> str:
        """The number of requests and their time span, as text."""
        pace = "" if self._speed == 1 else f", {self._speed:g} times as fast as recorded"
        return f"{len(self.due):,} recorded requests over {duration(self.due[-1] if self.due else 0.0)}{pace}"

    def stream(self, vocabulary: Sequence[int] = (), max_model_len: int | None = None) -> Iterator[LoadRequest]:
        """The requests in order, cut to a context; prompts are made lazily from tokens of this vocabulary."""
        known = vocabulary or ANY_VOCABULARY
        token_of = [known[byte % len(known)] for byte in range(256)]
        rng = random.Random(self._seed)
        before: deque[bytes] = deque(maxlen=PROMPTS_KEPT)
        for at, one in zip(self.due, self._requests, strict=True):
            length, output = fit_lengths(one.prompt_tokens or 1, one.output_tokens or 1, max_model_len)
            shared = min(one.cached_tokens or 0, length)
            parent = next((prompt for prompt in reversed(before) if len(prompt) >= shared), b"") if shared else b""
            prompt = parent[:shared]
            prompt += rng.randbytes(length - len(prompt))
            before.append(prompt)  # one byte per token, a list would take eight
            yield LoadRequest(at, [token_of[byte] for byte in prompt], output)
