"""Canaries of every kind of secret pass through the program; then all files and output are searched."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fakes.ports import free_port

SERVER = """#!{python}
import os, sys, time
if not sys.argv:
    from vllm.entrypoints.cli.main import main
if sys.argv[1:2] != ["serve"]:
    print("0.33.0"); sys.exit(0)
keys = {{name: os.environ[name] for name in {names!r} if name in os.environ}}
print("INFO 11-20 11:53:24 [utils.py:233] non-default args:", {{"api_key": [keys["VLLM_API_KEY"]], "env": keys}})
print("Authorization: Bearer", keys["VLLM_API_KEY"], "for", keys.get("UPSTREAM_URL"), flush=True)
for name, value in keys.items():
    for part in (name, " is told in pieces: ", value[:7], value[7:20], value[20:], "\\n"):
        sys.stdout.write(part); sys.stdout.flush(); time.sleep(0.02)
try:
    raise RuntimeError("401 for " + repr(keys))
except RuntimeError:
    import traceback; traceback.print_exc()
sys.stderr.flush()
argv = [word for word in sys.argv[1:]]
os.execv({python!r}, [{python!r}, "-m", "vllm_launchers.simulated", *argv])
"""
"""A server that logs all of its secrets in every known way, then serves."""

EACH = """
import json, os, sys
from vllm_console.cli.main import main
from vllm_console.crash_report import write_report
for words in json.loads(sys.argv[1]):
    print("@@@", words[0], flush=True)
    main(words)
secret = " ".join(os.environ[name] for name in {names!r})
try:
    raise RuntimeError(f"401 for {{secret}}") from ValueError(os.environ["CI_SECRET"])
except RuntimeError as error:
    print("@@@", write_report(error, ["start", "--env", "MY_SERVICE_PASSWORD=" + os.environ["MY_SERVICE_PASSWORD"]]))
