"""Bodies of ``/metrics`` and a raw HTTP server."""

from __future__ import annotations

from fakes.metrics_bodies import body, server, until

__all__ = ["body", "server", "until"]
