"""Flags that guides still name: since when they are removed, and the replacement if the meaning is the same."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from fakes.flag_history import last_release
from vllm_launchers.plan.flags import normalize_setting
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.flags.releases import RELEASES, release_table, variable_releases
from vllm_launchers.vllm.release_defaults import parse_release
from vllm_launchers.vllm.removed_flags import (
    MISREAD_VARIABLES,
    NEVER,
    REMOVED_FLAGS,
    REMOVED_VALUES,
    REMOVED_VARIABLES,
    RemovalKind,
    removed_value,
    unread_fate,
)

NEWEST = release_table(RELEASES[-1])


def after(release: str) -> str:
    return RELEASES[RELEASES.index(release) + 1]


def numbers(release: str) -> tuple[int, int, int]:
    found = parse_release(release)
    assert found is not None
    return found


@pytest.mark.parametrize("flag", REMOVED_FLAGS.values(), ids=lambda flag: flag.name)
def test_removed_flag_dates_match_the_release_table(flag: Any) -> None:
    last = last_release(flag.name)
    assert NEWEST.get(flag.name) is None
    if flag.since == NEVER:
        assert last is None
        assert all(release_table(release).get(flag.name) is None for release in RELEASES)
    else:
        assert last is not None
        assert numbers(last) < flag.since <= numbers(after(last))


def test_every_removed_flag_is_listed() -> None:
    names = {name for release in RELEASES for name in release_table(release).flags}
    assert {name for name in names if last_release(name)} <= set(REMOVED_FLAGS)


@pytest.mark.parametrize("variable", REMOVED_VARIABLES.values(), ids=lambda variable: variable.name)
def test_removed_variable_dates_match_the_release_table(variable: Any) -> None:
    span = variable_releases(variable.name)
    if variable.since == NEVER:
        assert span is None
    else:
        assert span is not None
        assert span[1] is not None
        assert numbers(span[1]) < variable.since <= numbers(after(span[1]))


@pytest.mark.parametrize("value", REMOVED_VALUES, ids=lambda value: f"{value.flag}={value.value}")
def test_removed_value_dates_match_the_release_table(value: Any) -> None:
    having = [release for release in RELEASES if value.value in known(release, value.flag)]
    if value.since == NEVER:
        assert not having
    else:
        assert numbers(having[-1]) < value.since <= numbers(after(having[-1]))
    if value.new_value:
        assert value.new_value in known(RELEASES[-1], value.flag)


@cache  # each value takes a pass over the tables of all releases; few results are kept
def spellings(release: str) -> dict[str, tuple[str, ...]]:
    return {name: spec.words or spec.choices for name, spec in release_table(release).flags.items()}


def known(release: str, flag: str) -> tuple[str, ...]:
    return spellings(release)[flag]


def test_misread_variables_are_read() -> None:
    assert set(MISREAD_VARIABLES) <= NEWEST.variables


CARRIED: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"swap-space": 4, "tensor-parallel-size": 2}, {"kv-offloading-size": 8}, ("swap-space",)),
    ({"swap-space": 0}, {}, ("swap-space",)),
    ({"swap-space": 4, "kv-offloading-size": 1}, {}, ("swap-space",)),
    ({"disable-log-requests": True}, {}, ("disable-log-requests",)),
    ({"disable-log-requests": False}, {"enable-log-requests": True}, ("disable-log-requests",)),
    ({"preemption-mode": "swap"}, {}, ("preemption-mode",)),
    ({"scheduler-delay-factor": 0.5}, {}, ("scheduler-delay-factor",)),
    ({"lora-extra-vocab-size": 256}, {}, ("lora-extra-vocab-size",)),
    ({"override-pooler-config": "{}"}, {"pooler-config": "{}"}, ("override-pooler-config",)),
    ({"task": "embed"}, {"runner": "pooling"}, ("task",)),
    ({"task": "generate"}, {"runner": "generate"}, ("task",)),
    ({"task": "auto"}, {}, ("task",)),
    ({"worker-use-ray": True}, {}, ("worker-use-ray",)),
    ({"worker-use-ray": False}, {}, ("worker-use-ray",)),
    ({"disable-mm-preprocessor-cache": True}, {"mm-processor-cache-gb": 0}, ("disable-mm-preprocessor-cache",)),
    ({"cuda-graph-sizes": 64}, {"max-cudagraph-capture-size": 64}, ("cuda-graph-sizes",)),
    ({"cuda-graph-sizes": "[64]"}, {"max-cudagraph-capture-size": 64}, ("cuda-graph-sizes",)),
    ({"cuda-graph-sizes": "[1, 2, 4]"}, {"cudagraph-capture-sizes": "[1, 2, 4]"}, ("cuda-graph-sizes",)),
]


@pytest.mark.parametrize(("flags", "new", "unset"), CARRIED)
def test_replacement_flags(flags: dict[str, Any], new: dict[str, Any], unset: tuple[str, ...]) -> None:
    assert REMOVED_FLAGS[unset[0]].carry(flags) == Changes(set=new, unset=unset)


@pytest.mark.parametrize("name", ["rope-scaling", "gguf-file", "prompt-adapters"])
def test_flag_without_an_equivalent_is_not_removed(name: str) -> None:
    assert REMOVED_FLAGS[name].carry({name: "x"}) is None


def json_of(changes: Changes | None, flag: str) -> Any:
    assert changes is not None
    return json.loads(str(changes.set[flag]))


def test_speculative_decoding_becomes_one_flag() -> None:
    flags = {"speculative-model": "org/draft", "num-speculative-tokens": 5, "max-num-seqs": 8}
    for name in ("speculative-model", "num-speculative-tokens"):
        changes = REMOVED_FLAGS[name].carry(flags)
        assert json_of(changes, "speculative-config") == {"model": "org/draft", "num_speculative_tokens": 5}
        assert changes is not None
        assert set(changes.unset) == {"speculative-model", "num-speculative-tokens"}


def test_ngram_speculation_is_a_method() -> None:
    flags = {"speculative-model": "[ngram]", "num-speculative-tokens": 3, "ngram-prompt-lookup-max": 4}
    changes = REMOVED_FLAGS["speculative-model"].carry(flags)
    expected = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert json_of(changes, "speculative-config") == expected


def test_incomplete_speculation_is_not_guessed() -> None:
    assert REMOVED_FLAGS["speculative-model"].carry({"speculative-model": "org/draft"}) is None


def test_existing_replacement_wins() -> None:
    flags = {"speculative-config": "{}", "speculative-model": "x", "num-speculative-tokens": 1}
    changes = REMOVED_FLAGS["speculative-model"].carry(flags)
    assert changes == Changes(unset=("speculative-model", "num-speculative-tokens"))


def test_guided_decoding_becomes_structured_outputs() -> None:
    flags = {"guided-decoding-backend": "xgrammar:no-fallback", "guided-decoding-disable-any-whitespace": True}
    changes = REMOVED_FLAGS["guided-decoding-backend"].carry(flags)
    assert json_of(changes, "structured-outputs-config") == {"backend": "xgrammar", "disable_any_whitespace": True}


def test_keys_are_merged_into_the_json_flag() -> None:
    flags = {"eplb-config": '{"window_size": 7}', "num-redundant-experts": 2, "eplb-window-size": 9}
    changes = REMOVED_FLAGS["num-redundant-experts"].carry(flags)
    assert json_of(changes, "eplb-config") == {"num_redundant_experts": 2, "window_size": 7}


@pytest.mark.parametrize("held", ["[1]", "no json"])
def test_json_flag_without_an_object_is_unchanged(held: str) -> None:
    flags = {"eplb-config": held, "num-redundant-experts": 2}
    assert REMOVED_FLAGS["num-redundant-experts"].carry(flags) is None


LONG = "9" * 5000
"""More digits than Python reads."""


@pytest.mark.parametrize(
    ("name", "value", "new"),
    [
        ("VLLM_ATTENTION_BACKEND", "flashinfer", {"attention-backend": "FLASHINFER"}),
        ("VLLM_ATTENTION_BACKEND", "FLASH_ATTN_VLLM_V1", {"attention-backend": "FLASH_ATTN"}),
        ("VLLM_ALL2ALL_BACKEND", "pplx", {"all2all-backend": "pplx"}),
        ("VLLM_MM_INPUT_CACHE_GIB", "4", {"mm-processor-cache-gb": 4}),
        pytest.param("VLLM_MM_INPUT_CACHE_GIB", LONG, {"mm-processor-cache-gb": LONG}, id="long"),
        pytest.param(
            "VLLM_FLASH_ATTN_VERSION",
            LONG,
            {"attention-config": f'{{"flash_attn_version": "{LONG}"}}'},
            id="long in JSON",
        ),
        ("VLLM_FLASH_ATTN_VERSION", "3", {"attention-config": '{"flash_attn_version": 3}'}),
        ("VLLM_USE_TRTLLM_ATTENTION", "0", {"attention-config": '{"use_trtllm_attention": false}'}),
        ("VLLM_TORCH_PROFILER_DIR", "/t", {"profiler-config": '{"profiler": "torch", "torch_profiler_dir": "/t"}'}),
    ],
)
def test_variable_becomes_a_flag(name: str, value: str, new: dict[str, Any]) -> None:
    carry = REMOVED_VARIABLES[name].carry
    assert carry is not None
    assert carry(value, {}) == Changes(set=new)


@pytest.mark.parametrize("value", ["XFORMERS", "", " "])
def test_removed_backend_is_not_carried_over(value: str) -> None:
    carry = REMOVED_VARIABLES["VLLM_ATTENTION_BACKEND"].carry
    assert carry is not None
    assert carry(value, {}) is None


def test_set_flag_overrides_a_variable() -> None:
    carry = REMOVED_VARIABLES["VLLM_ATTENTION_BACKEND"].carry
    assert carry is not None
    assert carry("FLASHINFER", {"attention-backend": "TRITON_ATTN"}) is None


@pytest.mark.parametrize("flag", REMOVED_FLAGS.values(), ids=lambda flag: flag.name)
def test_replacements_are_flags_that_can_be_set(flag: Any) -> None:
    changes = flag.carry({flag.name: True, "num-speculative-tokens": 3, "speculative-model": "m"})
    if changes is None:
        return
    for name, value in changes.set.items():
        assert NEWEST.get(name) is not None
        assert normalize_setting(name, value) == (name, value)


def test_replacement_follows_the_release() -> None:
    swap, flags = REMOVED_FLAGS["swap-space"], {"swap-space": 4}
    alone, moved = Changes(unset=("swap-space",)), Changes({"kv-offloading-size": 4}, ("swap-space",))
    assert [swap.changes(flags, release) for release in ((0, 20, 0), (0, 21, 0), None)] == [alone, moved, moved]


def test_removal_kinds() -> None:
    swap = REMOVED_FLAGS["swap-space"]
    assert [swap.fate(r) for r in ((0, 10, 2), (0, 11, 0), (0, 17, 1), (0, 18, 0))] == [
        None, RemovalKind.IGNORED, RemovalKind.IGNORED, RemovalKind.REFUSED,
    ]  # fmt: skip
    assert unread_fate((0, 16, 0)) is RemovalKind.IGNORED
    assert unread_fate((0, 17, 0)) is RemovalKind.WARNED
    assert REMOVED_VARIABLES["VLLM_USE_V1"].fate((0, 10, 2)) is None
    assert REMOVED_VARIABLES["VLLM_USE_V1"].fate((0, 33, 0)) is RemovalKind.WARNED


def test_removed_values_by_name() -> None:
    assert removed_value("quantization", "squeezellm") is not None
    assert removed_value("quantization", "awq") is None
    assert removed_value("dtype", "gguf") is None
