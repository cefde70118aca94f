"""Signals are sent in one place, which first verifies the process behind a pid."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SENDER = "launchers/vllm_launchers/keeper/processes.py"
SENDS = {"kill", "killpg", "pidfd_send_signal", "tgkill", "sigqueue", "pthread_kill", "send_signal"}
"""Functions and methods that signal a pid; children also have ``kill`` and ``terminate``."""
OWN_CHILDREN = {
    "console/vllm_console/fleet/background_commands.py": {"terminate", "kill"},
    "console/vllm_console/fleet/remote_hosts.py": {"terminate", "kill"},
    "console/vllm_console/cli/demo.py": {"terminate"},
    "console/vllm_console/web/server.py": {"terminate", "kill"},
    "launchers/vllm_launchers/keeper/client.py": {"kill"},
    "launchers/vllm_launchers/vllm/engine_install.py": {"terminate"},
    "launchers/vllm_launchers/vllm/hub.py": {"terminate"},
}
"""Places where the object that started a child ends it; it holds the pid until the child is reaped."""

UNREAPED = {("launchers/vllm_launchers/prepared/bootstrap.py", "os.kill(self._pid, signal.SIGKILL)")}
"""The child of a script that imports none of our code; it is reaped right after, so its pid cannot have been reused."""


def calls() -> Iterator[tuple[str, str, ast.Call, str]]:
    """Every call that could send a signal: file, enclosing function, call, and callee."""
    for folder in ("console", "launchers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for function in ast.walk(tree):
                if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                        name = node.func.attr
                        if name in SENDS | {"terminate"}:
                            yield str(path.relative_to(ROOT)), function.name, node, name


def to_itself(call: ast.Call) -> bool:
    """``os.kill(os.getpid(), …)``."""
    return bool(call.args) and ast.unparse(call.args[0]) == "os.getpid()"


def test_signals_are_sent_in_one_place() -> None:
    sent = set()
    for file, function, call, name in calls():
        if file == SENDER:
            sent.add((function, ast.unparse(call.func)))
        elif name in OWN_CHILDREN.get(file, ()):
            assert not call.args, f"{file}: {ast.unparse(call)}"
        elif (file, ast.unparse(call)) not in UNREAPED:
            assert to_itself(call), f"{file}: {ast.unparse(call)} in {function}"
    assert sent == {("send", "os.kill"), ("send", "signal.pidfd_send_signal")}


def test_no_shell_or_signaling_program_is_run() -> None:
    for folder in ("console", "launchers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    assert node.value not in {"pkill", "killall", "fuser"}, path
                if isinstance(node, ast.keyword) and node.arg == "shell":
                    assert ast.unparse(node.value) == "False", path


def test_send_verifies_the_process_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor is opened before the check, so that a pid reused in between is never signaled."""
    from vllm_launchers.keeper import processes
    from vllm_launchers.keeper.records import ProcessIdentity

    done: list[str] = []
    monkeypatch.setattr(processes.os, "pidfd_open", lambda pid: done.append("open") or 1000)
    monkeypatch.setattr(processes.os, "close", lambda fd: done.append("close"))
    monkeypatch.setattr(processes, "alive", lambda process: bool(done.append("look")))
    monkeypatch.setattr(processes.signal, "pidfd_send_signal", lambda fd, number: done.append("send"))
    assert not processes.send(ProcessIdentity(1, 1, "boot"), 15)
    assert done == ["open", "look", "close"]
    done.clear()
    monkeypatch.setattr(processes, "alive", lambda process: done.append("look") or True)
    assert processes.send(ProcessIdentity(1, 1, "boot"), 15)
    assert done == ["open", "look", "send", "close"]


STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


def test_test_processes_ignore_no_stop_signal():
    shown = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    ignored = int(next(line.split()[1] for line in shown.splitlines() if line.startswith("SigIgn:")), 16)
    assert not [number for number in STOPPING if ignored >> (number - 1) & 1]


def test_test_processes_reset_inherited_ignored_signals():
    here = f"{Path(__file__).relative_to(ROOT)}::test_test_processes_ignore_no_stop_signal"
    words = ["sh", "-c", "trap '' HUP INT QUIT; exec \"$@\"", "sh", sys.executable, "-m", "pytest", "-q", here]
    done = subprocess.run([*words, "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
