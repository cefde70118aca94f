"""ITL spikes in constructed frames: prompts delay others only if there is something to compute."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding
from vllm_console.diagnosis.live.findings import findings
from vllm_console.diagnosis.live.latency import _range, answered_by_shorter_steps, longest_of
from vllm_console.diagnosis.live.prefix_cache import LARGE_STEP
from vllm_console.diagnosis.live.rule import Evidence
from vllm_console.history.frames import Frame
from vllm_console.history.probe_records import EngineStep
from vllm_console.metrics.sample import EngineSample, Histogram
from vllm_console.runs.store import PastRun
from vllm_console.text import clock
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.release_defaults import Release

START, COUNT = 1_000_000.0, 12
BOUNDS = (0.025, 0.05, 0.1, 0.5, 1.0, math.inf)
SPIKES = Histogram(BOUNDS, (100.0, 100.0, 100.0, 105.0, 105.0, 105.0), 4.0)
"""A hundred gaps of about 20 ms, and five of about 300 ms."""
LENGTHS = (20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, math.inf)
"""Bounds of vLLM's histogram of prompt lengths, as far as needed."""
TWO_PROMPTS = Histogram(BOUNDS, (0.0, 0.0, 0.0, 2.0, 2.0, 2.0), 0.4)


def found(
    prompt_tokens: int,
    limit: int = 4096,
    idle: int = 0,
    itl: Histogram = SPIKES,
    running: int = 4,
    engines: int = 1,
    running_idle: int = 0,
    calm: Histogram | None = None,
    simulated: bool = False,
    block: int = 16,
    mm_item: int = 0,
    length: int | None = None,
    waiting: int = 0,
    steps: Sequence[EngineStep] = (),
    more: Flags | None = None,
    release: Release | None = None,
    prefill: Histogram = TWO_PROMPTS,
) -> dict[str, Finding]:
    """Findings if every ten seconds two prompts arrive, with ``prompt_tokens`` in total, and are computed in 0.2 s
    each.

    ``idle`` spans of ten seconds without a token follow, with ``running_idle`` requests running. With ``calm``, every
    third span has those gaps and a quarter of the requests. A large ``block`` means that the model has linear layers.
    With ``length``, twenty requests end with prompts of this many tokens.
    """
    grown = EngineSample(
        requests_running=running, requests_waiting=0, kv_cache_usage=0.1, preemptions_total=0,
        requests_finished_total=2, prompt_tokens_total=prompt_tokens, generation_tokens_total=105,
        histograms={"itl": itl, "prefill": prefill},
    )  # fmt: skip
    if length is not None:
        known = Histogram(LENGTHS, tuple(20.0 * (length <= bound) for bound in LENGTHS), 20.0 * length)
        grown = replace(grown, histograms={**grown.histograms, "prompt_tokens": known})
    frames = tuple(
        Frame(
            1, START + 10 * at, START + 10 * at + 10, grown,
            usage_max=0.1, running_max=running, waiting_max=waiting, waiting_min=0,
            kv_cache_tokens=50_000, engines=engines,
        )
        for at in range(COUNT)
    )  # fmt: skip
    if calm is not None:
        quiet = replace(grown, histograms={"itl": calm, "prefill": TWO_PROMPTS})
        frames = tuple(
            replace(frame, grown=quiet, running_max=running / 4) if at % 3 == 0 else frame
            for at, frame in enumerate(frames)
        )
    silent = replace(SPIKES, counts=(0.0,) * len(BOUNDS), sum=0.0)
    nothing = EngineSample(
        requests_running=0, requests_waiting=0, kv_cache_usage=0.0, preemptions_total=0, requests_finished_total=0,
        prompt_tokens_total=0, generation_tokens_total=0, histograms={"itl": silent},
    )  # fmt: skip
    last = frames[-1]
    frames += tuple(
        replace(last, start=last.end + 10 * at, end=last.end + 10 * at + 10, grown=nothing, running_max=running_idle)
        for at in range(idle)
    )
    flags: Flags = {"max-num-batched-tokens": limit, "max-num-seqs": 64, **(more or {})}
    frames = tuple(replace(frame, prefix_step=block) for frame in frames)
    evidence = Evidence(
        now=frames[-1].end, ready_at=START - 60, frames=frames, flags=flags, simulated=simulated,
        linear_layers=block > LARGE_STEP, max_tokens_per_mm_item=mm_item, steps=steps,
        idle_seconds=0 if running_idle else 10.0 * idle, release=release,
    )  # fmt: skip
    return {finding.code: finding for finding in findings(evidence)}


