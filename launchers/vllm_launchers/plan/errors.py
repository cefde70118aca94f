"""What can be wrong with a plan."""

from __future__ import annotations


class PlanError(Exception):
    """A launch that makes no sense as asked for; the text is one clear sentence."""


class FlagError(PlanError):
    """A flag that cannot be set this way."""
