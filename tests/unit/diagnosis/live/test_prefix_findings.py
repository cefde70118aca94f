"""Findings about prefix caching: the named cause, the offered fix, and when nothing is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Severity
from vllm_console.diagnosis.live.engine import without_flags
from vllm_console.diagnosis.live.findings import findings
from vllm_console.diagnosis.live.prefix_cache import PrefixCacheIdle, at_most, kept_seconds
from vllm_console.diagnosis.live.rule import Evidence, Judgment
from vllm_console.history.frames import Frame, Frames
from vllm_console.history.prefix_use import StillCached
from vllm_console.metrics.sample import EngineSample, Histogram, Sample
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.flags.changes import Changes

START = 1_000_000.0
MINUTES = 7
BOUNDS = (200.0, 500.0, 1000.0, 2000.0, float("inf"))


def frames_of(
    *, caching: bool | None = True, step: int | None = 16, hits: float = 0.0, looked_up: float | None = 1000.0,
    short: float = 1.0, cache_tokens: int = 1_000_000, preempted: float = 0.0, tokens: float = 500.0,
) -> tuple[Frame, ...]:  # fmt: skip
    """Frames with two requests per second of ``tokens`` each; ``short`` is the share of prompts up to 1,000 tokens."""
    frames = Frames()
    for second in range(MINUTES * 60 + 1):
        counts = tuple(2.0 * second * (short if bound <= 1000 else 1.0) * (bound >= 500) for bound in BOUNDS)
        one = EngineSample(
            requests_running=3, requests_waiting=0, kv_cache_usage=0.2, preemptions_total=preempted * second,
            prompt_tokens_total=1000.0 * second, generation_tokens_total=100.0 * second,
            requests_finished_total=2.0 * second, prefix_cache_hits_total=hits * second,
            prefix_cache_queries_total=None if looked_up is None else looked_up * second,
            histograms={"prompt_tokens": Histogram(BOUNDS, counts, 2 * tokens * second)},
        )  # fmt: skip
        frames.append(Sample(START + second, {"0": one}, cache_tokens, "m", caching, step))
    return frames.since(0.0)


def evidence(known: Mapping[str, Any] | None = None, **frames: Any) -> Evidence:
    made = frames_of(**frames)
    return Evidence(now=made[-1].end, ready_at=START - 60, frames=made, release=(0, 32, 0), **(known or {}))


def find(found: Evidence, code: str) -> Finding | None:
    return next((one for one in findings(found) if one.code == code), None)


HYBRID = {"linear_layers": True}


def test_prompts_shorter_than_a_hybrid_block_are_the_cause() -> None:
    """As seen with vLLM 0.32.0 and a model with linear attention: blocks of 1,152 tokens, prompts of 600."""
    found = find(evidence(HYBRID, step=1152), "prefix_cache_idle")
    assert found is not None
    assert found.cause == (
        "This model's prefixes are cached in blocks of 1,152 tokens, and 100% of the prompts have no more than that: "
        "they can't hit the cache."
    )
    assert [one.changes for one in found.fixes] == [Changes({"prefix-match-unit": 64})]
    assert "system prompt" in found.fixes[0].tradeoff


def test_longer_prompts_may_share_less_than_a_block() -> None:
    found = find(evidence(HYBRID, step=1152, short=0.5), "prefix_cache_idle")
    assert found is not None
    assert "or one that is shorter" in found.cause
    assert "at least 50%" in [one.value for one in found.measures]


@pytest.mark.parametrize(
    "known",
    [
        {"linear_layers": False},
        {**HYBRID, "release": (0, 31, 0)},
        {**HYBRID, "release": None},
        {**HYBRID, "sliding_layers": True},
        {**HYBRID, "attention_free": True},
        {**HYBRID, "flags": {"speculative-config": "{}"}},
        {**HYBRID, "flags": {"prefix-match-unit": 128}},
    ],
)
def test_prefix_match_unit_is_offered_only_where_it_helps(known: Mapping[str, Any]) -> None:
    found = find(replace(evidence(step=1152), **known), "prefix_cache_idle")
    assert found is not None
    assert not found.fixes


def test_with_a_match_unit_prompts_may_still_share_prefixes() -> None:
    """A hybrid model keeps the state at the end of a prompt, but only whole blocks of shared prefixes."""
    found = find(evidence({**HYBRID, "flags": {"prefix-match-unit": 64}}, step=64), "prefix_cache_idle")
    assert found is not None
    assert "or one that is not kept" in found.cause
    assert not found.fixes


def test_quickly_recycled_cache_may_have_evicted_prefixes() -> None:
    found = find(evidence(cache_tokens=50_000), "prefix_cache_idle")
    assert found is not None
    assert "reused only after its eviction, later than about 36s" in found.cause
    assert ("evicted when unused for", "about 36s") in [(one.name, one.value) for one in found.measures]


def test_prefix_caching_stays_on_while_requests_are_preempted() -> None:
    """Resumed requests find their own blocks again."""
    turned_off = Changes({"enable-prefix-caching": False})
    for preempted, offered in ((0.0, True), (0.1, False)):
        found = find(evidence(cache_tokens=50_000, preempted=preempted), "prefix_cache_idle")
        assert found is not None
        assert (turned_off in [fix.changes for fix in found.fixes]) is offered


def test_finding_ends_with_a_high_hit_rate_of_few_tokens() -> None:
    rule = PrefixCacheIdle()
    assert rule.verdicts(evidence(hits=0.0, looked_up=50.0))[-1] is Judgment.UNCLEAR
    assert rule.verdicts(evidence(hits=8.0, looked_up=50.0))[-1] is Judgment.FAILS


def test_cache_that_holds_everything_means_unshared_prompts() -> None:
    found = find(evidence(), "prefix_cache_idle")
    assert found is not None
    assert found.cause.startswith("Prompts share hardly any prefix.")
    assert kept_seconds(evidence(HYBRID), 30) is None, "the blocks differ"


@pytest.mark.parametrize("cache_tokens", [1_000_000, 50_000])
def test_prompts_of_a_block_or_two_may_share_less_than_a_block(cache_tokens: int) -> None:
    """As seen with real vLLM: 2,107 equal prompts of 26 tokens, blocks of 32. A larger cache would not help."""
    found = find(evidence(step=256, **{"cache_tokens": cache_tokens}), "prefix_cache_idle")
    assert found is not None
    assert "or one that is shorter" in found.cause, "blocks of 256 are a model's own"
    small = evidence(cache_tokens=cache_tokens, step=32, tokens=50.0)
    found = find(small, "prefix_cache_idle")
    assert found is not None
    assert found.cause.startswith("Prompts share hardly any prefix, or one shorter than a block of 32 tokens.")
    assert ("prompt length", "50 tokens on average") in [(one.name, one.value) for one in found.measures]
    assert [fix.changes for fix in found.fixes] == [Changes({"enable-prefix-caching": False})]


def test_at_most_counts_only_full_buckets() -> None:
    assert at_most(Histogram((100.0, 1000.0, float("inf")), (2.0, 8.0, 10.0), 0.0), 1152) == 0.8
    assert at_most(Histogram((100.0, 1000.0, float("inf")), (2.0, 8.0, 10.0), 0.0), 50) == 0.0
    assert at_most(Histogram((100.0,), (0.0,), 0.0), 50) is None


# -- turned off by vLLM -----------------------------------------------------------------------------------------------

OFF = {"caching": False, "looked_up": 0.0}


@pytest.mark.parametrize(
    ("known", "words", "changes"),
    [
        ({"mla": True, "build": "cpu"}, "On a CPU, vLLM turns prefix caching off for models with MLA", None),
        ({"attention_free": True, **HYBRID}, "models without attention", None),
        ({**HYBRID, "release": (0, 25, 1)}, "Before 0.28", Changes({"enable-prefix-caching": True})),
        ({**HYBRID, "release": (0, 27, 0)}, "Before 0.28", Changes({"enable-prefix-caching": True})),
        ({**HYBRID, "release": (0, 28, 0)}, "its log may say why", None),
        ({**HYBRID, "release": (0, 13, 0)}, "Before 0.28", None),
        ({**HYBRID, "release": (0, 13, 0), "flags": {"enable-prefix-caching": True}}, "This release can't", None),
        (
            {**HYBRID, "release": (0, 25, 1), "flags": {"enable-chunked-prefill": False}},
            "Before 0.28",
            None,
        ),
        ({}, "its log may say why", None),
    ],
)
def test_reason_why_vllm_disabled_caching_is_named(
    known: Mapping[str, Any], words: str, changes: Changes | None
) -> None:
    found = find(replace(evidence(**OFF), **known), "prefix_cache_off")
    assert found is not None
    assert found.severity is Severity.NOTE
    assert words in found.cause
    assert [one.changes for one in found.fixes] == ([changes] if changes is not None else [])


def test_linear_layer_caching_needs_steps_of_a_block() -> None:
    """vLLM 0.25.1: 'In Mamba cache align mode, block_size (2096) must be <= max_num_batched_tokens (2048)'."""
    known = {**HYBRID, "release": (0, 25, 1)}
    found = find(replace(evidence(**OFF, step=2096), **known), "prefix_cache_off")
    assert found is not None
    assert found.fixes[0].changes == Changes({"enable-prefix-caching": True, "max-num-batched-tokens": 2304})
    large = {"flags": {"max-num-batched-tokens": 4096}}
    found = find(replace(evidence(**OFF, step=2096), **known, **large), "prefix_cache_off")
    assert found is not None
    assert found.fixes[0].changes == Changes({"enable-prefix-caching": True})


def test_fix_for_known_repeated_prompts_is_a_warning() -> None:
    known = {**HYBRID, "release": (0, 25, 1), "earlier_reuse": 0.5}
    found = find(replace(evidence(**OFF), **known), "prefix_cache_off")
    assert found is not None
    assert found.severity is Severity.WARNING
    assert found.measures[0].value == "50%"


def test_missing_cache_lookups_are_reported() -> None:
    found = find(evidence(looked_up=0.0), "prefix_cache_off")
    assert found is not None
    assert found.symptom.startswith("No prompt is looked up")
    assert not found.fixes


@pytest.mark.parametrize(
    ("known", "frames"),
    [
        ({"flags": {"enable-prefix-caching": False}}, OFF),
        ({"workload": Workload(input_tokens_p95=500, output_tokens_p95=100, prefix_reuse=0.0, concurrency=8)}, OFF),
        ({}, {"caching": None, "looked_up": 0.0}),
        ({}, {"looked_up": None}),
        ({}, {"hits": 400.0}),
    ],
    ids=["by a flag", "unique prompts", "not reported", "no counter", "with hits"],
)
def test_expected_cache_off_is_not_reported(known: Mapping[str, Any], frames: Mapping[str, Any]) -> None:
    assert find(evidence(known, **frames), "prefix_cache_off") is None


def test_caching_off_is_not_reported_with_unknown_flags() -> None:
    assert not [one for one in without_flags(findings(evidence(**OFF))) if one.code == "prefix_cache_off"]


@pytest.mark.parametrize(
    "known",
    [{"mla": True, "build": "cpu"}, {"attention_free": True, **HYBRID}, {**HYBRID, "release": (0, 14, 1)}],
)
def test_caching_is_not_offered_where_vllm_disables_it_again(known: Mapping[str, Any]) -> None:
    off = {"flags": {"enable-prefix-caching": False}, "earlier_reuse": 0.5}
    offered = find(evidence(off, **OFF), "prefix_cache_missed")
    assert offered is not None
    assert offered.fixes[0].changes == Changes({"enable-prefix-caching": True})
    found = find(replace(evidence(off, **OFF), **known), "prefix_cache_missed")
    assert found is not None
    assert not found.fixes


def test_preemptions_show_tokens_still_cached_on_resume() -> None:
    found = find(evidence({"resumed": StillCached(4, 400, 100)}, hits=400.0, preempted=1.0), "preempting")
    assert found is not None
    assert ("still cached when resumed", "25% of 400 tokens") in [(one.name, one.value) for one in found.measures]
