"""The console in a terminal, controlled by keyboard, with simulated servers."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pyte
import pytest

from fakes.commands import ASK_SECONDS
from fakes.terminal import DEADLINE
from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import State

pytestmark = pytest.mark.terminal


def status(command, name):
    return json.loads(command("status", name, "--json").stdout)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40)])
def test_full_loop_by_keyboard(terminal, command, state, columns, rows):
    """Start a server, stage a change, restart, quit; a new console shows the server with the change."""
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
    asked = False
    deadline = time.monotonic() + DEADLINE
    while (record := client.read(state, "chatbot")).current.number != 2 or record.state is not State.READY:
        console.pump()
        if not asked and "Restart chatbot?" in console.text:  # its metrics are not read yet, so it asks
            console.press("y")
            asked = True
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
def test_signal_restores_terminal_and_server_keeps_running(terminal, command, way):
    command("start", "batch", "--engine", "simulated", "--wait")
    pid = status(command, "batch")["pid"]
    console = terminal()
    console.wait_for("batch")
    console.process.send_signal(way)
    console.wait_end()
    assert console.restored()
    os.kill(pid, 0)
    assert status(command, "batch")["state"] == "ready"


def test_hangup_ends_only_the_console(terminal, command):
    """Like a broken SSH connection: the pty closes and the session gets SIGHUP."""
    command("start", "batch", "--engine", "simulated", "--wait")
    pid = status(command, "batch")["pid"]
    console = terminal()
    console.wait_for("batch")
    os.killpg(console.process.pid, signal.SIGHUP)
    console.wait_end()
    os.kill(pid, 0)


def test_resize_and_no_color(terminal, command):
    command("start", "chatbot", "--engine", "simulated", "--wait")
    console = terminal(columns=120, rows=40, env={"NO_COLOR": "1"})
    console.wait_for("KV cache")
    for columns, rows in ((80, 24), (200, 60), (60, 15), (120, 40)):
        console.resize(columns, rows)
        console.wait_for(lambda text, rows=rows: "chatbot" in text and len(text.splitlines()) <= rows)
    console.wait_for("KV cache")
    console.press("q")
    assert console.wait_end() == 0


def test_two_consoles_show_the_same_server(terminal, command):
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


def test_launch_from_screen(terminal, command, state):
    """Press n, choose the simulated engine, launch: the server exists afterwards."""
    console = terminal()
    console.wait_for("Servers")
    console.press("n")
    console.wait_for("chatbot")
    console.wait_for("max-num-seqs")
    console.press("\x13")
    deadline = time.monotonic() + DEADLINE
    while not client.names(state):
        console.pump()
        assert time.monotonic() < deadline, console.text
    assert [server["name"] for server in json.loads(command("list", "--ours", "--json").stdout)] == ["chatbot"]
    console.wait_for(lambda text: re.search(r"chatbot sim .*ready", text) is not None)
    console.press("q")
    console.wait_end()


def test_removed_server_is_replayed(terminal, command):
    """Launch, load, remove, replay, leave."""
    command("start", "chatbot", "--engine", "simulated", "--wait")
    assert command("load", "chatbot", "--rate", "6", "--duration", "4", "--output-tokens", "20").returncode == 0
    deadline = time.monotonic() + DEADLINE
    while not (status(command, "chatbot")["metrics"] or {}).get("generation_tokens_total"):
        assert time.monotonic() < deadline, "the recorder does not see it"
        time.sleep(ASK_SECONDS)
    command("stop", "chatbot")
    console = terminal()
    console.wait_for("stopped as requested")
    console.press("x")
    console.wait_for("Remove chatbot?")
    console.wait_for("p purge")
    console.press("y")
    console.wait_for("chatbot is removed; O replays its runs.")
    console.press("O")
    console.wait_for("Replay which run?")
    console.press("\r")
    console.wait_for("whole run  end leave")
    console.wait_for(lambda text: re.search(r"chatbot@1 sim .*removed .*%", text) is not None)
    console.wait_for("it was deleted with its server")
    at = re.search(r" at (\d\d:\d\d:\d\d) ", console.text)
    console.press("\x1b[D")
    console.wait_for(lambda text: (then := re.search(r" at (\d\d:\d\d:\d\d) ", text)) and then[1] < at[1])
    console.press("s")
    console.wait_for("chatbot@1 has ended and is being replayed: it can't be changed")
    console.press("\x1b")
    console.wait_for(lambda text: "live · 15m" in text and "chatbot@1" not in text)
    console.press(":replay chatbot@1\r")
    console.wait_for("whole run  end leave")
    console.press("\x1b[F")
    console.wait_for("live · 15m")
    console.press("q")
    assert console.wait_end() == 0
    assert console.restored()
    again = terminal("replay", "chatbot", columns=80, rows=24)
    again.wait_for(lambda text: re.search(r"chatbot@1 sim .*removed .*%", text) is not None)
    again.press("q")
    assert again.wait_end() == 0


def test_demo_opens_with_recorded_history_and_verdict(command, tmp_path):
    """In a fresh home: full charts, the restart in them, and its effect in a line."""
    path = tmp_path / "overview.svg"
    assert command("demo", "--after", "3", "--picture", str(path)).returncode == 0
    text = path.read_text().replace("&#160;", " ")
    assert re.search(r"better (at \S+ )?than run 1\b.*: ttft mean", text.lower())
    assert "r2" in text
    assert "preempting" in text
    bars = {int(float(x)) for x in re.findall(r'<rect class="[^"]+" x="([\d.]+)"', text)}
    columns = [x for x in sorted(bars) if x < 480]
    assert columns[0] < 110
    assert columns[-1] > 460
    assert max(b - a for a, b in itertools.pairwise(columns)) < 4 * 12.2, "no gap in the first chart"


def test_picture_of_own_servers_needs_no_terminal(command, tmp_path):
    path = tmp_path / "empty.svg"
    assert command("--picture", str(path), "--screen", "launch").returncode == 0
    assert "chatbot" in path.read_text()
    wrong = command("demo", "--picture", str(tmp_path / "picture.gif"))
    assert (wrong.returncode, "must end in .svg or .png" in wrong.stderr) == (2, True)
    both = command("demo", "--picture", str(path), "--record", str(tmp_path / "a.cast"))
    assert (both.returncode, "can't be combined" in both.stderr) == (2, True)


def _without_keyboard_modes(drawn: bytes) -> bytes:
    """``ESC [ > 1 u`` and ``ESC [ < u`` in a form that pyte ignores: it would draw the ``u``."""
    return drawn.replace(b"\x1b[>", b"\x1b[?").replace(b"\x1b[<", b"\x1b[?")


def test_demo_of_two_servers_is_recorded_and_leaves_nothing(terminal, home, tmp_path):
    """The recording replays to the same screen."""
    path = tmp_path / "demo.cast"
    console = terminal("demo", "--record", str(path))
    console.wait_for(lambda text: text.count("ready") >= 2)
    console.wait_for("simulated")
    console.wait_for("hint 1/4  i shows the findings of docs")
    console.press("d")
    console.wait_for("esc back")
    console.press("\x1b")
    console.wait_for(lambda text: "esc hides hints" in text and "KV cache" in text)
    console.press("c")
    console.wait_for("The change helped")
    console.press("\x1b")
    console.wait_for(lambda text: "esc hides hints" in text and "KV cache" in text)
    console.press("q")
    assert console.wait_end() == 0
    assert list(Path(home["XDG_STATE_HOME"], "vllm-console", "demo").iterdir()) == []
    head, *events = map(json.loads, path.read_text().splitlines())
    assert (head["version"], head["width"], head["height"]) == (2, 120, 40)
    assert [at for at, *_ in events] == sorted(at for at, *_ in events)
    assert {kind for _, kind, _ in events} == {"o"}
    leave = "\x1b[?1049l"
    played, seen = (pyte.Screen(120, 40) for _ in range(2))
    drawn = bytes(console.raw).partition(b"\x1b[?1049h")[2].partition(leave.encode())[0]
    pyte.ByteStream(seen).feed(_without_keyboard_modes(drawn))
    pictures = []
    for _, _, data in itertools.takewhile(lambda event: leave not in event[2], events):
        pyte.ByteStream(played).feed(_without_keyboard_modes(data.encode()))
        pictures.append(list(played.display))
    # Frames still waiting for the terminal at exit are recorded but not drawn; on a busy machine, many are.
    assert seen.display in pictures
    assert any("KV cache" in row for row in played.display)


def test_missing_terminal_is_reported(command):
    answer = command()
    assert answer.returncode == 2
    assert "needs a terminal" in answer.stderr


@pytest.mark.parametrize("words", [(), ("demo",)])
@pytest.mark.parametrize("name", ["dumb", "Unknown"])
def test_unsupported_terminal_is_rejected(terminal, words, name):
    console = terminal(*words, env={"TERM": name})
    assert console.wait_end() == 2
    assert f"TERM={name}: the console needs a terminal with cursor positioning" in console.text.replace("\n", "")


BUSY = """
import os
import sys
from vllm_console.cli.main import main
from vllm_console.ui import app
from vllm_console.ui.app import ConsoleApp

app.END_SECONDS = 1  # of computing in vain

def action_help(self):
    os.mkdir(os.environ["BUSY_MARK"])
    while True:
        self._busy = True
ConsoleApp.action_help = action_help
sys.exit(main([]))
"""


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_busy_console(home, terminal_module, tmp_path, way):
    busy = tmp_path / "busy"
    console = terminal_module.Terminal([sys.executable, "-c", BUSY], 100, 30, {**home, "BUSY_MARK": str(busy)})
    try:
        console.wait_for("Servers")
        console.press("?")
        while not busy.exists():
            assert console.process.poll() is None
            console.pump(0.05)
        console.process.send_signal(way)
        assert console.wait_end() == 1
        assert console.restored()
    finally:
        console.close()
