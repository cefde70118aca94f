"""The only place for vLLM defaults that changed between releases; a test compares them with `releases`. Pure."""

from __future__ import annotations

import re

from vllm_launchers.patterns import lazy_pattern

Release = tuple[int, int, int]
"""Major, minor and patch number."""

NEWEST: Release = (0, 33, 0)
"""The newest release examined; an unknown one is treated like it."""

SIMULATED_RELEASE: Release = (0, 33, 0)
SIMULATED_VERSION = ".".join(map(str, SIMULATED_RELEASE))
"""The release that the simulated engine imitates."""

CHECKED_SINCE: Release = (0, 32, 0)
"""First release of which it was checked in detail what it refuses."""

_VERSION = lazy_pattern(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?:[.+\-a-z][a-zA-Z0-9.+_-]*)?", re.ASCII)


def parse_release(version: str) -> Release | None:
    """The numbers of a version, or None: ``(0, 32, 0)`` for ``0.32.0+cpu`` and ``v0.32``."""
    found = _VERSION.fullmatch(version.strip())
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def scales_yarn(release: Release | None) -> bool:
    """Whether vLLM multiplies a model's original context by YaRN's factor, as it did before 0.30.

    Since then, the config's length counts (``_get_and_verify_max_len``). An unknown release counts as the newest.
    """
    return release is not None and release < (0, 30, 0)


def checked(release: Release | None) -> bool:
    """Whether it is known in detail what a release refuses; False for an unknown one."""
    return release is not None and release >= CHECKED_SINCE


_UTILIZATION: tuple[tuple[Release, float], ...] = (((0, 20, 0), 0.92), ((0, 0, 0), 0.9))


def default_utilization(release: Release | None = None) -> float:
    """The default ``gpu-memory-utilization`` of a release; the newest one's if unknown."""
    release = release or NEWEST
    return next(share for since, share in _UTILIZATION if release >= since)


WHOLE_PROMPTS_SINCE: Release = (0, 11, 1)
"""First release whose generative models may run without chunked prefill; earlier ones ignore that it is off."""


ONLINE_FP8_SINCE: Release = (0, 15, 0)
"""Earlier releases allocate all 16-bit weights before they convert them to FP8, so the peak does not shrink."""


def online_fp8(release: Release | None = None) -> str:
    """The value of ``quantization`` that converts 16-bit weights to FP8 while they are loaded.

    From 0.31 on, ``fp8`` is deprecated for this, but works. For an unknown release, the name that all releases accept.
    """
    return "fp8_per_tensor" if release is not None and release >= (0, 31, 0) else "fp8"


def graphs_in_share(release: Release) -> bool:
    """Whether CUDA graphs count against the share of ``gpu-memory-utilization`` by default.

    vLLM's log says "default since v0.21.0", but 0.20.0 does it (``VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS``).
    """
    return release >= (0, 20, 0)


def caches_linear_prefixes(release: Release) -> bool:
    """Whether prefix caching is on by default for models with linear layers; it is off for models without attention.

    From ``EngineArgs._set_default_chunked_prefill_and_prefix_caching_args``: 0.26 and 0.27 support it for all of them,
    but leave it off unless a flag asks.
    """
    return release >= (0, 28, 0)


def can_cache_linear_prefixes(release: Release, *, drafts: bool) -> bool:
    """Whether ``mamba-cache-mode align`` turns on prefix caching for all models with linear layers.

    Before 0.15, vLLM turns it off again for most of these models. ``drafts``: with speculative decoding, which 0.16
    refuses then (``MambaModelConfig``).
    """
    return release >= ((0, 17, 0) if drafts else (0, 15, 0))
