"""``attach`` and ``detach``: an endpoint gets its own recorder, is read-only, and receives only its own key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fakes.endpoint import FakeEndpoint
from fakes.ports import free_port
from vllm_console.attached import attached_folder, is_recorded

KEYS = {"FAR_KEY": "far-s3cret", "VLLM_API_KEY": "own-s3cret"}


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    """A remote endpoint."""
    endpoint = FakeEndpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def far(program: Any, fake: FakeEndpoint) -> Iterator[dict[str, Any]]:
    """The endpoint, attached as ``far`` with a key."""
    yield program.json("attach", f"{fake.url}/v1", "--name", "far", "--key-env", "FAR_KEY", env=KEYS)
    program("detach", "far")


def test_attached_endpoint_is_recorded_read_only(program: Any, fake: FakeEndpoint, far: Any) -> None:
    assert far["name"] == "far"
    assert far["ours"] is False
    assert far["attached"] == {
        "host": "127.0.0.1", "reachability": "reachable", "url": fake.url, "key_env": "FAR_KEY", "ca": None,
        "keyed": True,
    }  # fmt: skip
    assert (far["model"], far["engine_version"]) == ("far-model", "0.32.0")
    fake.wait(3)
    listed = program("list").stdout
    assert "HOST" in listed
    assert "reachable" in listed
    for words in (("stop", "far"), ("restart", "far", "--set", "max-num-seqs=8"), ("remove", "far"), ("sleep", "far")):
        refused = program(*words)
        assert refused.returncode == 4, words
        assert "far is attached from" in refused.stderr
    assert program("logs", "far").returncode == 4
    assert program("start", "chatbot", "--engine", "simulated", "--name", "far").returncode == 1
    assert {method for method, _, _ in fake.asked} == {"GET"}
    assert program("check", "far", "--allow-idle").returncode == 0


def test_load_requires_remote_option_and_sends_only_its_own_key(program: Any, fake: FakeEndpoint, far: Any) -> None:
    for words in (
        ("load", "far"), ("load", fake.url), ("chat", "far"), ("chat", fake.url), ("ramp", "far"),
        ("ramp", "far", "--yes"),
    ):  # fmt: skip
        refused = program(*words, env=KEYS)
        assert refused.returncode == 4, words
        assert "without --remote" in refused.stderr
    for command in ("bench", "tune"):
        refused = program(command, "far", "--yes", env=KEYS)
        assert refused.returncode == 4, command
        assert "nothing is sent to it by this command; 'load' and 'ramp' take --remote" in refused.stderr
    assert {method for method, _, _ in fake.asked} == {"GET"}
    program("load", "far", "--remote", "--requests", "2", env=KEYS)
    program("load", f"{fake.url}/v1", "--remote", "--requests", "1", env=KEYS)
    for server in ("far", fake.url):
        program("chat", server, "--remote", env=KEYS, typed="hi")
    assert "POST" in {method for method, _, _ in fake.asked}
    assert {key for _, _, key in fake.asked} == {"Bearer far-s3cret"}
    without = len(fake.asked)
    program("load", "far", "--remote", "--requests", "2", env={"VLLM_API_KEY": "own-s3cret"})
    assert {key for _, _, key in fake.asked[without:]} <= {"Bearer far-s3cret", None}
    kept = b"".join(path.read_bytes() for path in (program.home / "state").rglob("*") if path.is_file())
    assert b"s3cret" not in kept


def test_reattaching_keeps_history_and_replaces_key(program: Any, fake: FakeEndpoint, far: Any) -> None:
    before = len(fake.asked)
    again = program.json("attach", fake.url, env={"FAR_KEY": "x"})
    assert (again["name"], again["attached"]["key_env"], again["attached"]["keyed"]) == ("far", None, False)
    fake.wait(2)
    assert fake.asked[-1][2] is None
    assert len(fake.asked) > before
    other = program("attach", fake.url, "--name", "other")
    assert other.returncode == 1
    assert "attached already, as far" in other.stderr


def test_detached_endpoint_is_not_polled_and_can_be_replayed(program: Any, fake: FakeEndpoint, far: Any) -> None:
    fake.wait(3)
    state: Path = program.home / "state" / "vllm-console"
    assert is_recorded(attached_folder(state, "far"))
    assert program.json("detach", "far") == {"name": "far", "detached": True, "history_kept": True}
    assert not attached_folder(state, "far").exists()
    (run,) = program.json("runs", "far")
    assert run["ended_at"] is not None
    assert run["exit"]["reason"] == "detached"
    (line,) = (line for line in program("runs", "far").stdout.splitlines() if line.startswith(" ") or "far" in line)
    assert "detached" in line
    assert "failed" not in line
    assert program("detach", "far").returncode == 3
    assert program("status", "far").returncode == 3


def test_unreachable_endpoint_is_attached_without_hiding_others(program: Any, fake: FakeEndpoint, far: Any) -> None:
    dead = program.json("attach", f"http://127.0.0.1:{free_port()}", "--name", "dead")
    assert dead["attached"]["reachability"] == "unreachable"
    assert "refused the connection" in dead["reason"]
    found = {one["name"]: one["attached"]["reachability"] for one in program.json("list") if one["attached"]}
    assert found == {"dead": "unreachable", "far": "reachable"}
    assert program("check", "dead").returncode == 1
    assert program("detach", "dead").returncode == 0


def test_invalid_arguments_attach_nothing(program: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words, code in (
        (("ftp://x",), 2),
        (("http://u:p@x",), 2),
        (("http://x", "--key-env", "sk-1234"), 2),
        (("http://x", "--ca", str(tmp_path)), 2),
        (("https://x", "--ca", str(pipe)), 2),
        (("https://x", "--ca", str(tmp_path / "none")), 2),
        (("http://x", "--name", "../x"), 2),
    ):
        answer = program("attach", *words)
        assert answer.returncode == code, (words, answer.stderr)
        assert "Traceback" not in answer.stderr
    assert not any(one["attached"] for one in program.json("list"))


def test_concurrent_attach_creates_one_endpoint(program: Any, fake: FakeEndpoint) -> None:
    with ThreadPoolExecutor(3) as threads:
        done = list(threads.map(lambda _: program("attach", fake.url, "--name", "far", "--json"), range(3)))
    try:
        assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
        assert [one["name"] for one in program.json("list") if one["attached"]] == ["far"]
        assert program.json("list", "--ours") == []
    finally:
        program("detach", "far")
