"""A server's name as titles show it."""

from __future__ import annotations

from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain


def marked_name(server: ServerView) -> str:
    """Its name, with a mark where its engine is simulated."""
    return plain(server.name) + (" sim" if server.simulated else "")
