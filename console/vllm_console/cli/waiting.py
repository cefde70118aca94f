"""Wait for a server to reach a state, report it, and undo a long command that is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vllm_console.cli.output import complain, print_json
from vllm_console.cli.progress import LINE_SECONDS, ProgressLine
from vllm_console.cli.servers import server_document
from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import duration, plain
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper.records import State

if TYPE_CHECKING:
    from types import FrameType

    from vllm_console.fleet.local import LocalFleet


def wait_until(
    fleet: LocalFleet, name: str, done: Callable[[ServerView], bool], *, quiet: bool, timeout: float
) -> ServerView:
    """Poll a server until ``done`` returns true; show startup progress, in a file or a pipe only if it takes long.

    Raises:
        OperationError: it took longer than ``timeout`` seconds.
    """
    begun = time.monotonic()
    with ProgressLine(silent=quiet) as line:
        while True:
            server = fleet.snapshot().server(name)
            if server is None:
                raise OperationError(f"{name} was removed while this command waited")
            if done(server):
                return server
            waited = time.monotonic() - begun
            if waited > timeout:
                raise OperationError(
                    f"{name} is still {server.state} after {duration(timeout)}, and continues without this command. "
                    f"See 'vllm-console logs {name}', or wait longer with --timeout"
                )
            line.show(_progress_text(server), waited - LINE_SECONDS)
            time.sleep(0.2)


def _progress_text(server: ServerView) -> str:
    if server.restart is not None and server.restart.under_way and server.state is State.READY:
        return f"{server.name}: {server.restart.sentence}"
    if server.node and server.pid is None and server.reason:
        return f"{server.name}: {server.reason}"
    stage = server.stages[-1] if server.stages else None
    return f"{server.name}: {server.state}" + (f" · {stage.name} {stage.detail}" if stage else "")


def wait_for_restart(
    fleet: LocalFleet, before: ServerView | None, asked: ServerView, *, quiet: bool, timeout: float
) -> tuple[ServerView, float | None]:
    """Wait until a requested restart has begun, or will not happen (see `did_not_happen`).

    ``before`` is the server before the request, ``asked`` the server that the call returned. Also returns when the
    preparation of this restart was requested (Unix seconds), or None if it has none.

    Raises:
        OperationError: it took longer than ``timeout`` seconds.
    """
    generation = before.generation if before else 0
    earlier = before.restart.asked_at if before is not None and before.restart is not None else None
    asked_at = asked.restart.asked_at if asked.restart is not None else None
    if asked_at == earlier:
        asked_at = None  # that restart ended long ago

    def begun(server: ServerView) -> bool:
        if server.generation > generation:
            return server.state is not State.STOPPING
        # Stopped by another console while it was stopping for this restart.
        return did_not_happen(server, asked_at) or not server.state.alive

    return wait_until(fleet, asked.name, begun, quiet=quiet, timeout=timeout), asked_at


def did_not_happen(server: ServerView, asked_at: float | None) -> bool:
    """Whether the prepared restart ended before it touched the server, or was replaced by another one."""
    if asked_at is None or server.restart is None:
        return False  # it was not prepared
    return server.restart.abandoned or server.restart.asked_at != asked_at


def is_settled(server: ServerView) -> bool:
    """Whether a server is up, or down without another automatic restart."""
    if server.state is State.FAILED:
        return server.next_attempt_at is None
    return server.state in (State.READY, State.STOPPED)


def not_ready(server: ServerView) -> str:
    """``chat failed``, or ``chat is starting``."""
    return f"{server.name} failed" if server.state is State.FAILED else f"{server.name} is {server.state}"


def report_server(args: argparse.Namespace, server: ServerView, *, wanted: State | None) -> int:
    """Print a server; exit code 1, with the reason on stderr, if it is not in the ``wanted`` state."""
    if args.json:
        print_json(server_document(server))
    else:
        mark = " (simulated)" if server.simulated else ""
        where = server.url if server.port else server.node
        print(f"{server.name}{mark}: {server.state}, run {server.generation}, {where}")
        if server.notice:
            print(f"  note: {plain(server.notice)}")
    if server.state is State.FAILED or (wanted is not None and server.state is not wanted):
        complain(f"{not_ready(server)}: {server.reason}")
        return 1
    return 0


def warn_of_tuner(server: ServerView | None) -> None:
    """Warn on standard error that a tuner gives up if this server is changed now."""
    if server is not None and (tuner := server.tuner) is not None:
        stay = f"; {server.name} keeps the flags of {tuner.place}" if tuner.place else ""
        complain(f"warning: a tuner (pid {tuner.pid}) is running on {server.name}: it gives up now{stay}")


class Canceling:
    """Signal handling: cancel immediately, or after a step that must be completed."""

    def __init__(self) -> None:
        self._whole = self.wanted = False

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.wanted = True
        if not self._whole:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def afterwards(self) -> Iterator[None]:
        """Delay cancellation until the end of the block."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
        if self.wanted:
            raise KeyboardInterrupt


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a program besides Ctrl-C. A SIGHUP that is ignored, as under nohup, stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def undone_at_end(undo: Callable[[], None]) -> Iterator[Canceling]:
    """SIGINT and the `ending_signals` end the block like Ctrl-C; then call ``undo``, which no signal interrupts."""
    cancel = Canceling()
    handled = (*ending_signals(), signal.SIGINT)
    before = {number: signal.signal(number, cancel.handle) for number in handled}
    try:
        yield cancel
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        cancel.wanted = False  # undoing is not canceled
        undo()
        for number, handler in before.items():
            signal.signal(number, handler)
