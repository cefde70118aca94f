from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.search import closest, resolve_flag_name, search


def names(table: FlagTable, text: str) -> list[str]:
    return [spec.name for spec in search(table, text)]


def test_empty_search_lists_all_by_name(table: FlagTable) -> None:
    assert names(table, "") == sorted(table.flags)
    assert names(table, "  ") == sorted(table.flags)


@pytest.mark.parametrize("text", ["max-num-seqs", "--max-num-seqs", "max_num_seqs", "MAX NUM SEQS", "max-num-s"])
def test_flag_is_found_first_by_its_name(table: FlagTable, text: str) -> None:
    assert names(table, text)[0] == "max-num-seqs"


def test_names_come_before_help(table: FlagTable) -> None:
    assert names(table, "prefix") == ["prefix-caching-hash-algo", "enable-prefix-caching"]
    assert names(table, "caching prefix")[0] in ("enable-prefix-caching", "prefix-caching-hash-algo")
    assert names(table, "kv cache") == ["kv-cache-dtype", "enable-prefix-caching"]


def test_aliases_choices_and_words_find_a_flag(table: FlagTable) -> None:
    assert names(table, "tp")[0] == "tensor-parallel-size"
    assert names(table, "fp8_e4m3") == ["kv-cache-dtype"]
    assert names(table, "flashinfer") == ["attention-backend"]
    assert names(table, "cuda graphs") == ["enforce-eager"]


def test_every_word_must_match(table: FlagTable) -> None:
    assert names(table, "max lora") == ["max-lora-rank", "max-loras", "max-cpu-loras"]
    assert "max-num-seqs" not in names(table, "max lora")


def test_typo_still_finds_the_flag(table: FlagTable) -> None:
    assert names(table, "enforce-eagre") == ["enforce-eager"]
    assert names(table, "qqqqqqqq") == []


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("max-num-seq", "max-num-seqs"),
        ("max_num_seqz", "max-num-seqs"),
        ("--no-enforce-egaer", "enforce-eager"),
        ("prefix-caching", "enable-prefix-caching"),
        ("enable-caching-prefix", "enable-prefix-caching"),
        ("gpu-memory-utilisation", "gpu-memory-utilization"),
        ("compilation.mode", "compilation-config"),
    ],
)
def test_nearest_name_is_suggested(table: FlagTable, typed: str, expected: str) -> None:
    assert expected in closest(table, typed)
    assert len(closest(table, typed)) <= 3


def test_dissimilar_name_has_no_suggestion(table: FlagTable) -> None:
    assert closest(table, "qqqqqqqq") == ()
    assert closest(table, "") == ()


def test_shortened_names_resolve_like_argparse(make_table: Callable[..., FlagTable]) -> None:
    bool_, int_ = ValueKind.BOOL, ValueKind.INT
    table = make_table(
        FlagSpec("max-loras", int_),
        FlagSpec("max-lora-rank", int_),
        FlagSpec("port", int_),
        FlagSpec("port-range", int_),
        FlagSpec("eager", bool_, negatable=True),
        FlagSpec("tensor-size", int_, aliases=("-ts", "--tensors")),
    )
    assert resolve_flag_name(table, "max-loras")[0] == table.flags["max-loras"]
    assert resolve_flag_name(table, "max_lora_r")[0] == table.flags["max-lora-rank"]
    assert resolve_flag_name(table, "max-lora") == (None, ("max-lora-rank", "max-loras"))
    assert resolve_flag_name(table, "port")[0] == table.flags["port"]
    assert resolve_flag_name(table, "no-e")[0] == table.flags["eager"]
    assert resolve_flag_name(table, "tensors")[0] == table.flags["tensor-size"]
    assert resolve_flag_name(table, "tensor") == (None, ("tensor-size", "tensors"))
    assert resolve_flag_name(table, "ts") == (None, ())
    assert resolve_flag_name(table, "q") == (None, ())
