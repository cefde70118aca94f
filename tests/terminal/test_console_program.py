"""The console as a person meets it: in a terminal, by keyboard, on simulated servers."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.terminal


def status(command, name):
    return json.loads(command("status", name, "--json").stdout)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40)])
def test_the_loop_by_keyboard(terminal, command, columns, rows):
    """Start a server, see it, stage a change with a key, restart, quit; find it again with the change."""
    started = command("start", "chatbot", "--engine", "simulated", "--wait", "--json")
    assert started.returncode == 0, started.stderr
    console = terminal(columns=columns, rows=rows)
    console.wait_for("chatbot")
    console.wait_for("ready")
    assert "sim" in console.text
    console.press("[")
    console.wait_for("max-num-seqs")
    console.wait_for("128")
    console.press("r")
    deadline = time.monotonic() + 60
    while status(command, "chatbot")["generation"] != 2:
        console.pump()
        assert time.monotonic() < deadline, console.text
    while status(command, "chatbot")["state"] != "ready":
        console.pump()
        assert time.monotonic() < deadline, console.text
    console.press("q")
    assert console.wait_end() == 0
    assert console.restored()
    again = terminal(columns=columns, rows=rows)
    again.wait_for("ready")
    argv = status(command, "chatbot")["argv"]
    assert argv[argv.index("--max-num-seqs") + 1] == "128"
    again.press("q")
    again.wait_end()


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_clean_and_the_server_up(terminal, command, way):
    command("start", "batch", "--engine", "simulated", "--wait")
    pid = status(command, "batch")["pid"]
    console = terminal()
    console.wait_for("batch")
    console.process.send_signal(way)
    console.wait_end()
    assert console.restored()
    os.kill(pid, 0)
    assert status(command, "batch")["state"] == "ready"


def test_a_hung_up_terminal_ends_the_console_and_nothing_else(terminal, command):
    """What an SSH connection that breaks does: the pty goes away and the session gets SIGHUP."""
    command("start", "batch", "--engine", "simulated", "--wait")
    pid = status(command, "batch")["pid"]
    console = terminal()
    console.wait_for("batch")
    os.killpg(console.process.pid, signal.SIGHUP)
    console.wait_end()
    os.kill(pid, 0)


def test_resizing_and_no_color(terminal, command):
    command("start", "chatbot", "--engine", "simulated", "--wait")
    console = terminal(columns=120, rows=40, env={"NO_COLOR": "1"})
    console.wait_for("KV cache")
    for columns, rows in ((80, 24), (200, 60), (60, 15), (120, 40)):
        console.resize(columns, rows)
        console.wait_for(lambda text, rows=rows: "chatbot" in text and len(text.splitlines()) <= rows)
    console.wait_for("KV cache")
    console.press("q")
    assert console.wait_end() == 0


def test_two_consoles_at_once_show_the_same_server(terminal, command):
    command("start", "chatbot", "--engine", "simulated", "--wait")
    first, second = terminal(), terminal(columns=80, rows=24)
    for console in (first, second):
        console.wait_for("chatbot")
        console.wait_for("ready")
    command("stop", "chatbot")
    for console in (first, second):
        console.wait_for("stopped")
        console.press("q")
        assert console.wait_end() == 0


def test_launching_by_hand(terminal, command):
    """n, choose the simulated engine, launch: the server is there afterwards."""
    console = terminal()
    console.wait_for("Servers")
    console.press("n")
    console.wait_for("chatbot")
    console.wait_for("max-num-seqs")
    console.press("\x13")
    deadline = time.monotonic() + 60
    while not json.loads(command("list", "--ours", "--json").stdout):
        console.pump()
        assert time.monotonic() < deadline, console.text
    console.wait_for("ready")
    console.press("q")
    console.wait_end()


def test_demo_shows_two_servers_under_traffic_and_leaves_nothing(terminal, home):
    console = terminal("demo")
    console.wait_for(lambda text: text.count("ready") >= 2)
    console.wait_for("simulated")
    console.press("q")
    assert console.wait_end() == 0
    assert list(Path(home["XDG_STATE_HOME"], "vllm-console", "demo").iterdir()) == []


def test_without_a_terminal_the_console_says_so(command):
    answer = command()
    assert answer.returncode == 2
    assert "needs a terminal" in answer.stderr
