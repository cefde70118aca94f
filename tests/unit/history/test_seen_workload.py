"""Measured traffic becomes a workload, with the evidence for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from vllm_console.diagnosis.live.fixes import fewer_sequences, more_sequences
from vllm_console.diagnosis.live.rule import Evidence
from vllm_console.fleet.probe import seen_traffic
from vllm_console.history.frames import Frame, Frames
from vllm_console.history.probe_records import FinishedRequest, ProbeReader
from vllm_console.history.store import HISTORY, HistoryReader, HistoryWriter
from vllm_console.history.workload import FEWEST, SeenWorkload, seen_room, seen_workload
from vllm_console.metrics.sample import EngineSample, Histogram, Sample
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.presets.model import Workload

BOUNDS = (1.0, 10.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, math.inf)
BEFORE = Workload(input_tokens_p95=9999, output_tokens_p95=999, prefix_reuse=0.77, concurrency=33)


class Sampled(NamedTuple):
    generation: int
    sample: Sample


def lengths(seen: Sequence[float]) -> Histogram:
    return Histogram(BOUNDS, tuple(float(sum(one <= bound for one in seen)) for bound in BOUNDS), float(sum(seen)))


def engine(
    prompts: Sequence[float] = (),
    answers: Sequence[float] = (),
    *,
    cached: tuple[float, float] | None = (0.0, 0.0),
    running: float | None = 0.0,
    waiting: float | None = 0.0,
) -> EngineSample:
    hits, queries = cached if cached is not None else (None, None)
    return EngineSample(
        requests_running=running,
        requests_waiting=waiting,
        prefix_cache_hits_total=hits,
        prefix_cache_queries_total=queries,
        requests_finished_total=float(len(prompts)),
        histograms={"prompt_tokens": lengths(prompts), "generation_tokens": lengths(answers)},
    )


def poll(at: float, *engines: EngineSample, generation: int = 1) -> Sampled:
    return Sampled(generation, Sample(at, {str(number): one for number, one in enumerate(engines)}))


def seen(*polls: Sampled, longest: int | None = None) -> SeenWorkload:
    return seen_workload(polls, BEFORE, longest=longest)


def test_lengths_reuse_and_concurrency() -> None:
    found = seen(
        poll(0, engine([5000] * 40, [3] * 40, cached=(900, 1000))),
        poll(1800, engine([5000] * 40 + [150] * 500, [3] * 40 + [50] * 500, cached=(1500, 2000), running=7, waiting=2)),
        poll(3600, engine([5000] * 40 + [150] * 1000, [3] * 40 + [50] * 1000, cached=(2100, 3000), running=3)),
    )
    # Values are assumed to be distributed uniformly over their bucket; earlier counts are subtracted.
    assert found.workload == Workload(input_tokens_p95=195, output_tokens_p95=96, prefix_reuse=0.6, concurrency=9)
    assert (found.requests, found.minutes) == (1000, 60.0)
    assert found.sentence == (
        "1,000 requests ended in the last hour (1h00m of it recorded): p95 prompt ~195 tokens, p95 output ~96 "
        "tokens (histogram buckets 100 to 200, 10 to 100), 60% of prompt tokens reused, 9 in flight (p95)."
    )


@pytest.mark.parametrize("count", [0, 1, FEWEST - 1])
def test_too_few_requests_are_counted_in_the_message(count: int) -> None:
    found = seen(poll(0, engine()), poll(600, engine([50] * count, [50] * count)))
    assert found.workload is None
    assert found.requests == count
    assert ("No request" if count == 0 else f"{count} request") in found.sentence
    assert "10m00s" in found.sentence
    assert str(FEWEST) in found.sentence


def test_barely_enough_requests_are_rough() -> None:
    found = seen(poll(0, engine()), poll(60, engine([50] * FEWEST, [50] * FEWEST, running=1)))
    assert found.workload is not None
    assert "rough" in found.sentence
    assert "1m00s" in found.sentence


def test_nothing_recorded_or_reported() -> None:
    assert seen().workload is None
    assert "Nothing has been recorded" in seen().sentence
    silent = seen(poll(0, EngineSample(requests_running=1)), poll(60, EngineSample(requests_running=1)))
    assert silent.workload is None
    assert "does not report" in silent.sentence


def test_last_bucket_is_open() -> None:
    polls = poll(0, engine()), poll(60, engine([3000] * 600, [50] * 600, running=1))
    open_ended = seen(*polls)
    assert open_ended.workload is not None
    assert open_ended.workload.input_tokens_p95 == 2000
    assert "p95 prompt over 2,000 tokens" in open_ended.sentence
    # If the server's longest request is known, the bucket ends there.
    closed = seen(*polls, longest=4000)
    assert closed.workload is not None
    assert closed.workload.input_tokens_p95 == 3900
    assert "2,000 to 4,000" in closed.sentence


def test_prompt_and_answer_together_do_not_exceed_the_longest_request() -> None:
    polls = poll(0, engine()), poll(60, engine([3000] * 600, [900] * 600, running=1))
    found = seen(*polls, longest=4000).workload
    assert found is not None
    assert found.output_tokens_p95 == 975
    assert found.input_tokens_p95 + found.output_tokens_p95 == 4000


def test_unmeasured_values_stay() -> None:
    none = engine([50] * 600, [50] * 600, cached=None, running=None, waiting=None)
    found = seen(poll(0, engine(cached=None, running=None, waiting=None)), poll(60, none))
    assert found.workload is not None
    assert (found.workload.prefix_reuse, found.workload.concurrency) == (0.77, 33)
    assert "prefix reuse not measured, concurrency not measured" in found.sentence
    off = seen(poll(0, engine()), poll(60, engine([50] * 600, [50] * 600, running=1)))  # no prefix cache lookups
    assert "prefix reuse not measured, 1 in flight" in off.sentence


def test_idle_time_does_not_count_as_concurrency() -> None:
    busy = [poll(at, engine([50] * 600, [50] * 600, running=8)) for at in range(1, 4)]
    idle = [poll(at, engine([50] * 600, [50] * 600)) for at in range(4, 100)]
    found = seen(poll(0, engine()), *busy, *idle).workload
    assert found is not None
    assert found.concurrency == 8


def test_restarts_and_several_engines_are_summed() -> None:
    found = seen(
        poll(0, engine([50] * 10, [50] * 10), engine()),
        poll(10, engine([50] * 110, [50] * 110, running=2), engine([50] * 100, [50] * 100, running=3)),
        # A new generation that has already counted more than the old one.
        poll(20, engine([50] * 300, [50] * 300, running=1), engine(), generation=2),
        # The same generation restarted automatically: its counters fell.
        poll(30, engine([50] * 40, [50] * 40, running=1), engine(), generation=2),
    )
    assert found.requests == 100 + 100 + 300 + 40
    assert found.workload is not None
    assert found.workload.concurrency == 5


def test_buckets_may_change_with_a_restart() -> None:
    short = Histogram((1.0, 100.0, math.inf), (0.0, 300.0, 300.0), 15_000.0)
    other = EngineSample(requests_running=1, histograms={"prompt_tokens": short, "generation_tokens": short})
    found = seen(poll(0, engine()), poll(9, engine([50] * 300, [50] * 300)), poll(20, other, generation=2))
    assert found.requests == 600
    assert found.workload is not None
    assert found.workload.input_tokens_p95 <= 100


def finished(at: float, prompt: int, answer: int) -> FinishedRequest:
    return FinishedRequest("r", at, at, 0, prompt, answer, 0, 0.1, 0.2, 0.3, 0.6, 0, "stop", 0)


def test_lengths_are_exact_if_a_probe_recorded_all_requests() -> None:
    """Buckets once gave 195 for 150, since values between two bounds are unknown."""
    polls = poll(0, engine()), poll(3600, engine([150] * 1000, [50] * 1000, running=3))
    records = [finished(1.0 + at, 150, 50) for at in range(1000)]
    found = seen_workload(polls, BEFORE, recorded=records)
    assert found.workload is not None
    assert (found.workload.input_tokens_p95, found.workload.output_tokens_p95) == (150, 50)
    assert "p95 prompt 150 tokens, p95 output 50 tokens, exact, prefix" in found.sentence
    assert seen_workload(polls, BEFORE, recorded=records[1:]) == seen(*polls), "one is missing: estimates"


def test_longest_request_is_exact_or_the_end_of_its_bucket() -> None:
    """A rare long request is not part of a p95, but a shorter context would reject it."""
    polls = poll(0, engine()), poll(3600, engine([150] * 990 + [1500] * 10, [50] * 990 + [5] * 10, running=3))
    assert seen(*polls).longest == 2000 + 100
    assert seen(*polls, longest=2048).longest == 2048, "vLLM accepts no longer ones"
    records = [finished(1.0 + at, 150, 50) for at in range(990)] + [finished(991.0 + at, 1500, 5) for at in range(10)]
    assert seen_workload(polls, BEFORE, recorded=records).longest == 1505
    assert seen_workload(polls, BEFORE, recorded=records[1:]).longest == 2100
    above = poll(0, engine()), poll(60, engine([50] * 600 + [3000], [50] * 601, running=1))
    assert math.isinf(seen(*above).longest)
    assert seen(*above, longest=4096).longest == 4096


def test_longest_request_includes_the_max_tokens_that_it_is_known_to_ask_for() -> None:
    """With a shorter context, vLLM would reject it, however short its answer is."""
    records = [finished(1.0 + at, 150, 50) for at in range(600)]

    def longest(max_tokens: float, context: int | None, recorded: Sequence[FinishedRequest] = ()) -> float:
        first, last = engine(), engine([150] * 600, [50] * 600, running=3)
        polls = [
            poll(at, replace(one, histograms={**one.histograms, "max_tokens": lengths([max_tokens] * count)}))
            for at, one, count in ((0, first, 0), (3600, last, 600))
        ]
        return seen_workload(polls, BEFORE, longest=context, recorded=recorded).longest

    assert longest(400, 4096) == 200 + 500
    assert longest(400, 4096, records) == 150 + 500, "as far as known, also with exact lengths"
    assert longest(4096 - 150, 4096) == longest(4096 - 150, None) == 300, "what requests without max_tokens count as"
    assert longest(400, None) == 700, "vLLM's highest bound is at most the context"
    assert longest(1500, 2048) == 300, "could be either"


def test_lengths_of_a_probed_server_are_exact(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / HISTORY)
    for second in (0, 100):
        writer.append(Sample(1e9 + second, {"0": engine([150] * second, [50] * second, running=4)}), 1)
    writer.close()
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(Details(workload=BEFORE)))
    record = ServerRecord("chat", State.READY, 1e9, 1e9, (Generation(1, spec, 1e9),))
    with patch.object(ProbeReader, "requests", lambda _: [finished(1e9 + 0.5 + at, 150, 50) for at in range(100)]):
        found = seen_traffic(tmp_path, record, 1e9 + 100)
    assert found is not None
    assert found.workload is not None
    assert (found.workload.input_tokens_p95, found.workload.output_tokens_p95) == (150, 50)


def test_workload_from_the_history_on_disk(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / "history.sqlite")
    for second in range(0, 3000, 5):
        count = second // 5
        writer.append(Sample(1e9 + second, {"0": engine([150] * count, [50] * count, cached=(0, count), running=4)}), 1)
    writer.close()
    reader = HistoryReader(tmp_path / "history.sqlite")
    found = seen_workload(reader.range(1e9, 1e9 + 3000), BEFORE, longest=4096)
    reader.close()
    assert found.workload is not None
    assert 550 <= found.requests <= 600
    assert (found.workload.input_tokens_p95, found.workload.concurrency) == (195, 4)
    assert found.workload.prefix_reuse == 0.0


def test_current_run_alone_counts_once_it_has_enough_traffic(tmp_path: Path) -> None:
    """257 in flight were once shown for a run with 95, because an earlier run had been overloaded."""
    writer = HistoryWriter(tmp_path / HISTORY)
    for second in range(0, 1000, 5):
        writer.append(Sample(1e9 + second, {"0": engine([150] * second, [50] * second, running=257)}), 1)
    for second in range(0, 100, 5):
        writer.append(Sample(1e9 + 1000 + second, {"0": engine([150] * second, [50] * second, running=95)}), 2)
    writer.close()
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(Details(workload=BEFORE)))
    generations = (Generation(1, spec, 1e9), Generation(2, spec, 1e9 + 1000))

    def in_flight(count: int, until: float) -> tuple[int, str]:
        record = ServerRecord("chat", State.READY, 1e9, 1e9, generations[:count])
        found = seen_traffic(tmp_path, record, 1e9 + until)
        assert found is not None
        assert found.workload is not None
        return found.workload.concurrency, found.sentence

    many, sentence = in_flight(2, 1099)
    assert many == 95
    assert "ended in the current run" in sentence
    few, sentence = in_flight(2, 1030)
    assert few == 257, "too few yet"
    assert "ended in the last hour" in sentence


def test_longest_request_of_an_earlier_run_counts(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / HISTORY)
    for second in range(0, 1000, 5):
        writer.append(Sample(1e9 + second, {"0": engine([1500] * second, [50] * second, running=4)}), 1)
    for second in range(0, 100, 5):
        writer.append(Sample(1e9 + 1000 + second, {"0": engine([150] * second, [50] * second, running=4)}), 2)
    writer.close()
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(Details(workload=BEFORE)))
    record = ServerRecord("chat", State.READY, 1e9, 1e9, (Generation(1, spec, 1e9), Generation(2, spec, 1e9 + 1000)))
    found = seen_traffic(tmp_path, record, 1e9 + 1099)
    assert found is not None
    assert found.workload is not None
    assert (found.workload.input_tokens_p95, found.longest) == (195, 2100)


def test_server_without_a_history_is_reported_in_a_sentence(tmp_path: Path) -> None:
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(Details(workload=BEFORE)))
    record = ServerRecord("chat", State.READY, 1e9, 1e9, (Generation(1, spec, 1e9),))
    none = seen_traffic(tmp_path, record, 1e9)
    assert none is not None
    assert (none.workload, none.sentence) == (None, "Nothing has been recorded for this server yet.")
    (tmp_path / HISTORY).write_bytes(b"no history" * 1000)
    damaged = seen_traffic(tmp_path, record, 1e9)
    assert damaged is not None
    assert "history" in damaged.sentence


def hour(*, crowd: int, usage: float, preempted: float = 0.0) -> list[Sampled]:
    """An hour of traffic: prompts and outputs that are rarely long, so that the p95 of both is far from the mean."""
    found = []
    for step in range(60):
        ended = [150.0] * (10 * step) + [1900.0] * step
        one = engine(ended, ended, running=float(crowd))
        one = replace(one, kv_cache_usage=usage, preemptions_total=preempted * step)
        found.append(Sampled(1, Sample(step * 10.0, {"0": one}, 40_000)))
    return found


def test_count_without_preemptions_is_the_lower_limit() -> None:
    """``96 → 13`` was once staged from requests of p95 length while 49 had run at 76% of the KV cache without
    preemptions."""
    room = seen_workload(hour(crowd=49, usage=0.76), BEFORE, objective=0.85).room
    assert room is not None
    assert room.ran == 49
    assert room.fitting == 49, "0.85 of the cache, of which each held 1/49 of 0.76, come to 54: 48 in steps of eight"
    assert room.reason.startswith("49 fit in 85% of the KV cache")


def test_count_with_preemptions_did_not_run_well() -> None:
    room = seen_workload(hour(crowd=60, usage=0.84, preempted=1.0), BEFORE, objective=0.85).room
    assert room is not None
    assert room.ran == 0
    full = seen_workload(hour(crowd=60, usage=0.99), BEFORE, objective=0.85).room
    assert full is not None
    assert (full.ran, full.fitting) == (0, 48)
    assert "held 660 of the KV cache's 40,000 tokens (p95)" in full.reason


def test_without_an_objective_or_values_no_capacity_is_reported() -> None:
    assert seen_workload(hour(crowd=49, usage=0.76), BEFORE).room is None
    unknown = [one._replace(sample=replace(one.sample, engines={"0": engine()})) for one in hour(crowd=4, usage=0.5)]
    assert seen_room(tuple(frames_of(unknown)), 0.85) is None


def frames_of(polls: Sequence[Sampled]) -> tuple[Frame, ...]:
    frames = Frames()
    for one in polls:
        frames.append(one.sample, one.generation)
    return frames.since(0.0)


def test_workload_and_finding_fix_use_one_estimate() -> None:
    polls = hour(crowd=60, usage=0.95, preempted=2.0)
    room = seen_workload(polls, BEFORE, objective=0.85).room
    frames = frames_of(polls)
    found = Evidence(now=frames[-1].end, ready_at=0.0, frames=frames, flags={"max-num-seqs": 96})
    fix = fewer_sequences(found, 0.6)
    assert room is not None
    assert fix is not None
    assert fix.changes.set["max-num-seqs"] == room.fitting == 48
    assert room.reason in fix.why


def test_negligible_changes_are_not_offered() -> None:
    """``--max-num-seqs 256 → 255`` and ``40 → 41`` were once offered: a restart for nothing."""
    ran_well = hour(crowd=255, usage=0.84)
    full = hour(crowd=256, usage=0.86)
    full = frames_of([*ran_well, *(one._replace(sample=replace(one.sample, at=one.sample.at + 3600)) for one in full)])
    found = Evidence(now=full[-1].end, ready_at=0.0, frames=full, flags={"max-num-seqs": 256})
    assert fewer_sequences(found, 0.6) is None
    for percent in range(65, 80):
        calm = frames_of(hour(crowd=41, usage=percent / 100))
        found = Evidence(now=calm[-1].end, ready_at=0.0, frames=calm, flags={"max-num-seqs": 41})
        fix = more_sequences(found)
        assert fix is None or int(str(fix.changes.set["max-num-seqs"])) >= 1.1 * 41, percent


def test_more_sequences_do_not_exceed_the_reduced_number() -> None:
    """A calm minute after a full hour: 48 fit according to the requests' usage, whatever the last minute shows."""
    polls = [*hour(crowd=60, usage=0.95, preempted=2.0)]
    frames = frames_of(polls)
    calm = (*frames[:-6], *(replace(one, usage_max=0.2) for one in frames[-6:]))
    found = Evidence(now=calm[-1].end, ready_at=0.0, frames=calm, flags={"max-num-seqs": 24})
    fix = more_sequences(found)
    assert fix is not None
    assert fix.changes.set["max-num-seqs"] == 48
