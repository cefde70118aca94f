"""Ports: several starts at once, and a stopped server whose port somebody else has by now."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor


def test_servers_started_at_once_get_ports_of_their_own(program):
    def begin(name):
        return program("start", "batch", "--engine", "simulated", "--name", name, "--wait", "--json")

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(begin, ("a", "b", "c", "d")))
    assert [answer.returncode for answer in answers] == [0] * 4, [answer.stderr for answer in answers]
    assert len({json.loads(answer.stdout)["port"] for answer in answers}) == 4


def test_servers_started_at_once_by_several_persons_get_ports_of_their_own(program, tmp_path):
    def begin(person):
        state = tmp_path / f"person-{person}"
        try:
            return program.json("--state", str(state), "start", "batch", "--engine", "simulated", "--wait")["port"]
        finally:
            program("--state", str(state), "stop", "batch")

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(begin, range(3)))) == 3


def test_starts_at_once_without_a_name_get_names_of_their_own(program):
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: program.json("start", "batch", "--engine", "simulated"), range(2)))
    assert sorted(answer["name"] for answer in answers) == ["batch", "batch-2"]


def test_a_stopped_server_whose_port_is_taken_starts_on_another(program):
    first = program.json("start", "batch", "--engine", "simulated", "--name", "first", "--wait")
    program.json("stop", "first")
    second = program.json(
        "start", "batch", "--engine", "simulated", "--name", "second", "--port", str(first["port"]), "--wait"
    )
    again = program.json("restart", "first", "--wait")
    assert again["state"] == "ready"
    assert again["generation"] == 2
    assert again["port"] != second["port"]
    program.json("stop", "second")
    assert program.json("restart", "first", "--wait")["port"] == again["port"], "one that runs stays where it is"
