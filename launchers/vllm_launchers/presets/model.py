"""The shape of a preset file, as decoded and checked by msgspec.

Ranges and descriptions are defined once, here: the loader validates with them, and the JSON Schema is generated from
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_launchers.vllm.flags.changes import FlagValue

MAX_TOKENS = 100_000_000
_Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class FlagSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One flag of ``vllm serve`` and the reason why the preset sets it."""

    value: FlagValue
    why: str


class EnvironmentSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One environment variable of the server and the reason for it. Never a secret."""

    value: str
    why: str


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The traffic a preset is made for. Lengths in tokens; ``prefix_reuse`` is a share from 0 to 1."""

    input_tokens_p95: Annotated[_Tokens, Meta(description="95th percentile of prompt length, in tokens")]
    output_tokens_p95: Annotated[_Tokens, Meta(description="95th percentile of output length, in tokens")]
    prefix_reuse: Annotated[
        _Share, Meta(description="fraction of a prompt that is a prefix shared with other requests, 0 to 1")
    ]
    concurrency: Annotated[int, Meta(ge=1, le=100_000, description="requests in flight at the same time")]


class Objectives(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What good service means: latencies in seconds, usage and rate as shares from 0 to 1."""

    ttft_p99_seconds: Annotated[_Seconds, Meta(description="99% of requests get their first token within this time")]
    itl_p99_seconds: Annotated[_Seconds, Meta(description="99% of gaps between two tokens are at most this long")]
    kv_cache_usage: Annotated[_Share, Meta(description="the KV cache should stay below this share, 0 to 1")]
    preemption_rate: Annotated[
        _Share, Meta(description="preemptions per finished request should stay below this share, 0 to 1")
    ]


ATTAINED = 0.99
"""Minimum share of requests (of gaps between tokens) within the limit: the objectives are 99th percentiles."""


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A preset as the rest of the program sees it: complete, validated, `extends` already resolved."""

    name: str
    title: str
    summary: str
    model: str
    flags: Mapping[str, FlagSetting]
    workload: Workload
    objectives: Objectives
    environment: Mapping[str, EnvironmentSetting] = {}
    source: str = ""
    """The file it was read from."""
    shipped: bool = True
