"""Ports: concurrent starts, and a stopped server whose port is in use by another process."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

from fakes import ports


def test_concurrent_starts_get_different_ports(program):
    def begin(name):
        return program("start", "batch", "--engine", "simulated", "--name", name, "--wait", "--json", own_port=False)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(begin, ("a", "b", "c", "d")))
    assert [answer.returncode for answer in answers] == [0] * 4, [answer.stderr for answer in answers]
    assert len({json.loads(answer.stdout)["port"] for answer in answers}) == 4


def test_concurrent_starts_of_several_users_get_different_ports(program, tmp_path):
    states = [str(tmp_path / f"person-{person}") for person in range(3)]

    def begin(state):
        words = ("--state", state, "start", "batch", "--engine", "simulated", "--wait")
        return program.json(*words)["port"]

    try:
        with ThreadPoolExecutor(3) as pool:
            assert len(set(pool.map(begin, states))) == 3
    finally:  # only after all have started, because a released port may be reused
        for state in states:
            program("--state", state, "stop", "batch")


def test_concurrent_unnamed_starts_get_different_names(program):
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: program.json("start", "batch", "--engine", "simulated"), range(2)))
    assert sorted(answer["name"] for answer in answers) == ["batch", "batch-2"]


def test_stopped_server_with_port_in_use_moves_only_on_request(program):
    port = str(ports.free_port())  # outside the range that servers of other tests choose from
    program.json("start", "batch", "--engine", "simulated", "--name", "first", "--port", port, "--wait")
    program.json("stop", "first")
    program.json("start", "batch", "--engine", "simulated", "--name", "second", "--port", port, "--wait")
    for verb in (("restart", "first"), ("restart", "first", "--preset", "chatbot")):
        refused = program(*verb)
        assert refused.returncode == 1
        assert f"port {port} belongs to another of your servers" in refused.stderr
        assert "choose another with --port" in refused.stderr, "it was not given, so omitting it would not help"
    assert program.json("status", "first")["state"] == "stopped"
    program.json("stop", "second")
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # over the last server's connections
        foreign.bind(("127.0.0.1", int(port)))
        foreign.listen()
        refused = program("restart", "first")
        assert refused.returncode == 1
        assert f"port {port} is in use by" in refused.stderr
        assert "--port" in refused.stderr
        free = ports.free_port()
        moved = program.json("restart", "first", "--port", str(free), "--wait")
    assert (moved["state"], moved["port"], moved["generation"]) == ("ready", free, 2)
    assert program.json("restart", "first", "--wait")["port"] == free, "it keeps its new port"


def test_running_server_can_be_moved_to_another_port(program):
    program.json("start", "batch", "--engine", "simulated", "--name", "first", "--wait")
    second = program.json("start", "batch", "--engine", "simulated", "--name", "second", "--wait")
    free = ports.free_port()
    refused = program("restart", "first", "--port", str(second["port"]))
    assert refused.returncode == 1
    assert program.json("status", "first")["generation"] == 1, "it is still starting"
    moved = program.json("restart", "first", "--port", str(free), "--wait")
    assert (moved["state"], moved["port"]) == ("ready", free)
