"""Why a start failed, by the lines that it wrote: of a server, of a restart, or of a launch that vLLM judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from vllm_console.diagnosis.finding import Diagnosis
from vllm_console.logs.file import last_lines
from vllm_console.text import redrawn
from vllm_launchers.launch.details import Details
from vllm_launchers.secrets import redact


def diagnosed(lines: Sequence[str], code: int | None, details: Details) -> Diagnosis:
    """Why a start with these details failed, by its last lines and its exit code."""
    from vllm_console.diagnosis.failure.diagnose import diagnose

    shown = [redact(redrawn(line)) for line in lines]
    return diagnose(shown, code, details.flags, details.gpu_name, mla=details.mla, environment=details.variables)


def diagnosed_part(
    log: Path, code: int | None, details: Details, inode: int | None, begin: int, end: int | None = None
) -> Diagnosis | None:
    """Why the generation that wrote this part of a log failed, with the line's number in the log.

    None if it wrote nothing and was not killed.
    """
    before, lines = last_lines(log, inode, begin, end)
    if not lines and (code is None or code >= 0):
        return None
    found = diagnosed(lines, code, details)
    return replace(found, line=found.line + before) if found.line is not None else found