def test_long_prompts_that_delay_streams_get_smaller_steps() -> None:
    finding = found(4000)["prefill_contention"]
    changes = [dict(fix.changes.set) for fix in finding.fixes if not fix.changes.empty]
    assert changes == [{"max-num-batched-tokens": 768}]


@pytest.mark.parametrize(
    ("drafts", "release", "tokens"), [(15, (0, 33, 0), 1280), (15, (0, 24, 0), 1280), (7, (0, 33, 0), 768)]
)
def test_smaller_steps_hold_the_drafts_of_all_sequences(drafts: int, release: Release, tokens: int) -> None:
    config: Flags = {"spec-method": "eagle3", "spec-tokens": drafts}
    finding = found(4000, more=config, release=release)["prefill_contention"]
    (change,) = [fix.changes for fix in finding.fixes if not fix.changes.empty]
    assert change == Changes({"max-num-batched-tokens": tokens})
    assert tokens >= 64 * (1 + drafts)


def test_prefills_side_by_side_do_not_count_as_slower() -> None:
    """Twenty prompts of 0.5 s each in 10 s were once taken for a tenth of the rate, and steps became too small."""
    alone = Histogram(TWO_PROMPTS.bounds, TWO_PROMPTS.counts, 5.0)
    changes = []
    for prefill in (alone, replace(alone, sum=10.0), replace(alone, sum=100.0)):
        finding = found(100_000, limit=16384, prefill=prefill)["prefill_contention"]
        changes.append([fix.changes.set["max-num-batched-tokens"] for fix in finding.fixes if not fix.changes.empty])
    assert changes[1] == changes[2] == [768]
    assert changes[0] == [1536]


def test_prefill_delay_is_a_bucket_over_a_named_time() -> None:
    finding = found(4000)["prefill_contention"]
    assert re.fullmatch(r"In the last \S+, ITL jumped from \S+ to 100ms–500ms during prefill\.", finding.symptom), (
        finding.symptom
    )


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((0, 0, 900, 900), "100ms–500ms"),
        ((900, 900, 900, 900), "<50ms"),
        ((900, 997, 997, 1000), ">500ms"),
        ((0, 0, 0, 900), ">500ms"),
        ((0, 0, 0, 0), "–"),
    ],
)
def test_the_longest_gap_is_shown_as_its_bucket(counts: tuple[float, ...], text: str) -> None:
    histogram = Histogram((0.05, 0.1, 0.5, math.inf), counts, 0.0)
    assert _range(*longest_of(histogram)) == text


def test_only_the_p99_measure_has_a_limit() -> None:
    measures = {one.name.partition(" in ")[0]: one for one in found(4000)["prefill_contention"].measures}
    assert measures["ITL p99"].limit == "100ms"
    assert measures["ITL max"].limit == ""
    assert max(len(one.value) for one in measures.values()) <= 12, "a table of them fits into 80 columns"


def test_linear_layer_models_keep_steps_of_at_least_a_block() -> None:
    changes = [dict(fix.changes.set) for fix in found(4000, block=1056)["prefill_contention"].fixes]
    assert {"max-num-batched-tokens": 1280} in changes
    assert all(fix.changes.empty for fix in found(4000, block=4096)["prefill_contention"].fixes)


def test_steps_keep_room_for_a_whole_video() -> None:
    changes = [dict(fix.changes.set) for fix in found(4000, mm_item=2496)["prefill_contention"].fixes]
    assert [one for one in changes if one] == [{"max-num-batched-tokens": 2560}]


