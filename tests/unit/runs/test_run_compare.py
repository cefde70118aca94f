"""The verdict on constructed minutes: changes that help, harm or do nothing, and different traffic."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
from msgspec.structs import replace

from vllm_console.cli.runs_text import comparison_lines
from vllm_console.metrics.sample import EngineSample, Histogram, Sample
from vllm_console.runs.compare import (
    FEWEST,
    JUDGED,
    ComparedFigure,
    ComparisonVerdict,
    Factor,
    Recorded,
    TrafficMatch,
    compare,
    differences,
)
from vllm_console.runs.confidence import difference, student, worth
from vllm_console.runs.document import comparison_document
from vllm_console.runs.text import (
    brief,
    detail_text,
    factor_sides,
    figure_change_text,
    likeness_text,
    notes,
    plain_sentence,
    short_verdict,
    side_text,
    times_note,
    traffic_text,
    verdict_text,
)
from vllm_console.runs.windows import Windows


def verdicts(made, seeds, count=10, before=None, after=None):
    """How often each verdict was given."""
    found = Counter()
    for seed in range(seeds):
        one = made.minutes(2 * seed, count, **(before or {}))
        other = made.minutes(2 * seed + 1, count, **{**(before or {}), **(after or {})})
        found[compare(*made.pair(one, other)).verdict] += 1
    return found


@pytest.mark.parametrize("count", [FEWEST, 10])
def test_change_without_effect_is_rarely_reported(made, count):
    found = verdicts(made, 200, count)
    assert found[ComparisonVerdict.BETTER] + found[ComparisonVerdict.WORSE] + found[ComparisonVerdict.MIXED] <= 10


@pytest.mark.parametrize(("slower", "verdict"), [(0.7, ComparisonVerdict.BETTER), (1.3, ComparisonVerdict.WORSE)])
def test_change_of_30_percent_is_seen_in_ten_minutes_each(made, slower, verdict):
    found = verdicts(made, 60, after={"slower": slower})
    assert found[verdict] >= 54, found


def test_values_and_uncertainty_accompany_the_verdict(made):
    found = compare(*made.pair(made.minutes(1), made.minutes(2, slower=1.5)))
    assert found.verdict is ComparisonVerdict.WORSE
    assert verdict_text(found).startswith("The change made it worse: ITL p99 rose from 90ms to "), "now above 100 ms"
    figures = {figure.key: figure for figure in found.figures}
    itl = figures["itl_mean"]
    assert itl.verdict is ComparisonVerdict.WORSE
    assert itl.before == pytest.approx(0.0264, rel=0.1)
    assert itl.low < itl.change < itl.high
    assert itl.share(itl.change) == pytest.approx(0.5, abs=0.12)
    assert figures["itl_p50"].verdict is None, "shown, not judged"
    assert {figure.key for figure in found.judged} == set(JUDGED)
    assert figures["generation_tokens_per_second"].verdict is ComparisonVerdict.NO_DIFFERENCE, "as much was asked for"


def with_exact_ttft(windows, factor, but=()):
    """The windows with exact TTFT quantiles, which are ``factor`` times the estimates."""
    return [
        window
        if number in but
        else replace(
            window,
            figures={
                **window.figures,
                **{f"ttft_{part}_exact": factor * window.figures[f"ttft_{part}"] for part in ("p50", "p90", "p99")},
            },
        )
        for number, window in enumerate(windows)
    ]


@pytest.mark.parametrize(
    ("missing_before", "missing_after", "exact"), [((), (), True), ((4,), (), False), ((), range(10), False)]
)
def test_quantiles_are_exact_only_if_exact_in_all_minutes(made, missing_before, missing_after, exact):
    """Otherwise the runs would differ only because one is estimated: here by half."""
    one = with_exact_ttft(made.minutes(1), 1.5, missing_before)
    other = with_exact_ttft(made.minutes(2), 1.5, missing_after)
    found = compare(*made.pair(one, other))
    figures = {figure.key: figure for figure in found.figures}
    ttft = figures["ttft_p99"]
    assert ttft.exact is exact
    assert not figures["e2e_p99"].exact
    assert ttft.verdict not in (ComparisonVerdict.BETTER, ComparisonVerdict.WORSE)
    estimates = {figure.key: figure for figure in compare(*made.pair(made.minutes(1), made.minutes(2))).figures}
    assert ttft.after == pytest.approx(estimates["ttft_p99"].after * (1.5 if exact else 1.0))
    assert ("TTFT p50, TTFT p90, TTFT p99: exact, from the probe's records." in notes(found)) is exact
    assert comparison_document(found)["figures"][3]["exact"] is exact


@pytest.mark.parametrize("missing", [(), (4,)])
def test_length_p95_is_exact_only_if_exact_in_all_minutes(made, missing):
    def known(windows):
        return [
            one
            if number in missing
            else replace(one, figures={**one.figures, "prompt_length_p95": 800.0, "prompt_length_p95_exact": 1234.0})
            for number, one in enumerate(windows)
        ]

    found = compare(*made.pair(known(made.minutes(1)), known(made.minutes(2))))
    factors = {factor.key: factor for factor in found.factors}
    assert factor_sides(factors["prompt_length_p95"])[1] == ("~800 tokens" if missing else "1,234 tokens")
    assert factor_sides(factors["answer_length_p95"])[1].startswith("~")
    document = {one["name"]: one for one in comparison_document(found)["traffic"]["factors"]}
    assert document["prompt_length_p95"]["exact"] is not bool(missing)
    assert "exact" not in document["prompt_length_mean"]


def test_comparison_is_deterministic_and_fast(made):
    pair = made.pair(made.minutes(1, 240), made.minutes(2, 240))
    compare(*pair)
    began = time.process_time()
    first = compare(*pair)
    assert time.process_time() - began < 3, "about 0.1 s on an idle machine"
    assert compare(*pair) == first


@pytest.mark.parametrize(
    ("traffic", "named"),
    [({"rate": 3.2}, "arrivals "), ({"prompt": 1400.0}, "prompt length"), ({"answer": 90.0}, "answer length")],
)
def test_different_traffic_is_not_compared(made, traffic, named):
    found = compare(*made.pair(made.minutes(1), made.minutes(2, slower=0.5, **traffic)))
    assert found.verdict is ComparisonVerdict.NOT_COMPARABLE
    assert found.traffic is TrafficMatch.DIFFERENT
    assert named in verdict_text(found)
    assert "%" in verdict_text(found)


def test_length_p95_is_marked_as_an_estimate(made):
    found = compare(*made.pair(made.minutes(1), made.minutes(2)))
    sides = {factor.key: factor_sides(factor) for factor in found.factors}
    known = {key for key, shown in sides.items() if all(one.startswith("~") for one in shown)}
    assert known == {factor.key for factor in found.factors if factor.key.endswith("p95") and factor.before is not None}
    assert known


def test_p95_above_the_last_bucket_is_only_a_bound(made):
    """Prompts of 30,000 tokens with ``max-model-len`` 32768: vLLM's last bound is 20,000."""
    histogram = Histogram((10_000.0, 20_000.0, math.inf), (0.0, 0.0, 50.0), 50 * 30_000.0)
    served = EngineSample(requests_finished_total=50.0, histograms={"prompt_tokens": histogram})
    idle = EngineSample(requests_finished_total=0.0)
    windows = Windows()
    windows.append(Sample(0.0, {"0": idle}))
    long = windows.append(Sample(60.0, {"0": served}))
    assert "prompt_length_p95" not in long.figures

    before, after = made.pair(made.minutes(1), made.minutes(2))
    for one in after.windows:
        one.figures.pop("prompt_length_p95")
        one.figures["prompt_length_p95_above"] = long.figures["prompt_length_p95_above"]
    found = compare(before, after)
    (factor,) = (factor for factor in found.factors if factor.key == "prompt_length_p95")
    assert factor_sides(factor)[1] == ">20.0k tokens"
    assert factor.change is None, "a value known only as a bound has no known change"
    assert factor.likeness is TrafficMatch.DIFFERENT
    document = next(one for one in comparison_document(found)["traffic"]["factors"] if one["name"] == factor.key)
    assert (document["after"], document["after_above"]) == (None, 20_000.0)
    assert "before_above" not in document


