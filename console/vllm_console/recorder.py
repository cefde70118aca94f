"""The process beside every server that records its history: ``python -m vllm_console.recorder``.

It scrapes once a second, stores what it reads, and ends with the server. It is deliberately small and does not
need a running console. If the keeper that started it dies, it starts a new one.
"""

from __future__ import annotations

import vllm_console.msgspec_import  # noqa: F401 - before msgspec

# isort: split
import argparse
import contextlib
import fcntl
import json
import math
import os
import signal
import sqlite3
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from vllm_console.history.energy import Totals, energy_within, totals_of
from vllm_console.history.exact import BOUNDARY_SECONDS, ProbeRecords, exact_latencies, read_records, recorded_lengths
from vllm_console.history.gpu_samples import GpuSampleStore, read_gpu_samples
from vllm_console.history.probe_records import SETTLED_SECONDS
from vllm_console.history.store import HistoryWriter
from vllm_console.metrics.sample import Responses, Sample
from vllm_console.metrics.scrape import ScrapeError, Scraper
from vllm_console.metrics.unauthorized import UnauthorizedCounter
from vllm_console.runs.store import RunName, RunStoreError, run_id, store_windows, thin, write
from vllm_console.runs.windows import WINDOW_SECONDS, RunWindow, Windows, with_exact, with_figures
from vllm_launchers.keeper.files import LOG, MOST_UNREAD, OUTPUT, RECORD
from vllm_launchers.listeners import Owner
from vllm_launchers.private import open_file, open_standard_streams
from vllm_launchers.probe.environment import PROBE
from vllm_launchers.procfs import stat

_WAITING_AT_MOST = 1440
_THIN_EVERY = 60


class WindowRecorder:
    """Sums up samples in windows and stores each window.

    Disk errors are not raised: windows wait in memory (up to 1,440), ``trouble`` has the reason as a sentence,
    and the next window triggers a retry. ``notice`` reports a damaged file that was set aside.
    """

    def __init__(
        self,
        path: Path,
        run: RunName,
        seconds: float = WINDOW_SECONDS,
        probe: Path | None = None,
        gpus: tuple[Path, int] | None = None,
    ) -> None:
        """``gpus`` is the file of GPU samples and the server's pid, used for the energy of each window."""
        self.trouble = ""
        self.notice = ""
        self._path, self._run = path, run
        self._windows, self._seconds = Windows(seconds), seconds
        self._waiting: deque[RunWindow] = deque(maxlen=_WAITING_AT_MOST)
        self._stored = 0
        self._probe = probe
        self._gpus, self._totals = gpus, deque[Totals]()
        self._newest: RunWindow | None = None
        """The last window, until the probe has written all of its records."""

    def append(self, sample: Sample) -> None:
        """Add the next sample."""
        if self._newest is not None and sample.at - self._newest.end >= SETTLED_SECONDS + BOUNDARY_SECONDS:
            self.flush()
        if self._gpus is not None:
            if self._totals and sample.at < self._totals[-1].at:
                self._totals.clear()  # the clock was set back: earlier samples now lie in the future
            self._totals.append(totals_of(sample))
            while self._totals[0].at < sample.at - 3 * self._seconds:
                self._totals.popleft()
        window = self._windows.append(sample)
        if window is not None:
            self.flush()
            self._newest = window

    def _settle(self) -> None:
        """Add the probe's records and the GPUs' energy to the last window."""
        window, self._newest = self._newest, None
        if window is None:
            return
        if self._probe is not None and self._probe.is_dir():
            try:
                records = read_records(self._probe, window.at, window.end)
            except OSError:
                records = ProbeRecords()  # unreadable records are treated as missing: the estimates stay
            latencies = exact_latencies(records, window.at, window.end, window.counted)
            lengths = recorded_lengths(records.requests, window.at, window.end, window.counted)
            window = with_exact(window, latencies, lengths)
        if self._gpus is not None:
            samples, pid = self._gpus
            hosts = read_gpu_samples(samples, window.at)
            energy = energy_within(hosts, pid, self._totals, window.at, window.end)
            window = with_figures(window, energy.figures if energy is not None else {})
        self._waiting.append(window)

    def flush(self) -> None:
        """Store the waiting windows."""
        self._settle()
        if not self._waiting:
            return
        try:
            self.notice = write(self._path, self._store) or self.notice
        except RunStoreError as error:
            self.trouble = str(error)
            return
        self._stored += len(self._waiting)
        self._waiting.clear()
        self.trouble = ""

    def _store(self, connection: sqlite3.Connection) -> None:
        run = run_id(connection, self._run, self._waiting[0].at)
        store_windows(connection, run, self._waiting)
        if -self._stored % _THIN_EVERY < len(self._waiting):  # a batch of several may pass the multiple
            thin(connection)


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOCK_POLL_SECONDS = 0.2
_ADOPT_SECONDS = 30.0
_BOUND_SECONDS = 5.0
OUTPUT_BLOCKS = MOST_UNREAD // 512
"""Maximum unread server output, in 512-byte blocks; beyond it, the oldest output is dropped."""