@pytest.mark.parametrize(
    ("before", "now", "code", "kept"),
    [
        (4096, 512, "prefill_contention", True),
        (None, 512, "prefill_contention", True),  # vLLM's default
        (512, 512, "prefill_contention", False),
        (512, 4096, "prefill_contention", False),
        (4096, None, "prefill_contention", False),
        (4096, 512, "slow_tokens", False),
    ],
)
def test_earlier_step_reductions_are_recognized(before: int | None, now: int | None, code: str, kept: bool) -> None:
    """The workload once proposed 2048 tokens right after this finding's fix had reduced 4096 to 512."""

    def flags(tokens: int | None) -> dict[str, int]:
        return {"max-num-batched-tokens": tokens} if tokens is not None else {}

    run = PastRun(1, 0.0, findings=((code, 10.0, 200.0),), flags=flags(before))
    calm = PastRun(2, 300.0, flags=flags(now))
    assert answered_by_shorter_steps(flags(now), [run]) is kept
    assert answered_by_shorter_steps(flags(now), [calm, run]) is kept
    assert not answered_by_shorter_steps(flags(now), [calm, calm, run]), "long ago"


def recorded(prompts: int, tokens: int, without: int) -> list[EngineStep]:
    """Twelve quick steps of ten milliseconds before each slow one of 300: ``prompts`` with a prompt, then others."""
    known = [(0.3, tokens)] * prompts + [(0.3, 0)] * without
    times = [step for slow in known for step in ([(0.01, 0)] * 12 + [slow])]
    found, now = [], START + 1
    for took, prompt in times:
        now += took
        found.append(EngineStep(now, 0, 4, 0, 0.1, 0, 0, 0, prompt, 4, 0, 4, took, took, None, None, None, 0))
    return found


@pytest.mark.parametrize(("length", "waiting", "blamed"), [(78, 0, False), (600, 0, True), (78, 9, True)])
def test_prefill_is_blamed_only_if_a_step_can_exceed_the_lowest_limit(length: int, waiting: int, blamed: bool) -> None:
    """Fourteen streams with prompts of 78 tokens on a busy machine: ``--max-num-batched-tokens 256`` was offered."""
    codes = set(found(1092, running=14, length=length, waiting=waiting))
    assert ("prefill_contention" in codes) is blamed
    assert ("slow_tokens" in codes) is not blamed


def test_recorded_steps_refute_prefill() -> None:
    finding = found(4000, running=14, steps=recorded(3, 4000, 37))
    assert "prefill_contention" not in finding
    assert finding["slow_tokens"].fixes == ()
    assert finding["slow_tokens"].cause.endswith(
        "37 of 40 such steps computed no prompt. A possible cause is other work on this GPU."
    )
    short = found(4000, running=14, steps=recorded(30, 78, 10))
    assert "prefill_contention" not in short
    assert short["slow_tokens"].cause.endswith(
        "Few such steps computed long prompts. A possible cause is other work on this GPU."
    )


def test_recorded_steps_confirm_prefill_of_many_short_prompts() -> None:
    """Thirty prompts that arrive together are as long as a long one."""
    assert "prefill_contention" not in found(4000, length=100)
    finding = found(4000, length=100, steps=recorded(30, 3000, 5))["prefill_contention"]
    assert [dict(fix.changes.set) for fix in finding.fixes if not fix.changes.empty] == [
        {"max-num-batched-tokens": 768}
    ]
    assert [one.value for one in finding.measures if one.name == "steps above 100ms with prompts"] == ["86%"]


def test_smaller_limit_that_few_recorded_steps_exceed_is_not_a_fix() -> None:
    finding = found(4000, steps=recorded(30, 600, 5))["prefill_contention"]
    assert all(fix.changes.empty for fix in finding.fixes)


def test_too_few_recorded_steps_show_no_cause() -> None:
    assert "prefill_contention" in found(4000, steps=recorded(0, 0, 4))


@pytest.mark.parametrize("limit", [2048, 4096])
def test_prompts_shorter_than_a_step_delay_nobody(limit: int) -> None:
    """A busy host also causes spikes; a smaller limit that no step reaches would change nothing."""
    codes = set(found(120, limit))
    assert "prefill_contention" not in codes
    assert "slow_tokens" in codes


def test_rare_slow_steps_are_not_blamed_on_sequences() -> None:
    """On a busy machine, ``--max-num-seqs 16 -> 4`` was once offered while the median gap was a third of the
    objective."""
    finding = found(120, running=16)["slow_tokens"]
    assert finding.fixes == ()
    assert finding.cause == (
        "4.8% of 630 gaps between tokens took longer than 100ms. "
        "Possible causes: other work on this GPU, steps with long prompts."
    )


