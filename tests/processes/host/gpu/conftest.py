"""A stub of NVIDIA's driver library, and recorded hosts."""

from __future__ import annotations

from fakes.nvml_stub import compiler, make_stub, recorded, stub_cache, stub_functions

__all__ = ["compiler", "make_stub", "recorded", "stub_cache", "stub_functions"]