def process_lives(pid: int, start_time: int) -> bool:
    """Whether that same process (pid and start time, field 22 of ``/proc/PID/stat``) is running, not as a zombie."""
    found = stat(pid)
    return found is not None and found.running and found.start_time == start_time


class Schedule:
    """Moments ``interval`` seconds apart that do not drift; missed ones are skipped, not made up for."""

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._next = now

    def wait_from(self, now: float) -> float:
        """Seconds from ``now`` until the next moment."""
        if now >= self._next:
            self._next += self._interval * (1 + (now - self._next) // self._interval)
        return self._next - now


def block_stop_signals() -> None:
    """Keep stop signals pending for `stopped_within`, and ignore hang-ups."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def stopped_within(seconds: float) -> bool:
    """Sleep; return True at once if a stop signal arrives or is pending."""
    return signal.sigtimedwait(_STOP_SIGNALS, max(0.0, seconds)) is not None


@contextlib.contextmanager
def only_writer(history: Path) -> Iterator[bool]:
    """Hold the lock of a history file once its current writer has ended. Yields False if stopped while waiting."""
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
    """Watches whether the parent is still the keeper that started this recorder; if not, starts a new keeper.

    The recorder cannot see the new keeper die, so from then on it checks every half minute, which is cheap.
    """

    def __init__(self, state_root: Path | None, folder: Path) -> None:
        self._root = state_root
        self._output = folder / OUTPUT
        self._keeper = _keeper_of(folder) or os.getppid()
        self._next_at = 0.0
        self._reported = ""

    def check(self, now: float) -> None:
        """Check once; ``now`` is `time.monotonic`."""
        if self._root is None or now < self._next_at:
            return
        kept = os.getppid() == self._keeper
        self._next_at = now + (_BOUND_SECONDS if kept else _ADOPT_SECONDS)
        self._bound_output()
        if kept:
            return
        # Imported lazily: it costs memory that would sit unused for days.
        from vllm_launchers.keeper.client import adopt_orphans
        from vllm_launchers.keeper.errors import KeeperError

        try:
            adopted = adopt_orphans(self._root)
        except (KeeperError, OSError, ValueError) as error:
            if str(error) != self._reported:
                say(f"a keeper is gone, and no new one could be started: {error}")
            self._reported = str(error)
            return
        if adopted:
            say(f"a keeper was gone; started a new one for: {', '.join(adopted)}")

    def _bound_output(self) -> None:
        """Keep unread server output from filling the disk, as when the keeper is stopped."""
        try:
            dropped = self._output.stat().st_blocks > OUTPUT_BLOCKS and _drop_oldest(self._output.parent)
        except OSError:
            return
        if dropped:
            say(f"{dropped} bytes of the server's output were dropped: its keeper is not reading it")


def _keeper_of(folder: Path) -> int | None:
    """The keeper's pid in the server's record, since it may have died before this process could see it as its parent;
    None if the record is unreadable."""
    try:
        return int(json.loads((folder / RECORD).read_bytes())["keeper"]["pid"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _drop_oldest(folder: Path) -> int:
    from vllm_launchers.keeper.output import bound  # imported lazily, like the keeper's client

    return bound(folder)


def say(message: str) -> None:
    """Print one line to stderr, which the keeper keeps; a full disk or closed pipe is ignored."""
    with contextlib.suppress(OSError, ValueError):
        print(f"recorder: {message}", file=sys.stderr, flush=True)


class TroubleReporter:
    """Reports each ``trouble`` and ``notice`` of a store once."""

    def __init__(self, store: HistoryWriter | WindowRecorder | GpuSampleStore, waiting: str = "") -> None:
        self._store, self._prefix = store, f"{waiting} in memory: " if waiting else ""
        self._trouble = self._notice = ""

    def report(self) -> None:
        """Report what is new."""
        store = self._store
        if store.trouble and store.trouble != self._trouble:
            say(f"{self._prefix}{store.trouble}")
        if store.notice and store.notice != self._notice:
            say(store.notice)
        self._trouble, self._notice = store.trouble, store.notice


class ReadyWatch:
    """Whether a generation has been ready, according to the keeper's record beside the history.

    Counts from before the server was ready are not traffic: its first request triggers compilation. If the record is
    missing or unreadable, the generation counts as ready.
    """

    def __init__(self, history: Path, generation: int) -> None:
        self._path, self._generation = history.with_name(RECORD), generation
        self._read: tuple[int, int] | None = None
        self._ready = False

    def check(self) -> bool:
        """Check once; the file is read only when it has changed, and not again once the generation was ready."""
        if self._ready:
            return True
        try:
            status = self._path.stat()
            if (stamp := (status.st_ino, status.st_mtime_ns)) != self._read:
                generations = json.loads(self._path.read_bytes())["generations"]
                self._ready = any(
                    one["number"] == self._generation and one["ready_at"] is not None for one in generations
                )
                self._read = stamp
        except (OSError, ValueError, LookupError, TypeError):
            return True
        return self._ready


def record(
    scraper: Scraper | None, writer: HistoryWriter, runs: WindowRecorder | None, options: argparse.Namespace
) -> None:
    """Scrape and store until the server is gone or a stop signal arrives."""
    schedule = Schedule(options.interval, time.monotonic())
    keeper = KeeperWatch(options.state_root, options.history.resolve().parent)
    gpus = GpuSampleStore(options.gpu_samples) if options.gpu_samples is not None else None
    reporters = [TroubleReporter(writer, "history waits")]
    if runs is not None:
        reporters.append(TroubleReporter(runs, "minutes of this run wait"))
    if gpus is not None:
        reporters.append(TroubleReporter(gpus))
    ready = ReadyWatch(options.history, options.generation)
    unauthorized = UnauthorizedCounter(options.history.with_name(LOG))
    fault = ""
    while process_lives(options.pid, options.start_time):
        try:
            if scraper is not None and ready.check():
                sample = with_unauthorized(scraper.sample(time.time()), unauthorized.count())
                _take(sample, writer, runs, options.generation)
            fault = ""
        except ScrapeError as error:
            # A refused connection is normal while vLLM loads: it listens only once it is ready.
            if error.kind != "refused" and error.kind != fault:
                say(str(error))
            fault = error.kind
        if gpus is not None:
            gpus.record()
        for reporter in reporters:
            reporter.report()
        keeper.check(time.monotonic())
        if stopped_within(schedule.wait_from(time.monotonic())):
            return
    keeper.check(math.inf)  # if the keeper died before its server, only a new one can clean up after it


def with_unauthorized(sample: Sample, count: int) -> Sample:
    """Add the requests refused for their API key, the only responses that vLLM does not count."""
    if sample.responses is None and not count:
        return sample
    return replace(sample, responses=replace(sample.responses or Responses(), unauthorized=float(count)))


def _take(sample: Sample, writer: HistoryWriter, runs: WindowRecorder | None, generation: int) -> None:
    writer.append(sample, generation)
    if runs is not None:
        runs.append(sample)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recorder; returns the exit code."""
    open_standard_streams()
    options = _options(arguments)
    block_stop_signals()
    try:
        owner = Owner(options.pid, options.start_time)
        timeout = min(2.0, max(0.5, options.interval * 2))
        scraper = Scraper(options.url, timeout=timeout, owner=owner) if options.url else None
        with only_writer(options.history) as ours:
            if ours:
                writer = HistoryWriter(options.history)
                runs = _run_log(options)
                try:
                    record(scraper, writer, runs, options)
                finally:
                    writer.close()
                    if runs is not None:
                        runs.flush()
                    if scraper is not None:
                        scraper.close()
    except (ScrapeError, OSError) as error:
        say(str(error))
        return 1
    return 0


def _run_log(options: argparse.Namespace) -> WindowRecorder | None:
    if options.runs is None or options.run is None:
        return None
    run = RunName(options.run, options.history.resolve().parent.name, options.generation)
    gpus = (options.gpu_samples, options.pid) if options.gpu_samples is not None else None
    return WindowRecorder(options.runs, run, options.window, options.history.resolve().parent / PROBE, gpus)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_console.recorder", description="Record a server's metrics until it ends."
    )
    parser.add_argument("--url", help="the server's base URL; a headless node has none and is only watched")
    parser.add_argument("--history", required=True, type=Path, help="the history file")
    parser.add_argument("--generation", required=True, type=int, help="stored with each row")
    parser.add_argument("--pid", required=True, type=int, help="the server's process")
    parser.add_argument("--start-time", required=True, type=int, help="its start time, field 22 of /proc/PID/stat")
    parser.add_argument("--interval", type=_interval, default=1.0, help="seconds between samples (default 1)")
    parser.add_argument("--state-root", type=Path, help="folder of the keepers' records, to start a new keeper")
    parser.add_argument("--runs", type=Path, help="the run database; with --run the run's minutes go there")
    parser.add_argument("--run", help="the key of this run")
    parser.add_argument("--gpu-samples", type=Path, help="sample the machine's GPUs too, into this file")
    parser.add_argument("--window", type=_interval, default=WINDOW_SECONDS, help="seconds per window")
    return parser.parse_args(arguments)


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("must be from 0.05 to 3600 seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
