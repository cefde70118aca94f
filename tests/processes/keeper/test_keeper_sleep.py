"""A keeper puts a simulated server to sleep and wakes it up; its record shows the state."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import httpx
import pytest

from fakes.keeper_bench import TUNING, Bench
from fakes.ports import free_port
from vllm_launchers.keeper import client
from vllm_launchers.keeper.errors import CannotSleepError, NotPreparingError
from vllm_launchers.keeper.records import LaunchSpec, ServerRecord, SleepStep, State, WarmUp

pytestmark = pytest.mark.xdist_group("keeper-sleep")


def sleepy(bench: Bench, *, sleep_mode: bool = True, speed: str = "20", **more: Any) -> LaunchSpec:
    port = free_port()
    argv = [sys.executable, "-m", "vllm_launchers.simulated", "serve", "Qwen/Qwen3-0.6B", "--host", "127.0.0.1"]
    argv += ["--port", str(port), *(["--enable-sleep-mode"] if sleep_mode else [])]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "SIMULATED_STARTUP_SECONDS": "0", "SIMULATED_SPEED": speed}
    return bench.spec(
        port=port, argv=tuple(argv), environment=variables, warm_up=WarmUp(), sleep_mode=sleep_mode, **more
    )


def over(record: ServerRecord) -> bool:
    return record.sleep is not None and not record.sleep.step.under_way


def step_of(record: ServerRecord) -> SleepStep | None:
    return record.sleep.step if record.sleep is not None else None


def sleep(bench: Bench, level: int = 1, seconds: float = 30.0) -> ServerRecord:
    client.sleep(bench.root, "one", level, seconds, tuning=TUNING)
    return bench.until(over)


def wake(bench: Bench) -> ServerRecord:
    client.wake(bench.root, "one", tuning=TUNING)
    return bench.until(over)


def url(record: ServerRecord) -> str:
    return f"http://127.0.0.1:{record.current.spec.port}"


def asleep(record: ServerRecord) -> bool:
    return bool(httpx.get(f"{url(record)}/is_sleeping").json()["is_sleeping"])


@pytest.mark.parametrize("level", [1, 2])
def test_server_answers_the_same_after_sleep(bench: Bench, level: int) -> None:
    ready = bench.ready(sleepy(bench))
    assert len(ready.current.golden) == 4
    slept = sleep(bench, level)
    assert (slept.state, step_of(slept)) == (State.ASLEEP, SleepStep.ASLEEP)
    assert asleep(slept)
    awake = wake(bench)
    assert awake.state is State.READY
    assert awake.sleep is not None
    assert (awake.sleep.step, awake.sleep.level, awake.sleep.checked) == (SleepStep.AWAKE, level, 4)
    assert awake.server == ready.server
    assert not asleep(awake)


def test_changed_output_after_wake_up_causes_cold_start(bench: Bench) -> None:
    ready = bench.ready(sleepy(bench))
    slept = sleep(bench)
    httpx.post(f"{url(slept)}/wake_up")
    httpx.post(f"{url(slept)}/sleep?level=2")  # another client discards the weights
    client.wake(bench.root, "one", tuning=TUNING)
    anew = bench.wait(State.READY, generation=2)
    assert anew.sleep is not None
    assert anew.sleep.step is SleepStep.MISMATCH
    assert len(anew.sleep.differing) == anew.sleep.checked == 4
    assert anew.server != ready.server
    assert anew.current.spec == ready.current.spec
    bench.restart(ready.current.spec)
    assert bench.wait(State.READY, generation=3).sleep is None


def test_busy_server_is_not_put_to_sleep(bench: Bench) -> None:
    ready = bench.ready(sleepy(bench))
    body = {"prompt": "one", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url(ready)}/v1/completions", json=body, timeout=60) as busy:
        assert busy.status_code == 200
        stayed = sleep(bench, seconds=0.0)
        assert (stayed.state, step_of(stayed)) == (State.READY, SleepStep.CANCELED)
        assert stayed.sleep is not None
        assert "1 request left" in stayed.sleep.message

        client.sleep(bench.root, "one", 1, 60.0, tuning=TUNING)
        client.cancel(bench.root, "one")
        canceled = bench.read()
        assert (canceled.state, step_of(canceled)) == (State.READY, SleepStep.CANCELED)
        with pytest.raises(NotPreparingError):
            client.cancel(bench.root, "one")


@pytest.mark.parametrize("do", ["sleep", "wake"])
def test_server_that_ends_meanwhile_can_neither_sleep_nor_wake_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    """The request was once repeated for ten seconds, and then the keeper "did not answer"."""
    bench.ready(sleepy(bench))
    ask = client._ask

    def ask_too_late(*request: Any) -> ServerRecord | None:
        monkeypatch.setattr(client, "_ask", ask)
        bench.stopped()
        return ask(*request)

    monkeypatch.setattr(client, "_ask", ask_too_late)
    ask_for = partial(client.sleep, level=1, drain_seconds=1.0) if do == "sleep" else client.wake
    with pytest.raises(CannotSleepError, match="stopped"):
        ask_for(bench.root, "one", tuning=TUNING)


def test_unsupported_sleep_reports_reason(bench: Bench) -> None:
    bench.ready(sleepy(bench, sleep_mode=False))
    with pytest.raises(CannotSleepError, match="without sleep mode"):
        client.sleep(bench.root, "one", 1, 1.0)
    bench.stopped()
    with pytest.raises(CannotSleepError, match="stopped"):
        client.wake(bench.root, "one")


def test_sleeping_server_survives_keeper_death(bench: Bench) -> None:
    bench.ready(sleepy(bench))
    slept = sleep(bench)
    bench.orphaned(slept)
    assert bench.adopt() == ["one"]
    assert bench.read().state is State.ASLEEP
    assert wake(bench).state is State.READY


def test_next_keeper_completes_interrupted_wake_up(bench: Bench) -> None:
    bench.ready(sleepy(bench, speed="0.5"))
    sleep(bench, level=2)
    client.wake(bench.root, "one", tuning=TUNING)
    waking = bench.until(lambda record: step_of(record) is SleepStep.WAKING)
    bench.orphaned(waking)
    assert bench.adopt() == ["one"]
    awake = bench.until(over)
    assert (awake.state, step_of(awake)) == (State.READY, SleepStep.AWAKE)
    assert not asleep(awake)


def test_keeper_death_during_drain_leaves_server_serving(bench: Bench) -> None:
    ready = bench.ready(sleepy(bench))
    body = {"prompt": "one", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url(ready)}/v1/completions", json=body, timeout=60) as busy:
        assert busy.status_code == 200
        client.sleep(bench.root, "one", 1, 60.0, tuning=TUNING)
        bench.orphaned(bench.read())
        assert bench.adopt() == ["one"]
        found = bench.until(over)
    assert (found.state, step_of(found)) == (State.READY, SleepStep.CANCELED)


def test_sleeping_server_can_be_stopped(bench: Bench) -> None:
    bench.ready(sleepy(bench))
    sleep(bench)
    assert bench.stopped().state is State.STOPPED
