"""Engines in virtual time, and simulated servers as real processes."""

from __future__ import annotations

from fakes.simulated_servers import lab, launch, launcher_in, quantile, server, traffic, until

__all__ = ["lab", "launch", "launcher_in", "quantile", "server", "traffic", "until"]
