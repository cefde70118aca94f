"""A container that puts its children into given regions, and hides those without a place."""

from __future__ import annotations

from collections.abc import Mapping

from textual.geometry import NULL_OFFSET, NULL_SPACING, Region, Size
from textual.layout import ArrangeResult, Layout, WidgetPlacement
from textual.widget import Widget


class _Placed(Layout):
    """Puts each widget where the arrangement has it."""

    name = "placed"

    def __init__(self) -> None:
        self.regions: Mapping[str, Region] = {}

    def arrange(self, parent: Widget, children: list[Widget], size: Size, greedy: bool = True) -> ArrangeResult:  # noqa: ARG002 - Textual's
        """A placement for each child that has a region."""
        parent.pre_layout(self)
        return [
            WidgetPlacement(self.regions[child.id], NULL_OFFSET, NULL_SPACING, child)
            for child in children
            if child.id is not None and child.id in self.regions
        ]


class PlacedArea(Widget):
    """Holds widgets, each where `place` puts it, by id; those without a place are hidden."""

    DEFAULT_CSS = "PlacedArea { height: 1fr; background: ansi_default; overflow: hidden; }"

    def __init__(self, *children: Widget, id: str) -> None:
        super().__init__(*children, id=id)
        self._placed = _Placed()
        for child in children:
            child.display = False  # none has a place yet: a first layout of all would be drawn for nothing

    @property
    def layout(self) -> Layout:
        """The layout that puts the children where they were placed."""
        return self._placed

    def place(self, regions: Mapping[str, Region]) -> None:
        """Put the children there; costs a layout only if that changes something."""
        if regions == self._placed.regions:
            return
        self._placed.regions = regions
        for child in self.children:
            set_display(child, child.id in regions)
        for child in self.children:
            if child.id in regions:
                child.refresh(layout=True)  # a child's request lays out its parent anew
                return


def set_display(widget: Widget, wanted: bool) -> None:
    """Show or hide a widget; costs a layout only if that changes something."""
    if widget.display != wanted:
        widget.display = wanted


def set_height(widget: Widget, height: int) -> None:
    """Set a widget's rows; costs a layout only if that changes something."""
    present = widget.styles.height
    if present is None or present.value != height:
        widget.styles.height = height