"""
"""Several commands in one process, and an exception with all secrets in its text."""

GIVEN_BY_ENVIRONMENT = (
    *("VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    *("MY_SERVICE_PASSWORD", "CI_SECRET", "ALERTS_AUTHORIZATION"),
)
GIVEN_BY_FLAG = ("EXTRA_TOKEN", "UPSTREAM_URL")


def canary() -> str:
    return f"cAnArY{secrets.token_hex(16)}"


@dataclass
class Box:
    """A home with canaries in its environment, and the program in it."""

    home: Path
    canaries: dict[str, str] = field(default_factory=lambda: {n: canary() for n in GIVEN_BY_ENVIRONMENT})
    said: list[tuple[str, bytes]] = field(default_factory=list)

    def new(self, kind: str) -> str:
        self.canaries[kind] = canary()
        return self.canaries[kind]

    @property
    def env(self) -> dict[str, str]:
        own = {name: self.canaries[name] for name in GIVEN_BY_ENVIRONMENT}
        folders = {f"XDG_{name.upper()}_HOME": str(self.home / name) for name in ("state", "config", "cache")}
        return {**os.environ, **own, **folders, "HOME": str(self.home), "SIMULATED_STARTUP_SECONDS": "0"}

    def __call__(self, *words: str, umask: int = -1) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_console", *words], env=self.env, capture_output=True, timeout=180, check=False,
            stdin=subprocess.DEVNULL, umask=umask,
        )  # fmt: skip
        self.said.append((" ".join(words), done.stdout + done.stderr))
        return done

    def found(self, data: bytes) -> list[str]:
        """The kinds of canaries in some bytes, including base64-encoded ones (OSC 52)."""
        for packed in re.findall(rb"\x1b\]52;c;([A-Za-z0-9+/=]+)", data):
            with contextlib.suppress(binascii.Error):  # hostile command lines of other tests are in /proc too
                data += b"\n" + base64.b64decode(packed)
        return [kind for kind, value in self.canaries.items() if value.encode() in data or value.encode()[:20] in data]

    def command_lines(self) -> list[str]:
        """Canaries in the command line of any process on this machine."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found += [f"{kind} in {path}" for kind in self.found(path.read_bytes())]
        return found

    def files(self) -> list[str]:
        """Canaries in any file below the program's folders, including databases and the shared board."""
        paths = [path for name in ("state", "config", "cache", "board") for path in (self.home / name).rglob("*")]
        files = [path for path in paths if path.is_file() and path not in self.given]
        assert len(files) > 5
        return [f"{kind} in {path}" for path in files for kind in self.found(path.read_bytes())]

    @property
    def given(self) -> list[Path]:
        """Files that this test wrote canaries to."""
        return [self.home / "config/vllm-console/config.toml", *(self.home / "config/vllm-console/presets").glob("*")]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A server started, put under load and restarted with ``umask 000``; stopped at the end."""
    box = Box(tmp_path_factory.mktemp("box"))
    config = box.home / "config" / "vllm-console"
    (config / "presets").mkdir(parents=True, mode=0o700)
    hook = f'webhook = "https://127.0.0.1:9/hooks/{box.new("webhook")}"\nwebhook_header_env = "ALERTS_AUTHORIZATION"\n'
    (box.home / "board").mkdir(mode=0o700)
    (box.home / "board").chmod(0o1777)
    (config / "config.toml").write_text(f'board = "{box.home / "board"}"\n[alerts]\n{hook}')
    vllm = box.home / "vllm"
    vllm.write_text(SERVER.format(python=sys.executable, names=(*GIVEN_BY_ENVIRONMENT, *GIVEN_BY_FLAG)))
    vllm.chmod(0o755)
    extra, upstream = box.new("EXTRA_TOKEN"), box.new("UPSTREAM_URL")
    given = ("--env", f"EXTRA_TOKEN={extra}", "--env", f"UPSTREAM_URL=http://me:{upstream}@127.0.0.1:9/v1")
    try:
        words = ("start", "chatbot", "--vllm", str(vllm), "--name", "chat", "--gpus", "none", "--force", "--wait")
        address = ("--host", "0.0.0.0", "--port", str(free_port()))
        done = box(*words, *address, "--timeout", "60", *given, umask=0)
        assert done.returncode == 0, done.stdout + done.stderr
        yield box
    finally:
        box("stop", "chat")
        box("stop", "open")


def test_no_written_or_displayed_data_contains_a_secret(box: Box) -> None:
    record = box.home / "state/vllm-console/servers/chat/record.json"
    log = record.with_name("server.log").read_text()
    assert "non-default args" in log
    assert "EXTRA_TOKEN is told in pieces: •••" in log, "the server printed its secrets, and the keeper masked them"
    assert {"EXTRA_TOKEN", "UPSTREAM_URL", "VLLM_API_KEY"} <= set(
        json.loads(record.read_text())["generations"][-1]["spec"]["secret_names"]
    )
    restarted = box("restart", "chat", "--set", "max-num-seqs=64", "--wait", "--timeout", "60")
    assert restarted.returncode == 0, restarted.stderr
    assert box.command_lines() == []
    port = str(json.loads(box("status", "chat", "--json").stdout)["port"])
    commands = [
        ["list"],
        ["status", "chat"],
        ["plan", "chatbot", "--engine", "simulated"],
        ["runs"],
        ["host"],
        ["engines"],
    ]
    commands += [["logs", "chat", "-n", "500"], ["compare", "chat"], ["metrics", f"http://127.0.0.1:{port}/metrics"]]
    commands += [["load", "chat", "--duration", "1", "--rate", "2"], ["diagnose", str(record.with_name("server.log"))]]
    commands += [["plan", "chatbot", "--engine", "simulated", "--env", f"ANY_KEY={box.new('plan')}"]]
    words = [[*command, *more] for command in commands for more in ((), ("--json",))]
    forms = ("shell", "config", "systemd-user", "compose", "kubernetes")
    words += [["plan", "chatbot", "--vllm", str(box.home / "vllm"), "--export", form] for form in forms]
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda one: box(*one), words))
    assert all(b"Traceback" not in one.stderr for one in done)
    assert sum(one.returncode == 0 for one in done) > 20
    assert {what: box.found(text) for what, text in box.said if box.found(text)} == {}
    assert box.files() == []


def test_reports_exports_and_board_pages_contain_no_secret(box: Box) -> None:
    """Data meant for sharing: ``doctor``, a crash report, dashboards and rules, a board page."""
    lines = [["doctor"], ["doctor", "--json"], ["board"], ["board", "--json"], ["check", "chat"], ["presets", "--json"]]
    lines += [["export", form, "chat"] for form in ("prometheus", "grafana")] + [["leftovers"], ["list", "--json"]]
    code = EACH.format(names=GIVEN_BY_ENVIRONMENT)
    words = [sys.executable, "-c", code, json.dumps(lines)]
    done = subprocess.run(words, env=box.env, capture_output=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode()
    assert said.count("@@@") == len(lines) + 1
    crashes = list((box.home / "state/vllm-console/crashes").glob("crash-*.txt"))
    assert str(crashes[-1]) in said
    assert "401 for" in crashes[-1].read_text()
    page = box.home / "board" / f"{os.getuid()}.json"
    assert "chat" in page.read_text(), "its being running is public"
    assert "VLLM_API_KEY" in said, "doctor lists which variables are set, without values"
    assert box.found(done.stdout + done.stderr) == []
    assert box.files() == []


def test_secret_in_wrong_option_is_refused_and_not_echoed(box: Box) -> None:
    presets = box.home / "config/vllm-console/presets"
    (presets / "mine.toml").write_text(f'extends = "chatbot"\n[flags]\napi-key = "{box.new("preset")}"\n')
    (presets / "more.toml").write_text(
        f'extends = "chatbot"\n[flags]\nkv-transfer-config = \'{{"password": "{box.new("JSON in a preset")}"}}\'\n'
    )
    typed = [
        ["--set", f"api-key={box.new('--set api-key')}"],
        ["--set", f"hf-token={box.new('--set hf-token')}"],
        ["--set", f"ssl-keyfile-password={box.new('ssl-keyfile-password')}"],
        ["--set", f'override-generation-config={{"api_key": "{box.new("JSON")}"}}'],
        ["--set", f"kv-transfer-config.password={box.new('key of JSON')}"],
        ["--set", f"otlp-traces-endpoint=http://me:{box.new('URL')}@127.0.0.1:9"],
        ["--model", f"https://me:{box.new('model')}@127.0.0.1/m"],
        ["--api-key", box.new("--api-key")],
        [f"--api-key={box.new('--api-key=')}"],
    ]
    before = len(box.said)
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda one: box("start", "chatbot", "--engine", "simulated", *one), typed))
        box("presets")
        box("plan", "mine")
        box("plan", "more")
    assert all(one.returncode in (1, 2) and one.stderr for one in done)
    text = b"\n".join(said for _, said in box.said[before:])
    assert box.found(text) == []
    assert b"Traceback" not in text
    assert box.files() == []


def test_no_console_screen_shows_a_secret(box: Box, terminal_module) -> None:
    own = {name: value for name, value in box.env.items() if os.environ.get(name) != value}
    terminal = terminal_module.Terminal([sys.executable, "-m", "vllm_console"], 120, 40, own)
    try:
        terminal.wait_for("ready")
        typed = box.new("flags editor")
        for keys, shown in (
            *(
                ("d", "Command"),
                ("y", ""),
                ("\x1b", "Servers"),
                ("l", "n older"),
                ("y", ""),
                ("\x1b", "Servers"),
            ),
            *(("e", "max-num-seqs"), ("\x1b", "Servers"), ("n", "chatbot"), ("y", "")),
        ):
            terminal.press(keys)
            terminal.wait_for(shown) if shown else terminal.pump(0.5)
        terminal.press("a")
        terminal.pump(0.5)
        terminal.press(f"api-key={typed}")
        terminal.pump(0.5)
        terminal.press("\r")
        for _ in range(20):
            terminal.pump(0.1)
        while "Servers" not in terminal.text:
            terminal.press("\x1b")
            terminal.wait_for(lambda text, before=terminal.text: text != before)
        assert b"\x1b]52;" in terminal.raw, "something was copied"
        seen = box.found(bytes(terminal.raw))
        assert [kind for kind in seen if kind != "flags editor"] == []  # typed text is visible while typing
        titles = re.findall(rb"\x1b\][012];([^\x07\x1b]*)", bytes(terminal.raw))
        assert box.found(b"\n".join(titles)) == [], "the terminal title persists in tmux and the window list"
        assert box.files() == []
        assert box.command_lines() == []
    finally:
        terminal.close()


def test_files_are_private_to_user_for_any_umask(box: Box) -> None:
    done = box("plan", "chatbot", "--engine", "simulated", umask=0)
    assert done.returncode == 0
    for name in ("state", "cache"):
        top = box.home / name / "vllm-console"
        for path in (top, *top.rglob("*")) if top.exists() else ():
            mode = path.lstat().st_mode & 0o777
            assert not mode & 0o077, f"{path} is {mode:o}"


def test_removed_server_leaves_only_its_metrics(box: Box) -> None:
    """Last test of this box: no log, record or environment remains."""
    assert box("stop", "chat", "--timeout", "60").returncode == 0
    done = box("remove", "chat", umask=0)
    assert done.returncode == 0, done.stderr
    state = box.home / "state/vllm-console"
    assert not (state / "servers/chat").exists()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (state / "removed").glob("chat@*/*")}
    assert modes.keys() <= {"history.sqlite", "loads.jsonl"}
    assert "history.sqlite" in modes
    assert set(modes.values()) == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (state / "removed", *(state / "removed").iterdir())} == {
        0o700
    }
    assert box.files() == []
    assert box("remove", "chat", "--purge").returncode == 0
    assert list((state / "removed").iterdir()) == []
    assert box("remove", "chat", "--purge").returncode == 3
