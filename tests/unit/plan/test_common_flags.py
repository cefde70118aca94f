"""The table of common flags, and how it parses typed values."""

from __future__ import annotations

import pytest

from vllm_launchers.plan.common_flags import (
    COMMON_FLAGS,
    FlagKind,
    common_flag,
    flag_name,
    name_warning,
    parse_flag_value,
)
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.vllm.flags.changes import change_text, flag_text


def test_flag_table_is_consistent():
    names = [flag.name for flag in COMMON_FLAGS]
    assert len(names) == len(set(names))
    assert len(names) >= 60
    for flag in COMMON_FLAGS:
        assert flag_name(flag.name) == flag.name, "none is refused as a change"
        assert flag.meaning
        assert len(flag.meaning) <= 90
        assert flag.kind is not FlagKind.BOOL or not flag.choices
        for choice in flag.choices:
            parse_flag_value(flag.name, choice)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max-num-seqs", " 64 ", 64),
        ("max-model-len", "8K", "8K"),
        ("max-model-len", "auto", "auto"),
        ("max-model-len", "-1", "-1"),
        ("kv-cache-memory-bytes", "4G", "4G"),
        ("kv-cache-memory-bytes", "4000000000", 4_000_000_000),
        ("gpu-memory-utilization", ".9", 0.9),
        ("gpu-memory-utilization", "1", 1.0),
        ("enforce-eager", "on", True),
        ("enforce-eager", "False", False),
        ("kv-cache-dtype", "something-newer", "something-newer"),
        ("compilation-config", '{"mode": 3}', '{"mode": 3}'),
        ("never-heard-of", "7", 7),
        ("never-heard-of", "", True),
        ("never-heard-of", "off", False),
        ("never-heard-of", "1.5", 1.5),
        ("never-heard-of", "text", "text"),
    ],
)
def test_typed_values(name, text, value):
    read = parse_flag_value(name, text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max-num-seqs", "1.5"),
        ("max-num-seqs", "-3"),
        ("max-num-seqs", ""),
        ("max-model-len", "long"),
        ("kv-cache-memory-bytes", "auto"),
        ("kv-cache-memory-bytes", "0"),
        ("kv-cache-memory-bytes", "0G"),
        ("max-model-len", "0k"),
        ("max-num-batched-tokens", "0.0001k"),
        ("cpu-offload-gb", "-1e1"),
        ("mm-processor-cache-gb", "-.5e-1"),
        ("gpu-memory-utilization", "0"),
        ("gpu-memory-utilization", "nan"),
        ("enforce-eager", "maybe"),
        ("dtype", "int4"),
        ("max-lora-rank", "17"),
        ("hf-overrides", "[1]"),
        ("hf-overrides", "{"),
    ],
)
def test_invalid_values_are_refused_in_one_sentence(name, text):
    with pytest.raises(FlagError) as refused:
        parse_flag_value(name, text)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


def test_similar_choice_is_offered():
    with pytest.raises(FlagError, match="did you mean 'bfloat16'"):
        parse_flag_value("dtype", "bfloat-16")


@pytest.mark.parametrize("name", ["--Max_Num_Seqs", "max-num-seqs", " max_num_seqs "])
def test_names_are_normalized(name):
    assert flag_name(name) == "max-num-seqs"


@pytest.mark.parametrize("name", ["api-key", "--port", "model", "", "a b", "--"])
def test_names_that_cannot_be_set_here(name):
    with pytest.raises(FlagError):
        flag_name(name)


def test_unknown_names_are_warned_about_with_the_nearest():
    assert "did you mean max-num-seqs?" in name_warning("max-num-seq")
    assert name_warning("max-num-seqs") == ""
    assert name_warning("compilation-config.mode") == ""
    assert "will reject" in name_warning("zzz")


def test_values_are_formatted_as_typed():
    assert [flag_text(value) for value in (True, False, None, 0.9, "8K")] == ["on", "off", "–", "0.9", "8K"]
    assert change_text("enforce-eager", None, True) == "enforce-eager unset → on"
    assert common_flag("nope") is None
