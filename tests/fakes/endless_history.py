"""A history writer that runs until killed, in a module that a spawned process can import."""

from __future__ import annotations

from multiprocessing.synchronize import Event
from pathlib import Path

from vllm_console.history.store import HistoryWriter
from vllm_console.metrics.sample import EngineSample, Sample


def write_for_ever(path: Path, start: float, started: Event) -> None:
    """One sample per second of the history's time; sets ``started`` after 30 of them."""
    writer = HistoryWriter(path)
    second = 0
    while True:
        writer.append(Sample(start + second, {"0": EngineSample(generation_tokens_total=float(second))}))
        second += 1
        if second == 30:
            started.set()
