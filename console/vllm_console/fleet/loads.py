"""The load that this console sends: one process per server, bounded, ended with the console."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from vllm_console.fleet.details import unpack
from vllm_console.format import seconds as latency

if TYPE_CHECKING:
    import subprocess

    from vllm_launchers.keeper.records import ServerRecord


@dataclass(slots=True)
class _Load:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]
    rate: float
    until: float
    result: str = ""


class Loads:
    """Starts, watches and ends load processes. A process of its own keeps the screen free of their work."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}

    def start(self, name: str, state: Path, rate: float, seconds: float, concurrency: int | None = None) -> None:
        """Send the preset's workload at ``rate`` requests per second for ``seconds``; replaces one that runs.

        No more than ``concurrency`` requests are in flight at once; None leaves that to the command.
        """
        import subprocess  # most commands and consoles send no load
        import tempfile

        self.stop(name)
        output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - live as long as the load
        words = [sys.executable, "-m", "vllm_console", "--state", str(state), "load", name, "--json"]
        words += ["--rate", f"{rate:g}", "--duration", f"{seconds:g}"]
        words += ["--concurrency", str(concurrency)] if concurrency else []
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        self._loads[name] = _Load(process, output, errors, rate, time.monotonic() + seconds)

    def describe(self, name: str) -> str:
        """What is being sent, or how the last load went, in a few words."""
        load = self._loads.get(name)
        if load is None:
            return ""
        if load.process.poll() is None:
            left = max(0, round(load.until - time.monotonic()))
            return f"load {load.rate:g}/s, {left} s left" if left else "load: waiting for the last answers"
        if not load.result:
            load.result = _summary(_read(load.output), _read(load.errors))
            load.output.close()
            load.errors.close()
        return load.result

    def stop(self, name: str) -> None:
        """End the load on a server, if there is one."""
        load = self._loads.pop(name, None)
        if load is None:
            return
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
        for name in list(self._loads):
            self.stop(name)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(64 * 1024).decode(errors="replace")


def _summary(output: str, errors: str) -> str:
    try:
        report = json.loads(output)
        ttft, itl = report["ttft_seconds"]["p99"], report["itl_seconds"]["p99"]
        return (
            f"load done: {report['completed']}/{report['sent']} answered, TTFT99 {latency(ttft)}, ITL99 {latency(itl)}"
        )
    except (ValueError, KeyError, TypeError):
        lines = [line for line in errors.splitlines() if line.strip()]
        return f"load failed: {lines[-1].removeprefix('vllm-console: ')}" if lines else "load ended without a report"


class LoadVerbs:
    """The fleet's verbs for load. Its part of `vllm_console.fleet.service.LocalFleet`."""

    _state: Path
    _loads: Loads

    def _refuse_read_only(self) -> None:
        raise NotImplementedError

    def _ours(self, name: str) -> ServerRecord:
        raise NotImplementedError

    def start_load(self, name: str, rate: float | None = None, seconds: float = 60.0) -> None:
        """Send the preset's workload from a process of its own, bounded in count and time.

        Without a rate, one that keeps about the preset's concurrency in flight is taken, and never more than that
        many are: a server slower than the rate assumes is kept busy and not buried.
        """
        from vllm_console.load.shape import suggested_rate

        self._refuse_read_only()
        workload = unpack(self._ours(name).current.spec.details).workload
        most = None
        if rate is None:
            rate = suggested_rate(workload) if workload is not None else 1.0
            most = workload.concurrency if workload is not None else None
        self._loads.start(name, self._state, rate, seconds, most)

    def stop_load(self, name: str) -> None:
        """End the load that this console sends."""
        self._refuse_read_only()
        self._loads.stop(name)
