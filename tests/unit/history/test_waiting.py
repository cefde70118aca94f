"""The minimum wait of queued requests, compared with a queue of known waits."""

from __future__ import annotations

import random
from collections import deque

import pytest

from vllm_console.history.timeline import Timeline
from vllm_console.metrics.sample import EngineSample, Histogram, Sample


def engine(
    running: float, waiting: float, finished: float = 0.0, preempted: float = 0.0, first: float = 0.0,
    queries: float | None = 500.0,
):  # fmt: skip
    """One engine's state and totals: ``first`` is the number of first tokens, ``queries`` that of prefix cache
    queries."""
    ttft = Histogram((1.0, float("inf")), (first, first), first)
    return EngineSample(requests_running=running, requests_waiting=waiting, requests_finished_total=finished,
                        preemptions_total=preempted, prefix_cache_queries_total=queries,
                        histograms={"ttft": ttft})  # fmt: skip


def longest(*engines: tuple[float, EngineSample]) -> float | None:
    """The known wait after samples at these times."""
    timeline = Timeline(5.0, 10)
    for at, one in engines:
        timeline.append(Sample(at, {"0": one}), 1)
    found = timeline.window()
    assert found is not None
    return found.longest_wait


def test_static_queue_gets_older() -> None:
    assert longest(*((float(at), engine(1, 3)) for at in range(90))) == 89.0


def test_without_a_queue_there_is_no_wait() -> None:
    assert longest((0.0, engine(1, 0)), (1.0, engine(1, 0))) is None
    assert longest((0.0, engine(1, 4)), (1.0, engine(5, 0, first=4))) is None


def test_queue_of_equal_length_may_hold_other_requests() -> None:
    """Three wait, three are admitted, three arrive: nobody is known to have waited since."""
    assert longest((0.0, engine(1, 3)), (2.0, engine(4, 3, first=3))) == 0.0
    assert longest((0.0, engine(1, 3)), (2.0, engine(3, 3, first=2))) == 2.0, "one of the first three is left"


def test_ended_or_preempted_requests_made_room() -> None:
    assert longest((0.0, engine(4, 3)), (2.0, engine(4, 3, finished=3))) == 0.0
    assert longest((0.0, engine(4, 3)), (2.0, engine(4, 3, preempted=3))) == 0.0
    assert longest((0.0, engine(4, 3)), (2.0, engine(4, 3, first=3))) == 0.0, "vLLM counts no aborted requests"


def test_gap_or_new_generation_restarts_the_wait() -> None:
    assert longest((0.0, engine(1, 3)), (1.0, engine(1, 3)), (21.0, engine(1, 3)), (22.0, engine(1, 3))) == 1.0
    timeline = Timeline(5.0, 10)
    timeline.append(Sample(0.0, {"0": engine(1, 3)}), 1)
    timeline.append(Sample(1.0, {"0": engine(1, 3)}), 2)
    found = timeline.window()
    assert found is not None
    assert found.longest_wait == 0.0


def test_unreported_counters_give_no_wait() -> None:
    silent = EngineSample(requests_waiting=3.0, requests_running=1.0)
    assert longest((0.0, silent), (1.0, silent), (2.0, silent)) in (None, 0.0)


@pytest.mark.parametrize("queries", [None, 0.0])
def test_without_prefix_caching_the_wait_is_unknown(queries: float | None) -> None:
    """The running requests may have been replaced without any visible sign."""
    assert longest(*((float(at), engine(1, 3, queries=queries)) for at in range(30))) is None


def test_clients_leaving_before_the_first_token_make_room() -> None:
    """Every second all five running requests are canceled, the five waiting ones run, and five more arrive."""
    found = longest(*((float(at), engine(5, 5, queries=500.0 + 500.0 * at)) for at in range(30)))
    assert found is not None
    assert found <= 1.0


@pytest.mark.parametrize("patient_share", [1.0, 0.6, 0.2])
@pytest.mark.parametrize("seed", range(10))
def test_wait_is_never_overstated(seed: int, patient_share: float) -> None:
    """A queue with arrivals, a limit of running requests, preemptions, and clients that cancel.

    ``patient_share`` is the share of clients that wait for the first token of a running request.
    """
    chance, timeline = random.Random(seed), Timeline(5.0, 10)
    waiting: deque[tuple[int, bool]] = deque()
    running: list[bool] = []
    finished = preempted = first = known = 0
    queries = 100
    for at in range(1000):
        busy = at % 40 < 20  # followed by a time without admissions
        waiting.extend([(at, True)] * (chance.random() < 0.7))
        while busy and waiting and len(running) < 4 and chance.random() < 0.8:
            _, anew = waiting.popleft()
            queries += chance.randint(1, 40) if anew else 0
            running.append(chance.random() < patient_share)
            first += anew and running[-1]
        running = [stays for stays in running if stays or chance.random() < 0.3 or not busy]
        if busy and running and chance.random() < 0.5:
            running.pop()
            finished += 1
        if busy and running and chance.random() < 0.05:
            running.pop()
            waiting.appendleft((at, False))
            preempted += 1
        now = engine(len(running), len(waiting), finished, preempted, first, queries)
        timeline.append(Sample(float(at), {"0": now}), 1)
        found = timeline.window()
        assert found is not None
        if waiting and found.longest_wait:
            assert found.longest_wait <= at - min(at for at, _ in waiting)
            known += 1
    assert known > 50
