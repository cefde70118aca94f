"""Real keepers with a fake server."""

from __future__ import annotations

from fakes.keeper_bench import bench, port, session_of, wait_until

__all__ = ["bench", "port", "session_of", "wait_until"]
