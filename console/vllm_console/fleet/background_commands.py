"""Commands that a console runs in separate processes and ends on exit: loads, ramps, predictions of staged changes.

Separate processes keep the screen responsive and the measured times exact.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from vllm_console.metrics.quantile import p99_in
from vllm_console.runs.measurement import RAMP, Measurement
from vllm_console.text import duration
from vllm_console.text import rate as rate_text
from vllm_launchers.errors import OperationError, RefusedError
from vllm_launchers.keeper.records import State
from vllm_launchers.launch.details import unpack
from vllm_launchers.typed_decoding import decode_json
from vllm_launchers.vllm.flags.changes import Changes, value_word

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from vllm_console.fleet.access import ServerAccess
    from vllm_console.fleet.predictions import PredictedChange
    from vllm_console.load.ramp import RampProgress


LOAD_SECONDS = 60.0
"""Duration of a load that a console starts."""

RESULT_SECONDS = 60.0
"""How long the result of a load is shown."""

WITH_SERVER = "load ended with the server"


def child_options(state: Path | None, config: Path | None, host_file: Path | None) -> tuple[str, ...]:
    """The global options with which a command sees what this process does; None: the default."""
    given = {"--state": state, "--config": config, "--host": host_file}
    return tuple(f"{name}={path}" for name, path in given.items() if path is not None)


class _Load(msgspec.Struct):
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]
    rate: float
    until: float
    concurrency: int | None = None
    result: str = ""
    ended_at: float = 0.0
    server_ended: bool = False


class Loads:
    """Starts, watches and ends loads, one per server. Thread-safe, as snapshots describe a load while an action ends
    it. ``options`` are the `child_options`.
    """

    def __init__(self, options: Sequence[str], access: ServerAccess) -> None:
        self._options, self._access = options, access
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}

    def start(self, name: str) -> None:
        """Send the preset's workload for a minute; replaces a running load.

        The rate keeps about the preset's concurrency in flight. The concurrency is also the limit, so that a server
        slower than assumed stays busy without an ever-growing queue.

        Raises:
            NotFoundError, RefusedError: there is no such server, or it may not be acted on.
        """
        import subprocess  # most commands and consoles send no load
        import tempfile

        from vllm_console.load.shape import suggested_rate

        workload = unpack(self._access.adopt_ours(name).current.spec.details).workload
        rate = suggested_rate(workload) if workload is not None else 1.0
        concurrency = workload.concurrency if workload is not None else None
        self._end(name)
        output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - live as long as the load
        words = [sys.executable, "-m", "vllm_console", *self._options, "load", name, "--json"]
        words += ["--rate", f"{rate:g}", "--duration", f"{LOAD_SECONDS:g}"]
        words += ["--concurrency", str(concurrency)] if concurrency else []
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        except OSError:
            output.close()
            errors.close()
            raise
        with self._lock:
            other = self._loads.get(name)  # started at the same time
            until = time.monotonic() + LOAD_SECONDS
            self._loads[name] = _Load(process, output, errors, rate, until, concurrency)
        if other is not None:
            _finish(other)

    def describe(self, name: str) -> str:
        """The running load in a few words; empty if there is none."""
        with self._lock:
            load = self._loads.get(name)
            if load is None or load.process.poll() is not None:
                return ""
            if load.server_ended:
                return WITH_SERVER
            left = max(0, round(load.until - time.monotonic()))
            most = f", at most {load.concurrency} in flight" if load.concurrency else ""
            sending = f"load {rate_text(load.rate, 'req')}{most}, {duration(left)} left"
            return sending if left else "load: time is up; waiting for outstanding responses"

    def result(self, name: str) -> str:
        """The result of a finished load in a few words; empty while it runs, and a minute after it ended."""
        with self._lock:
            load = self._loads.get(name)
            if load is None or load.process.poll() is None:
                return ""
            if not load.result:
                head = WITH_SERVER if load.server_ended else ""
                load.result, load.ended_at = _summary(_read(load.output), _read(load.errors), head), time.monotonic()
                load.output.close()
                load.errors.close()
            return load.result if time.monotonic() - load.ended_at < RESULT_SECONDS else ""

    def server_ended(self, name: str) -> None:
        """End the load on a server that has ended. Does not wait for its report."""
        with self._lock:
            load = self._loads.get(name)
            if load is not None and not load.server_ended and load.process.poll() is None:
                load.server_ended = True
                load.process.terminate()

    def stop(self, name: str) -> None:
        """End the load on a server, if there is one. Raises RefusedError if the fleet is read-only."""
        self._access.refuse_read_only()
        self._end(name)

    def _end(self, name: str) -> None:
        with self._lock:
            load = self._loads.pop(name, None)
        if load is not None:
            _finish(load)

    def close(self) -> None:
        """End all loads."""
        with self._lock:
            names = list(self._loads)
        for name in names:
            self._end(name)


def _finish(load: _Load) -> None:
    """End a load; kill it if it has not ended after 5 s."""
    import subprocess

    load.process.terminate()  # does nothing if it has ended
    try:
        load.process.wait(5)
    except subprocess.TimeoutExpired:
        load.process.kill()
        load.process.wait()
    load.output.close()
    load.errors.close()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(64 * 1024).decode(errors="replace")


def _summary(output: str, errors: str, head: str) -> str:
    try:
        report = json.loads(output)
        ttft, itl = p99_in(report["ttft_seconds"]), p99_in(report["itl_seconds"])
        sent, completed, failed = report["sent"], report["completed"], report.get("failed", 0)
        cut_off = min(failed, report.get("unfinished", 0))
        late = report.get("held_back", 0)
        others = {
            "failed": failed - cut_off,
            "unfinished when it ended": sent - completed - failed + cut_off,
            "sent late: too many in flight": late,
        }
        ttft += " from the scheduled arrival" if late else ""
        rest = "".join(f", {number} {what}" for what, number in others.items() if number)
        return f"{head or 'load done'}: {completed} of {sent} answered{rest}, TTFT p99 {ttft}, ITL p99 {itl}"
    except (ValueError, KeyError, TypeError):
        if head:
            return head
        message = _last_message(errors)
        return f"load failed: {message}" if message else "load ended without a report"


def _last_message(errors: str) -> str:
    """The last line that a command wrote to stderr, without the program name."""
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].removeprefix("vllm-console: ") if lines else ""


BUDGET_SECONDS = 600.0
"""Maximum duration of a ramp."""

ENDING_SECONDS = 5.0
"""How long a canceled ramp may take to report its results."""


class RampView(msgspec.Struct, frozen=True):
    """The state of a ramp. ``steps`` are as ``ramp --json`` prints them; ``limits`` are the objectives."""

    steps: tuple[Mapping[str, Any], ...] = ()
    limits: Mapping[str, float] = msgspec.field(default_factory=dict)
    progress: RampProgress | None = None
    budget_seconds: float = BUDGET_SECONDS
    running: bool = True
    canceled: bool = False
    others: str = ""
    """Why the server seems to have other traffic, if the ramp did not start because of it."""
    result: Measurement | None = None
    problem: str = ""
    """Why it could not start, ended without a result, or could not store its result."""

    @property
    def measured(self) -> Measurement:
        """The result, or the partial result so far."""
        return self.result or Measurement(RAMP, 0.0, self.steps, limits=self.limits)


class _Ramp:
    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self.process, self._errors = process, errors
        self._lock = threading.Lock()
        self._view = RampView()
        self.reader = threading.Thread(target=self._read, name="ramp", daemon=True)
        self.reader.start()

    @property
    def view(self) -> RampView:
        with self._lock:
            return self._view

    def _change(self, **changes: Any) -> None:
        with self._lock:
            self._view = replace(self._view, **changes)

    def cancel(self) -> None:
        """End it early, with the results so far."""
        if self.view.running:
            self._change(canceled=True)
            self.process.terminate()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # some other line
                    self._take(json.loads(line))
        self.process.wait()
        problem = _last_message(_read(self._errors))
        self._errors.close()
        view = self.view
        if view.others or (view.canceled and view.result is None):
            problem = ""
        elif view.result is None:
            problem = problem or "the ramp ended without a result"
        self._change(running=False, progress=None, problem=problem)

    def _take(self, event: Mapping[str, Any]) -> None:
        """Process one line of ``ramp --events``."""
        view = self.view
        if "progress" in event:
            from vllm_console.load.ramp import RampProgress  # most consoles run no ramp

            self._change(progress=msgspec.convert(event["progress"], RampProgress))
        elif "step" in event:
            self._change(steps=(*view.steps, event["step"]))
        elif "others" in event:
            self._change(others=event["others"])
        elif "begin" in event:
            begin = event["begin"]
            self._change(limits=begin["objectives"], budget_seconds=begin["budget_seconds"])
        elif "result" in event:
            result = Measurement.of_ramp(event["result"], time.time(), view.limits)
            self._change(steps=result.steps, result=result)


class Ramps:
    """Starts, watches and ends ramps, one per server. ``options`` are the `child_options`."""

    def __init__(self, options: Sequence[str], access: ServerAccess) -> None:
        self._options, self._access = options, access
        self._lock = threading.Lock()
        self._ramps: dict[str, _Ramp] = {}

    def start(self, name: str, *, others_allowed: bool = False) -> None:
        """Search for the highest rate at which a server meets its objectives.

        The result is kept with the server's run. If the server has other traffic, the view says so and nothing is
        measured, unless ``others_allowed``.

        Raises:
            OperationError: it is not ready.
            NotFoundError, RefusedError: it may not be acted on, or a ramp is running on it.
        """
        import subprocess  # most consoles run no ramp
        import tempfile

        record = self._access.adopt_ours(name)
        if record.state is not State.READY:
            raise OperationError(f"{name} is {record.state}: a ramp needs a ready server")
        words = [sys.executable, "-m", "vllm_console", *self._options, "ramp", name, "--events"]
        words += ["--budget", f"{BUDGET_SECONDS:g}", *(["--yes"] if others_allowed else [])]
        with self._lock:
            before = self._ramps.get(name)
            if before is not None and before.view.running:
                raise RefusedError(f"a ramp runs on {name} already")
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the ramp
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
            self._ramps[name] = _Ramp(process, errors)

    def view(self, name: str) -> RampView | None:
        """The state of the newest ramp on a server; None if there was none. Never blocks."""
        with self._lock:
            ramp = self._ramps.get(name)
        return ramp.view if ramp is not None else None

    def cancel(self, name: str) -> None:
        """End the ramp on a server early; it reports and keeps the results so far.

        Raises:
            RefusedError: the fleet is read-only.
        """
        self._access.refuse_read_only()
        with self._lock:
            ramp = self._ramps.get(name)
        if ramp is not None:
            ramp.cancel()

    def stop(self, name: str) -> None:
        """End the ramp on a server, and wait for it to end. Raises RefusedError if the fleet is read-only."""
        self._access.refuse_read_only()
        with self._lock:
            ramp = self._ramps.pop(name, None)
        if ramp is not None:
            _end(ramp)

    def close(self) -> None:
        """End all ramps."""
        with self._lock:
            ramps = list(self._ramps.values())
            self._ramps.clear()
        for ramp in ramps:
            ramp.cancel()
        for ramp in ramps:
            _end(ramp)


def _end(ramp: _Ramp) -> None:
    ramp.cancel()
    ramp.reader.join(ENDING_SECONDS)
    if ramp.reader.is_alive():
        ramp.process.kill()
        ramp.reader.join()


DEADLINE = 30.0
"""Prediction timeout in seconds."""


class StagedPredictions:
    """Runs the command `predict` for one change at a time; a new request ends the previous one's process.

    ``options`` are the `child_options`.
    """

    def __init__(self, options: Sequence[str], deadline: float = DEADLINE) -> None:
        self._options, self._deadline = options, deadline
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0
        """Number of the newest request; also counts up when one is ended."""
        self._closed = False

    def ask(self, name: str, changes: Changes) -> PredictedChange | None:
        """Predict a change without storing it. Takes seconds. None if another request or `close` ended it.

        Raises:
            OperationError: nothing can be predicted, or it took too long.
        """
        import subprocess  # most consoles predict nothing

        from vllm_console.fleet.predictions import PredictedChange

        words = [sys.executable, "-m", "vllm_console", *self._options, "predict", name, "--draft"]
        words += [word for flag, value in changes.set.items() for word in ("--set", f"{flag}={value_word(value)}")]
        words += [word for flag in changes.unset for word in ("--unset", flag)]
        with self._lock:
            self._end()
            if self._closed:
                return None
            asked = self._asked
        # Outside the lock: starting a process may take long, and the screen's thread calls `cancel`.
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        with self._lock:
            if self._asked == asked:
                self._process = process
            else:
                process.kill()  # ended meanwhile
        try:
            output, errors = process.communicate(timeout=self._deadline)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise OperationError(f"no prediction within {self._deadline:g} seconds") from error
        with self._lock:
            if self._process is not process:
                return None
            self._process = None
        with contextlib.suppress(ValueError):
            return decode_json(output, PredictedChange)
        raise OperationError(_last_message(errors.decode(errors="replace")) or "the prediction gave no result")

    def cancel(self) -> None:
        """End the running prediction."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End the running prediction, and refuse new ones."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        self._asked += 1
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # the thread waiting for it reaps it
