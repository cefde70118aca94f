"""Fleets of other machines: addresses, messages over ssh, and faulty connections."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from fakes import fake_fleet as fakes
from vllm_console.cli.elsewhere import run_elsewhere
from vllm_console.cli.main import parse
from vllm_console.fleet import remote_hosts
from vllm_console.fleet.local import LocalFleet
from vllm_console.fleet.remote_hosts import (
    Connection,
    RemoteHost,
    RemoteHosts,
    Session,
    host_from,
    read_hosts,
    split_host,
    write_hosts,
)
from vllm_console.fleet.remote_protocol import (
    LEFT_OUT,
    ProtocolError,
    decode,
    decode_error,
    decode_options,
    encode,
    error_document,
    snapshot_document,
    views_of,
)
from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.fleet.types import HOSTS
from vllm_launchers.errors import OperationError, RefusedError, UsageError
from vllm_launchers.launch.errors import UnfitError
from vllm_launchers.launch.request import RestartOptions
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.vllm.flags.changes import Changes

SSH = Path(__file__).parents[2] / "fakes"


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("ssh://gpubox", RemoteHost("gpubox", "gpubox")),
        ("ssh://anna@gpu-1.example:2222", RemoteHost("gpu-1.example", "anna@gpu-1.example", 2222)),
        ("ssh://gpubox/opt/venv/bin/vllm-console", RemoteHost("gpubox", "gpubox", None, "/opt/venv/bin/vllm-console")),
    ],
)
def test_valid_address_is_parsed(url: str, host: RemoteHost) -> None:
    assert host_from(url, None) == host
    assert host_from(host.url, host.name) == host


@pytest.mark.parametrize(
    "url",
    [
        "ssh://",
        "ssh://-oProxyCommand=x",
        "ssh://a@-oX",
        "ssh://u:s3cret@h",
        "ssh://h/a;reboot",
        "ssh://h/$(x)",
        "ssh://h?x",
        "ssh://a b",
    ],
)
def test_option_or_command_is_not_an_address(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        host_from(url, None)
    assert "s3cret" not in str(refused.value)


def test_words_reach_the_other_machine_unchanged() -> None:
    argv = RemoteHost("box", "anna@box").argv(["stop", "a; rm -rf /", "$(x)"])
    before, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    assert "BatchMode=yes" in before
    assert command[0] == "anna@box"
    assert shlex.split(command[1]) == ["vllm-console", "stop", "a; rm -rf /", "$(x)"]


def test_invalid_hosts_file_starts_nothing(tmp_path: Path) -> None:
    bad = '[{"name": "a", "destination": "-oProxyCommand=x"}, {"name": "b", "destination": "b", "command": "x;y"}]'
    (tmp_path / HOSTS).write_text(bad)
    assert read_hosts(tmp_path) == ()
    (tmp_path / HOSTS).write_text("{")
    with pytest.raises(OperationError, match=r"hosts\.json can't be read"):
        read_hosts(tmp_path)


def test_host_is_split_from_the_server_name() -> None:
    assert split_host("box/chat") == ("box", "chat")
    assert [split_host(name) for name in ("chat", "http://h:1", "/x", "a/b/c", "box/")] == [None] * 5


@pytest.mark.parametrize("make", [fakes.chat, fakes.docs, fakes.broken, fakes.stopped, fakes.observed, fakes.asleep,
                                  fakes.tuned])  # fmt: skip
def test_server_is_the_same_on_the_other_side(make: object) -> None:
    view: ServerView = make(fakes.NOW)  # type: ignore[operator]
    view = replace(view, reason="größer …")
    line = encode({"snapshot": snapshot_document(FleetSnapshot(fakes.NOW, "box", (view,), ("a notice",)))})
    assert line.isascii()
    (there,), notices = views_of(decode(line)["snapshot"], "box")
    assert notices == ["a notice"]
    changed = {"name", "ours", "gpus", "remote", "remote_ours", "sample", *LEFT_OUT}
    for field in set(ServerView.__struct_fields__) - changed:
        assert getattr(there, field) == getattr(view, field), field
    assert (there.name, there.ours, there.remote_ours, there.where) == (f"box/{view.name}", False, view.ours, "box")


@pytest.mark.parametrize(
    "document",
    [None, 3, {}, {"servers": 1}, {"servers": [1]}, {"servers": [{"name": "x"}]},
     {"servers": [{"name": "\x1b[31m", "state": "ready", "state_since": 1.0}]},
     {"servers": [{"name": "../x", "state": "ready", "state_since": 1.0}]},
     {"servers": [{"name": "x", "state": "flying", "state_since": 1.0}]},
     {"servers": [{"name": "x", "state": "ready", "state_since": 1e300}]},
     {"servers": [{"name": "x", "state": "ready", "state_since": 1.0, "flags": {"a": [10**40]}}]}],
)  # fmt: skip
def test_invalid_answer_is_a_protocol_error(document: object) -> None:
    with pytest.raises(ProtocolError):
        views_of(document, "box")


def test_deeply_nested_answer_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        views_of(decode(b'{"snapshot": ' + b"[" * 900 + b"]" * 900 + b"}")["snapshot"], "box")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'no route' >&2; exit 255", "no route"),
        ("cat /dev/null", "the connection was closed"),
        ('echo Welcome; echo \'{"hello": {"protocol": 99, "version": "9.9"}}\'; cat', "(9.9) and this one"),
        ("echo '{\"hello\": {\"protocol\": 1}}'; echo '{x'; cat", "not JSON"),
        ("yes", "does not respond like vllm-console"),
        ('echo \'{"hello": {"protocol": 1}}\'; read l; echo \'{"id": 1, "snapshot": {}}\'; cat', "can't be read"),
    ],
)
def test_faulty_connection_is_one_row(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "box").mkdir()
    monkeypatch.setenv("PATH", f"{SSH}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_HOMES", str(tmp_path))
    monkeypatch.setenv("FAKE_SSH_SAYS", script)
    connection = Connection(RemoteHost("box", "box"))
    assert connection.answered.wait(30)
    (row,), notices = connection.views()
    connection.close()
    assert reason in row.reason
    assert (row.name, row.state_text, notices) == ("box", "unreachable", [])
    with pytest.raises(OperationError, match="box is not connected"):
        connection.do("stop", "chat")


def test_unexpected_error_is_shown_and_the_machine_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Semaphore(0)

    def no_thread(_argv: object) -> object:
        tried.release()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(remote_hosts, "Session", no_thread)
    connection = Connection(RemoteHost("box", "box"))
    assert connection.answered.wait(30)
    (row,), _ = connection.views()
    assert "unexpected error: can't start new thread" in row.reason
    for _ in range(2):
        assert tried.acquire(timeout=30)
    connection.close()


def test_refusal_of_a_plan_keeps_its_findings() -> None:
    finding = PlanFinding("no_room", Level.ERROR, "3 GiB are missing.", Changes(set={"max-model-len": 8192}), False)
    unfit = UnfitError("plan error: 3 GiB are missing.", (finding,), forceable=True)
    there = decode_error(decode(encode({"error": error_document(unfit)}))["error"], "box")
    assert isinstance(there, UnfitError)
    assert (str(there), there.findings, there.forceable) == ("box: plan error: 3 GiB are missing.", (finding,), True)
    for error in (RefusedError("no"), OperationError("no")):
        assert type(decode_error(error_document(error), "box")) is type(error)
    assert type(decode_error({"message": "no", "code": 1, "findings": [{"code": 3}]}, "box")) is OperationError


def test_options_of_a_restart_are_the_same_on_the_other_side() -> None:
    options = RestartOptions(force=True, port=8003, environment={"A": "b"})
    assert decode_options(decode(encode({"options": options}))["options"]) == options
    assert decode_options(None) == RestartOptions()
    with pytest.raises(UsageError, match="can't be read"):
        decode_options({"force": "yes"})


@pytest.mark.parametrize("streams", ["", "2>&1", "1>&2"])
def test_process_left_by_ssh_does_not_delay_the_end(streams: str) -> None:
    """The master of shared connections may keep ssh's standard error open for hours."""
    script = f"""sleep 30 {streams} & echo '{{"hello": {{"protocol": 1}}, "pid": '$!'}}'; exec cat"""
    session = Session(["sh", "-c", script])
    left = int(session._answer(0, 20.0)["pid"])
    ended = threading.Event()
    threading.Thread(target=lambda: (session.close(), ended.set()), daemon=True).start()
    try:
        assert ended.wait(15)
    finally:
        os.kill(left, signal.SIGKILL)


