"""The process beside every server that keeps its history: ``python -m vllm_console.telemetry.recorder``.

It asks once a second, writes what it saw, and ends with the server. It is small on purpose and needs nothing of the
console. When the keeper that started it dies, it calls for a new one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_console.telemetry.gpu_looks import GpuLooks
from vllm_console.telemetry.history import Writer
from vllm_console.telemetry.ledger_log import RunLog, RunName
from vllm_console.telemetry.run_windows import WINDOW_SECONDS
from vllm_console.telemetry.scrape import ScrapeError, Scraper
from vllm_launchers.private import open_file
from vllm_launchers.procfs import stat

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOCK_POLL_SECONDS = 0.2
_ADOPT_SECONDS = 30.0


def process_lives(pid: int, start_time: int) -> bool:
    """Whether that very process still runs: its pid, its start time (field 22 of ``/proc/PID/stat``), no zombie."""
    found = stat(pid)
    return found is not None and found.running and found.start_time == start_time


class Schedule:
    """Moments ``interval`` seconds apart that do not drift; those missed are left out, not made up for."""

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._next = now

    def wait_from(self, now: float) -> float:
        """Seconds from ``now`` until the next moment."""
        if now >= self._next:
            self._next += self._interval * (1 + (now - self._next) // self._interval)
        return self._next - now


def stopped_within(seconds: float) -> bool:
    """Sleep; True at once when a stop signal (blocked beforehand) comes or has come."""
    return signal.sigtimedwait(_STOP_SIGNALS, max(0.0, seconds)) is not None


@contextlib.contextmanager
def only_writer(history: Path) -> Iterator[bool]:
    """Hold the lock of a history file, after its present writer has ended. Yields False when told to stop meanwhile."""
    descriptor = open_file(history.with_name(history.name + ".lock"), os.O_RDWR)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if stopped_within(_LOCK_POLL_SECONDS):
                    yield False
                    return
            else:
                yield True
                return
    finally:
        os.close(descriptor)


class KeeperWatch:
    """Watches whether the parent is still the keeper that started this recorder; when not, calls for a new one.

    From then on nobody's death can be seen from here, so it looks again every half minute: a look costs little.
    """

    def __init__(self, state_root: Path | None) -> None:
        self._root = state_root
        self._parent = os.getppid()
        self._next_at = 0.0
        self._said = ""

    def look(self, now: float) -> None:
        """Look once; ``now`` is `time.monotonic`."""
        if self._root is None or now < self._next_at or os.getppid() == self._parent:
            return
        self._next_at = now + _ADOPT_SECONDS
        # Only now: it costs memory that would lie idle for days.
        from vllm_launchers.keeper.client import adopt_orphans
        from vllm_launchers.keeper.errors import KeeperError

        try:
            adopted = adopt_orphans(self._root)
        except (KeeperError, OSError, ValueError) as error:
            if str(error) != self._said:
                say(f"a keeper is gone and no new one could be started: {error}")
            self._said = str(error)
            return
        if adopted:
            say(f"a keeper was gone; there is a new one for: {', '.join(adopted)}")


def say(message: str) -> None:
    """One line to stderr, which the keeper keeps; a full disk or a closed pipe there stops nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(f"recorder: {message}", file=sys.stderr, flush=True)


class Told:
    """Says what becomes of a store (its ``trouble`` and ``notice``), each once."""

    def __init__(self, store: Writer | RunLog | GpuLooks, words: str = "") -> None:
        self._store, self._words = store, f"{words} in memory: " if words else ""
        self._trouble = self._notice = ""

    def look(self) -> None:
        """Say what is new."""
        store = self._store
        if store.trouble and store.trouble != self._trouble:
            say(f"{self._words}{store.trouble}")
        if store.notice and store.notice != self._notice:
            say(store.notice)
        self._trouble, self._notice = store.trouble, store.notice


def record(scraper: Scraper, writer: Writer, runs: RunLog | None, options: argparse.Namespace) -> None:
    """Ask and write until the server is gone or a stop signal comes."""
    schedule = Schedule(options.interval, time.monotonic())
    keeper = KeeperWatch(options.state_root)
    gpus = GpuLooks(options.gpu_looks) if options.gpu_looks is not None else None
    told = [Told(writer, "history waits")]
    if runs is not None:
        told.append(Told(runs, "minutes of this run wait"))
    if gpus is not None:
        told.append(Told(gpus))
    fault = ""
    while process_lives(options.pid, options.start_time):
        try:
            sample = scraper.sample(time.time())
            writer.append(sample, options.generation)
            if runs is not None:
                runs.append(sample)
            fault = ""
        except ScrapeError as error:
            # Refused is normal while vLLM loads: it listens only when it is ready.
            if error.kind != "refused" and error.kind != fault:
                say(str(error))
            fault = error.kind
        if gpus is not None:
            gpus.look()
        for each in told:
            each.look()
        keeper.look(time.monotonic())
        if stopped_within(schedule.wait_from(time.monotonic())):
            return
    keeper.look(math.inf)  # a keeper that died before its server has nobody else to end what that left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recorder; returns the exit code."""
    options = _options(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        scraper = Scraper(options.url, timeout=min(2.0, max(0.5, options.interval * 2)), own=True)
        with only_writer(options.history) as ours:
            if ours:
                writer = Writer(options.history)
                runs = _run_log(options)
                try:
                    record(scraper, writer, runs, options)
                finally:
                    writer.close()
                    if runs is not None:
                        runs.flush()
                    scraper.close()
    except (ScrapeError, OSError) as error:
        say(str(error))
        return 1
    return 0


def _run_log(options: argparse.Namespace) -> RunLog | None:
    if options.ledger is None or options.run is None:
        return None
    run = RunName(options.run, options.history.resolve().parent.name, options.generation)
    return RunLog(options.ledger, run, options.window)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_console.telemetry.recorder", description="Record a server's metrics until it ends."
    )
    parser.add_argument("--url", required=True, help="the server's base URL")
    parser.add_argument("--history", required=True, type=Path, help="the history file")
    parser.add_argument("--generation", required=True, type=int, help="stored with each row")
    parser.add_argument("--pid", required=True, type=int, help="the server's process")
    parser.add_argument("--start-time", required=True, type=int, help="its start time, field 22 of /proc/PID/stat")
    parser.add_argument("--interval", type=_interval, default=1.0, help="seconds between looks (default 1)")
    parser.add_argument("--state-root", type=Path, help="where keepers keep their records; to call for a new keeper")
    parser.add_argument("--ledger", type=Path, help="the ledger of runs; with --run the run's minutes go there")
    parser.add_argument("--run", help="the key of the run that this is")
    parser.add_argument("--gpu-looks", type=Path, help="look at the machine's GPUs too, and keep that in this file")
    parser.add_argument("--window", type=_interval, default=WINDOW_SECONDS, help="seconds that are summed up at a time")
    return parser.parse_args(arguments)


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("must be from 0.05 to 3600 seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
