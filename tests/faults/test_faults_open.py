"""A server that others can use without an API key is shown with a warning everywhere."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.keeper_bench import PATIENCE
from fakes.ports import free_port
from vllm_console.cli.main import main
from vllm_console.fleet.local import LocalFleet
from vllm_console.fleet.other_servers import exposed
from vllm_console.ui.panes.bars import message_lines
from vllm_console.ui.panes.servers import columns_for, row
from vllm_console.ui.parts.server_verbs import _exposure
from vllm_console.ui.screens.describe import describe_lines
from vllm_launchers.host.ports import user_name
from vllm_launchers.host.processes import ObservedServer
from vllm_launchers.vllm.flags.changes import Changes

WORDS = "it listens on all addresses (0.0.0.0) without an API key: anyone who can reach it can use it"


def shared_home(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(root / name.lower()))
    monkeypatch.setenv("SIMULATED_STARTUP_SECONDS", "0")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    (root / "config" / "vllm-console").mkdir(parents=True)
    (root / "board").mkdir()
    (root / "board").chmod(0o1777)
    (root / "config" / "vllm-console" / "config.toml").write_text(f'board = "{root / "board"}"\n')


@pytest.fixture
def said(tmp_path, monkeypatch, capsys) -> Iterator[Callable[..., Any]]:
    """Standard output and standard error of a command."""
    shared_home(tmp_path, monkeypatch)

    def run(*words: str) -> Any:
        main(list(words))
        return capsys.readouterr()

    try:
        yield run
    finally:
        with contextlib.suppress(SystemExit):
            main(["stop", "open"])


def test_open_server_is_reported_everywhere_until_it_has_a_key(said, tmp_path, monkeypatch):
    start = ("start", "chatbot", "--engine", "simulated", "--name", "open", "--wait", "--json")
    out, err = said(*start, "--host", "0.0.0.0", "--port", str(free_port()))
    assert json.loads(out)["notice"] == WORDS
    assert f"warning: {WORDS}. Export VLLM_API_KEY first" in err
    assert said("list", "--ours").out.count(WORDS) == 1
    assert [one["notice"] for one in json.loads(said("list", "--ours", "--json").out)] == [WORDS]
    assert f"note        {WORDS}" in said("status", "open").out
    assert json.loads(said("status", "open", "--json").out)["notice"] == WORDS
    page = json.loads(said("board", "--json").out)["servers"]
    assert [(one["name"], one["open"]) for one in page] == [("open", True)]
    assert "! others can use it: no API key" in said("board").out
    problems = [problem["what"] for problem in json.loads(said("doctor", "--json").out)["problems"]]
    assert f"open: {WORDS}" in problems
    on_screens(tmp_path / "state" / "vllm-console")
    out, err = said("restart", "open", "--wait")
    assert f"note: {WORDS}" in out

    monkeypatch.setenv("VLLM_API_KEY", "k" * 20)
    answer = json.loads(said("restart", "open", "--wait", "--json").out)
    assert answer["state"] == "ready"
    assert "notice" not in answer
    assert "without an API key" not in said("list", "--ours").out
    assert [one["open"] for one in json.loads(said("board", "--json").out)["servers"]] == [False]


def on_screens(state: Path) -> None:
    fleet = LocalFleet(state, observe=False, gpus=False)
    try:
        snapshot = fleet.snapshot("open")
        findings = [finding.message for finding in fleet.plan_restart("open", Changes()).findings]
    finally:
        fleet.close()
    server = snapshot.server("open")
    assert server is not None
    port = f"{server.port}!"
    for width in (80, 120, 200):
        assert port in row(server, columns_for([server], width), snapshot.at, width, True).text
    assert WORDS in " ".join(strip.text.strip() for strip in message_lines(None, server, snapshot, 120))
    described = [strip.text.strip() for strip in describe_lines(server, snapshot.at, 160)]
    assert any(WORDS in text for text in described)
    assert _exposure(server) == [f"! {WORDS}."]
    assert any(text.startswith(WORDS) for text in findings), "the plan of a restart, shown in the launch screen too"


@contextlib.contextmanager
def listening(host: str) -> Iterator[int]:
    """A port that listens at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip(f"{host} is no address here")
        server.listen()
        yield server.getsockname()[1]


def observed(port: int | None, *words: str, host: str = "0.0.0.0", pid: int = 0) -> ObservedServer:
    return ObservedServer(
        pid or os.getpid(), 1, user_name(os.getuid()), ("vllm", "serve", "m", *words), port, host, "m"
    )


@pytest.mark.parametrize(
    ("at", "words", "host", "expected"),
    [
        ("0.0.0.0", (), "0.0.0.0", True),
        ("0.0.0.0", ("--host", "gpubox"), "gpubox", True),
        ("::", ("--host", "::"), "::", True),
        ("127.0.0.1", (), "0.0.0.0", False),  # the kernel's answer wins over --config and a process title
        ("127.0.0.1", ("--host", "gpubox"), "gpubox", False),
        ("::1", ("--host", "localhost6"), "localhost6", False),
        ("0.0.0.0", ("--api-key", "•••"), "0.0.0.0", False),
        ("0.0.0.0", ("--api_key=•••",), "0.0.0.0", False),
        ("0.0.0.0", ("--uds", "/run/vllm.sock"), "0.0.0.0", False),
        ("127.0.0.1", ("--host", "127.0.0.1"), "127.0.0.1", False),
    ],
)
def test_open_servers_of_other_users_are_detected_from_outside(at, words, host, expected, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with listening(at) as port:
        said = exposed(observed(port, *words, host=host))
    assert ("no API key seen: anyone who can reach it can use it, unless it has one" in said) is expected
    assert bool(said) is expected


def test_unknown_port_falls_back_to_command_line():
    assert "all addresses (0.0.0.0)" in exposed(observed(None))
    assert exposed(observed(None, host="127.0.0.1")) == ""
    elsewhere = ObservedServer(1 << 30, 1, "nobody-else", ("vllm", "serve", "m"), None, "0.0.0.0", "m")
    with listening("127.0.0.1") as port:
        other = ObservedServer(1 << 30, 1, "nobody-else", ("vllm", "serve", "m"), port, "0.0.0.0", "m")
        assert exposed(other), "a process of another user listens there"
    assert exposed(elsewhere)


def test_key_in_environment_counts_unless_empty():
    for key, expected in (("k" * 20, False), ("", True)):
        words = [sys.executable, "-c", "print(flush=True); input()"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(words, env={**os.environ, "VLLM_API_KEY": key}, **pipes) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert bool(exposed(observed(None, pid=process.pid))) is expected
            process.kill()


def test_lists_report_open_servers_of_other_users(tmp_path, monkeypatch, capsys):
    shared_home(tmp_path, monkeypatch)
    script, port = tmp_path / "vllm", free_port()
    script.write_text(
        "import socket, sys, time\ns = socket.create_server(('0.0.0.0', int(sys.argv[3])))\ntime.sleep(600)\n"
    )
    words = [sys.executable, str(script), "serve", "--port", str(port)]
    with subprocess.Popen(words) as process:
        try:
            deadline = time.monotonic() + PATIENCE
            while True:
                main(["list", "--json"])
                notices = [one["notice"] for one in json.loads(capsys.readouterr().out) if one["pid"] == process.pid]
                if notices:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            process.kill()
    assert notices[0].startswith("it listens on all addresses (0.0.0.0), no API key seen")
    assert "outside this console: read-only" in notices[0]
