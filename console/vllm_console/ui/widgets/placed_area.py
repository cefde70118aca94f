"""A container that puts its children into given regions and hides those without one."""

from __future__ import annotations

from collections.abc import Mapping

from textual.geometry import NULL_OFFSET, NULL_SPACING, Region, Size
from textual.layout import ArrangeResult, Layout, WidgetPlacement
from textual.widget import Widget


class _Placed(Layout):
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
    """Holds widgets, placed by id with `place`; widgets without a place are hidden."""

    DEFAULT_CSS = "PlacedArea { height: 1fr; background: ansi_default; overflow: hidden; }"

    def __init__(self, *children: Widget, id: str) -> None:
        super().__init__(*children, id=id)
        self._placed = _Placed()
        for child in children:
            child.display = False  # none has a place yet; laying out all of them would be wasted

    @property
    def layout(self) -> Layout:
        """The layout that applies the regions set by `place`."""
        return self._placed

    def place(self, regions: Mapping[str, Region]) -> None:
        """Move the children to these regions, by id. Costs a layout only if something changes."""
        if regions == self._placed.regions:
            return
        self._placed.regions = regions
        for child in self.children:
            set_display(child, child.id in regions)
        for child in self.children:
            if child.id in regions:
                child.refresh(layout=True)  # a child's request also lays out its parent again
                return


def set_display(widget: Widget, wanted: bool) -> None:
    """Show or hide a widget. Costs a layout only if something changes."""
    if widget.display != wanted:
        widget.display = wanted


def set_height(widget: Widget, height: int) -> None:
    """Set a widget's height in rows. Costs a layout only if something changes."""
    present = widget.styles.height
    if present is None or present.value != height:
        widget.styles.height = height
