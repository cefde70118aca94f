"""Output to a terminal: in order, never blocking, with known delay or loss. Pipes replace the terminal."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator

import pytest

from vllm_console.ui.terminal.driver import MOST_BYTES, WAITING_BYTES, OutputWriter

SECONDS = 120.0


class Pipe:
    """An output writer to a pipe, with the events that it reported."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()
        self.caught_up, self.lost = threading.Event(), threading.Event()
        self.output = OutputWriter(self.writes, self.caught_up.set, self.lost.set)

    def read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            found += os.read(self.reads, count - len(found))
        return found

    def stop_reading(self) -> None:
        os.close(self.reads)
        self.reads = -1

    def close(self) -> None:
        if self.reads >= 0:
            self.stop_reading()
        self.output.close(0)
        os.close(self.writes)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def filled(pipe: Pipe, more: int = WAITING_BYTES + 1) -> int:
    """Write until the pipe is full and ``more`` bytes are queued; returns the number of bytes."""
    count = fcntl.fcntl(pipe.writes, fcntl.F_GETPIPE_SZ) + more
    pipe.output.write(b"x" * count)
    return count


def test_everything_arrives_in_order(pipe: Pipe) -> None:
    pieces = [f"{number:06d}".encode() * 100 for number in range(100)]
    for piece in pieces:
        pipe.output.write(piece)
    assert pipe.read(60_000) == b"".join(pieces)


def test_writer_never_waits_and_is_notified_when_caught_up(pipe: Pipe) -> None:
    written = filled(pipe)
    assert pipe.output.behind()
    pipe.output.write(b"a mode")
    assert not pipe.caught_up.is_set()
    assert pipe.read(written + 6).endswith(b"xa mode")
    assert pipe.caught_up.wait(SECONDS)
    assert not pipe.output.behind()


def test_nobody_is_notified_without_a_request(pipe: Pipe) -> None:
    """Only a writer that skips frames needs to know when the next one would be accepted."""
    pipe.read(filled(pipe))
    pipe.output.write(b"end")
    assert pipe.read(3) == b"end"
    pipe.output.close(SECONDS)
    assert not pipe.caught_up.is_set()


def test_bounded_amount_waits(pipe: Pipe) -> None:
    written = filled(pipe, MOST_BYTES // 2)
    pipe.output.write(b"y" * MOST_BYTES)
    pipe.output.write(b"z")
    assert pipe.read(written + 1)[-2:] == b"xz"


def test_close_waits_for_the_terminal_with_a_limit(pipe: Pipe) -> None:
    pipe.output.write(b"modes")
    pipe.output.close(SECONDS)
    pipe.output.write(b"too late")
    assert os.read(pipe.reads, 100) == b"modes"
    stalled = Pipe()
    filled(stalled)
    stalled.output.close(0.01)
    assert not stalled.lost.is_set()
    stalled.close()


@pytest.mark.parametrize("stalled", [False, True])
def test_lost_terminal_is_noticed(pipe: Pipe, stalled: bool) -> None:
    """Also if nothing is written to it."""
    if stalled:
        filled(pipe)
    pipe.stop_reading()
    assert pipe.lost.wait(SECONDS)
    pipe.output.write(b"nothing comes of it")
    pipe.output.close(SECONDS)
    assert not pipe.caught_up.is_set()


def test_waiting_output_is_dropped_to_release_a_slow_terminal(pipe: Pipe) -> None:
    written = filled(pipe, more=4 * WAITING_BYTES)
    found = pipe.read(1)
    pipe.output.drop()
    pipe.output.write(b"given back")
    while not found.endswith(b"given back"):
        found += os.read(pipe.reads, 1 << 16)
    assert len(found) < written, "unsent output was dropped"
    assert set(found.removesuffix(b"given back")) == {ord("x")}


def test_terminal_that_another_program_made_non_blocking_is_not_lost(pipe: Pipe) -> None:
    os.set_blocking(pipe.writes, False)
    count = filled(pipe)
    assert pipe.read(count) == b"x" * count
    assert not pipe.lost.is_set()