def test_rare_slow_steps_of_a_simulated_engine_are_not_blamed_on_its_gpu() -> None:
    cause = found(120, running=16, simulated=True)["slow_tokens"].cause
    assert cause == (
        "4.8% of 630 gaps between tokens took longer than 100ms. "
        "No fix is known: simulated steps also take longer while the CPU is busy."
    )


def test_slow_steps_in_busy_spans_are_blamed_on_sequences() -> None:
    calm = Histogram(BOUNDS, (100.0, 105.0, 105.0, 105.0, 105.0, 105.0), 2.0)
    finding = found(120, running=16, calm=calm)["slow_tokens"]
    assert [fix.changes.set for fix in finding.fixes if not fix.changes.empty] == [{"max-num-seqs": 8}]


def test_limit_above_every_step_is_not_a_fix() -> None:
    finding = found(700, 8192)["prefill_contention"]
    for fix in finding.fixes:
        assert int(fix.changes.set.get("max-num-batched-tokens", 0)) < 700


PAUSE = 30
"""Number of frames in five minutes."""


def at(seconds: float) -> str:
    return clock(seconds, seconds, seconds=True)


def test_missed_objective_persists_through_a_pause_with_its_values() -> None:
    shown = [finding for idle in range(PAUSE) if (finding := found(120, idle=idle).get("slow_tokens"))]
    assert len(shown) == PAUSE, "all along"
    assert {one.since for one in shown} == {START}
    assert {one.cause for one in shown} == {shown[0].cause}
    for one in shown[:6]:
        assert one.symptom.startswith("ITL p99 of the last minute is ~")
    until = at(START + 10 * COUNT)
    for one in shown[6:]:
        assert one.measures == shown[0].measures
        p99 = one.measures[0].value
        assert one.symptom == (
            f"ITL p99 was {p99} in the minute to {until}, and nothing was measured since; the objective is 100ms."
        )


def test_prefill_contention_persists_through_a_pause_with_its_values() -> None:
    before, after = found(4000)["prefill_contention"], found(4000, idle=PAUSE - 1)["prefill_contention"]
    assert (after.since, after.measures, after.fixes) == (before.since, before.measures, before.fixes)
    assert after.symptom == before.symptom.replace("the last 2m", f"the 2m to {at(START + 10 * COUNT)}")


@pytest.mark.parametrize("prompt_tokens", [120, 4000])
def test_nothing_is_reported_after_five_minutes_without_requests(prompt_tokens: int) -> None:
    assert found(prompt_tokens, idle=PAUSE) == {}


def test_slow_sparse_traffic_is_one_finding_until_it_improves() -> None:
    """One request every hundred seconds: the finding once began and ended with each of them, in every console."""
    slow = EngineSample(generation_tokens_total=105, requests_running=1, histograms={"itl": SPIKES})
    well = replace(SPIKES, counts=(105.0,) * len(BOUNDS), sum=2.0)
    none = replace(SPIKES, counts=(0.0,) * len(BOUNDS), sum=0.0)
    silent = EngineSample(generation_tokens_total=0, requests_running=0, histograms={"itl": none})
    good = replace(slow, histograms={"itl": well})
    traffic = [silent, *[slow, *[silent] * 9] * 4, good, *[silent] * 9, good]
    frames = [
        Frame(1, START + 10 * index, START + 10 * index + 10, grown, running_max=grown.requests_running, waiting_max=0)
        for index, grown in enumerate(traffic)
    ]
    open_at = []
    for count in range(1, len(frames) + 1):
        seen = Evidence(now=frames[count - 1].end, ready_at=START - 60, frames=frames[:count])
        if "slow_tokens" in {finding.code for finding in findings(seen)}:
            open_at.append(count - 1)
    # It begins with the third bad minute and ends with the third good one.
    assert open_at == list(range(3, 43))


def test_missed_objective_persists_while_running_requests_get_no_token() -> None:
    """A gap is only counted once its token arrives."""
    symptom = found(120, idle=9, running_idle=3)["slow_tokens"].symptom
    assert "nothing was measured since" in symptom


def test_stall_in_one_engine_is_found_while_others_run() -> None:
    seldom = Histogram(BOUNDS, (1000.0, 1000.0, 1000.0, 1000.0, 1006.0, 1006.0), 25.0)
    assert "prefill_contention" not in found(4000, itl=seldom, running=40)
    assert "prefill_contention" in found(4000, itl=seldom, running=40, engines=4)