def test_heavier_traffic_may_explain_a_slowdown(made):
    heavier = [made.minutes(seed, rate=2.4, slower=1.5) for seed in range(1, 40, 2)]
    lighter = [made.minutes(seed, rate=2.4, slower=0.6) for seed in range(1, 40, 2)]
    worse = Counter(compare(*made.pair(made.minutes(2), other)).verdict for other in heavier)
    better = Counter(compare(*made.pair(made.minutes(2), other)).verdict for other in lighter)
    assert worse[ComparisonVerdict.NOT_COMPARABLE] > 15, worse
    assert better[ComparisonVerdict.BETTER] > 15, better


def test_rate_is_a_result_if_clients_wait_for_answers(made):
    found = compare(*made.pair(made.minutes(1, in_flight=16.0), made.minutes(2, in_flight=16.0, slower=0.6)))
    assert found.verdict is ComparisonVerdict.BETTER
    throughput = next(figure for figure in found.figures if figure.key == "generation_tokens_per_second")
    assert throughput.verdict is ComparisonVerdict.BETTER
    assert any("wait for answers" in note for note in notes(found))


def test_more_traffic_is_not_better_throughput(made):
    for seed in range(40):
        found = compare(*made.pair(made.minutes(2 * seed), made.minutes(2 * seed + 1, rate=2.4)))
        throughput = next(figure for figure in found.figures if figure.key == "generation_tokens_per_second")
        assert throughput.change > 0
        assert throughput.verdict in (ComparisonVerdict.NO_DIFFERENCE, ComparisonVerdict.NOT_COMPARABLE)


def test_only_minutes_of_similar_traffic_are_compared(made):
    night = made.minutes(1, 60, rate=0.4)
    day = made.minutes(2, 7, rate=2.0, begins=made.BEGAN + 180 + 60 * 60)
    found = compare(*made.pair(night + day, made.minutes(3, 20, rate=2.0, slower=2.0)))
    assert found.verdict is ComparisonVerdict.WORSE
    assert found.before.compared <= 7
    assert any("similar traffic are compared" in note for note in notes(found))


def test_verdict_is_kept_with_later_traffic(made):
    before, minutes = made.minutes(1, 20), made.minutes(2, 10, slower=0.6)
    first = compare(*made.pair(before, minutes))
    assert (first.verdict, first.kept) == (ComparisonVerdict.BETTER, True)
    for seed in range(3):
        later = made.minutes(seed, 60, rate=6.0, slower=3.0, begins=minutes[-1].end + 600 * seed)
        again = compare(*made.pair(before, minutes + later))
        assert again.figures == first.figures
        assert (again.after.since, again.after.until) == (first.after.since, first.after.until)
    assert first.after.since == minutes[0].at
    assert first.before.since == before[10].at, "the minutes next to the change"
    assert first.before.until == before[-1].end


def hitting(windows, share):
    """The windows with this share of prefix hits."""
    return [replace(one, figures={**one.figures, "hit_rate": share}) for one in windows]


@pytest.mark.parametrize("flags", [{"max-num-seqs": 64}, {"max-num-seqs": 256, "kv-cache-dtype": "fp8"}])
def test_slowdown_with_a_cold_prefix_cache_is_judged_again(made, flags):
    """Eight minutes with 30% instead of 80% hits were once a final "worse", whatever came later."""
    before, cold = hitting(made.minutes(1, 60), 0.8), hitting(made.minutes(2, 6, slower=1.5), 0.3)
    first = compare(*made.pair(before, cold, flags))
    assert (first.verdict, first.kept, first.again) == (ComparisonVerdict.WORSE, False, 10)
    filling = "Prefix hits went from 80% to 30%: prompts may share less than before, or the cache was still filling"
    assert f"{filling} after the restart." in notes(first)
    warm = hitting(made.minutes(3, 60, begins=cold[-1].end), 0.8)
    later = compare(*made.pair(before, cold + warm, flags))
    assert later.verdict is ComparisonVerdict.NO_DIFFERENCE
    assert not any("Prefix hits" in note for note in notes(later))


