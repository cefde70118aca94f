"""A server's port between two generations."""

from __future__ import annotations

import socket

from fakes.ports import binds
from vllm_launchers.keeper.records import RestartMode, RestartPolicy, State


def test_server_waiting_for_restart_keeps_its_port(bench) -> None:
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


def test_restart_keeps_port_while_old_processes_end(bench) -> None:
    """The API server and its socket are gone, and a process that ignores SIGTERM delays the restart."""
    spec = bench.spec("--children", "1", "--children-ignore-term")
    bench.ready(spec)
    bench.until(lambda _: "child up" in bench.log())
    bench.restart(bench.spec(port=spec.port))
    bench.until(lambda record: record.current.exit is not None or record.current.number == 2)
    assert bench.read().current.number == 1, "it has not been restarted yet"
    assert not binds(spec.port, socket.SO_REUSEADDR), "another program waiting for the port does not get it"
    assert bench.wait(State.READY, generation=2).current.spec.port == spec.port


def test_port_is_released_after_stop(bench) -> None:
    spec = bench.spec()
    bench.ready(spec)
    bench.stopped()
    assert binds(spec.port, socket.SO_REUSEADDR)
