"""Sends exactly the changed cells. Textual 8.2 repaints each changed widget's line from its left edge on.

This leans on Textual's compositor, which is no public API: the version is pinned, and a test counts the bytes.
"""

from __future__ import annotations

from rich.console import Console
from textual._compositor import ChopsUpdate, Compositor
from textual.screen import Screen


class TightUpdate(ChopsUpdate):
    """An update that begins where a change begins."""

    def render_segments(self, console: Console) -> str:
        """The bytes for the terminal: a jump to each changed span and its text."""
        parts: list[str] = []
        for y, left, right in self.spans:
            for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                if strip is None or x >= right or end <= left:
                    continue
                start, stop = max(x, left), min(end, right)
                parts.append(f"\x1b[{y + 1};{start + 1}H")
                parts.append((strip if (start, stop) == (x, end) else strip.crop(start - x, stop - x)).render(console))
        return "".join(parts)


class TightCompositor(Compositor):
    """A compositor whose partial updates are `TightUpdate`."""

    def render_partial_update(self) -> TightUpdate | None:
        """Render the regions that were marked as changed, and nothing else."""
        update = super().render_partial_update()
        return None if update is None else TightUpdate(update.chops, update.spans, update.chop_ends)


class TightScreen(Screen[None]):
    """A screen that sends only changed cells while nothing covers it."""

    def __init__(self, name: str | None = None, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(name=name, id=id, classes=classes)
        self._compositor = TightCompositor()


__all__ = ["TightScreen", "TightUpdate"]
