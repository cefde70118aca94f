"""The load that this console sends: one process per server, bounded, ended with the console."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from vllm_console.text import duration
from vllm_console.text import rate as rate_text
from vllm_console.text import seconds as latency

if TYPE_CHECKING:
    import subprocess

    from vllm_console.load.spans import LoadSpan


RESULT_SECONDS = 60.0
"""How long the result of a load is shown."""

MOST_SPANS = 20
"""How many loads per server have their times kept."""


class _Load(msgspec.Struct):
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]
    rate: float
    until: float
    began_at: float
    result: str = ""
    ended_at: float = 0.0


class Loads:
    """Starts, watches and ends load processes. A separate process keeps their work off the screen's.

    Several threads may use it: snapshots describe a load while a verb ends it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}
        self._past: dict[str, list[LoadSpan]] = {}

    def start(self, name: str, state: Path, rate: float, seconds: float, concurrency: int | None = None) -> None:
        """Send the preset's workload at ``rate`` requests per second for ``seconds``; replaces a running load.

        At most ``concurrency`` requests are in flight; None leaves that to the command.
        """
        import subprocess  # most commands and consoles send no load
        import tempfile

        self.stop(name)
        output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - live as long as the load
        words = [sys.executable, "-m", "vllm_console", "--state", str(state), "load", name, "--json"]
        words += ["--rate", f"{rate:g}", "--duration", f"{seconds:g}"]
        words += ["--concurrency", str(concurrency)] if concurrency else []
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        with self._lock:
            self._loads[name] = _Load(process, output, errors, rate, time.monotonic() + seconds, time.time())

    def describe(self, name: str) -> str:
        """What is being sent, in a few words; empty if nothing is."""
        with self._lock:
            load = self._loads.get(name)
            if load is None or load.process.poll() is not None:
                return ""
            left = max(0, round(load.until - time.monotonic()))
            sending = f"load {rate_text(load.rate, 'req')}, {duration(left)} left"
            return sending if left else "load: waiting for the last answers"

    def result(self, name: str) -> str:
        """How a load that has just ended went, in a few words; empty while it runs, and later than a minute after."""
        with self._lock:
            load = self._loads.get(name)
            if load is None or load.process.poll() is None:
                return ""
            if not load.result:
                self._remember(name, load)
                load.result, load.ended_at = _summary(_read(load.output), _read(load.errors)), time.monotonic()
                load.output.close()
                load.errors.close()
            return load.result if time.monotonic() - load.ended_at < RESULT_SECONDS else ""

    def spans(self, name: str) -> tuple[LoadSpan, ...]:
        """When this console sent load to a server, oldest first."""
        with self._lock:
            load, past = self._loads.get(name), tuple(self._past.get(name, ()))
        if load is None or load.result:
            return past
        from vllm_console.load.spans import LoadSpan  # most consoles send no load

        return (*past, LoadSpan(load.began_at, None, load.rate))

    def _remember(self, name: str, load: _Load) -> None:
        from vllm_console.load.spans import LoadSpan

        past = self._past.setdefault(name, [])
        past.append(LoadSpan(load.began_at, time.time(), load.rate))
        del past[:-MOST_SPANS]

    def stop(self, name: str) -> None:
        """End the load on a server, if there is one."""
        with self._lock:
            load = self._loads.pop(name, None)
            if load is None:
                return
            if not load.result:
                self._remember(name, load)
        if load.process.poll() is None:
            import subprocess

            load.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                load.process.wait(5)
            if load.process.poll() is None:
                load.process.kill()
                load.process.wait()
        load.output.close()
        load.errors.close()

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            names = list(self._loads)
        for name in names:
            self.stop(name)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(64 * 1024).decode(errors="replace")


def _summary(output: str, errors: str) -> str:
    try:
        report = json.loads(output)
        ttft, itl = _p99(report["ttft_seconds"]), _p99(report["itl_seconds"])
        sent, completed, failed = report["sent"], report["completed"], report.get("failed", 0)
        others = {"failed": failed, "unfinished when it ended": sent - completed - failed}
        rest = "".join(f", {number} {what}" for what, number in others.items() if number)
        return f"load done: {completed} of {sent} answered{rest}, TTFT p99 {ttft}, ITL p99 {itl}"
    except (ValueError, KeyError, TypeError):
        lines = [line for line in errors.splitlines() if line.strip()]
        return f"load failed: {lines[-1].removeprefix('vllm-console: ')}" if lines else "load ended without a report"


def _p99(document: dict[str, float | None]) -> str:
    """The 99th percentile in a latency document; ``>60s`` if so many are unfinished that only a bound is known."""
    above = document.get("p99_above")
    return latency(document["p99"]) if above is None else f">{latency(above)}"
