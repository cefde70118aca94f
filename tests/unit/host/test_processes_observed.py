"""vLLM servers among the processes of a machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_launchers.host.processes import ObservedServer, ProcessScanner, ServerCommand, server_command

Process = Callable[..., None]


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/v/bin/python3.11 /v/bin/vllm serve m --port 8001", ("m", "0.0.0.0", 8001)),
        ("/v/bin/vllm serve org/m --host=::1 --port=9", ("org/m", "::1", 9)),
        ("vllm serve --model m", ("m", "0.0.0.0", None)),
        ("python -m vllm.entrypoints.openai.api_server --model m --host 1.2.3.4", ("m", "1.2.3.4", None)),
        ("python3 -u -X dev -m vllm.entrypoints.cli.main serve m", ("m", "0.0.0.0", None)),
        ("python /x/vllm/entrypoints/openai/api_server.py --model m --port 5", ("m", "0.0.0.0", 5)),
        ("VLLM::APIServer_0", (None, "0.0.0.0", None)),
        ("vllm serve m --port 8000 --host ::1 --port=9000", ("m", "::1", 9000)),
        ("vllm serve --port 8000 m", ("m", "0.0.0.0", 8000)),
        ("vllm serve --host ::1 --dtype=half m -tp 2", ("m", "::1", None)),
        ("vllm serve --lora-modules a=/a b=/b", (None, "0.0.0.0", None)),
        ("vllm serve m --port none", ("m", "0.0.0.0", None)),
        ("vllm serve m --port 99999999", ("m", "0.0.0.0", None)),
    ],
)
def test_server_commands_are_recognized(line: str, command: tuple[str | None, str, int | None]) -> None:
    assert server_command(line.split()) == ServerCommand(*command, simulated=False)


def test_simulated_engine_is_recognized() -> None:
    found = server_command(["python", "-m", "vllm_launchers.simulated", "serve", "m", "--port", "8002"])
    assert found == ServerCommand("m", "0.0.0.0", 8002, simulated=True)


@pytest.mark.parametrize(
    "argv",
    [
        ["grep", "vllm", "serve"],
        ["bash", "-c", "vllm serve m"],
        ["vim", "/x/vllm", "serve"],
        ["tmux", "new", "vllm", "serve", "m"],
        ["/v/bin/python", "/v/bin/vllm", "bench", "serve"],
        ["python", "-m", "vllm_launchers.keeper"],
        ["python"],
        ["python", "-c", "x"],
        ["VLLM::EngineCore"],
        ["VLLM::Worker_TP0"],
        [""],
        [],
    ],
)
def test_other_commands_are_not_servers(argv: list[str]) -> None:
    assert server_command(argv) is None


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def process(proc: Path) -> Process:
    def process(pid: int, line: str, parent: int = 1, start: int = 100) -> None:
        folder = proc / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in line.split()))
        fields = " ".join(["S", str(parent), *["0"] * 17, str(start), "0"])
        (folder / "stat").write_text(f"{pid} (a) name) {fields}\n")

    return process


def test_scan_finds_servers(proc: Path, process: Process) -> None:
    process(10, "python /v/bin/vllm serve m --port 8001 --api-key hunter2")
    process(11, "VLLM::EngineCore", parent=10)
    process(12, "bash")
    (proc / "self").mkdir()
    (server,) = ProcessScanner(proc).scan()
    assert isinstance(server, ObservedServer)
    assert (server.pid, server.start_time, server.port, server.model) == (10, 100, 8001, "m")
    assert "hunter2" not in server.argv


def test_own_servers_and_their_descendants_are_excluded(proc: Path, process: Process) -> None:
    process(10, "vllm serve ours --port 1")
    process(11, "bash", parent=10)
    process(12, "vllm serve below --port 2", parent=11)
    process(20, "vllm serve theirs --port 3")
    process(21, "vllm serve theirs --port 3", parent=20)
    assert [server.pid for server in ProcessScanner(proc).scan([10])] == [20]


def test_new_ended_and_changed_processes_are_noticed(proc: Path, process: Process) -> None:
    scanner = ProcessScanner(proc)
    process(10, "bash")
    assert scanner.scan() == []
    process(10, "vllm serve m --port 1")  # the shell became vLLM by exec
    assert [len(scanner.scan()) for _ in range(10)][-1] == 1
    process(10, "vllm serve m --port 1", start=999)  # the pid was reused
    assert scanner.scan()[0].start_time == 999
    process(10, "sleep 1", start=1000)
    assert scanner.scan() == []
    (proc / "10" / "stat").unlink()
    (proc / "10" / "cmdline").unlink()
    (proc / "10").rmdir()
    assert scanner.scan() == []


def test_port_of_a_real_process_is_found(tmp_path: Path) -> None:
    """A stand-in for vLLM that listens on a port missing from its command line."""
    script = tmp_path / "vllm"
    script.write_text(
        "import socket, time\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\n"
        "print(s.getsockname()[1], flush=True)\ntime.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, str(script), "serve", "some/model"], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        deadline = time.monotonic() + 60
        found: list[ObservedServer] = []
        scanner = ProcessScanner()
        while not found and time.monotonic() < deadline:
            found = [server for server in scanner.scan() if server.pid == child.pid]
        assert (found[0].port, found[0].model) == (port, "some/model")
        assert child.pid not in [server.pid for server in scanner.scan([os.getpid()])]
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