def test_slowdown_with_fewer_prefix_hits_for_two_hours_is_final(made):
    before, after = hitting(made.minutes(1, 60), 0.8), hitting(made.minutes(2, 130, slower=1.5), 0.3)
    found = compare(*made.pair(before, after))
    assert (found.verdict, found.kept, found.after.compared) == (ComparisonVerdict.WORSE, True, 120)
    assert "Prefix hits went from 80% to 30%: prompts may share less than before." in notes(found)


@pytest.mark.parametrize(("slower", "before", "after"), [(0.6, 0.8, 0.3), (1.5, 0.3, 0.8), (1.5, 0.5, 0.35)])
def test_difference_that_a_cold_prefix_cache_does_not_explain_is_final(made, slower, before, after):
    one, other = hitting(made.minutes(1), before), hitting(made.minutes(2, slower=slower), after)
    assert compare(*made.pair(one, other)).kept


def test_verdict_over_few_requests_is_not_kept(made):
    few = {"rate": 0.3}
    before, minutes = made.minutes(1, 20, **few), made.minutes(51, 5, slower=0.3, **few)
    first = compare(*made.pair(before, minutes))
    assert (first.verdict, first.kept) == (ComparisonVerdict.BETTER, False)
    later = made.minutes(91, 40, slower=1.0, begins=minutes[-1].end, **few)
    assert compare(*made.pair(before, minutes + later)).verdict is not ComparisonVerdict.BETTER


def test_no_difference_is_judged_again_for_up_to_two_hours(made):
    before, minutes = made.minutes(1, 120), made.minutes(2, 300)
    compared = {count: compare(*made.pair(before, minutes[:count])) for count in (5, 9, 10, 39, 119, 120, 300)}
    assert [found.verdict for found in compared.values()] == [ComparisonVerdict.NO_DIFFERENCE] * len(compared)
    assert [found.after.compared for found in compared.values()] == [5, 5, 10, 20, 80, 120, 120]
    assert [found.kept for found in compared.values()] == [False] * 5 + [True] * 2
    assert [found.again for found in compared.values()] == [10, 10, 20, 40, 120, None, None]
    assert times_note(compared[9], made.BEGAN).endswith(" With 10 minutes after the change it is compared again.")
    one, other = made.pair(before, minutes[:9])
    ended = replace(other, run=replace(other.run, ended_at=made.BEGAN + 3600))
    assert compare(one, ended).again is None, "no minute will come"


def test_verdict_states_its_time_spans(made):
    found = compare(*made.pair(made.minutes(1, 10), made.minutes(2, 5, slower=0.5, begins=made.BEGAN + 3600)))
    assert times_note(found, made.BEGAN) == (
        "Compared: 10:34–10:44 before, 11:31–11:36 after. Later traffic is not included."
    )
    spans = times_note(found, made.BEGAN + 30 * 86_400).split("Compared: ")[1].split(" after")[0]
    assert spans.count(time.strftime("%b ", time.localtime(made.BEGAN))) == 2, "a date once for each run"
    little = compare(*made.pair(made.minutes(1), made.minutes(2, 2)))
    assert times_note(little, made.BEGAN) == ""


def test_too_little_data_says_how_much_is_missing(made):
    found = compare(*made.pair(made.minutes(1), made.minutes(2, 2, slower=2.0)))
    assert found.verdict is ComparisonVerdict.TOO_LITTLE
    assert found.after.minutes_missing == pytest.approx(FEWEST - 2)
    assert "chat@2 needs 3 min more" in verdict_text(found)
    assert all(figure.verdict is ComparisonVerdict.TOO_LITTLE for figure in found.judged)


def test_traffic_of_a_run_that_just_began_is_not_called_not_reported(made):
    found = compare(*made.pair(made.minutes(1), []))
    assert found.traffic is TrafficMatch.UNKNOWN
    assert traffic_text(found) == "needs data"
    assert {likeness_text(one, early=True) for one in found.factors if one.after is None} == {"needs data"}
    assert str(TrafficMatch.UNKNOWN) not in "\n".join(comparison_lines(found))


def test_missing_minutes_are_the_same_number_in_the_sentence_and_as_a_value(made):
    """A minute of frames takes 60.8 s if each scrape is late."""
    found = compare(*made.pair(made.minutes(1), made.minutes(2, 2)))
    late = replace(found, after=replace(found.after, seconds=60.8))
    assert "chat@2 needs 3 min more" in verdict_text(late)
    assert late.after.minutes_missing == 3
    assert replace(late.after, seconds=20.0).minutes_missing == 1


def test_run_without_a_minute_needs_its_warm_up_too(made):
    before, after = made.pair(made.minutes(1), [])
    found = compare(before, replace(after, warm_at=None))
    assert found.verdict is ComparisonVerdict.TOO_LITTLE
    assert found.after.minutes_missing == FEWEST + 2


def test_run_that_never_served_is_named_with_its_cause(made):
    before, after = made.pair(made.minutes(1), [], ready_at=None, cause="weights_do_not_fit")
    found = compare(before, replace(after, warm_at=None))
    assert found.verdict is ComparisonVerdict.TOO_LITTLE
    assert "never served a request (weights do not fit)" in verdict_text(found)


def test_minutes_after_a_start_and_at_traffic_edges_are_excluded(made):
    cold = made.minutes(1, 2, slower=20.0)
    steady = made.minutes(2, 10, begins=cold[-1].end)
    later = made.minutes(3, 10, begins=steady[-1].end + 3600)
    before, after = made.pair(cold + steady + later, made.minutes(4))
    found = compare(replace(before, warm_at=cold[-1].end), after)
    assert found.before.compared == 18, "without the two before and after the pause"
    assert found.verdict is ComparisonVerdict.NO_DIFFERENCE


