"""The process prefix of log lines: vLLM's ``(Worker rank=0 pid=7) ``, Ray's ``(RayWorkerProc pid=9, ip=10.0.0.2) ``."""

from __future__ import annotations

NAME = r"[\w.:-]+"
PID = r"pid=\d+(?:, ip=[^)]*)?\) ?"
RANK = r"(?: [\w=.]+)*? "

PROCESS = rf"\((?:{NAME}{RANK})?{PID}"

PROCESSES = rf"(?:{PROCESS}){{0,3}}"
"""Ray puts its own prefix before that of vLLM, which the engine may have prefixed again."""
