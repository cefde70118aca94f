"""What can go wrong when flags are learned."""

from __future__ import annotations


class FlagsUnknownError(Exception):
    """The flags of an installation cannot be told; the text is one clear sentence."""
