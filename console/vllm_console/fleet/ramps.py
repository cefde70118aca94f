"""The ramps that this console runs: one process per server, ended with the console, and what they have measured."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from vllm_console.fleet.verbs import RefusedError
from vllm_console.runs.measurement import RAMP, Measurement

if TYPE_CHECKING:
    import subprocess

    from vllm_console.load.ramp import RampProgress

BUDGET_SECONDS = 600.0
"""How long a ramp takes at most."""

ENDING_SECONDS = 5.0
"""How long a canceled one may take to report what it has."""


class RampView(msgspec.Struct, frozen=True):
    """A ramp as far as it has come. ``steps`` are as ``ramp --json`` prints them; ``limits`` are the objectives."""

    steps: tuple[Mapping[str, Any], ...] = ()
    limits: Mapping[str, float] = msgspec.field(default_factory=dict)
    progress: RampProgress | None = None
    budget_seconds: float = BUDGET_SECONDS
    running: bool = True
    canceled: bool = False
    others: str = ""
    """Why the server is taken to serve others, where it was not begun because of that."""
    result: Measurement | None = None
    problem: str = ""
    """Why it could not begin or ended without a result, or why its result is not kept."""

    @property
    def measured(self) -> Measurement:
        """The result, or what there is of it by now."""
        return self.result or Measurement(RAMP, 0.0, self.steps, limits=self.limits)


class _Ramp:
    """One process, and a thread that reads what it prints."""

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
        """Have it end with what it has."""
        if self.view.running:
            self._change(canceled=True)
            self.process.terminate()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a line of something else
                    self._take(json.loads(line))
        self.process.wait()
        self._errors.seek(0)
        said = [text for text in self._errors.read(64 * 1024).decode(errors="replace").splitlines() if text.strip()]
        self._errors.close()
        problem = said[-1].removeprefix("vllm-console: ") if said else ""
        view = self.view
        if view.others or (view.canceled and view.result is None):
            problem = ""
        elif view.result is None:
            problem = problem or "the ramp ended without a result"
        self._change(running=False, progress=None, problem=problem)

    def _take(self, event: Mapping[str, Any]) -> None:
        """One line of ``ramp --events``."""
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
            found = event["result"]
            steps = tuple(found["steps"])
            figures = (found["ceiling_requests_per_second"], found["goodput"], found["limited_by"], found["sentence"])
            self._change(steps=steps, result=Measurement(RAMP, time.time(), steps, *figures, view.limits))


class Ramps:
    """Starts, watches and ends ramps. A separate process keeps their work off the screen's, and their times exact."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ramps: dict[str, _Ramp] = {}

    def start(self, name: str, state: Path, *, others_allowed: bool) -> None:
        """Begin one; with ``others_allowed`` also on a server that serves others.

        Raises:
            RefusedError: this console runs one on that server already.
        """
        import subprocess  # most consoles run no ramp
        import tempfile

        words = [sys.executable, "-m", "vllm_console", "--state", str(state), "ramp", name, "--events"]
        words += ["--budget", f"{BUDGET_SECONDS:g}", *(["--yes"] if others_allowed else [])]
        with self._lock:
            before = self._ramps.get(name)
            if before is not None and before.view.running:
                raise RefusedError(f"a ramp runs on {name} already")
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the ramp
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
            self._ramps[name] = _Ramp(process, errors)

    def view(self, name: str) -> RampView | None:
        """How far the newest one on a server has come; None if there was none."""
        with self._lock:
            ramp = self._ramps.get(name)
        return ramp.view if ramp is not None else None

    def cancel(self, name: str) -> None:
        """Have the one on a server end; it reports and keeps what it has."""
        with self._lock:
            ramp = self._ramps.get(name)
        if ramp is not None:
            ramp.cancel()

    def stop(self, name: str) -> None:
        """End the one on a server, and wait until it has."""
        with self._lock:
            ramp = self._ramps.pop(name, None)
        if ramp is not None:
            _end(ramp)

    def close(self) -> None:
        """End all of them."""
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
