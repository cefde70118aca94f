"""Which metric family means what, over vLLM 0.7 to 0.33: names, their forerunners, and who wins when both are there.

Within one look a field takes the first of its names that has a value, so a server that exports an old and a new name
side by side (as vLLM 0.9.2 to 0.11 did) is not counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

GAUGES: Mapping[str, tuple[str, ...]] = {
    "requests_running": ("vllm:num_requests_running",),
    "requests_waiting": ("vllm:num_requests_waiting",),
    # A share from 0 to 1 in spite of its name; the old name is gone since 0.12.
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
"""Gauges by field of `EngineSample`: family names, the preferred first."""

COUNTERS: Mapping[str, tuple[str, ...]] = {
    "preemptions_total": ("vllm:num_preemptions_total",),
    "prefix_cache_queries_total": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_cache_hits_total": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "prompt_tokens_total": ("vllm:prompt_tokens_total",),
    "generation_tokens_total": ("vllm:generation_tokens_total",),
    # One series per finished_reason: they are added.
    "requests_finished_total": ("vllm:request_success_total",),
}
"""Counters by field of `EngineSample`, by whole name: a histogram may end in ``_total`` too."""

HISTOGRAMS: Mapping[str, tuple[str, ...]] = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    # The old name meant the time between tokens too; request_time_per_output_token_seconds is a mean per request.
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "e2e": ("vllm:e2e_request_latency_seconds",),
    "queue": ("vllm:request_queue_time_seconds", "vllm:time_in_queue_requests"),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "decode": ("vllm:request_decode_time_seconds",),
    "prompt_tokens": ("vllm:request_prompt_tokens",),
    "generation_tokens": ("vllm:request_generation_tokens",),
}
"""Histograms by key of `EngineSample.histograms`: base names, the preferred first."""

CACHE_CONFIG = "vllm:cache_config_info"
"""The cache's settings as labels; its value says nothing and it has no ``model_name``."""

PREFIX = "vllm:"


class Role(NamedTuple):
    """What a sample name is for: kind, field or key, rank (0 is preferred) and, of a histogram, which part."""

    kind: Literal["gauge", "counter", "histogram"]
    key: str
    rank: int
    part: Literal["", "bucket", "sum", "count"] = ""


def _roles() -> dict[str, Role]:
    roles: dict[str, Role] = {}
    for key, names in GAUGES.items():
        roles.update({name: Role("gauge", key, rank) for rank, name in enumerate(names)})
    for key, names in COUNTERS.items():
        roles.update({name: Role("counter", key, rank) for rank, name in enumerate(names)})
    for key, names in HISTOGRAMS.items():
        for rank, name in enumerate(names):
            roles[f"{name}_bucket"] = Role("histogram", key, rank, "bucket")
            roles[f"{name}_sum"] = Role("histogram", key, rank, "sum")
            roles[f"{name}_count"] = Role("histogram", key, rank, "count")
    return roles


ROLES: Mapping[str, Role] = _roles()
"""Every sample name that is read, and what for. Whatever is not here is skipped."""


def kv_cache_tokens(engines: Iterable[Mapping[str, str]]) -> int | None:
    """Tokens that the KV cache holds over all engines; None when it was not told.

    ``engines`` are the labels of `CACHE_CONFIG`, one mapping per engine. Since 0.24 each tells *one* engine's capacity
    as ``kv_cache_size_tokens``, right for hybrid models too: these are added. Older versions tell the number of blocks
    and the block size; ``num_gpu_blocks`` is already the sum over data-parallel engines and is repeated on each.
    """
    told = 0
    by_blocks = 0
    for labels in engines:
        told += _integer(labels.get("kv_cache_size_tokens")) or 0
        blocks, block_size = _integer(labels.get("num_gpu_blocks")), _integer(labels.get("block_size"))
        by_blocks = max(by_blocks, (blocks or 0) * (block_size or 0))
    return told or by_blocks or None


def _integer(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 15:
        return None
    return int(text) or None