def test_growing_queue_does_not_hide_an_improvement(made):
    def queued(windows):
        waits = [2.0 + 1.5 * index for index in range(len(windows))]
        return [
            replace(w, figures={**w.figures, **{key: w.figures[key] + wait for key in w.figures
                                                if key.startswith(("ttft", "e2e"))}})
            for w, wait in zip(windows, waits, strict=True)
        ]  # fmt: skip

    found = compare(*made.pair(queued(made.minutes(1)), made.minutes(2)))
    assert found.verdict is ComparisonVerdict.BETTER
    ttft = next(figure for figure in found.figures if figure.key == "ttft_mean")
    assert ttft.share(ttft.low) > -1


@pytest.mark.parametrize("long", [8, 15])
def test_minutes_of_a_shrinking_queue_are_excluded(made, long):
    idle = [replace(w, figures={**w.figures, "requests_per_second": 0.0})
            for w in made.minutes(3, long, begins=made.BEGAN + 780)]  # fmt: skip
    found = compare(*made.pair(made.minutes(1) + idle, made.minutes(2)))
    assert found.before.compared == 10
    assert found.verdict is ComparisonVerdict.NO_DIFFERENCE


def test_several_changes_cannot_be_distinguished(made):
    flags = {"max-num-seqs": 64, "kv-cache-dtype": "fp8"}
    found = compare(*made.pair(made.minutes(1), made.minutes(2, slower=0.5), flags))
    assert found.verdict is ComparisonVerdict.BETTER
    assert any("can't attribute" in note and "kv-cache-dtype" in note for note in notes(found))


def test_another_model_or_engine_is_a_change(made):
    found = compare(*made.pair(made.minutes(1), made.minutes(2), {"max-num-seqs": 256}, version="0.32.0"))
    assert [change.flag for change in found.differences] == ["engine"]
    same = compare(*made.pair(made.minutes(1), made.minutes(2), {"max-num-seqs": 256}))
    assert any("same flags" in note for note in notes(same))


def test_better_and_worse_values_are_mixed(made):
    after = [
        replace(w, figures={**w.figures, **{key: w.figures[key] * 4 for key in w.figures if key.startswith("ttft")}})
        for w in made.minutes(2, slower=0.6)
    ]
    found = compare(*made.pair(made.minutes(1), after))
    assert found.verdict is ComparisonVerdict.MIXED
    assert verdict_text(found).startswith("Some of it got better and some worse: ")
    assert any("No longer within its objective: TTFT p99 ≤ " in note for note in notes(found))


@pytest.mark.parametrize(
    ("verdict", "sentence", "short"),
    [
        (
            ComparisonVerdict.MIXED,
            r"Some of it got .*: ITL mean fell .*, but TTFT mean rose",
            "Mixed: ITL mean −.*, TTFT",
        ),
        (ComparisonVerdict.BETTER, "The change helped: ITL mean fell", "Better: ITL mean −"),
        (ComparisonVerdict.WORSE, "The change made it worse: TTFT mean rose", r"Worse: TTFT mean \+"),
    ],
)
def test_headline_names_what_the_verdict_rests_on(made, verdict, sentence, short):
    after = [
        replace(w, figures={**w.figures, "ttft_mean": w.figures["ttft_mean"] * 4}) for w in made.minutes(2, slower=0.6)
    ]
    found = compare(*made.pair(made.minutes(1), after))
    verdicts = {
        "ttft_mean": ComparisonVerdict.WORSE,
        "itl_mean": ComparisonVerdict.BETTER,
        "e2e_mean": ComparisonVerdict.INCONCLUSIVE,
    }
    figures = tuple(replace(one, verdict=verdicts.get(one.key)) for one in found.figures)
    found = replace(found, verdict=verdict, figures=figures)
    assert re.match(sentence, plain_sentence(found))
    assert re.match(short, brief(found))


def test_request_latency_decides_if_no_objective_is_missed(made):
    after = [
        replace(w, figures={**w.figures, "itl_mean": w.figures["itl_mean"] * 3})
        for w in made.minutes(2, slower=0.6)
    ]  # fmt: skip
    found = compare(*made.pair(made.minutes(1), after))
    assert found.verdict is ComparisonVerdict.BETTER
    assert ", while ITL mean rose from" in verdict_text(found)
    back = compare(*made.pair(after, made.minutes(3)))
    assert back.verdict is ComparisonVerdict.WORSE
    assert "is better" in verdict_text(back)


def test_preemptions_count_above_half_a_percent(made):
    few = compare(*made.pair(made.minutes(1), made.minutes(2, preempted=0.003)))
    many = compare(*made.pair(made.minutes(1), made.minutes(2, preempted=0.05)))
    assert few.verdict is ComparisonVerdict.NO_DIFFERENCE
    assert many.verdict is ComparisonVerdict.WORSE
    assert "preemptions/req rose from 0 to 0.05" in verdict_text(many)


def test_preemptions_that_ended_are_no_chance_because_an_earlier_run_had_more(made):
    """``preemptions/req … may be chance`` was once shown for a run without a single preemption: it was given the
    scatter of an earlier, longer run."""

    def figures_of(seed, then, now):
        drift = (0.0, 0.3)
        runs = [(60, 30.0), (10, then), (6, now)]
        earlier, before, after = (
            made.preempted(made.minutes(3 * seed + n, count), 3 * seed + n, per_minute, drift)
            for n, (count, per_minute) in enumerate(runs)
        )
        found = compare(*made.pair(before, after), Recorded(made.run(3), earlier, 0.0))
        by_key = {figure.key: figure for figure in found.figures}
        return by_key["preemption_share"], by_key["preemptions_per_minute"]

    ended = [figures_of(seed, 13.0, 0.0) for seed in range(10)]
    assert sum(share.verdict is ComparisonVerdict.BETTER for share, _ in ended) >= 7
    fell = [[figure.high is not None and figure.high < 0 for figure in figures] for figures in ended]
    assert sum(share == rate for share, rate in fell) >= 9, "both figures count the same events"
    same = [figures_of(seed, 13.0, 13.0)[0] for seed in range(20)]
    assert sum(share.verdict in (ComparisonVerdict.BETTER, ComparisonVerdict.WORSE) for share in same) <= 2


