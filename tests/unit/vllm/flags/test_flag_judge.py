from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.plan.flags import flag_words
from vllm_launchers.vllm.flags.changes import FlagValue
from vllm_launchers.vllm.flags.check_value import problem, refused_together
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.wording import expected

GOOD: list[tuple[str, FlagValue]] = [
    ("max-num-seqs", 1),
    ("max-num-seqs", "256"),
    ("max-num-seqs", " 256 "),
    ("seed", -1),
    ("max-num-batched-tokens", 8192),
    ("max-num-batched-tokens", "8k"),
    ("max-num-batched-tokens", "1.5k"),
    ("max-num-batched-tokens", "8K"),
    ("max-model-len", "auto"),
    ("max-model-len", "AUTO"),
    ("max-model-len", "-1"),
    ("max-model-len", 4096),
    ("gpu-memory-utilization", 0.9),
    ("gpu-memory-utilization", 1),
    ("gpu-memory-utilization", "9e-1"),
    ("device-memory-utilization", 0.9),
    ("watermark", 0),
    ("enforce-eager", True),
    ("enforce-eager", False),
    ("headless", True),
    ("headless", False),
    ("disable-prefix-caching", True),
    ("kv-cache-dtype", "fp8"),
    ("max-lora-rank", 16),
    ("max-lora-rank", "16"),
    ("attention-backend", "FLASHINFER"),
    ("attention-backend", "flash_attn"),
    ("attention-backend", "auto"),
    ("attention-backend", "None"),
    ("moe-backend", "DEEP-GEMM"),
    ("load-format", "my_own_loader"),
    ("compilation-config", '{"mode": 3}'),
    ("compilation-config", '{"cudagraph_capture_sizes": [1, 2k]}'),
    ("compilation-config.mode", 3),
    ("compilation-config.mode.deeper", 3),
    ("compilation-config.cudagraph_capture_sizes+", "1,2"),
    ("hf-overrides", '{"anything": {"goes": 1}}'),
    ("hf-overrides.anything", True),
    ("speculative-config", ""),
    ("allowed-origins", '["*"]'),
    ("additional-config", "my.module"),
    ("additional-config", '{"a": 1}'),
    ("cudagraph-capture-sizes", 8),
    ("cudagraph-capture-sizes", "[1, 2, 4]"),
    ("served-model-name", "1.10"),
    ("hf-token", True),
    ("max-num-se", 4),
    ("max_num_seqs", 4),
    ("gpu-mem", 0.5),
]

BAD: list[tuple[str, FlagValue, str]] = [
    ("max-num-seqs", 0, "--max-num-seqs must be 1 or more, not '0'"),
    ("max-num-seqs", -3, "must be 1 or more"),
    ("max-num-seqs", "9" * 23, "must be below 2^64"),
    ("max-model-len", "9" * 23, "must be below 2^64"),
    ("max-num-seqs", 1.5, "takes a whole number, not '1.5'"),
    ("max-num-seqs", "many", "takes a whole number, not 'many'"),
    ("max-num-seqs", "", "takes a whole number"),
    ("max-num-seqs", "4k", "takes a whole number"),
    ("max-num-seqs", True, "--max-num-seqs needs a value: a whole number"),
    ("max-num-seqs", False, "needs a value"),
    ("max-num-batched-tokens", "1.5K", "takes a whole number such as 4096, 4k (4,000) or 4K (4,096), not '1.5K'"),
    ("max-num-batched-tokens", "auto", "not 'auto'"),
    ("max-num-batched-tokens", "9" * 400 + "k", "takes a whole number such as"),
    ("compilation-config", '{"mode": ' + "9" * 4299 + "T}", "takes a JSON object"),
    ("max-model-len", 0, "must be 1 or more, or auto"),
    ("max-model-len", -2, "must be -1 or more"),
    ("max-model-len", "automatic", ", or auto, not 'automatic'"),
    ("gpu-memory-utilization", 0, "must be above 0, not '0'"),
    ("gpu-memory-utilization", 1.01, "must be 1 or less"),
    ("gpu-memory-utilization", "nan", "must be above 0"),
    ("gpu-memory-utilization", "90%", "takes a number"),
    ("watermark", 1, "must be below 1"),
    ("enforce-eager", 1, "--enforce-eager is on or off and takes no value, not '1'"),
    ("enforce-eager", "yes", "takes no value"),
    ("disable-prefix-caching", False, "set enable-prefix-caching instead"),
    ("kv-cache-dtype", "fp9", "takes auto, fp8 or fp8_e4m3, not 'fp9'"),
    ("kv-cache-dtype", "FP8", "not 'FP8'"),
    ("kv-cache-dtype", 8, "not '8'"),
    ("max-lora-rank", 12, "takes 8, 16 or 32, not '12'"),
    ("attention-backend", "FLASHY", "takes FLASH_ATTN or FLASHINFER, not 'FLASHY'"),
    ("moe-backend", "deep", "not 'deep'"),
    ("compilation-config", "3", "takes a JSON object"),
    ("compilation-config", '{"mode": 3', "takes a JSON object"),
    ("compilation-config", '{"mod": 3}', "has no key 'mod' (it has mode, cudagraph_capture_sizes); did you mean mode?"),
    ("compilation-config.cudagraph_sizes", 3, "did you mean cudagraph_capture_sizes?"),
    ("compilation-config.zzz", 3, "has no key 'zzz'; it has mode, cudagraph_capture_sizes"),
    ("hf-overrides", "[1]", "takes a JSON object"),
    ("hf-overrides", '{"a": 2k}', "takes a JSON object"),
    ("allowed-origins", "*", 'takes a JSON list such as ["*"]'),
    ("additional-config", "{a: 1}", "looks like a JSON object but is not valid JSON"),
    ("cudagraph-capture-sizes", "1 2", "takes whole numbers as a JSON list such as [1, 2, 4], not '1 2'"),
    ("cudagraph-capture-sizes", "None", "takes whole numbers"),
    ("cudagraph-capture-sizes", "[1, 2.5]", "not '2.5'"),
    ("max-num-seqs.x", 1, "--max-num-seqs has no keys"),
    ("kv-cache-dtype.x", 1, "has no keys"),
    ("tensor-parallel", "x", "takes a whole number"),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_accepted_values_have_no_problem(table: FlagTable, name: str, value: FlagValue) -> None:
    assert problem(table, name, value) is None


@pytest.mark.parametrize(("name", "value", "words"), BAD)
def test_refused_values_are_reported_in_one_sentence(table: FlagTable, name: str, value: FlagValue, words: str) -> None:
    sentence = problem(table, name, value)
    assert sentence is not None
    assert words in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max-num-sequences", "vLLM 0.32.0 has no flag --max-num-sequences; did you mean --max-num-seqs"),
        ("enable-prefix-cache", "did you mean --enable-prefix-caching"),
        ("zzzzzzzz", "vLLM 0.32.0 has no flag --zzzzzzzz"),
        ("max", "--max is not one flag of vLLM 0.32.0 but the beginning of several: --max-cpu-loras, "),
    ],
)
def test_unknown_flags_suggest_a_name(table: FlagTable, name: str, words: str) -> None:
    assert words in (problem(table, name, 1) or "")


