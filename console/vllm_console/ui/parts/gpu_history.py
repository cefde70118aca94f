"""Whether the GPUs pane shows what a GPU did, and which GPU and which of its charts."""

from __future__ import annotations

from vllm_console.fleet.snapshot import FleetSnapshot, ServerView


class GpuHistoryChoice:
    """What the user chose. Until one steps to another GPU, it is the first one of the selected server."""

    def __init__(self) -> None:
        self.shown = False
        self.page = 0
        self._gpu: int | None = None

    def toggle(self) -> None:
        """Charts, or the GPUs as they are now."""
        self.shown = not self.shown
        self.page, self._gpu = 0, None

    def gpu(self, snapshot: FleetSnapshot | None, server: ServerView | None) -> int | None:
        """The index of the GPU whose charts are wanted; None where none are."""
        if not self.shown or snapshot is None or snapshot.host is None:
            return None
        known = [gpu.index for gpu in snapshot.host.gpus]
        if self._gpu in known:
            return self._gpu
        of_server = [index for index in (server.gpus if server is not None else ()) if index in known]
        return next(iter((*of_server, *known)), None)

    def step(self, by: int, pages: int, snapshot: FleetSnapshot | None, server: ServerView | None) -> None:
        """The next page of charts, of ``pages``; behind the last one, the next GPU. Back for -1."""
        present = self.gpu(snapshot, server)
        if present is None or snapshot is None or snapshot.host is None:
            return
        page = min(self.page, pages - 1) + by
        if 0 <= page < pages:
            self.page = page
            return
        known = [gpu.index for gpu in snapshot.host.gpus]
        self._gpu = known[(known.index(present) + by) % len(known)]
        self.page = 0
