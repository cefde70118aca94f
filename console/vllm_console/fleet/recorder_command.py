"""The command line of the recorder that a keeper runs beside its server."""

from __future__ import annotations

import sys
from pathlib import Path
from secrets import token_hex

from vllm_console.fleet.own_server import HISTORY
from vllm_console.history.gpu_samples import GPU_SAMPLES
from vllm_console.runs.store import FILE_NAME as RUNS_FILE
from vllm_console.runs.windows import WINDOW_SECONDS as RUN_WINDOW_SECONDS
from vllm_launchers.launch.resolve import LaunchPlan


def recorder_command(state: Path, launch: LaunchPlan, folder: Path) -> tuple[str, ...]:
    """The recorder of the server with records in ``folder``, below the state folder ``state``."""
    return (
        *(sys.executable, "-m", "vllm_console.recorder", "--url", launch.url),
        *("--history", str(folder / HISTORY), "--generation", "{generation}"),
        *("--pid", "{pid}", "--start-time", "{start_time}", "--state-root", str(state)),
        *(
            "--runs",
            str(state / RUNS_FILE),
            "--run",
            f"{token_hex(8)}-{{generation}}",
            "--window",
            f"{RUN_WINDOW_SECONDS:g}",
        ),
        *(("--gpu-samples", str(state / GPU_SAMPLES)) if launch.plan.gpus else ()),
    )
