"""Recorded hosts."""

from __future__ import annotations

from fakes.nvml_stub import recorded

__all__ = ["recorded"]
