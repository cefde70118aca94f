"""The command history, newest first, saved in the state directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from vllm_launchers.private import make_folder, replace_file
from vllm_launchers.secrets import holds_secret

FILE = "commands.json"

MOST_KEPT = 50

MOST_CHARACTERS = 200
"""Longer commands are not saved."""

MAX_BYTES = 64 * 1024
"""Maximum number of bytes read from the file."""


class RecentCommands:
    """Saves commands in ``folder``; with None, keeps them only in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE if folder is not None else None
        self._texts: list[str] = []

    @property
    def texts(self) -> Sequence[str]:
        """The commands, newest first."""
        return self._texts

    def add(self, text: str) -> None:
        """Add a command, unless it contains a secret."""
        if len(text) <= MOST_CHARACTERS and not holds_secret(text):
            self._texts = [text, *(other for other in self._texts if other != text)][:MOST_KEPT]

    def read(self) -> None:
        """Append commands saved by other consoles; blocks.

        An unreadable or invalid file counts as empty.
        """
        if self._path is None:
            return
        try:
            with self._path.open("rb") as file:
                found = msgspec.json.decode(file.read(MAX_BYTES), type=list[str])
        except (OSError, ValueError):
            return
        kept = [text for text in found if text.isprintable() and len(text) <= MOST_CHARACTERS]
        self._texts = list(dict.fromkeys([*self._texts, *kept]))[:MOST_KEPT]

    def write(self) -> None:
        """Save the history; blocks.

        Raises:
            OSError: the file can't be written.
        """
        if self._path is None:
            return
        make_folder(self._path.parent)
        replace_file(self._path, msgspec.json.encode(self._texts))
