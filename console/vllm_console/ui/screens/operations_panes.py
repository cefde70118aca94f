"""Which pane of the operations screen stands alone, and the keys that choose it."""

from __future__ import annotations

from textual.widget import Widget

from vllm_console.ui.screens.verbs import ServerVerbs

GRID_WIDTH, GRID_HEIGHT = 110, 32
"""From this size on all panes are shown together; below, one at a time."""

PANES, LOG, GPUS = 6, 4, 5
"""How many panes there are, and which of them are the log and the GPUs."""


class PaneChoice(ServerVerbs):
    """Knows which pane was picked; subclasses show it."""

    def __init__(self) -> None:
        super().__init__()
        self._zoom: int | None = None
        """Index of the pane that is shown alone."""

    @property
    def roomy(self) -> bool:
        """Whether all panes find room together."""
        size = self.app.size
        return size.width >= GRID_WIDTH and size.height >= GRID_HEIGHT

    @property
    def _one_pane(self) -> int | None:
        """Index of the pane that stands alone, None when there is room for all and none was picked."""
        return self._zoom if self.roomy else self._zoom or 0

    def action_pane(self, number: int) -> None:
        """Show one pane alone; once more shows all again."""
        self._zoom = None if self._zoom == number - 1 else number - 1
        self.redraw()

    def action_pane_1(self) -> None:
        """KV cache."""
        self.action_pane(1)

    def action_pane_2(self) -> None:
        """Preemptions."""
        self.action_pane(2)

    def action_pane_3(self) -> None:
        """Latency."""
        self.action_pane(3)

    def action_pane_4(self) -> None:
        """Requests and throughput."""
        self.action_pane(4)

    def action_pane_5(self) -> None:
        """Log."""
        self.action_pane(5)

    def action_pane_6(self) -> None:
        """GPUs."""
        self.action_pane(6)

    def action_next_pane(self) -> None:
        """The next pane alone."""
        self._zoom = ((self._one_pane if self._one_pane is not None else -1) + 1) % PANES
        self.redraw()

    def action_previous_pane(self) -> None:
        """The pane before, alone."""
        self._zoom = ((self._one_pane or 0) - 1) % PANES
        self.redraw()


def set_display(widget: Widget, wanted: bool) -> None:
    """Show a widget or take it away; costs a layout only where that changes something."""
    if widget.display != wanted:
        widget.display = wanted


def set_height(widget: Widget, height: int) -> None:
    """Give a widget so many rows; costs a layout only where that changes something."""
    present = widget.styles.height
    if present is None or present.value != height:
        widget.styles.height = height
