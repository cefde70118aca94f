"""``vllm-console COMMAND`` as a separate process, without the import time that dominates its cost."""

from __future__ import annotations

import atexit
import os
import pkgutil
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import vllm_console
import vllm_launchers
from fakes.forked import Forks
from fakes.ports import free_port

READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG")
"""Prefixes of variables that Python and the dynamic linker read only at process start. PYTHONPATH counts only if it
changes Python itself: other tests set it for the servers that a command starts."""

NOT_IMPORTED = (
    "vllm_console.ui",
    "vllm_console.web",
    "vllm_launchers.prepared.bootstrap",
    "vllm_launchers.probe.plugin",
    "vllm_launchers.simulated",
    "vllm_launchers.vllm.hub_worker",
    "vllm_launchers.vllm.ray_query",
)
"""Screens, which few commands need, and modules that run in other processes."""

ASK_SECONDS = 0.2
"""Pause between polls: each starts a process, and without a pause polling occupies a core."""

PATIENCE = 180.0
"""Timeout in seconds for things that take one second on an idle machine."""

_starting = threading.Lock()
"""Tests run commands from several threads, but share one fork server."""


def run_command(
    words: Sequence[str],
    env: Mapping[str, str],
    given: str = "",
    *,
    timeout: float = 180.0,
    program: Sequence[str] = ("-m", "vllm_console"),
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` of ``python -m vllm_console WORDS`` with ``given`` as its input, but about 0.2 s faster.

    Runs in a fork of a process that has imported the commands, unless ``env`` has variables that are only read at
    process start. ``program`` replaces ``-m vllm_console`` by another program that accepts a command.
    """
    argv = [*program, *words]
    if _read_at_start(env) != _read_at_start(_forks().environment):
        command = [sys.executable, *argv]
        return subprocess.run(
            command, env=env, input=given, capture_output=True, text=True, timeout=timeout, check=False
        )
    ours, theirs = zip(*(_pipe(kind) for kind in ("in", "out", "out")), strict=True)
    process = _forks().start(argv, env, *theirs)
    for descriptor in theirs:
        os.close(descriptor)
    try:
        os.write(ours[0], given.encode())
        os.close(ours[0])
        output, errors = _read(ours[1:], time.monotonic() + timeout)
        return subprocess.CompletedProcess(argv, process.wait(timeout), output, errors)
    except TimeoutError:
        process.kill()
        raise subprocess.TimeoutExpired(argv, timeout) from None
    finally:
        for descriptor in ours[1:]:
            os.close(descriptor)


def with_own_port(words: tuple[str, ...]) -> tuple[str, ...]:
    """``… start …`` with a port unused by other tests; other command lines are unchanged."""
    if "start" not in words or "--port" in words:
        return words
    after = words.index("start") + 1
    return (*words[:after], "--port", str(free_port()), *words[after:])


def _forks() -> Forks:
    with _starting:
        return _started_forks()


@cache
def _started_forks() -> Forks:
    forks = Forks(sys.executable, os.environ, ["vllm_console.cli.main", *_modules(), "compiled_patterns"])
    atexit.register(forks.close)
    return forks


def _modules() -> Iterator[str]:
    """All modules that a command can import, except screens and separate programs."""
    for package in (vllm_console, vllm_launchers):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.startswith(NOT_IMPORTED) and not found.name.endswith("__main__"):
                yield found.name


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    folders = [Path(folder) for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    customized = any((folder / "sitecustomize.py").exists() for folder in folders)
    return {
        name: value
        for name, value in env.items()
        if name.startswith(READ_AT_START) and (customized or name != "PYTHONPATH")
    }


def _pipe(kind: str) -> tuple[int, int]:
    """Our end of a pipe, and the process's end."""
    reading, writing = os.pipe()
    return (writing, reading) if kind == "in" else (reading, writing)


def _read(descriptors: Sequence[int], deadline: float) -> list[str]:
    """Data written to each pipe until all writers have closed it; raises TimeoutError."""
    texts = {descriptor: bytearray() for descriptor in descriptors}
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                texts[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
    return [text.decode().replace("\r\n", "\n").replace("\r", "\n") for text in texts.values()]
