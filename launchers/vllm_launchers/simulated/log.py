"""Log lines as vLLM 0.33 writes them: ``(EngineCore pid=7) INFO 11-20 09:56:26 [core.py:133] message``."""

from __future__ import annotations

import os
import sys
import time
from enum import StrEnum

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}


class Process(StrEnum):
    """The process that a line would come from. The simulation is one process, so all share its pid."""

    API = "APIServer"
    ENGINE = "EngineCore"


class Log:
    """Writes lines to stdout, progress bars to stderr, as vLLM does."""

    def __init__(self, level: str | None = None) -> None:
        name = (level or os.environ.get("VLLM_LOGGING_LEVEL") or "INFO").upper()
        self._threshold = _LEVELS.get(name, 20)
        self._pid = os.getpid()

    def write(self, process: Process | str, level: str, where: str, message: str) -> None:
        """Write one record, a prefix before each of its lines. ``where`` is vLLM's ``file.py:LINE``."""
        if _LEVELS[level] < self._threshold:
            return
        stamp = time.strftime("%m-%d %H:%M:%S")
        prefix = f"({process} pid={self._pid}) {level} {stamp} [{where}] "
        sys.stdout.write("".join(f"{prefix}{line}\n" for line in message.split("\n")))
        sys.stdout.flush()

    def api(self, where: str, message: str, level: str = "INFO") -> None:
        """Write a line of the API server."""
        self.write(Process.API, level, where, message)

    def engine(self, where: str, message: str, level: str = "INFO", rank: int | None = None) -> None:
        """Write a line of the engine process, or of one data-parallel rank of several."""
        process = Process.ENGINE if rank is None else f"{Process.ENGINE}_DP{rank}"
        self.write(process, level, where, message)

    def progress(self, text: str) -> None:
        """Write a step of a progress bar, control characters and all."""
        sys.stderr.write(text)
        sys.stderr.flush()
