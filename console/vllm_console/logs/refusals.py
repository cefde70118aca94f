"""Why requests were refused, as far as a server's log shows it. Pure, except for reading the log.

vLLM writes an access line per request unless a flag disables them, and a message for some refused requests: for an
unknown model with chat completions and responses (not with completions, 0.32), for too long a prompt only in some
versions.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vllm_console.logs.access import parse_access_line
from vllm_console.logs.file import LogFile
from vllm_console.metrics.parse import GENERATING
from vllm_console.text import plain
from vllm_launchers.patterns import lazy_pattern

SEARCHED_LINES = 5000
"""Number of lines at the end of a log that are searched for reasons."""

NAME_LENGTH = 80

_MODEL = lazy_pattern(r"The model `([^`]{1,300})` does not exist")
_CONTEXT = lazy_pattern(
    r"maximum context length is \d+ tokens|cannot be greater than max_model_len|longer than the maximum model length"
)
_TOKENS = lazy_pattern(
    r"(?:you requested|prompt contains|request has|prompt \(length|length of) (?:at least )?(\d+)"
    r"(?: (?:input )?tokens|\))"
)


class Refusals(msgspec.Struct, frozen=True):
    """The newest refused requests in a log: their number by status (``404 Not Found``), most frequent first, and the
    reasons.

    ``models`` are the requested names that are not served, likewise. ``too_long`` is whether some exceeded the context,
    and ``longest`` the most tokens that such a request is known to have needed.
    """

    statuses: tuple[tuple[str, int], ...] = ()
    models: tuple[tuple[str, int], ...] = ()
    too_long: bool = False
    longest: int | None = None

    def share(self, status: str) -> float:
        """The fraction of them whose status begins with ``status``."""
        whole = sum(number for _, number in self.statuses)
        return sum(number for name, number in self.statuses if name.startswith(status)) / whole if whole else 0.0


def refusals_in(lines: Sequence[str], most: int) -> Refusals:
    """The newest refused requests, at most ``most``, in the last lines of a log, with the reasons found there."""
    statuses, models, needed = Counter[str](), Counter[str](), list[int]()
    too_long, seen = False, 0
    for text in reversed(lines):
        access = parse_access_line(text)
        if access is not None:
            method, _, path = access.request.partition(" ")
            if access.status.startswith("4") and method == "POST" and path in GENERATING:
                if seen == most:
                    break
                seen += 1
                statuses[access.status] += 1
        elif seen:  # a request's message is above its access line
            if (model := _MODEL.search(text)) is not None:
                models[plain(model[1], NAME_LENGTH)] += 1
            elif _CONTEXT.search(text) is not None:
                too_long = True
                needed += [int(tokens) for tokens in _TOKENS.findall(text)]
    return Refusals(tuple(statuses.most_common()), tuple(models.most_common()), too_long, max(needed, default=None))


def read_refusals(log: Path, most: int) -> Refusals:
    """The newest refused requests in a log, at most ``most``; none if it can't be read."""
    with contextlib.closing(LogFile(log)) as file:
        return refusals_in([line.text for line in file.tail(SEARCHED_LINES)], most)
