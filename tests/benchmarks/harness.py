"""Shared by the benchmarks: a state folder, servers, programs in a pty, CPU and memory from /proc."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
WAIT_SECONDS = 600
"""Timeout of a command. A prepared restart takes minutes if the server and its successor share two cores."""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process from its own clock (nanoseconds)."""
    return time.clock_gettime(~pid << 3 | 2)


def ended_children_seconds(pid: int) -> float:
    """CPU time of its reaped children (/proc/PID/stat, fields 16 and 17, in ticks)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(value) for value in fields[13:15]) / TICK


def memory_mb(pid: int) -> float:
    """Resident memory in MB (/proc/PID/statm, field 2)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6


@dataclass(frozen=True)
class Usage:
    """Resource use of a program in a terminal over an interval. ``children_seconds`` is the CPU time of processes that
    it started and that ended meanwhile, such as predictions; these are one-time costs, so a percentage would be
    meaningless."""

    cpu_percent: float
    children_seconds: float
    bytes_per_second: float
    memory_mb: float


def watch(
    words: Sequence[str], env: dict[str, str], *, settle: float, seconds: float, extra_pids: Sequence[int]
) -> Usage:
    """Run a program in a 120×40 pty; measure for ``seconds`` after ``settle`` seconds.

    The CPU time of ``extra_pids`` (recorders) is added to the program's.
    """
    with in_terminal(words, env) as (process, master):
        drain(master, settle)
        pids = (process.pid, *extra_pids)
        began, used, children = time.monotonic(), sum(map(cpu_seconds, pids)), ended_children_seconds(process.pid)
        written = drain(master, seconds)
        span = time.monotonic() - began
        used, children = sum(map(cpu_seconds, pids)) - used, ended_children_seconds(process.pid) - children
        return Usage(100 * used / span, children, written / span, memory_mb(process.pid))


@contextlib.contextmanager
def in_terminal(words: Sequence[str], env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A program in a 120×40 pseudo-terminal, ended afterwards."""
    master, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        list(words), stdin=child, stdout=child, stderr=child, start_new_session=True,
        env={**env, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
    )  # fmt: skip
    os.close(child)
    try:
        yield process, master
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)


def drain(master: int, seconds: float) -> int:
    """Read a program's output for that long; returns the number of bytes."""
    total, deadline = 0, time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([master], [], [], left)[0]:
            with contextlib.suppress(OSError):
                total += len(os.read(master, 1 << 16))
    return total


class Bench:
    """A separate state folder and the commands that act on it."""

    def __init__(self, folder: Path) -> None:
        around = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.env = {
            **around,
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "SIMULATED_STARTUP_SECONDS": "0",
        }
        self.servers = folder / "state" / "vllm-console" / "servers"

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "vllm_console", *words]

    def __call__(self, *words: str) -> Any:
        answer = subprocess.run(
            self.words(*words, "--json"),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        if answer.returncode:
            raise SystemExit(f"{' '.join(words)}: {answer.stderr}")
        return json.loads(answer.stdout)

    def start(self, name: str, preset: str = "chatbot") -> dict[str, Any]:
        """Start a simulated server and wait until it is ready."""
        server: dict[str, Any] = self("start", preset, "--engine", "simulated", "--name", name, "--wait")
        return server

    def load(self, name: str, rate: float, seconds: float) -> subprocess.Popen[bytes]:
        """Send load from a separate process."""
        words = self.words("load", name, "--rate", str(rate), "--duration", str(seconds))
        return subprocess.Popen(words, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def record(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.servers / name / "record.json").read_text())
        return record


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        made = Bench(Path(folder))
        try:
            yield made
        finally:
            for server in made("list", "--ours"):
                made("stop", server["name"])


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
