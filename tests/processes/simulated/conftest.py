"""Simulated servers as real processes."""

from __future__ import annotations

from fakes.simulated_servers import launch, launcher_in, quantile, server, until

__all__ = ["launch", "launcher_in", "quantile", "server", "until"]
