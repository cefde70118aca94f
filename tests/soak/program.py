"""``vllm-console``, with logs of servers that are bounded to a size which a soak comes to: ``python program.py …``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_launchers.keeper.records import LaunchSpec

LOG_BYTES, LOG_FILES = 1 << 20, 3
LOOKING = frozenset(
    {"list", "status", "runs", "check", "doctor", "leftovers", "logs", "host", "load", "stop", "remove"}
)
"""Commands that launch nothing, and need not know how."""


def bound_logs() -> None:
    """From now on what is launched has small logs."""
    from vllm_console.fleet.launching import Launch

    spec = Launch.spec

    def bounded(launch: Launch, folder: Path, state: Path) -> LaunchSpec:
        return replace(spec(launch, folder, state), log_bytes=LOG_BYTES, log_files=LOG_FILES)

    Launch.spec = bounded  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    from vllm_console.cli.main import main

    if not LOOKING.intersection(sys.argv[1:2]):
        bound_logs()
    sys.exit(main())