def test_p99_of_a_dozen_requests_is_not_judged(made):
    found = compare(*made.pair(made.minutes(1, rate=0.2), made.minutes(2, rate=0.2)))
    assert "ttft_p99" not in {figure.key for figure in found.judged}


def test_unexpected_end_comes_first(made):
    ended = {"ended_at": made.BEGAN + 9000.0, "ended": {"requested": False, "reason": "killed by SIGKILL"}}
    found = compare(*made.pair(made.minutes(1), made.minutes(2), cause="cuda_oom_runtime", **ended))
    assert notes(found)[0].startswith("The run after ended unexpectedly (cuda oom runtime)")


def test_unreported_values_are_not_zero(made):
    bare = [replace(w, figures={k: v for k, v in w.figures.items() if not k.startswith("ttft")})
            for w in made.minutes(2)]  # fmt: skip
    found = compare(*made.pair(made.minutes(1), bare))
    ttft = next(figure for figure in found.figures if figure.key == "ttft_mean")
    assert ttft.after is None
    assert ttft.verdict is ComparisonVerdict.TOO_LITTLE
    assert found.verdict is ComparisonVerdict.NO_DIFFERENCE
    silent = [replace(w, figures={}) for w in made.minutes(2)]
    assert compare(*made.pair(silent, silent)).verdict is ComparisonVerdict.NOT_COMPARABLE


def test_nothing_recorded_at_all(made):
    found = compare(Recorded(made.run(1, windows=0), ()), Recorded(made.run(2, windows=0), ()))
    assert found.verdict is ComparisonVerdict.TOO_LITTLE
    assert comparison_document(found)["verdict"] == "not enough data"


def test_document_holds_what_a_script_needs(made):
    document = comparison_document(compare(*made.pair(made.minutes(1), made.minutes(2, slower=1.5))))
    assert document["verdict"] == "worse"
    assert document["changed"] == [{"flag": "max-num-seqs", "before": 256, "after": 64}]
    assert document["before"]["compared"] == 10
    assert document["kept"] is True
    assert document["after"]["since"] < document["after"]["until"]
    figure = next(figure for figure in document["figures"] if figure["name"] == "itl_mean")
    assert figure["low"] <= figure["change"] <= figure["high"]
    assert document["traffic"]["likeness"] == "similar"


def test_student_quantiles_match_the_tables():
    assert student(0.975, 10) == pytest.approx(2.228, abs=0.002)
    assert student(0.995, 5) == pytest.approx(4.032, abs=0.02)


def test_correlated_values_count_less():
    swinging = [1.0, 2.0, 1.0, 2.0] * 5
    drifting = [float(index) for index in range(20)]
    assert worth(drifting) < 0.3
    assert worth(swinging) > worth(drifting)
    change, low, high = difference([1.0] * 8, [1.0] * 8, 0.95)
    assert (change, low, high) == (0, 0, 0)


def test_comparison_uses_neither_clock_nor_randomness():
    code = "import sys, vllm_console.runs.compare as c; print(*vars(c)); print(*sys.modules)"
    own, _ = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert not {"time", "random", "datetime", "sqlite3"} & set(own.split())


def test_long_run_shows_the_drift_of_a_short_one(made):
    alarms = {ComparisonVerdict.BETTER, ComparisonVerdict.WORSE, ComparisonVerdict.MIXED}

    def verdict_of(seed, slower):
        before = made.minutes(2 * seed, 60, drift=(0.8, 0.1))
        after = made.minutes(2 * seed + 1, 10, drift=(0.8, 0.1), slower=slower)
        return compare(*made.pair(before, after)).verdict

    assert sum(verdict_of(seed, 1.0) in alarms for seed in range(20)) <= 2
    assert sum(verdict_of(seed, 2.0) is ComparisonVerdict.WORSE for seed in range(10)) >= 9


def test_earlier_long_run_shows_the_drift_of_two_short_ones(made):
    alarms = {ComparisonVerdict.BETTER, ComparisonVerdict.WORSE, ComparisonVerdict.MIXED}
    drift = (0.9, 0.1)

    def verdict_of(seed, slower, known):
        before = made.minutes(2 * seed, 10, drift=drift)
        after = made.minutes(2 * seed + 1, 10, drift=drift, slower=slower)
        earlier = Recorded(made.run(3), made.minutes(9000 + seed, 60, drift=drift), 0.0)
        return compare(*made.pair(before, after), earlier if known else None).verdict

    without = sum(verdict_of(seed, 1.0, False) in alarms for seed in range(20))
    assert sum(verdict_of(seed, 1.0, True) in alarms for seed in range(20)) < without / 2
    assert sum(verdict_of(seed, 2.0, True) is ComparisonVerdict.WORSE for seed in range(8)) >= 7


def test_earlier_run_of_another_kind_changes_nothing(made):
    pair = made.pair(made.minutes(1), made.minutes(2, slower=0.7))

    def bounds(*earlier):
        found = compare(*pair, *(Recorded(made.run(3), minutes, 0.0) for minutes in earlier))
        return [(figure.low, figure.high) for figure in found.figures if figure.unit == "s"]

    heavier, longer, short = made.minutes(3, 60, rate=5.0), made.minutes(3, 60, prompt=4000), made.minutes(3, 9)
    wild = made.minutes(3, 60, drift=(0.9, 3.0))
    for minutes in (heavier, longer, short, wild):
        assert bounds(minutes) == bounds()
    assert bounds(made.minutes(3, 60)) != bounds()


def test_noisy_minutes_do_not_prove_no_difference(made):
    wild = {"drift": (0.9, 2.5)}
    for seed in range(3):
        found = compare(*made.pair(made.minutes(2 * seed, **wild), made.minutes(2 * seed + 1, **wild)))
        latencies = [replace(figure, verdict=None) if figure.unit != "s" else figure for figure in found.figures]
        found = replace(found, figures=tuple(latencies))
        assert found.verdict is ComparisonVerdict.INCONCLUSIVE
        assert verdict_text(found).startswith("Inconclusive whether the change helped: ")
        assert verdict_text(found).endswith(": the 10 + 10 minutes vary too much.")
        assert brief(found).endswith(" may be noise")
        assert not any("met:" in note for note in notes(found)), "an objective met by chance is not reported"


