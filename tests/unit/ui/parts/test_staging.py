from __future__ import annotations

import pytest

from vllm_console.diagnosis.finding import Fix
from vllm_console.fleet.snapshot import ServerView, UnsetFlags
from vllm_console.ui.findings import edits_of
from vllm_console.ui.parts import staging
from vllm_launchers.keeper.records import State
from vllm_launchers.vllm.flags.changes import Changes, FlagValue

UNKNOWN = UnsetFlags()
LARGE_GPU = UnsetFlags(max_num_seqs=1024, max_model_len=131_072)


def server(unset: UnsetFlags = UNKNOWN) -> ServerView:
    return ServerView("chat", State.READY, 0.0, unset=unset)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("halve_sequences", 512),
        ("double_sequences", 2048),
        ("halve_context", 65_536),
        ("double_context", 262_144),
    ],
)
def test_unset_flags_start_from_the_values_in_effect(key: str, value: int) -> None:
    step = staging.TUNING_KEYS[key].step(server(LARGE_GPU), {})
    assert step.value == value
    assert "was unset" in step.note


def test_note_states_what_was_assumed_for_an_unknown_gpu() -> None:
    step = staging.TUNING_KEYS["halve_sequences"].step(server(), {})
    assert (step.value, "256 (1024 on GPUs" in step.note) == (128, True)


@pytest.mark.parametrize("there", ["halve_sequences", "halve_context", "toggle_prefix_caching", "cycle_kv_dtype"])
def test_returning_to_the_start_unsets_an_unset_flag(there: str) -> None:
    seen, back = server(LARGE_GPU), there.replace("halve", "double")
    staged = staging.stage({}, {}, staging.TUNING_KEYS[there].step(seen, {}))
    assert staged
    step = staging.TUNING_KEYS[back].step(seen, staging.staged_flags({}, staged))
    assert staging.stage({}, staged, step) == {}


@pytest.mark.parametrize(
    ("flag", "value"),
    [("max-num-seqs", 256), ("enable-prefix-caching", True), ("enable-chunked-prefill", True)],
)
def test_common_default_is_staged_for_an_unset_flag(flag: str, value: FlagValue) -> None:
    """It may differ from the default for this GPU, model and release."""
    fix = Fix(Changes({flag: value}), "why")
    assert edits_of({}, fix) == {flag: value}
    assert edits_of({flag: value}, fix) == {}
