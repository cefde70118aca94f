"""Read-only mode, by option or by administrator setting: everything is shown and nothing changes.

The home has a server whose keeper is dead, one whose keeper records every request, a stopped one, and one started by
another user. Servers record every request.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

from fakes.keeper_bench import PATIENCE
from vllm_console.cli.main import CHANGING, COMMANDS
from vllm_console.fleet.access import ServerAccess
from vllm_console.fleet.attachments import Attachments
from vllm_console.fleet.background_commands import Loads, Ramps, StagedPredictions
from vllm_console.fleet.board import GpuClaims
from vllm_console.fleet.change_predictions import ChangePredictions
from vllm_console.fleet.leftovers import FleetLeftovers
from vllm_console.fleet.local import LocalFleet
from vllm_console.fleet.probe import ProbeReports
from vllm_console.fleet.replay import Replays
from vllm_console.fleet.runs import RunHistory
from vllm_console.history.workload import SeenWorkload
from vllm_console.settings import Settings
from vllm_console.ui.actions import SCREENS, actions
from vllm_launchers.errors import RefusedError
from vllm_launchers.keeper import client, folders, processes
from vllm_launchers.keeper.records import LaunchSpec, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.launch.engine_check import EngineCheck
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.engines import simulated_engine
from vllm_launchers.vllm.flags.changes import Changes

FAKES = Path(__file__).parents[1] / "fakes"
WORK = Workload(input_tokens_p95=1500, output_tokens_p95=400, prefix_reuse=0.6, concurrency=64)

READING = {
    "presets": [], "plan": ["chatbot", "--engine", "simulated"], "list": [], "status": ["ordered"],
    "check": ["ordered", "--allow-idle"], "watch": [], "export": ["prometheus"], "logs": ["ordered"], "runs": [],
    "requests": ["ordered"], "lora": ["list", "ordered"],
    "replay": ["gone"],
    "compare": ["ordered"], "metrics": ["URL"], "diagnose": ["LOG"], "host": [], "topology": [],
    "gpus": ["--free", "1", "--host", "4xa6000"], "engines": [], "models": [], "board": [],
    "remote": [],
    "doctor": [], "leftovers": [], "web": ["--port", "70000"], "predict": ["ordered", "--set", "max-num-seqs=8"],
}  # fmt: skip
"""Read-only commands with arguments. A new command must be listed here, or be refused."""

REFUSED = {
    "start": ["chatbot", "--engine", "simulated"], "restart": ["ordered", "--set", "max-num-seqs=8"],
    "stop": ["ordered"], "remove": ["gone"], "load": ["URL", "--duration", "1"], "ramp": ["ordered"],
    "tune": ["ordered"],
    "bench": ["ordered"], "claim": ["0", "--until", "2h"],
    "chat": ["ordered"],
    "attach": ["URL"], "detach": ["gone"],
    "sleep": ["ordered"], "wake": ["ordered"], "release": [], "demo": ["--picture", "x.svg", "--after", "1"],
}  # fmt: skip

REFUSED_WORDS = (
    ["leftovers", "--remove"],
    ["models", "get", "org/model", "--yes"], ["models", "remove", "org/model", "--yes"],
    ["engines", "install", "--cpu", "--yes"], ["engines", "remove", "0.32.0-cpu", "--yes"],
)  # fmt: skip
"""Subcommands that change something, of otherwise read-only commands."""

READING_VERBS = {
    "launch_name", "snapshot", "preset", "presets", "engines", "models", "flags", "seen_workload", "plan", "close",
    "listener", "energy", "adapters", "engine", "plan_trial",
}  # fmt: skip
REFUSED_VERBS = {
    "chat_server": ("ordered",),
    "load_adapter": ("ordered", "a", "/nowhere"), "unload_adapter": ("ordered", "a"),
    "suggest": ("ordered", SeenWorkload(WORK, 100, 60.0, "seen")), "plan_restart": ("ordered", Changes()),
    "start": (LaunchRequest("chatbot", engine="simulated"),), "restart": ("ordered", Changes()),
    "judged_plan": (LaunchRequest("chatbot", engine="simulated"),), "start_beside": ("ordered", Changes()),
    "start_trial": ("ordered", "trial", None, Changes()),
    "compare_answers": ("ordered", "orphan"),
    "switch": ("ordered", "batch"), "cancel_restart": ("ordered",), "sleep": ("ordered",), "wake": ("ordered",),
    "resume": ("new", (), None), "stop": ("ordered",), "forget": ("gone",),
    "model_download": ("org/model",),
}  # fmt: skip
PARTS: dict[str, tuple[type, set[str], dict[str, tuple[object, ...]]]] = {
    "access": (ServerAccess, {"record", "recorded"}, {"adopt_ours": ("ordered",), "refuse_read_only": ()}),
    "history": (
        RunHistory,
        {
            "used_models", "used_presets", "runs", "has_others", "finished", "run", "find", "compare", "last_change",
            "compare_again", "judge_past", "outcome",
        },
        {"keep_measurement": ("ordered", None)},
    ),
    "attached": (
        Attachments,
        {"host_views", "close"},
        {
            "attach_host": ("ssh://gpubox", None), "attach": ("http://127.0.0.1:9",), "detach": ("gone",),
            "act": ("gpubox/chat", "stop"),
        },
    ),
    "claims": (GpuClaims, {"board"}, {"claim": ([0], 9e9), "release": ()}),
    "leftovers": (FleetLeftovers, {"find", "notices", "close"}, {"remove": (None,)}),
    "loads": (
        Loads,
        {"describe", "result", "server_ended", "close"},
        {"start": ("ordered",), "stop": ("ordered",)},
    ),
    "predictions": (ChangePredictions, {"predict", "rank"}, {"keep": ("ordered", 1, None)}),
    "probes": (ProbeReports, {"requests", "requests_of", "steps", "cached_prefixes"}, {}),
    "ramps": (
        Ramps, {"view", "close"}, {"start": ("ordered",), "cancel": ("ordered",), "stop": ("ordered",)},
    ),
    "replays": (Replays, {"find", "removed_at", "view", "close"}, {}),
    "engine_check": (EngineCheck, {"keep", "with_verdict", "take", "close"}, {"ask": (None, None)}),
}  # fmt: skip
"""The parts of a fleet: their methods that only read (or end what a console started), and those that are refused."""

READING_ACTIONS = {
    "findings", "open_log", "describe", "compare", "filter", "copy_command", "cursor_down", "cursor_up", "cursor_first",
    "cursor_last", "pane_1", "pane_2", "pane_3", "pane_4", "pane_5", "pane_6", "pane_7", "pane_8", "next_pane",
    "previous_pane", "next_layout", "messages", "sort", "range_shorter", "range_longer", "time_back", "time_forward",
    "time_page_back", "time_page_forward", "marker_back", "marker_forward", "time_first", "time_live", "log_scale",
    "clear", "pause", "refresh_faster", "refresh_slower", "commands", "help", "quit",
    "gpu_charts_next", "gpu_charts_previous", "gpu_history", "next_theme", "picture", "replay", "requests_order",
    "describe_gpus", "ranks",
}  # fmt: skip

CHANGING_KEYS = {"findings": {"findings_stage"}, "compare": {"compare_revert"}, "help": set(), "describe": set()}
"""Keys of screens that a read-only console can open."""

KEYS = {
    "tab": "\t", "shift+tab": "\x1b[Z", "escape": "\x1b", "enter": "\r", "space": " ", "backspace": "\x7f",
    "delete": "\x1b[3~", "up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D", "home": "\x1b[H",
    "end": "\x1b[F", "pageup": "\x1b[5~", "pagedown": "\x1b[6~", "f1": "\x1bOP", "shift+up": "\x1b[1;2A",
    "shift+down": "\x1b[1;2B", "slash": "/", "question_mark": "?", "colon": ":", "plus": "+", "equals_sign": "=",
    "asterisk": "*", "insert": "\x1b[2~",
    "minus": "-", "left_square_bracket": "[", "right_square_bracket": "]", "left_curly_bracket": "{",
    "right_curly_bracket": "}", "less_than_sign": "<", "greater_than_sign": ">", "left_parenthesis": "(",
    "right_parenthesis": ")", "shift+left": "\x1b[1;2D", "shift+right": "\x1b[1;2C", "comma": ",", "full_stop": ".",
}  # fmt: skip


def typed(key: str) -> str:
    """What a terminal sends for a key."""
    return chr(ord(key[-1]) & 31) if key.startswith("ctrl+") else KEYS.get(key, key)


@dataclass
class Box:
    """A home with servers, and the requests they received."""

    home: Path
    root: Path
    url: str = ""
    orders: bytearray = field(default_factory=bytearray)
    running: dict[str, processes.ProcessIdentity] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        folders = {f"XDG_{name}_HOME": str(self.home / name.lower()) for name in ("STATE", "CONFIG", "CACHE")}
        return {**os.environ, **folders, "HOME": str(self.home), "VLLMCONSOLE_STATE": str(self.root), "ADMIN": ""}

    def admin(self, text: str) -> Path:
        path = self.home / "etc" / "config.toml"
        path.parent.mkdir(exist_ok=True, mode=0o755)
        path.write_text(text)
        path.chmod(0o644)
        return path

    def tree(self) -> dict[str, object]:
        """Everything below state, config and cache: kind, mode, size, time and content."""
        found: dict[str, object] = {}
        for top in (self.root, *(self.home / name for name in ("state", "config", "cache", "board"))):
            for path in sorted([top, *top.rglob("*")]):
                status = path.lstat()
                digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
                found[str(path)] = (oct(status.st_mode), status.st_mtime_ns, digest)
        return found

    def requests(self) -> set[str]:
        path = self.home / "requests"
        return {line.split()[0] for line in path.read_text().splitlines()} if path.exists() else set()

    def check(self, before: dict[str, object], watched: Path) -> None:
        """Assert that nothing changed since ``before``."""
        assert self.tree() == before
        # `doctor` prints Python's platform.platform(), which runs uname.
        started = [line for line in watched.read_text().splitlines() if "['uname', '-p']" not in line]
        assert started == [], "a process was started, a signal sent or a keeper contacted"
        assert self.orders == b""
        assert self.requests() <= {"GET"}
        assert all(processes.alive(process) for process in self.running.values())
        assert not client.keeper_alive(self.root, "orphan")


@pytest.fixture
def box(bench, tmp_path, port, monkeypatch):
    """Three servers of ours and a foreign one."""
    box = Box(tmp_path, bench.root, f"http://127.0.0.1:{port}")
    for name in ("state", "config", "cache", "board"):
        (tmp_path / name).mkdir()
    (tmp_path / "config" / "vllm-console").mkdir()
    (tmp_path / "board").chmod(0o1777)
    config = f'read_only = false\nboard = "{tmp_path / "board"}"\n[alerts]\nterminal = ["bell"]\n'
    (tmp_path / "config" / "vllm-console" / "config.toml").write_text(config)
    script = tmp_path / "vllm"
    shutil.copy(FAKES / "recording_vllm.py", script)
    details = pack(Details("chatbot", "tiny", simulated_engine(), {"max-num-seqs": 256}, workload=WORK))
    own = {"RECORDED": str(tmp_path / "requests")}
    monkeypatch.setenv("RECORDED", own["RECORDED"])
    for name in ("orphan", "ordered", "gone"):
        taken = bench.spec().port
        argv = (sys.executable, str(script), "serve", "tiny", "--port", str(taken))
        bench.launch(LaunchSpec(argv, "127.0.0.1", taken, own, details=details), name)
    for name in ("orphan", "ordered"):
        record = bench.wait(State.READY, name)
        box.running[name] = record.server
    bench.wait(State.READY, "gone")
    bench.stopped("gone")
    for name in ("orphan", "ordered"):
        bench.orphaned(bench.read(name))
    lock = folders.take_lock(folders.server_folder(bench.root, "ordered"), 5)
    assert lock is not None
    listener = _recording_keeper(folders.server_folder(bench.root, "ordered") / "keeper.sock", box.orders)
    words = [sys.executable, str(script), "serve", "tiny", "--port", str(port)]
    other = subprocess.Popen(words, env={**os.environ, **own})
    box.running["other"] = processes.identity_of(processes.table()[other.pid])
    assert client.keeper_alive(bench.root, "ordered")
    try:
        yield box
    finally:
        listener.close()
        os.close(lock)
        other.kill()
        other.wait()


def _recording_keeper(path: Path, orders: bytearray) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            orders.extend(b"asked ")
            orders.extend(connection.recv(4096))
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    return listener


def lines_of(box: Box, commands: dict[str, list[str]], *before: str) -> list[list[str]]:
    places = {"URL": box.url, "LOG": str(folders.server_folder(box.root, "gone") / "server.log")}
    found = [[*before, name, *(places.get(word, word) for word in words)] for name, words in commands.items()]
    return [line for line in found if line[len(before)] in COMMANDS]


def run_each(box: Box, watched: Path, lines: list[list[str]], **env: str) -> list[dict[str, object]]:
    watched.touch()
    words = [sys.executable, str(FAKES / "watched_program.py"), str(watched), "--each"]
    done = subprocess.run(
        words, input=json.dumps(lines), env={**box.env, **env}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, object]] = json.loads(done.stdout)
    return answers


def test_all_commands_are_covered():
    assert set(COMMANDS) <= READING.keys() | REFUSED.keys()
    assert set(REFUSED) == CHANGING
    assert not READING.keys() & REFUSED.keys()


def test_every_command_changes_nothing_in_read_only_mode(box, tmp_path):
    before, watched = box.tree(), tmp_path / "watched"
    shown = lines_of(box, READING, "--read-only")
    refused = lines_of(box, REFUSED, "--read-only")
    verbs = [["--read-only", *words] for words in REFUSED_WORDS]
    answers = run_each(box, watched, [*shown, *refused, *verbs])
    assert [answer["code"] for answer in answers[-len(verbs) :]] == [4] * len(verbs)
    answers = answers[: -len(verbs)]
    results = {line[1]: answer for line, answer in zip(shown + refused, answers, strict=True)}
    for name in REFUSED:
        assert results[name]["code"] == 4, (name, results[name])
        assert "read-only (--read-only)" in results[name]["err"]
    assert {name for name in READING if name in results and results[name]["code"] == 4} == set()
    for name in ("list", "status", "watch", "logs", "metrics", "board", "gpus"):
        assert results[name]["code"] == 0, (name, results[name])
    assert all(
        name in results["list"]["out"] for name in ("orphan", "ordered", "gone", f"vllm@{box.url.rpartition(':')[2]}")
    )
    assert "a keeper died" in results["list"]["err"]
    assert box.requests() == {"GET"}, "it was read"
    box.check(before, watched)
    assert not (tmp_path / "x.svg").exists()


def test_administrator_setting_overrides_user_setting(box, tmp_path):
    admin = box.admin("read_only = true\n")
    loose = tmp_path / "loose.toml"
    loose.write_text("read_only = false\n")
    (tmp_path / "config" / "vllm-console" / "config.toml").write_text("read_only = false\n")
    before, watched = box.tree(), tmp_path / "watched"
    around = {"ADMIN": str(admin), "XDG_CONFIG_DIRS": str(tmp_path / "config")}
    lines = [*lines_of(box, REFUSED), ["--config", str(loose), "stop", "ordered"], ["list"]]
    answers = run_each(box, watched, lines, **around)
    for line, answer in zip(lines[:-1], answers, strict=False):
        assert answer["code"] == 4, (line, answer)
        assert f"read_only = true in {admin}" in str(answer["err"])
    assert answers[-1]["code"] == 0
    box.check(before, watched)


def test_administrator_file_must_not_be_writable_by_others(box, tmp_path):
    admin = box.admin("read_only = true\n")
    around, watched = {"ADMIN": str(admin)}, tmp_path / "watched"

    def run_as_user(words: list[str]) -> dict[str, object]:
        return run_each(box, watched, [words], **around)[0]

    admin.chmod(0o666)
    answer = run_as_user(["list"])
    assert "is ignored" in str(answer["err"])
    assert "is writable by users other than root" in str(answer["err"])
    admin.chmod(0o644)
    admin.parent.chmod(0o777)
    assert "is ignored" in str(run_as_user(["list"])["err"])
    admin.parent.chmod(0o755)
    admin.write_text("read_onyl = true\n")
    answer = run_as_user(["list"])
    assert answer["code"] == 2, "an unreadable administrator file is not ignored"
    assert "did you mean 'read_only'" in str(answer["err"])


def public_methods(owner: type) -> set[str]:
    return {name for name, value in vars(owner).items() if callable(value) and not name.startswith("_")}


def test_every_fleet_verb_is_refused_or_read_only(box, tmp_path):
    assert public_methods(LocalFleet) == READING_VERBS | REFUSED_VERBS.keys()
    for kind, reading, refused in PARTS.values():
        assert public_methods(kind) == reading | refused.keys()
    assert public_methods(StagedPredictions) == {"ask", "cancel", "close"}, "it stores nothing"
    before = box.tree()
    settings = Settings(board=str(tmp_path / "board"))
    fleet = LocalFleet(box.root, settings=settings, read_only=True, read_only_by="a test", interactive=True)
    try:
        parts = {name for name, value in vars(fleet).items() if not name.startswith("_") and hasattr(value, "__dict__")}
        lazy = {name for name, value in vars(LocalFleet).items() if isinstance(value, cached_property)}
        assert parts | {name for name in lazy if not name.startswith("_")} == PARTS.keys()
        changing = [(fleet, REFUSED_VERBS), *((getattr(fleet, name), calls) for name, (_, _, calls) in PARTS.items())]
        for owner, calls in changing:
            for name, words in calls.items():
                with pytest.raises(RefusedError, match="read-only") as raised:
                    getattr(owner, name)(*words)
                assert raised.value.exit_code == 4
        for _ in range(3):
            assert fleet.snapshot("ordered").server("ordered") is not None
        assert fleet.claims.board().claims == ()
        fleet.history.runs()
        assert fleet.history.last_change("ordered") is None
        fleet.history.judge_past()
        fleet.plan(LaunchRequest("chatbot", engine="simulated"))
    finally:
        fleet.close()
    assert box.tree() == before
    assert box.orders == b""
    assert box.requests() <= {"GET"}


def test_all_actions_are_covered():
    reachable = [action for action in actions() if action.scope in ("app", "operations")]
    assert {action.id for action in reachable if not action.changes} == READING_ACTIONS
    elsewhere = [action for action in actions() if action.scope not in ("app", "operations")]
    assert {action.scope for action in elsewhere} == set(SCREENS)
    for scope, changing in CHANGING_KEYS.items():
        assert {action.id for action in elsewhere if action.scope == scope and action.changes} == changing, scope


@pytest.mark.terminal
def test_pressing_every_key_in_read_only_console_changes_nothing(box, tmp_path, terminal_module):
    quitting = {key for action in actions() if action.id == "quit" for key in action.keys}
    keys = dict.fromkeys(key for action in actions() for key in action.keys if key not in quitting)
    before, watched = box.tree(), tmp_path / "watched"
    watched.touch()
    words = [sys.executable, str(FAKES / "watched_program.py"), str(watched)]
    env = {**box.env, "WORDS": "--read-only --refresh 0.25"}
    terminal = terminal_module.Terminal(words, 120, 40, env, tmp_path)  # screenshots are saved in the current folder
    try:
        terminal.wait_for("ordered")
        terminal.wait_for("read-only (--read-only): nothing can be changed here")
        terminal.press("j")  # to a server without a message of its own
        terminal.wait_for("a keeper died")
        for key in keys:
            for keystroke in (typed(key), "\x1b"):
                terminal.press(keystroke)
                terminal.pump(0.06)
        for _ in range(3):
            terminal.press("\x1b")
            terminal.pump(0.3)
        terminal.wait_for("read-only (--read-only)")
        assert terminal.process.poll() is None
        # A key right after escape is parsed as another key; on an open screen, q closes it.
        for _ in range(120):
            if terminal.process.poll() is None:
                terminal.press("q")
                terminal.pump(0.5)
        assert terminal.wait_end() == 0
    finally:
        terminal.close()
    box.check(before, watched)


def test_same_checks_detect_changes_without_read_only(box, tmp_path):
    """Verifies that the hash, the audit hook and the recording keeper detect changes."""
    before, watched = box.tree(), tmp_path / "watched"
    answers = run_each(box, watched, [["claim", "0", "--until", "2h"], ["list"]])
    assert [answer["code"] for answer in answers] == [0, 0]
    assert box.tree() != before
    assert "subprocess.Popen" in watched.read_text() or "os.fork" in watched.read_text(), "the orphan was adopted"
    deadline = time.monotonic() + PATIENCE
    while not client.keeper_alive(box.root, "orphan"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(processes_keeper(box, "orphan"), signal.SIGKILL)


def processes_keeper(box: Box, name: str) -> int:
    keeper = client.read(box.root, name).keeper
    assert keeper is not None
    return keeper.pid
