"""The GPUs pane, and the machine in a few words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import events

from vllm_console.fleet.model import FleetSnapshot
from vllm_console.text import plain
from vllm_console.ui.widgets.lines import LineView

if TYPE_CHECKING:
    from vllm_launchers.machine.gpu.host import Gpu


class GpusPane(LineView):
    """The machine's GPUs as the newest snapshot has them."""

    DEFAULT_CSS = "GpusPane { height: 1fr; width: 1fr; }"

    _given: FleetSnapshot | None = None

    def give(self, snapshot: FleetSnapshot) -> None:
        """Show this snapshot; a hidden pane only remembers it."""
        self._given = snapshot
        if self.is_on_screen and self.size.width:
            self._draw(*self.size)

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        if self._given and event.size.width:
            self._draw(*event.size)

    def on_show(self) -> None:
        """Draw what came while the pane was hidden."""
        if self._given:
            self.give(self._given)

    @staticmethod
    def wanted_height(snapshot: FleetSnapshot | None) -> int:
        """Lines that say all there is to say."""
        if snapshot is None or snapshot.host is None:
            return 2
        from vllm_console.ui.panes.gpu_lines import wanted_height

        return wanted_height(snapshot.host)

    def _draw(self, width: int, height: int) -> None:
        # Most of what it takes to draw GPUs is imported when there are some to draw: it costs at start.
        from vllm_console.ui.panes.gpu_lines import gpus_lines

        if self._given is not None:
            self.show(gpus_lines(self._given, width, height))


def host_words(snapshot: FleetSnapshot) -> list[str]:
    """The machine's GPUs and driver in a few words each: ``4× RTX A6000``, ``driver 580.95``."""
    host = snapshot.host
    if host is None or not host.gpus:
        return []
    names = [_name(gpu) for gpu in host.gpus]
    models = " + ".join(f"{names.count(name)}× {name}" for name in dict.fromkeys(names))
    driver = ".".join((host.driver or "").split(".")[:2])
    return [models + (" (recorded)" if snapshot.host_recorded else ""), *([f"driver {driver}"] if driver else [])]


def _name(gpu: Gpu) -> str:
    return plain(gpu.name or "GPU").removeprefix("NVIDIA ").removeprefix("GeForce ")