def with_figures(windows, **figures):
    """The windows with other metrics; the values of each are used in turn."""

    def at(index):
        return {key: values[index % len(values)] for key, values in figures.items()}

    return [replace(window, figures={**window.figures, **at(index)}) for index, window in enumerate(windows)]


WILD = (0.9, 40.0, 350.0, 2.0, 40.0, 90.0, 1.0, 40.0, 200.0, 41.0)


def test_share_has_no_meaningless_interval(made):
    """It was once +0.065 (−1.43 to +1.56), although the share of preempted requests can't be negative."""
    before = with_figures(made.minutes(1), preemption_share=(0.0, 2.0, 0.0, 0.1, 1.5))
    after = with_figures(made.minutes(2), preemption_share=(0.0, 0.1, 3.0, 1.2, 0.1))
    figure = next(one for one in compare(*made.pair(before, after)).figures if one.key == "preemption_share")
    assert (figure.low, figure.high, figure.variable) == (None, None, True)
    assert figure_change_text(figure) == "±0, too variable"


def test_certain_change_keeps_its_wide_interval(made):
    found = compare(*made.pair(made.minutes(1, slower=400.0), made.minutes(2)))
    ttft = next(figure for figure in found.figures if figure.key == "ttft_mean")
    assert ttft.verdict is ComparisonVerdict.BETTER
    assert ttft.low is not None
    assert not ttft.variable


def test_large_uncertain_change_is_inconclusive(made):
    """TTFT from 4.9 to 40 s with a huge interval was once "none seen"."""
    before = with_figures(made.minutes(1), ttft_mean=(4.7, 4.9, 5.1))
    found = compare(*made.pair(before, with_figures(made.minutes(2), ttft_mean=WILD)))
    ttft = next(figure for figure in found.figures if figure.key == "ttft_mean")
    assert ttft.verdict is ComparisonVerdict.INCONCLUSIVE
    assert (ttft.low, ttft.high, ttft.variable) == (None, None, True), "it spanned a factor of more than 20"
    assert figure_change_text(ttft).endswith(", too variable")
    assert found.verdict is ComparisonVerdict.INCONCLUSIVE
    assert "TTFT mean rose from 4.9s to 40s, which may be chance. TTFT mean (too variable for an interval)" in (
        verdict_text(found)
    )
    assert brief(found) == "Inconclusive: TTFT mean 4.9s → 40s may be noise"
    assert comparison_document(found)["verdict"] == "inconclusive"


def test_headline_omits_minor_values_if_a_major_one_is_inconclusive(made):
    itl = {"itl_mean": (0.0200, 0.0201), "itl_p99": (0.050, 0.051)}
    before = with_figures(made.minutes(1), ttft_mean=(4.7, 4.9, 5.1), **itl)
    slower = {key: tuple(1.2 * value for value in values) for key, values in itl.items()}
    found = compare(*made.pair(before, with_figures(made.minutes(2), ttft_mean=WILD, **slower)))
    assert next(figure for figure in found.figures if figure.key == "itl_mean").verdict is ComparisonVerdict.WORSE
    assert found.verdict is ComparisonVerdict.INCONCLUSIVE
    assert "ITL" not in verdict_text(found)
    assert "ITL" not in brief(found)
    # Once a major metric is decided, it determines the verdict, and the other one is named as open.
    whole = with_figures(made.minutes(2), ttft_mean=WILD, e2e_mean=(9.0, 9.1), **slower)
    found = compare(*made.pair(with_figures(before, e2e_mean=(4.6, 4.7)), whole))
    assert found.verdict is ComparisonVerdict.WORSE
    assert verdict_text(found).startswith("The change made it worse: end-to-end mean rose from")
    assert verdict_text(found).endswith("TTFT mean 4.9s → 40s is inconclusive.")
    assert "ITL" not in verdict_text(found)


def test_headline_is_about_the_objective_missed_before(made):
    """``Inconclusive: TTFT`` was once shown for a change that was offered against preemptions and ended them."""
    wild = with_figures(made.minutes(1, preempted=0.5), ttft_mean=(4.7, 4.9, 5.1))
    found = compare(*made.pair(wild, with_figures(made.minutes(2), ttft_mean=WILD)))
    assert (
        next(figure for figure in found.figures if figure.key == "ttft_mean").verdict is ComparisonVerdict.INCONCLUSIVE
    )
    assert found.verdict is ComparisonVerdict.BETTER
    assert plain_sentence(found).startswith("The change helped: preemptions/req fell from 0.5")
    assert verdict_text(found).endswith(" TTFT mean 4.9s → 40s is inconclusive.")
    assert brief(found).startswith("Better: preemptions/req −0.5")
    # Even if other values changed more, and even if that objective is still missed.
    for preempted, sentence in (
        (0.0, "preemptions/req fell from"),
        (0.5, "preemptions/req did not clearly improve (0.5"),
    ):
        found = compare(*made.pair(made.minutes(1, preempted=0.5), made.minutes(2, preempted=preempted, slower=0.3)))
        assert found.verdict is ComparisonVerdict.BETTER
        assert sentence in plain_sentence(found)
        assert "preemptions/req" in brief(found)


