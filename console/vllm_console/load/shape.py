"""A preset's workload as a stream of requests: lengths, arrival times and shared prefixes. Pure and seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_launchers.presets.model import Workload

FIRST_TOKEN_ID = 20
"""Prompts use the ids from here to 275: ordinary tokens in any vocabulary, past the special ones at its start."""

SPREAD = 0.7
"""Standard deviation of a length's logarithm; the median is then 0.32 of the 95th percentile."""

Z95 = 1.6448536269514722
"""95th percentile of the standard normal distribution."""

LONGEST = 3.0
"""No length goes over this multiple of its 95th percentile (about the 99.95th percentile)."""

PREFIXES = 4
"""How many different prefixes the requests share among them."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it is due (seconds after the start), its prompt as token ids, how many tokens to generate."""

    at: float
    prompt: list[int]
    output_tokens: int


def request_count(rate: float, seconds: float) -> int:
    """How many requests ``rate`` per second over ``seconds`` comes to: at least one."""
    return max(1, math.ceil(rate * seconds))


def arrivals(rng: random.Random, rate: float, seconds: float) -> list[float]:
    """Times of a Poisson process with exactly `request_count` arrivals, in seconds from 0 to ``seconds``.

    Given their number, the arrivals of a Poisson process are distributed as sorted uniform draws.
    """
    return sorted(rng.uniform(0, seconds) for _ in range(request_count(rate, seconds)))


def draw_length(rng: random.Random, p95: int) -> int:
    """A length in tokens, log-normal with this 95th percentile, at least 1."""
    mean_log = math.log(max(1, p95)) - Z95 * SPREAD
    return max(1, min(round(rng.lognormvariate(mean_log, SPREAD)), round(p95 * LONGEST)))


def suggested_rate(workload: Workload, itl_seconds: float = 0.03) -> float:
    """A rate (requests per second) that keeps about ``workload.concurrency`` requests in flight, by Little's law.

    A request is taken to last as long as the mean output at ``itl_seconds`` per token.
    """
    mean_tokens = workload.output_tokens_p95 * math.exp(SPREAD * SPREAD / 2 - Z95 * SPREAD)
    return round(workload.concurrency / max(mean_tokens * itl_seconds, 0.01), 3)


def fit(prompt: int, output: int, max_model_len: int | None) -> tuple[int, int]:
    """Cut lengths down to a context: the output to at most half of it, the prompt to what is left."""
    if max_model_len is None:
        return prompt, output
    output = max(1, min(output, max_model_len // 2))
    return max(1, min(prompt, max_model_len - output)), output


class Shape:
    """Draws requests of a workload. Two shapes of equal arguments draw equal requests.

    Every prompt begins with a piece, ``prefix_reuse`` of its length, of one of a few prefixes that all requests share,
    so that a prefix cache that holds them answers for about that share of the prompt tokens.
    """

    def __init__(self, workload: Workload, *, seed: int = 0, max_model_len: int | None = None) -> None:
        self.workload = workload
        self.max_model_len = max_model_len
        self._rng = random.Random(seed)
        self._prefix_rngs = [random.Random(f"{seed} prefix {index}") for index in range(PREFIXES)]
        self._prefixes: list[list[int]] = [[] for _ in range(PREFIXES)]

    def stream(self, rate: float, seconds: float) -> Iterator[Request]:
        """The requests of ``seconds`` at ``rate`` per second, in order; a prompt is made when its turn comes."""
        for at in arrivals(self._rng, rate, seconds):
            yield self._request(at)

    def _request(self, at: float) -> Request:
        workload = self.workload
        prompt, output = fit(
            draw_length(self._rng, workload.input_tokens_p95),
            draw_length(self._rng, workload.output_tokens_p95),
            self.max_model_len,
        )
        shared = round(prompt * min(1.0, max(0.0, workload.prefix_reuse)))
        tokens = self._prefix(self._rng.randrange(PREFIXES), shared)
        return Request(at, tokens + _tokens(self._rng, prompt - shared), output)

    def _prefix(self, index: int, length: int) -> list[int]:
        prefix = self._prefixes[index]
        if len(prefix) < length:
            prefix += _tokens(self._prefix_rngs[index], length - len(prefix))
        return prefix[:length]


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [FIRST_TOKEN_ID + byte for byte in rng.randbytes(length)]
