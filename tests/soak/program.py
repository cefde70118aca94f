"""``vllm-console`` with server logs limited to a size that a soak reaches: ``python program.py …``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from vllm_launchers.values import replace

if TYPE_CHECKING:
    from vllm_launchers.keeper.records import LaunchSpec

LOG_BYTES, LOG_FILES = 1 << 20, 3
LOOKING = frozenset(
    {"list", "status", "runs", "check", "doctor", "leftovers", "logs", "host", "load", "stop", "remove"}
)
"""Commands that launch nothing and need no launch code."""


def bound_logs() -> None:
    """Give small logs to servers that are launched from now on."""
    from vllm_launchers.launch.launch_plan import LaunchPlan

    spec = LaunchPlan.spec

    def bounded(launch: LaunchPlan, *words: Any) -> LaunchSpec:
        return replace(spec(launch, *words), log_bytes=LOG_BYTES, log_files=LOG_FILES)

    LaunchPlan.spec = bounded  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    from vllm_console.cli.main import main

    if not LOOKING.intersection(sys.argv[1:2]):
        bound_logs()
    sys.exit(main())
