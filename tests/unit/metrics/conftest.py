"""Bodies, samples and a raw HTTP server."""

from __future__ import annotations

from fakes.metrics_bodies import body, engine, sample, server, until

__all__ = ["body", "engine", "sample", "server", "until"]
