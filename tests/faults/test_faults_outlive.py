"""Servers survive consoles, terminals, tmux, deletion of the program's files, and upgrades."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.keeper_bench import PATIENCE
from fakes.terminal import Terminal
from vllm_console.cli.main import main
from vllm_launchers import keeper as keeper_package
from vllm_launchers.keeper import client, errors, folders, processes, wire
from vllm_launchers.keeper.records import RECORD_VERSION, RestartMode, RestartPolicy, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.vllm.engines import Engine, EngineKind

LAUNCH = """
import json, os, sys
from pathlib import Path
from vllm_launchers.keeper import client, wire
from vllm_launchers.keeper.records import LaunchSpec
root, name, spec, tuning = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
client.launch(root, name, wire.from_plain(LaunchSpec, spec), tuning=tuning)
if len(sys.argv) > 5:
    os.execv(sys.executable, [sys.executable, "-m", "vllm_console", "--state", str(root)])
"""
TUNING = {"stop_timeouts": {"interrupt": 1.0, "terminate": 1.5, "rest": 0.7, "kill": 5.0},
          "health_check_starting": 0.05, "health_check_ready": 0.1}  # fmt: skip
WAYS = ["killed", "hung up", "closed"]


def launching(bench, name: str, spec, *more: str) -> list[str]:
    return ["-c", LAUNCH, str(bench.root), name, json.dumps(wire.to_plain(spec)), json.dumps(TUNING), *more]


def answers(record) -> bool:
    with socket.create_connection(("127.0.0.1", record.current.spec.port), 5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        return connection.recv(100).startswith(b"HTTP/1.1 200")


def test_servers_survive_their_consoles_and_terminals(bench, wait_until, tmp_path):  # noqa: C901 (one scene)
    """Consoles in separate terminals: killed, hung up, terminal closed, tmux killed."""
    details = pack(Details(preset="chatbot", model="m", engine=Engine(EngineKind.SIMULATED, ("x",), "1", "cpu", "x")))
    names = {way: way.replace(" ", "-") for way in WAYS}
    specs = {way: bench.spec(details=details) for way in WAYS}
    terminals = {
        way: Terminal([sys.executable, *launching(bench, names[way], specs[way], "console")], 120, 30, {})
        for way in WAYS
    }
    tmux = shutil.which("tmux")
    if tmux is not None:
        names["tmux"] = "tmux"
        tmux = [tmux, "-S", str(tmp_path / "socket"), "-f", "/dev/null"]
        words = [sys.executable, *launching(bench, "tmux", bench.spec(details=details), "console")]
        subprocess.run([*tmux, "new-session", "-d", "-x", "120", "-y", "30", *words], check=True)
    try:
        for terminal in terminals.values():
            terminal.wait_for("quit")
        if tmux is not None:
            shown = [*tmux, "capture-pane", "-p"]
            wait_until(lambda: "quit" in subprocess.run(shown, capture_output=True, text=True, check=True).stdout)
        before = {name: bench.wait(State.READY, name) for name in names.values()}
        consoles = {way: terminal.process for way, terminal in terminals.items()}

        consoles["killed"].kill()
        os.killpg(consoles["hung up"].pid, signal.SIGHUP)
        terminals["closed"].hang_up()
        if tmux is not None:
            subprocess.run([*tmux, "kill-server"], check=True)
            wait_until(lambda: subprocess.run(shown, capture_output=True, check=False).returncode != 0)
        assert consoles["killed"].wait(PATIENCE) == -signal.SIGKILL
        for way in ("hung up", "closed"):
            consoles[way].wait(PATIENCE)
    finally:
        for terminal in terminals.values():
            terminal.close()
        if tmux is not None:
            subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)
    assert bench.adopt() == [], "no keeper ended either"
    for name, was in before.items():
        record = bench.read(name)
        assert (record.state, record.server, record.keeper) == (State.READY, was.server, was.keeper)
        assert answers(record)
        assert os.getsid(record.keeper.pid) != os.getsid(record.server.pid)
    for name in before:
        bench.stop(name)
    for name in before:
        bench.wait(State.STOPPED, name)


def test_keeper_survives_deletion_of_its_installation(bench, session_of, tmp_path):
    """The package, virtual environment, working folder and runtime folder are deleted."""
    package, place = Path(keeper_package.__file__).parents[1], tmp_path / "place"
    site, run, cwd, venv = (place / name for name in ("site", "run", "cwd", "venv"))
    for folder in (run, cwd):
        folder.mkdir(parents=True)
    for name in ("keeper", "probe"):
        shutil.copytree(package / name, site / "vllm_launchers" / name, ignore=shutil.ignore_patterns("*.pyc"))
    for name in (
        "__init__",
        "addresses",
        "errors",
        "http_connection",
        "listeners",
        "patterns",
        "private",
        "procfs",
        "secrets",
        "units",
        "values",
    ):
        shutil.copy(package / f"{name}.py", site / "vllm_launchers" / f"{name}.py")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    quiet = tmp_path / "quiet"
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=0.05)
    sidecar_command = (str(venv / "bin" / "python"), "-S", "-c", "import time; time.sleep(600)")
    spec = bench.spec("--quiet-file", str(quiet), "--children", "1", restart=policy, sidecar=sidecar_command)
    environment = {**os.environ, "PYTHONPATH": str(site), "XDG_RUNTIME_DIR": str(run)}
    words = [str(venv / "bin" / "python"), *launching(bench, "one", spec)]
    subprocess.run(words, check=True, cwd=cwd, env=environment)
    first = bench.wait(State.READY)
    assert str(site) in Path(f"/proc/{first.keeper.pid}/cmdline").read_text()
    assert str(venv) in Path(f"/proc/{first.keeper.pid}/cmdline").read_text()
    shutil.rmtree(place)
    assert not site.exists()

    quiet.touch()
    assert "HTTP 503" in bench.wait(State.UNRESPONSIVE).reason
    quiet.unlink()
    bench.wait(State.READY)
    processes.send(first.server, signal.SIGKILL)
    again = bench.until(lambda record: record.state is State.READY and record.attempt == 1)
    bench.restart(bench.spec("--ignore", "TERM", "--children", "1"))
    second = bench.wait(State.READY, generation=2)
    with pytest.raises(errors.StillAliveError):
        client.remove(bench.root, "one")
    bench.stop()
    stopped = bench.wait(State.STOPPED)
    assert stopped.exit.signal == "SIGKILL"
    assert first.keeper == again.keeper == second.keeper
    assert not session_of(second.server.pid)
    bench.until(lambda _: not client.keeper_alive(bench.root, "one"))
    notes = bench.file("keeper.log").read_text()
    assert "internal error" not in notes
    assert "Error" not in notes
    assert "can't start the sidecar" in notes, "the loss of its interpreter is reported"


@pytest.mark.parametrize("keeper_lives", [True, False])
def test_newer_record_is_refused_and_its_server_keeps_running(bench, keeper_lives, capsys):
    ready = bench.ready(bench.spec())
    if not keeper_lives:
        bench.orphaned(ready)
    raw = json.loads(wire.dumps(ready)) | {"version": RECORD_VERSION + 1, "server": {"kind": "unheard of"}}
    newer = json.dumps(raw).encode()
    bench.file("record.json").write_bytes(newer)
    expected = "newer vllm-console .* update vllm-console"
    for act in (
        lambda: bench.stop(),
        lambda: bench.restart(bench.spec()),
    ):
        with pytest.raises(errors.NewerRecordError, match=expected):
            act()
    with pytest.raises(errors.StillAliveError if keeper_lives else errors.NewerRecordError):
        client.remove(bench.root, "one")
    with pytest.raises(errors.NameTakenError):
        bench.launch(bench.spec())
    assert bench.adopt() == []
    for words in (["list"], ["status", "one"], ["stop", "one"], ["restart", "one"], ["remove", "one"]):
        code = main(["--state", str(bench.root), *words])
        said = capsys.readouterr()
        assert "update vllm-console" in said.out + said.err, words
        assert "Traceback" not in said.out + said.err
        assert code in ((0, 1) if words == ["list"] else (1, 2, 3, 4)), words
    assert bench.file("record.json").read_bytes() == newer, "unchanged"
    assert processes.alive(ready.server)
    assert answers(ready)

    folders.write_record(folders.server_folder(bench.root, "one"), ready)  # as if the newer console had written it
    assert bench.stopped().exit.requested


def test_response_of_newer_keeper_is_refused_with_message(monkeypatch, tmp_path):
    monkeypatch.setattr("vllm_launchers.keeper.wire.ask", lambda *_: {"record": {"version": RECORD_VERSION + 1}})
    with pytest.raises(errors.NewerRecordError, match="update vllm-console"):
        client._ask(tmp_path, {"do": "read"})