def machine(number: int) -> str:
    view = fakes.chat(fakes.NOW)
    document = snapshot_document(FleetSnapshot(fakes.NOW, "box", (replace(view, name=f"chat-{number}"),)))
    answer = encode({"id": 1, "snapshot": document}).decode().strip()
    return f"echo '{{\"hello\": {{\"protocol\": 1}}}}'; read l; cat <<'E'\n{answer}\nE\ncat"


def test_machine_without_servers_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    monkeypatch.setenv("PATH", f"{SSH}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_HOMES", str(tmp_path))
    answer = encode({"id": 1, "snapshot": snapshot_document(FleetSnapshot(fakes.NOW, "box"))}).decode().strip()
    monkeypatch.setenv("FAKE_SSH_SAYS", f"echo '{{\"hello\": {{\"protocol\": 1}}}}'; read l; echo '{answer}'; cat")
    connection = Connection(RemoteHost("box", "one"))
    try:
        ((row,), _) = connection.views()
        assert (row.machine, row.state_text) == (True, "attached")
        assert connection.answered.wait(30)
        ((row,), _) = connection.views()
        assert (row.name, row.state_text, row.reason) == ("box", "reachable", "")
        assert row.attached is not None
        assert row.attached.notice == "no servers there"
    finally:
        connection.close()


