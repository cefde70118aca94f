"""Asks the chosen engine for its verdict on a plan's flags, before the first launch.

The script that prepares a restart (`vllm_launchers.prepared`) runs as a child of this process, for the verdict only:
it imports vLLM, lets it judge the flags, answers and ends. The kernel kills it with the thread that waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_launchers.keeper import processes
from vllm_launchers.launch.prepared_start import prepared_argv
from vllm_launchers.launch.resolve import LaunchPlan
from vllm_launchers.plan.model import EngineKind
from vllm_launchers.plan.verdict import Answer, Verdict
from vllm_launchers.prepared.bootstrap import VERDICT_FD
from vllm_launchers.procfs import resident_mib
from vllm_launchers.secrets import redact

LONGEST_SECONDS = 300.0
"""As for a prepared restart: from a cold network file system vLLM takes minutes to import."""
WAKE_SECONDS = 0.5
"""How often its memory is read while it works."""


class EngineVerdicts:
    """Asks one question at a time. `ask` is for a thread of its own; the rest returns at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    @property
    def memory_mib(self) -> int | None:
        """The memory of the process that is at work; None if none is, or not known yet."""
        process = self._process
        return process.memory_mib if process is not None else None

    def ask(self, launch: LaunchPlan) -> Verdict | None:
        """The engine's verdict on a plan; None if `end` or another question came first."""
        if why := _why_not(launch):
            return Verdict(Answer.UNKNOWN, why)
        words = prepared_argv(launch.plan)
        if not words:
            return Verdict(Answer.UNKNOWN, "its command may do more than to run vLLM")
        environment = {**os.environ, **launch.spec().environment, **launch.secrets}
        try:
            with self._lock:
                self._end()
                process = self._process = _Process(words, environment)
        except OSError as error:
            return Verdict(Answer.UNKNOWN, f"its process could not be started: {error.strerror}")
        try:
            verdict = process.verdict()
        finally:
            process.close()
            with self._lock:
                if self._process is process:
                    self._process = None
        return _redacted(verdict, launch.secrets) if verdict is not None else None

    def end(self) -> None:
        """End what is at work: nobody waits for it any more."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def _why_not(launch: LaunchPlan) -> str:
    """Why the engine can't be asked about this plan; empty if it can."""
    if launch.plan.engine.kind is EngineKind.SIMULATED:
        return ""
    if not launch.plan.engine.path:
        return "it is not installed here"
    if not launch.model_here:
        return "the model is not on this machine"
    return ""


def _redacted(verdict: Verdict, secrets: Mapping[str, str]) -> Verdict:
    return Verdict(verdict.answer, redact(verdict.message, tuple(secrets.values())), verdict.version,
                   parser_only=verdict.parser_only)  # fmt: skip


class _Process:
    """One question. Its own thread calls `verdict` and `close`, any other `end`."""

    def __init__(self, words: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.memory_mib: int | None = None
        self._ended = False
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**environment, VERDICT_FD: str(theirs.fileno())},
                    cwd=Path.home() if Path.home().is_dir() else "/",
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise
        self._identity = processes.identity(self._process.pid)

    def verdict(self) -> Verdict | None:
        """Wait for the verdict; None if it was ended before."""
        deadline, version, data = time.monotonic() + LONGEST_SECONDS, "", b""
        self._socket.settimeout(WAKE_SECONDS)
        while not self._ended:
            if time.monotonic() > deadline:
                return Verdict(Answer.UNKNOWN, f"it took more than {LONGEST_SECONDS:g}s", version)
            try:
                received = self._socket.recv(1 << 16)
            except TimeoutError:
                self.memory_mib = resident_mib(self._process.pid)
                continue
            except OSError:
                received = b""
            if not received:
                break
            *lines, data = (data + received).split(b"\n")
            for message in map(_decoded, lines):
                version = str(message.get("vllm") or version)
                if (found := _verdict(message, version)) is not None:
                    return found
        return None if self._ended else Verdict(Answer.UNKNOWN, "its process ended before it answered", version)

    def end(self) -> None:
        """End it and what it started; the thread that waits notices."""
        self._ended = True
        if self._identity is not None:
            processes.end_session(self._identity)

    def close(self) -> None:
        """It and what it started are gone afterwards."""
        self._socket.close()
        if self._identity is not None:
            processes.end_session(self._identity)
        self._process.wait()


def _verdict(message: Mapping[str, Any], version: str) -> Verdict | None:
    """The verdict that a message says; None if it is no verdict."""
    text = str(message.get("message") or "")
    match message.get("step"):
        case "accepted":
            return Verdict(Answer.ACCEPTED, "", version, parser_only=message.get("config_checked") is False)
        case "refused":
            return Verdict(Answer.REFUSED, text, version)
        case "unprepared":
            return Verdict(Answer.UNKNOWN, text, version)
    return None


def _decoded(line: bytes) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(message := json.loads(line), dict):
            return message
    return {}
