"""Going to sleep, request by request: the record always matches the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from vllm_launchers.keeper.health import HealthTarget
from vllm_launchers.keeper.lifecycle import Event, SleepProgress
from vllm_launchers.keeper.records import SleepStep
from vllm_launchers.keeper.server_client import RequestTimeoutError, Response
from vllm_launchers.keeper.sleeper import SleepOrder, SleepRun
from vllm_launchers.listeners import Owner

IDLE = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
BUSY = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 1.0\n"


class Server:
    """Replaces a `ServerClient`. ``sleep`` is the effect of ``POST /sleep``."""

    def __init__(self, sleep: Callable[[Server], Response], metrics: bytes = IDLE, *, asleep: bool = False) -> None:
        self.canceled, self.asleep = threading.Event(), asleep
        self._sleep, self._metrics = sleep, metrics
        self.reachable = True

    def cancel(self) -> None:
        self.canceled.set()

    def ask(self, _method: str, path: str, _body: object = None, **_: Any) -> Response:
        if path.startswith("/sleep"):
            return self._sleep(self)
        if path == "/metrics":
            return Response(200, self._metrics)
        if not self.reachable:
            raise RequestTimeoutError(path, 10.0, taken=False)
        return Response(200, b'{"is_sleeping": %s}' % str(self.asleep).lower().encode())


def steps(server: Server, before: Callable[[SleepRun], None] = lambda _: None) -> list[SleepStep]:
    posted: list[Event] = []
    run = SleepRun(HealthTarget(1, Owner(1, 1), "127.0.0.1", 1, 0.0), "", SleepOrder(False, 1), (), posted.append)
    run._client = server  # type: ignore[assignment]
    before(run)
    run.run()
    return [event.step for event in posted if isinstance(event, SleepProgress)]


def falls_asleep(server: Server) -> Response:
    server.asleep = True
    return Response(200, b"")


def late(server: Server) -> Response:
    server.asleep = True
    raise RequestTimeoutError("/sleep", 600.0, taken=True)


def gone(server: Server) -> Response:
    server.reachable = False
    raise RequestTimeoutError("/sleep", 600.0, taken=True)


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (Server(falls_asleep), [SleepStep.SUSPENDING, SleepStep.ASLEEP]),
        (Server(lambda _: Response(500, b"")), [SleepStep.SUSPENDING, SleepStep.CANCELED]),
        (Server(late), [SleepStep.SUSPENDING, SleepStep.ASLEEP]),
        (Server(gone), [SleepStep.SUSPENDING, SleepStep.FAILED]),
        (Server(falls_asleep, BUSY), [SleepStep.CANCELED]),
        (Server(falls_asleep, BUSY, asleep=True), [SleepStep.ASLEEP]),
    ],
    ids=["sleeps", "refuses", "answers late", "is gone", "busy", "sleeps already, and requests wait"],
)
def test_server_keeps_serving_only_if_that_is_certain(server: Server, expected: list[SleepStep]) -> None:
    assert steps(server) == expected


def test_sleep_is_canceled_only_before_it_is_sent() -> None:
    asked: list[bool] = []

    def sleeps(server: Server) -> Response:
        asked.append(run_of[0].cancel_drain())
        return falls_asleep(server)

    run_of: list[SleepRun] = []
    assert steps(Server(sleeps), run_of.append) == [SleepStep.SUSPENDING, SleepStep.ASLEEP]
    assert asked == [False]
    assert steps(Server(sleeps), lambda run: asked.append(run.cancel_drain())) == []
    assert asked == [False, True]