def test_newly_missed_objective_decides_although_ttft_is_inconclusive(made):
    """Reverting such a change was once "Inconclusive: TTFT mean may be noise", with preemptions/req 0 → 0.14."""
    before = with_figures(made.minutes(1), ttft_mean=(4.7, 4.9, 5.1))
    found = compare(*made.pair(before, with_figures(made.minutes(2, preempted=0.5), ttft_mean=WILD)))
    figures = {figure.key: figure for figure in found.figures}
    assert figures["ttft_mean"].verdict is ComparisonVerdict.INCONCLUSIVE
    assert figures["preemption_share"].meets == (True, False)
    assert found.verdict is ComparisonVerdict.WORSE
    assert plain_sentence(found).startswith("The change made it worse: preemptions/req rose from 0")
    assert verdict_text(found).endswith(" TTFT mean 4.9s → 40s is inconclusive.")
    assert brief(found).startswith("Worse: preemptions/req +0.5")
    # Even if other values changed more.
    slower = with_figures(made.minutes(2, preempted=0.5, slower=3.0), ttft_p99=(0.6, 0.7), itl_p99=(0.08, 0.09))
    found = compare(*made.pair(made.minutes(1), slower))
    assert plain_sentence(found).startswith("The change made it worse: preemptions/req rose from 0")
    # Not if the objective is still met.
    within = with_figures(made.minutes(2, preempted=0.01), ttft_mean=WILD)
    assert compare(*made.pair(before, within)).verdict is ComparisonVerdict.INCONCLUSIVE


def test_latency_quantile_that_newly_misses_its_objective_decides(made):
    """ITL p99 80 → 158 ms with an objective of 100 ms was once "Inconclusive: end-to-end mean may be noise"."""
    before = with_figures(made.minutes(1), ttft_mean=(4.7, 4.9, 5.1), itl_p99=(0.080, 0.081))
    found = compare(*made.pair(before, with_figures(made.minutes(2), ttft_mean=WILD, itl_p99=(0.158, 0.159))))
    assert found.verdict is ComparisonVerdict.WORSE
    assert plain_sentence(found) == "The change made it worse: ITL p99 rose from 80ms to 158ms."
    assert verdict_text(found).endswith(" TTFT mean 4.9s → 40s is inconclusive.")
    assert brief(found).startswith("Worse: ITL p99 +9")
    # Not if the objective is still met, or was missed before as well.
    for then, now in ((0.050, 0.090), (0.110, 0.159)):
        one = with_figures(made.minutes(1), ttft_mean=(4.7, 4.9, 5.1), itl_p99=(then, then + 0.001))
        other = with_figures(made.minutes(2), ttft_mean=WILD, itl_p99=(now, now + 0.001))
        figures = {figure.key: figure for figure in compare(*made.pair(one, other)).figures}
        assert figures["itl_p99"].verdict is ComparisonVerdict.WORSE
        assert not figures["itl_p99"].newly_missed


@pytest.mark.parametrize(
    ("after", "missed", "sentence", "short"),
    [
        ({"ttft_mean": (0.07, 0.08)}, 0.0, "The change helped: TTFT mean fell from ", "Better: TTFT mean −"),
        ({}, 0.0, "The change made no measurable difference in these minutes, but ", "No significant difference: "),
        (
            {"ttft_mean": (0.07, 0.08)},
            0.5,
            "The change helped: TTFT mean fell from ",
            "Better: TTFT mean −60%, preemptions/req still 0.5, ",
        ),
    ],
)
def test_objective_that_may_now_be_missed_is_named(made, after, missed, sentence, short):
    """ITL p99 78 → 133 ms with an objective of 100 ms was once shown only in the table."""
    before = with_figures(made.minutes(1, preempted=missed), itl_p99=(0.077, 0.078, 0.079))
    wild = (0.08, 0.13, 0.3, 0.09, 0.133, 0.4, 0.07, 0.15)
    found = compare(*made.pair(before, with_figures(made.minutes(2, preempted=missed), itl_p99=wild, **after)))
    assert next(one for one in found.figures if one.key == "itl_p99").verdict is ComparisonVerdict.INCONCLUSIVE
    assert plain_sentence(found).startswith(sentence)
    named = "ITL p99 may now miss its objective (78ms → 130ms)."
    assert plain_sentence(found).endswith(f", and {named}" if missed else f", but {named}")
    assert brief(found).startswith(short)
    assert brief(found).endswith("ITL p99 may now miss its objective")
    # Not if it was inconclusive below the objective.
    within = with_figures(made.minutes(2, preempted=missed), itl_p99=tuple(0.5 * one for one in wild), **after)
    low = with_figures(before, itl_p99=(0.039,))
    assert "may now miss" not in plain_sentence(compare(*made.pair(low, within)))


def test_newly_met_objective_decides_if_requests_are_not_slower(made):
    before = made.minutes(1, preempted=0.5)
    later = {"ttft_mean": (0.36, 0.37, 0.38)}
    found = compare(*made.pair(before, with_figures(made.minutes(2), **later)))
    assert next(figure for figure in found.figures if figure.key == "ttft_mean").verdict is ComparisonVerdict.WORSE
    assert found.verdict is ComparisonVerdict.BETTER
    assert plain_sentence(found).startswith("The change helped: preemptions/req fell from 0.5")
    assert "while TTFT mean rose from" in plain_sentence(found)
    # It does not excuse slower requests, or another missed objective.
    whole = with_figures(made.minutes(2), e2e_mean=(9.0, 9.1), **later)
    assert compare(*made.pair(before, whole)).verdict is ComparisonVerdict.MIXED
    lost = with_figures(made.minutes(2), ttft_p99=(30.0, 31.0), **later)
    assert compare(*made.pair(before, lost)).verdict is ComparisonVerdict.MIXED
    back = compare(*made.pair(with_figures(made.minutes(1), **later), made.minutes(2, preempted=0.5)))
    assert back.verdict is ComparisonVerdict.WORSE


def bounded(made, seed, value=None):
    """Minutes whose end-to-end p99 is below 0.3 s, or has that value within its bucket."""
    windows = [replace(one, figures={key: figure for key, figure in one.figures.items() if key != "e2e_p99"})
               for one in made.minutes(seed)]  # fmt: skip
    if value is None:
        return with_figures(windows, e2e_p99_below=(0.3,))
    return with_figures(windows, e2e_p99=(value,), e2e_p99_above=(0.3,), e2e_p99_below=(0.5,))


