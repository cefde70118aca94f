"""Bodies, samples and a raw HTTP server; a stub of NVIDIA's driver library."""

from __future__ import annotations

from fakes.metrics_bodies import body, engine, sample, server, until
from fakes.nvml_stub import compiler, make_stub, recorded, stub_cache

__all__ = ["body", "compiler", "engine", "make_stub", "recorded", "sample", "server", "stub_cache", "until"]