def test_name_that_now_means_another_machine_is_reconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", f"{SSH}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_HOMES", str(tmp_path))
    hosts = RemoteHosts(tmp_path / "state", patience=30.0, read_only=True)
    try:
        for number, destination in enumerate(("one", "two")):
            monkeypatch.setenv("FAKE_SSH_SAYS", machine(number))
            write_hosts(tmp_path / "state", [RemoteHost("box", destination)])
            views, _ = hosts.views(None)
            assert [view.name for view in views] == [f"box/chat-{number}"]
            assert hosts.connection("box").host.destination == destination
            asked = (tmp_path / destination / "asked").read_text()
            assert asked.endswith("vllm-console --read-only remote\n"), "it starts and records nothing there"
    finally:
        hosts.close()


def test_action_leaves_the_selected_server_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine sends the charts of that server only."""
    (tmp_path / "one").mkdir()
    monkeypatch.setenv("PATH", f"{SSH}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_HOMES", str(tmp_path))
    monkeypatch.setenv("FAKE_SSH_SAYS", machine(0))
    monkeypatch.setattr(Connection, "do", lambda *words, **more: None)
    fleet = LocalFleet(tmp_path / "state", observe=False, gpus=False, interactive=True, remote=True)
    try:
        write_hosts(tmp_path / "state", [RemoteHost("box", "one")])
        fleet.attached.host_views("box/chat-0")
        connection = fleet.attached._hosts.connection("box")
        assert connection.answered.wait(30)
        assert fleet.attached.act("box/chat-0", "stop") is not None
        assert connection._selected == "chat-0"
    finally:
        fleet.close()


def test_remote_command_uses_remote_names_and_keeps_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    monkeypatch.setenv("PATH", f"{SSH}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_HOMES", str(tmp_path))
    monkeypatch.setenv("FAKE_SSH_SAYS", "true")
    monkeypatch.chdir(tmp_path)
    state = Path("compare")  # same name as the command
    write_hosts(state, [RemoteHost("box", "one"), RemoteHost("other", "two")])
    words = ["--state", str(state), "compare", "box/chat@1", "box/chat@2"]
    assert run_elsewhere(parse(words)) == 0
    assert "vllm-console compare chat@1 chat@2" in (tmp_path / "one" / "asked").read_text()
    with_engines = ["--state", str(state), "--read-only", "compare", "box/chat", "--engine", "a", "--engine", "b"]
    assert run_elsewhere(parse(with_engines)) == 0
    asked = (tmp_path / "one" / "asked").read_text()
    assert "vllm-console --read-only compare chat --engine a" in asked, "it would start servers there"
    words[-1] = "other/chat@2"
    with pytest.raises(OperationError, match="other/chat@2 is not on box"):
        run_elsewhere(parse(words))