def test_two_quantiles_in_the_first_bucket_are_not_compared(made):
    found = compare(*made.pair(bounded(made, 1), bounded(made, 2)))
    figure = next(figure for figure in found.figures if figure.key == "e2e_p99")
    assert (figure.verdict, side_text(figure, after=True), figure_change_text(figure)) == (None, "<300ms", "–")
    document = next(one for one in comparison_document(found)["figures"] if one["name"] == "e2e_p99")
    assert (document["before"], document["before_below"], document["change"]) == (None, 0.3, None)


def test_quantile_leaving_the_first_bucket_changed_by_a_minimum(made):
    found = compare(*made.pair(bounded(made, 1), bounded(made, 2, 0.45)))
    figure = next(figure for figure in found.figures if figure.key == "e2e_p99")
    assert figure.verdict is ComparisonVerdict.WORSE
    assert (side_text(figure, after=False), side_text(figure, after=True)) == ("<300ms", "~450ms")
    assert figure_change_text(figure) == "over +50%"
    assert comparison_document(found)["figures"][[one.key for one in found.figures].index("e2e_p99")]["low"] is None


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ({"gpu_kind": "NVIDIA RTX A6000", "gpus": (0, 1)}, {"gpu_kind": "", "gpus": (0, 1)}, None),
        ({"gpu_kind": "NVIDIA RTX A6000", "gpus": (0, 1)}, {"gpu_kind": "", "gpus": ()}, None),
        ({"gpu_kind": "NVIDIA RTX A6000", "gpus": ()}, {"gpu_kind": "NVIDIA RTX A6000", "gpus": (0, 1)}, None),
        ({"gpu_kind": "", "gpus": (0,)}, {"gpu_kind": "NVIDIA L40S", "gpus": (0, 1)}, ("0", "0,1")),
        ({"gpu_kind": "NVIDIA L40S", "gpus": (0,)}, {"gpu_kind": "NVIDIA H100", "gpus": (0,)},
         ("NVIDIA L40S 0", "NVIDIA H100 0")),
    ],
)  # fmt: skip
def test_gpus_unknown_in_one_run_are_not_a_change(made, before, after, change):
    found = [one for one in differences(made.run(1, **before), made.run(2, **after)) if one.flag == "GPUs"]
    assert [(one.before, one.after) for one in found] == ([change] if change else [])


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        ({"slower": 0.6}, "The change helped: "),
        ({"slower": 1.6}, "The change made it worse: "),
        ({}, "The change made no measurable difference in these minutes."),
        ({"rate": 3.4}, "These runs can't be compared: their traffic differed."),
        ({"count": 2}, "It is too early to tell."),
    ],
)
def test_plain_sentence_states_the_outcome(made, after, sentence):
    found = compare(*made.pair(made.minutes(1), made.minutes(2, **after)))
    assert plain_sentence(found).startswith(sentence)
    assert "%" not in plain_sentence(found)


@pytest.mark.parametrize(
    ("after", "detail"),
    [
        ({"slower": 0.6}, ""),
        ({"slower": 1.6}, "TTFT mean "),
        ({}, "10 + 10 minutes can't resolve "),
        ({"rate": 3.4}, "Traffic differs: arrivals "),
    ],
)
def test_detail_adds_to_the_sentence(made, after, detail):
    found = compare(*made.pair(made.minutes(1), made.minutes(2, **after)))
    assert detail_text(found).startswith(detail)
    assert bool(detail_text(found)) == bool(detail)


def test_detail_of_an_inconclusive_change_says_how_wide_it_is(made):
    before = with_figures(made.minutes(1), ttft_mean=(4.7, 4.9, 5.1))
    found = compare(*made.pair(before, with_figures(made.minutes(2), ttft_mean=WILD)))
    assert detail_text(found).startswith("TTFT mean (too variable for an interval)")
    assert detail_text(found).endswith(": the 10 + 10 minutes vary too much.")


@pytest.mark.parametrize(
    ("key", "after", "likeness", "text"),
    [
        ("answer_length_p95", 420.0, TrafficMatch.ALIKE, "similar"),
        ("answer_length_p95", 600.0, TrafficMatch.ALIKE, "within the noise"),
        ("answer_length_p95", 824.0, TrafficMatch.ROUGHLY, "may be noise"),
        ("answer_length_p95", 1200.0, TrafficMatch.DIFFERENT, "different"),
        ("requests_per_second", 480.0, TrafficMatch.ROUGHLY, "roughly similar"),
    ],
)
def test_a_change_that_may_be_noise_is_not_called_similar(key, after, likeness, text):
    """``+106% roughly similar`` was once shown: a p95 of lengths is only known to a bucket, and scatters."""
    assert likeness_text(Factor(key, "", "tokens", 400.0, after, likeness)) == text


@pytest.mark.parametrize(
    ("change", "low", "high", "text"),
    [
        (0.95, 0.029, 23.48, "×96 (×3.9 to ×2,349)"),
        (0.11, 0.011, 0.67, "×12 (×2.1 to ×68)"),
        (0.058, 0.0074, 0.25, "+580% (×1.7 to ×26)"),
        (0.058, -0.0074, 0.25, "+580% (−74% to ×26)"),
        (0.05, 0.01, 0.08, "+500% (+100 to +800%)"),
    ],
)
def test_interval_with_a_factor_does_not_mix_units(change, low, high, text):
    """``×96 (+291 to ×2,348)`` was once shown."""
    figure = ComparedFigure("ttft_p99", "TTFT p99", "s", 0.01, 0.01 + change, change=change, low=low, high=high)
    assert figure_change_text(figure) == text


def test_decrease_is_limited_to_all_and_zero_interval_is_unclear():
    """``preemptions −100% (−158 to −42%)`` and, for −43 to +46%, ``no change`` were once shown."""
    gone = ComparedFigure(
        "preemptions_per_minute", "preemptions", "/min", 12.0, 0.0, change=-12.0, low=-19.0, high=-5.0
    )
    assert figure_change_text(gone) == "−100% (−100 to −42%)"
    assert short_verdict(ComparisonVerdict.NO_DIFFERENCE) == "no clear change"
