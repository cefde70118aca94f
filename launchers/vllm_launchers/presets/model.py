"""The shape of a preset file, as decoded and checked by msgspec."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FlagValue = bool | int | float | str
"""A flag's value: a boolean becomes ``--flag`` or ``--no-flag``, all else ``--flag VALUE``."""


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

    input_tokens_p95: int
    output_tokens_p95: int
    prefix_reuse: float
    concurrency: int


class Objectives(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What good service means: latencies in seconds, usage and rate as shares from 0 to 1."""

    ttft_p99_seconds: float
    itl_p99_seconds: float
    kv_cache_usage: float
    preemption_rate: float


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A preset as the rest of the program sees it: complete, checked, `extends` already resolved."""

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
