"""A server is stopped through the fleet; the driver reports whether its memory was released, or who holds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_launchers.host.gpu.host import Host

FLEET = """
import functools, json, os, subprocess, sys, threading, time
from pathlib import Path
import psutil
from vllm_console.fleet import gpus
gpus.Releases = functools.partial(gpus.Releases, timeout=float(sys.argv[2]))
from vllm_console.fleet.local import LocalFleet
from vllm_launchers.launch.request import LaunchRequest

def say(*lines):
    control = os.environ["NVML_STUB_CONTROL"]
    Path(control + ".new").write_text("".join(line + "\\n" for line in lines))
    os.replace(control + ".new", control)

def until(true):
    deadline = time.monotonic() + 180
    while not true(seen := fleet.snapshot()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)
    return seen

def holds(seen, name):
    return seen.host and seen.host.gpus and any(h.server == name for h in seen.host.gpu(0).holders)

def watched():
    return any(thread.name == "release-chat" for thread in threading.enumerate())

other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
fleet = LocalFleet(Path(sys.argv[1]), interactive=True, observe=False)
fleet.start(LaunchRequest("chatbot", engine="simulated", name="chat", port=int(os.environ["OWN_PORT"])))
pid = until(lambda seen: seen.server("chat").pid).server("chat").pid
say(f"holds 0 {pid} 20480", f"holds 0 {other.pid} 1024")
until(lambda seen: holds(seen, "chat"))
fleet.stop("chat")
assert watched()
until(lambda seen: not seen.server("chat").state.alive)
"""
END = """
fleet.close()
other.kill()
"""


def test_unreleased_gpu_memory_is_reported_until_freed(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SIMULATED_STARTUP_SECONDS", "0")
    code = (
        FLEET
        + """
stuck = until(lambda seen: f"pid {pid} of" in seen.server("chat").notice).server("chat").notice
say(f"holds 0 {other.pid} 1024")
until(lambda seen: not seen.server("chat").notice)
print(json.dumps([stuck, pid, psutil.Process().username()]))
"""
        + END
    )
    stuck, pid, user = make_stub(recorded("1xrtx4090")).run(code, str(tmp_path / "state"), "0.1")
    assert stuck == (
        f"ended, but GPU 0: 19.5 GiB were not freed; pid {pid} of {user} still holds 20.0 GiB"
    )  # fmt: skip


def test_released_gpu_memory_is_awaited_and_not_reported(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SIMULATED_STARTUP_SECONDS", "0")
    code = (
        FLEET
        + """
still = [watched(), fleet.snapshot().server("chat").notice]
say(f"holds 0 {other.pid} 1024")
until(lambda seen: not watched())
print(json.dumps([still, fleet.snapshot().server("chat").notice]))
"""
        + END
    )
    still, notice = make_stub(recorded("1xrtx4090")).run(code, str(tmp_path / "state"), "60")
    assert still == [True, ""]
    assert notice == ""


STOP = """
import json, os, subprocess, sys, time
from pathlib import Path
import psutil

def say(*lines):
    control = os.environ["NVML_STUB_CONTROL"]
    Path(control + ".new").write_text("".join(line + "\\n" for line in lines))
    os.replace(control + ".new", control)

def program(*words):
    return [sys.executable, "-m", "vllm_console", "--state", sys.argv[1], *words]

def status():
    return json.loads(subprocess.check_output(program("status", "chat", "--json")))

words = ("--engine", "simulated", "--name", "chat", "--port", os.environ["OWN_PORT"], "--wait", "--json")
start = program("start", "chatbot", *words)
pid = json.loads(subprocess.check_output(start))["pid"]
other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
say(f"holds 0 {pid} 20480", f"holds 0 {other.pid} 1024")
code = "import sys; from vllm_console.fleet import gpus\\n"
code += "gpus.TIMEOUT_SECONDS = float(sys.argv.pop(1))\\n"
code += "from vllm_console.cli.main import main; sys.exit(main())"
words = [sys.executable, "-c", code, sys.argv[2], *program()[3:], "stop", "chat", "--json"]
stop = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
while psutil.pid_exists(pid):
    assert stop.poll() is None
    time.sleep(0.02)
if sys.argv[3] == "stuck":
    say(f"holds 0 {pid} 20480", f"holds 0 {other.pid} 2048")
else:
    say(f"holds 0 {other.pid} 16384")
server, stderr = stop.communicate(timeout=60)
print(json.dumps([json.loads(server)["state"], stderr, pid, psutil.Process().username()]))
other.kill()
"""


@pytest.mark.parametrize(("timeout", "memory"), [("3", "stuck"), ("60", "freed")])
def test_stop_waits_for_gpu_memory_and_names_its_holder(
    timeout: str,
    memory: str,
    recorded: Callable[[str], Host],
    make_stub: Callable[[Host], Any],
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setenv("SIMULATED_STARTUP_SECONDS", "0")
    answer = make_stub(recorded("1xrtx4090")).run(STOP, str(tmp_path / "state"), timeout, memory)
    state, stderr, pid, user = answer
    assert state == "stopped"
    held = f"19.5 GiB were not freed; pid {pid} of {user} still holds 20.0 GiB"
    # The other process has grown meanwhile by its own memory.
    assert stderr == ("" if memory == "freed" else f"! chat: ended, but GPU 0: {held}\n")
