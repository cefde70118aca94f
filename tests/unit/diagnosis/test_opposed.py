"""Changes that would worsen an open finding are recognized from its fixes, or from what is known about its kind."""

from __future__ import annotations

import pytest

from vllm_console.diagnosis.finding import Finding, Fix, Severity
from vllm_console.diagnosis.opposed import opposed, with_conflicts
from vllm_launchers.vllm.flags.changes import Changes, Flags

BATCHED, SEQUENCES, SHARE = "max-num-batched-tokens", "max-num-seqs", "gpu-memory-utilization"


def found(code: str, severity: Severity = Severity.WARNING, **fix: object) -> Finding:
    changes = Changes({name.replace("_", "-"): value for name, value in fix.items()})  # type: ignore[misc]
    return Finding(code, severity, 0.0, "", "", fixes=(Fix(changes, ""),))


@pytest.mark.parametrize(
    ("finding", "present", "wanted", "held"),
    [
        (found("prefill_contention"), {BATCHED: 2048}, {BATCHED: 4096}, True),
        (found("prefill_contention"), {BATCHED: "4k"}, {BATCHED: 2048}, False),
        (found("prefill_contention"), {}, {BATCHED: 2048}, True),  # the direction is unknown
        (found("prefill_contention"), {SEQUENCES: 64}, {SEQUENCES: 128}, False),
        (found("preempting"), {SEQUENCES: 64}, {SEQUENCES: 128}, True),
        (found("oversubscribed_sequences"), {SEQUENCES: 64}, {SEQUENCES: 32}, True),
        (found("other", gpu_memory_utilization=0.94), {SHARE: 0.92}, {SHARE: 0.9}, True),
        (found("other", gpu_memory_utilization=0.94), {SHARE: 0.92}, {SHARE: 0.93}, False),
        (found("other", enable_prefix_caching=True), {"enable-prefix-caching": True}, {"enable-prefix-caching": False},
         False),  # the fix is already applied, so it does not oppose a change back
        (found("prefill_contention", Severity.NOTE), {BATCHED: 2048}, {BATCHED: 4096}, False),
        (found("other", kv_cache_dtype="fp8"), {}, {"kv-cache-dtype": "auto"}, False),
    ],
)  # fmt: skip
def test_flag_is_held_where_its_change_worsens_a_finding(
    finding: Finding, present: Flags, wanted: Flags, *, held: bool
) -> None:
    assert opposed((finding,), present, wanted) == (dict.fromkeys(wanted, finding) if held else {})


def test_opposite_fixes_name_each_other_and_which_one_comes_first() -> None:
    more, fewer = found("slow_first_token", max_num_seqs=128), found("slow_tokens", max_num_seqs=32)
    first, second = with_conflicts((more, fewer), {SEQUENCES: 64})
    assert first.fixes[0].tradeoff == "Works against the finding 'ITL above objective'."
    assert second.fixes[0].tradeoff == "Works against the finding 'TTFT above objective', which is ranked higher."


def test_fix_that_worsens_a_finding_without_a_fix_for_that_flag_says_so() -> None:
    shorter = found("prefill_contention", max_num_batched_tokens=512)
    late = Finding("slow_first_token", Severity.WARNING, 0.0, "", "")
    found_now = with_conflicts((shorter, late), {BATCHED: 2048})
    assert found_now[0].fixes[0].tradeoff == "Works against the finding 'TTFT above objective'."
    assert found_now[1] == late


@pytest.mark.parametrize(
    ("one", "other", "present"),
    [
        (found("preempting", max_num_seqs=32), found("slow_tokens", max_num_seqs=16), {SEQUENCES: 64}),
        (found("preempting", gpu_memory_utilization=0.9), found("other", gpu_memory_utilization=0.8), {}),
    ],
)
def test_fixes_in_one_direction_or_from_an_unknown_value_are_no_conflict(
    one: Finding, other: Finding, present: Flags
) -> None:
    assert with_conflicts((one, other), present) == (one, other)
