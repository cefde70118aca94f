"""The one registry of what a person can do: key bindings, palette, help, footer and the README's table come from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Action:
    """Something a person can do with a key.

    ``id`` names the method ``action_<id>`` (words joined by ``_``); ``keys`` are Textual key names, the first is shown;
    ``scope`` is ``app``, ``operations``, ``launch``, ``flags`` or ``log``; ``changes`` marks what alters a server and
    vanishes under ``--read-only``; ``footer`` puts it into the footer line, in the order of the registry.
    """

    id: str
    keys: tuple[str, ...]
    title: str
    scope: str
    changes: bool = False
    footer: bool = False
