"""What a fleet adds to launches: its GPUs, a recorder, failures that are not retried, and the run database."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_console.fleet.runs import RunRecorder
from vllm_launchers.keeper.records import NotRetryable, ServerRecord
from vllm_launchers.launch.launch_plan import LaunchPlan
from vllm_launchers.launch.launcher import LaunchHooks


class FleetLaunchHooks(LaunchHooks):
    """The hooks of `vllm_console.fleet.local.LocalFleet`, whose methods the two functions are.

    ``window_seconds``: length of the windows in which runs are compared; None means one minute.
    """

    def __init__(
        self,
        state: Path,
        recorder: RunRecorder,
        refresh_gpus: Callable[[], None],
        forget_release: Callable[[str], None],
        window_seconds: float | None,
    ) -> None:
        self._state, self._recorder, self._window_seconds = state, recorder, window_seconds
        self._refresh_gpus, self._forget_release = refresh_gpus, forget_release

    def refresh_gpus(self) -> None:
        """Map processes (and the GPUs of a recorded host) to servers."""
        self._refresh_gpus()

    def recorder_command(self, launch: LaunchPlan, folder: Path) -> Sequence[str]:
        """The recorder's command line. The keeper fills in the placeholders in braces."""
        from vllm_console.history.gpu_samples import GPU_SAMPLES
        from vllm_console.history.store import HISTORY
        from vllm_console.runs import windows
        from vllm_console.runs.store import FILE_NAME as RUNS

        state = self._state
        return (
            *(sys.executable, "-m", "vllm_console.recorder"),
            *(() if launch.plan.flags.get("headless") is True else ("--url", launch.plan.url)),  # no metrics there
            *("--history", str(folder / HISTORY), "--generation", "{generation}"),
            *("--pid", "{pid}", "--start-time", "{start_time}", "--state-root", str(state)),
            *("--runs", str(state / RUNS), "--run", f"{os.urandom(8).hex()}-{{generation}}"),
            *("--window", f"{self._window_seconds or windows.WINDOW_SECONDS:g}"),
            *(("--gpu-samples", str(state / GPU_SAMPLES)) if launch.plan.gpus else ()),
        )

    def not_retryable(self) -> Sequence[NotRetryable]:
        """The failures that `diagnosis` knows to repeat."""
        from vllm_console.diagnosis.failure.diagnose import NOT_RETRYABLE

        return NOT_RETRYABLE

    def note(self, record: ServerRecord) -> ServerRecord:
        """Enter it into the run database; the memory that it held is not waited for any more."""
        self._forget_release(record.name)
        return self._recorder.enter(record)
