"""Ports: several starts at once, and a stopped server whose port somebody else has by now."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

from fakes import ports


def test_servers_started_at_once_get_ports_of_their_own(program):
    def begin(name):
        return program("start", "batch", "--engine", "simulated", "--name", name, "--wait", "--json", own_port=False)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(begin, ("a", "b", "c", "d")))
    assert [answer.returncode for answer in answers] == [0] * 4, [answer.stderr for answer in answers]
    assert len({json.loads(answer.stdout)["port"] for answer in answers}) == 4


def test_servers_started_at_once_by_several_persons_get_ports_of_their_own(program, tmp_path):
    states = [str(tmp_path / f"person-{person}") for person in range(3)]

    def begin(state):
        words = ("--state", state, "start", "batch", "--engine", "simulated", "--wait")
        return program.json(*words)["port"]

    try:
        with ThreadPoolExecutor(3) as pool:
            assert len(set(pool.map(begin, states))) == 3
    finally:  # not before all have started: a port that is free again may be taken again
        for state in states:
            program("--state", state, "stop", "batch")


def test_starts_at_once_without_a_name_get_names_of_their_own(program):
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: program.json("start", "batch", "--engine", "simulated"), range(2)))
    assert sorted(answer["name"] for answer in answers) == ["batch", "batch-2"]


def test_a_stopped_server_whose_port_is_taken_reports_it_and_moves_only_when_asked_to(program):
    port = str(ports.free_port())  # not one that a server of another test takes by itself
    program.json("start", "batch", "--engine", "simulated", "--name", "first", "--port", port, "--wait")
    program.json("stop", "first")
    program.json("start", "batch", "--engine", "simulated", "--name", "second", "--port", port, "--wait")
    for verb in (("restart", "first"), ("restart", "first", "--preset", "chatbot")):
        refused = program(*verb)
        assert refused.returncode == 1
        assert f"port {port} belongs to another of your servers" in refused.stderr
        assert "choose another with --port" in refused.stderr, "it was not given: leaving it out would not help"
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
    assert program.json("restart", "first", "--wait")["port"] == free, "it stays where it was moved to"


def test_a_running_server_is_moved_to_another_port(program):
    program.json("start", "batch", "--engine", "simulated", "--name", "first", "--wait")
    second = program.json("start", "batch", "--engine", "simulated", "--name", "second", "--wait")
    free = ports.free_port()
    refused = program("restart", "first", "--port", str(second["port"]))
    assert refused.returncode == 1
    assert program.json("status", "first")["generation"] == 1, "it continues to start"
    moved = program.json("restart", "first", "--port", str(free), "--wait")
    assert (moved["state"], moved["port"]) == ("ready", free)
