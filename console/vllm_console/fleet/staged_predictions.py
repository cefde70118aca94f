"""The prediction of staged changes, in a short-lived process: its seconds of computing hold up nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.fleet.snapshot import Changes, FlagValue
from vllm_console.fleet.verbs import FleetError
from vllm_launchers.typed_decoding import decode_json

if TYPE_CHECKING:
    import subprocess

    from vllm_console.fleet.predictions import PredictedChange

DEADLINE = 30.0
"""Seconds after which a prediction is given up."""


class StagedPredictions:
    """Runs the command `predict` for one change at a time; a later question ends the earlier one's process."""

    def __init__(self, options: Sequence[str], deadline: float = DEADLINE) -> None:
        self._options, self._deadline = tuple(options), deadline
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def ask(self, name: str, changes: Changes) -> PredictedChange | None:
        """Predict a change; nothing is kept. Blocks for seconds. None if it was ended by another question or `close`.

        Raises:
            FleetError: nothing can be predicted, or it took too long.
        """
        import subprocess  # most consoles predict nothing

        from vllm_console.fleet.predictions import PredictedChange

        words = [sys.executable, "-m", "vllm_console", *self._options, "predict", name, "--draft"]
        words += [word for flag, value in changes.set.items() for word in ("--set", f"{flag}={_value(value)}")]
        words += [word for flag in changes.unset for word in ("--unset", flag)]
        with self._lock:
            self._end()
            if self._closed:
                return None
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
            self._process = process
        try:
            output, errors = process.communicate(timeout=self._deadline)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise FleetError(f"no prediction within {self._deadline:g} seconds") from error
        with self._lock:
            if self._process is not process:
                return None
            self._process = None
        with contextlib.suppress(ValueError):
            return decode_json(output, PredictedChange)
        lines = errors.decode(errors="replace").strip().splitlines()
        raise FleetError(lines[-1].removeprefix("vllm-console: ") if lines else "the prediction gave no result")

    def cancel(self) -> None:
        """End what is being computed."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End what is being computed, for good."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # whoever waits for it reaps it


def options_of(state: Path, host_file: Path | None) -> list[str]:
    """The options by which the command sees the same servers on the same machine."""
    return ["--state", str(state), *(("--host", str(host_file)) if host_file is not None else ())]


def _value(value: FlagValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
