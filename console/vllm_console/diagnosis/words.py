"""Names of flags in vLLM's messages, and sentences that several remedies say. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

FP8_CACHE_PRICE = "Attention is slower on Ampere and Ada (native from Hopper on); answers can differ a little."
"""Of an FP8 KV cache, where the GPU is not known to be native."""

_WORD = re.compile(r"--(?P<dashed>[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*)|`?\b(?P<plain>[a-z][a-z0-9]*(?:_[a-z0-9]+)+)\b")


def flags_in(text: str) -> Iterator[str]:
    """Names of flags that a message speaks of, without dashes in front: ``--max-num-seqs``, ``max_num_seqs``."""
    from vllm_launchers.machine.flags.releases import NEWEST, OLDEST, release_table

    tables = [release_table(".".join(map(str, numbers))).flags for numbers in (NEWEST, OLDEST)]
    for found in _WORD.finditer(text):
        name = (found["dashed"] or found["plain"]).replace("_", "-")
        if any(name in table for table in tables):
            yield name


def names_a_flag(text: str) -> bool:
    """Whether a message speaks of a flag."""
    return next(flags_in(text), None) is not None