def test_unknown_version_is_not_invented(make_table: Callable[..., FlagTable]) -> None:
    assert problem(make_table(version=None), "x", 1) == "this vLLM has no flag --x"
    assert "vLLM 0.32.0 has" in (problem(make_table(version="0.32.0+cpu"), "x", 1) or "")


def test_outside_text_is_cleaned_and_cut(table: FlagTable) -> None:
    sentence = problem(table, "kv-cache-dtype", "\x1b[31m" + "x" * 500) or ""
    assert "\x1b" not in sentence
    assert len(sentence) < 200


def test_all_flags_of_a_plan_are_judged_in_order(table: FlagTable) -> None:
    flags: dict[str, FlagValue] = {"watermark": 2, "max-num-seqs": 8, "enforce-eager": True, "nonsense-flag": 1}
    assert [name for name, _ in refused_together(table, flags)] == ["watermark", "nonsense-flag"]
    assert refused_together(table, {}) == []


def test_lora_bounds_apply_once_lora_is_on(table: FlagTable) -> None:
    assert refused_together(table, {"max-loras": 0}) == []
    assert [name for name, _ in refused_together(table, {"max-loras": 0, "enable-lora": True})] == ["max-loras"]
    assert problem(table, "max-loras", 0) is not None
    assert refused_together(table, {"max-loras": "x"}) != []


def test_conditions_are_checked_only_for_valid_flags(table: FlagTable) -> None:
    broken: dict[str, FlagValue] = {"max-num-seqs": 64, "max-num-batched-tokens": 32}
    assert len(refused_together(table, broken)) == 1
    assert refused_together(table, {**broken, "max-num-seqs": "64x"}) == [
        ("max-num-seqs", "--max-num-seqs takes a whole number, not '64x'")
    ]


def test_expected_values_are_described(table: FlagTable) -> None:
    assert expected(table.flags["enforce-eager"]) == "on or off"
    assert expected(table.flags["load-format"]) == "text"
    many = FlagSpec("x", ValueKind.TEXT, choices=tuple(f"c{number}" for number in range(12)))
    assert expected(many) == "c0, c1, c2, c3, c4, c5, c6, c7 or one of 4 others"


VALUES = st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=30), st.sampled_from(["{}", "[]", "1k"]))
NAMES = st.one_of(st.sampled_from([name for name, _ in GOOD]), st.text("abc-.nomuxse_", min_size=1, max_size=20))


@settings(max_examples=300, deadline=None)
@given(flags=st.dictionaries(NAMES, VALUES, max_size=5))
def test_every_value_gets_a_plain_verdict(flags: dict[str, FlagValue]) -> None:
    kind = ValueKind
    table = FlagTable(
        "0.32.0",
        "installation",
        {
            spec.name: spec
            for spec in (
                FlagSpec("max-num-seqs", kind.INT, minimum=1),
                FlagSpec("max-num-batched-tokens", kind.HUMAN_INT),
                FlagSpec("max-model-len", kind.HUMAN_INT, words=("auto", "-1")),
                FlagSpec("gpu-memory-utilization", kind.FLOAT, above=0, maximum=1),
                FlagSpec("compilation-config", kind.JSON, parts=(FlagSpec("mode", kind.OTHER),)),
                FlagSpec("additional-config", kind.OTHER),
                FlagSpec("enforce-eager", kind.BOOL, negatable=True),
            )
        },
    )
    flag_words(flags)
    for name, sentence in refused_together(table, flags):
        assert name in {*flags, "max-num-seqs", "max-num-batched-tokens"}
        assert sentence
        assert "\x1b" not in sentence
