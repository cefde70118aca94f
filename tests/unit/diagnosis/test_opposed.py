"""Changes that would worsen an open finding are recognized from its fixes, or from what is known about its kind."""

from __future__ import annotations

import pytest

from vllm_console.diagnosis.finding import Finding, Fix, Severity
from vllm_console.diagnosis.opposed import opposed
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
