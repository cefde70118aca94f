"""``attach ssh://HOST``: the fleet of another machine, read and controlled over ssh, with a fake local ssh."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.commands import PATIENCE
from fakes.keeper_bench import end_servers
from vllm_console.fleet.local import LocalFleet
from vllm_launchers.errors import OperationError, RefusedError
from vllm_launchers.keeper import client
from vllm_launchers.launch.errors import UnfitError
from vllm_launchers.launch.request import RestartOptions
from vllm_launchers.vllm.flags.changes import Changes

FAKES = Path(__file__).parents[1] / "fakes"


@pytest.fixture
def gpubox(program: Any, tmp_path: Path) -> Iterator[Path]:
    """The home of a user on another machine, with a server; attached."""
    home = tmp_path / "hosts" / "gpubox"
    (home / "config").mkdir(parents=True)
    there = {"XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config")}
    try:
        program.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait", env=there)
        program.env |= {
            "FAKE_SSH_HOMES": str(tmp_path / "hosts"),
            "FAKE_SSH_PATH": str(Path(sys.executable).parent),
            "PATH": f"{FAKES}{os.pathsep}{os.environ['PATH']}",
        }
        attached = program.json("attach", "ssh://gpubox")
        assert (attached["name"], attached["problem"]) == ("gpubox", None)
        assert "gpubox/chat" in [server["name"] for server in attached["servers"]]
        yield home
    finally:
        end_servers(home / "state" / "vllm-console")


def settled(fleet: LocalFleet, done: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not done(found := fleet.snapshot()):
        assert time.monotonic() < deadline, found.servers
        time.sleep(0.1)
    return found


def test_commands_for_remote_servers_run_on_their_machine(program: Any, gpubox: Path) -> None:
    (chat,) = (one for one in program.json("list") if one["name"] == "gpubox/chat")
    assert (chat["ours"], chat["host"], chat["state"]) == (False, "gpubox", "ready")
    assert program.json("status", "gpubox/chat")["name"] == "chat"
    assert program("chat", "gpubox/chat", "--max-tokens", "4", typed="hi").stdout.strip()
    assert "chat runs without --enable-lora" in program("lora", "list", "gpubox/chat").stdout
    assert program.json("plan", "gpubox/chatbot", "--engine", "simulated")["preset"] == "chatbot"
    after = program.json("restart", "gpubox/chat", "--set", "max-num-seqs=64", "--wait")
    assert after["generation"] == 2
    refused = program("restart", "gpubox/chat", "--set", "max-num-seqs=-4")
    assert refused.returncode == 1
    assert "--max-num-seqs must be 1 or more" in refused.stderr
    assert program("stop", "gpubox/nobody").returncode == 3
    assert program("--read-only", "stop", "gpubox/chat").returncode == 4
    (gpubox / "config" / "vllm-console").mkdir()
    (gpubox / "config" / "vllm-console" / "config.toml").write_text("read_only = true\n")
    forbidden = program("stop", "gpubox/chat")
    assert forbidden.returncode == 4, "the settings of the remote machine apply"
    assert "read_only = true" in forbidden.stderr
    (gpubox / "config" / "vllm-console" / "config.toml").unlink()
    assert program.json("stop", "gpubox/chat")["state"] == "stopped"
    named = program("status", "gpubox")
    assert (named.returncode, "name one of its servers, gpubox/chat" in named.stderr) == (3, True)
    gpubox.rename(gpubox.with_name("away"))
    away = program("status", "gpubox")
    assert (away.returncode, "Connection refused" in away.stdout) == (0, True)
    gpubox.with_name("away").rename(gpubox)
    assert program("detach", "gpubox").returncode == 0
    assert program("status", "gpubox/chat").returncode == 3


def test_does_not_wait_for_process_holding_ssh_pipe(program: Any, gpubox: Path, tmp_path: Path) -> None:
    """For example the master process of a shared connection, which stays for later commands."""
    left = tmp_path / "left"
    says = f"sleep 600 </dev/null >/dev/null & echo $! >{left}; echo done; echo last words >&2; exit 7"
    answer = program("status", "gpubox/chat", env={"FAKE_SSH_SAYS": says})
    pid = int(left.read_text())
    os.kill(pid, signal.SIGKILL)  # it still exists
    assert (answer.returncode, answer.stdout, answer.stderr) == (7, "done\n", "last words\n")


def test_console_uses_one_connection_and_reconnects(
    program: Any, gpubox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "FAKE_SSH_HOMES", "FAKE_SSH_PATH", "HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, program.env[name])
    asked = len((gpubox / "asked").read_text().splitlines())
    state = program.home / "state" / "vllm-console"
    fleet = LocalFleet(state, interactive=True, observe=False, gpus=False, remote=True)
    try:
        view = settled(fleet, lambda seen: seen.server("gpubox/chat") is not None).server("gpubox/chat")
        assert (view.remote, view.remote_ours, view.ours) == ("gpubox", True, False)
        with pytest.raises(OperationError, match=r"^gpubox: "):
            fleet.stop("gpubox/nobody")
        with pytest.raises(RefusedError):
            fleet.forget("gpubox/chat")
        with pytest.raises(UnfitError, match=r"^gpubox: plan error: .*--max-num-seqs must be 1 or more") as refused:
            fleet.restart("gpubox/chat", Changes(set={"max-num-seqs": -4}))
        assert [finding.level for finding in refused.value.findings] == ["error"]
        assert not refused.value.forceable
        options = RestartOptions(environment={"A_VARIABLE": "there"})
        fleet.restart("gpubox/chat", Changes(set={"max-num-seqs": 32}), options)
        settled(fleet, lambda seen: (one := seen.server("gpubox/chat")) is not None and one.generation == 2)
        spec = client.read(gpubox / "state" / "vllm-console", "chat").generations[-1].spec
        assert spec.environment["A_VARIABLE"] == "there"
        assert len((gpubox / "asked").read_text().splitlines()) == asked + 1
        connection = fleet.attached._hosts.connection("gpubox")
        session = connection._session
        assert session is not None
        os.killpg(session._process.pid, signal.SIGKILL)  # the shell and its command
        settled(fleet, lambda seen: (one := seen.server("gpubox")) is not None and one.state_text == "unreachable")
        settled(fleet, lambda seen: seen.server("gpubox/chat") is not None)
        fleet.stop("gpubox/chat")
        settled(fleet, lambda seen: str(seen.server("gpubox/chat").state) == "stopped")
    finally:
        fleet.close()
