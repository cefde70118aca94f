"""The GPUs pane, and a short description of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import events

from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.text import plain
from vllm_console.ui.panes.base import ChartedView

if TYPE_CHECKING:
    from vllm_console.ui.panes.gpu_charts import GpuHistoryView
    from vllm_launchers.host.gpu.host import Gpu


class GpusPane(ChartedView):
    """The machine's GPUs from the newest snapshot, or the charts of one of them."""

    DEFAULT_CSS = "GpusPane { height: 1fr; width: 1fr; }"

    _snapshot: FleetSnapshot | None = None
    _history: GpuHistoryView | None = None
    _moment: float | None = None

    def show_snapshot(
        self, snapshot: FleetSnapshot, history: GpuHistoryView | None = None, moment: float | None = None
    ) -> None:
        """Show this snapshot; with ``history``, the charts of its GPU. A hidden pane only stores it.

        ``moment`` (Unix seconds) is the earlier moment that the screen shows, if any.
        """
        self._snapshot, self._history, self._moment = snapshot, history, moment
        if self.is_on_screen and self.size.width:
            self._draw(*self.room)

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the new size."""
        if self._snapshot and event.size.width:
            self._draw(*self.room)

    def on_show(self) -> None:
        """Draw what arrived while the pane was hidden."""
        if self._snapshot:
            self.show_snapshot(self._snapshot, self._history, self._moment)

    @property
    def chart_pages(self) -> int:
        """The number of chart pages at the current size."""
        if self._snapshot is None or self._snapshot.gpu_chart is None or not self.size.width:
            return 1
        from vllm_console.ui.panes.gpu_charts import page_count

        return page_count(self._snapshot.gpu_chart, *self.room)

    @staticmethod
    def wanted_height(snapshot: FleetSnapshot | None, width: int) -> int:
        """The lines needed to show everything at this screen width."""
        if snapshot is None or snapshot.host is None:
            return 2
        from vllm_console.ui.panes.gpu_lines import wanted_height

        return wanted_height(snapshot.host, width)

    def _draw(self, width: int, height: int) -> None:
        # Imported only when there is something to draw, to keep startup fast.
        if self._snapshot is None:
            return
        if self._history is not None:
            from vllm_console.ui.panes.gpu_charts import gpu_chart_lines

            self.show_lines(gpu_chart_lines(self._snapshot, self._history, width, height))
            return
        from vllm_console.ui.panes.gpu_lines import gpus_lines

        self.show_lines(gpus_lines(self._snapshot, width, height, self._moment))


def format_host(snapshot: FleetSnapshot) -> list[str]:
    """The machine's GPUs and driver in brief: ``4× RTX A6000``, ``driver 580.95``."""
    host = snapshot.host
    if host is None or not host.gpus:
        return []
    names = [_name(gpu) for gpu in host.gpus]
    models = " + ".join(f"{names.count(name)}× {name}" for name in dict.fromkeys(names))
    driver = ".".join((host.driver or "").split(".")[:2])
    return [models + (" (recorded)" if snapshot.host_recorded else ""), *([f"driver {driver}"] if driver else [])]


def _name(gpu: Gpu) -> str:
    return plain(gpu.name or "GPU").removeprefix("NVIDIA ").removeprefix("GeForce ")
