"""The port of a real server between two of its generations."""

from __future__ import annotations

import socket

from fakes.ports import binds
from vllm_launchers.keeper.records import RestartMode, RestartPolicy, State


def test_a_server_that_waits_to_start_again_keeps_its_port(bench) -> None:
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=600, backoff_cap_seconds=600)
    spec = bench.spec("--exit-after", "0.5", "--exit-code", "3", restart=policy)
    bench.ready(spec)
    waiting = bench.until(lambda record: record.next_attempt_at is not None)
    assert waiting.state is State.FAILED
    assert not binds(spec.port, socket.SO_REUSEADDR)
    again = bench.restart(bench.spec(port=spec.port))
    assert bench.wait(State.READY, generation=again.current.number).current.spec.port == spec.port
    bench.stopped()
    assert binds(spec.port, socket.SO_REUSEADDR)


def test_a_restart_keeps_the_port_while_the_rest_of_the_old_server_ends(bench) -> None:
    """Its API server is gone, and with it the socket; a process of it that ignores SIGTERM holds the restart up."""
    spec = bench.spec("--children", "1", "--children-ignore-term")
    bench.ready(spec)
    bench.until(lambda _: "child up" in bench.log())
    bench.restart(bench.spec(port=spec.port))
    bench.until(lambda record: record.current.exit is not None or record.current.number == 2)
    assert bench.read().current.number == 1, "it has not been started again yet"
    assert not binds(spec.port, socket.SO_REUSEADDR), "a program that waits for the port does not get it"
    assert bench.wait(State.READY, generation=2).current.spec.port == spec.port


def test_the_port_is_free_for_others_once_the_server_has_stopped(bench) -> None:
    spec = bench.spec()
    bench.ready(spec)
    bench.stopped()
    assert binds(spec.port, socket.SO_REUSEADDR)
