"""Flags as users write them, and as arguments."""

from __future__ import annotations

import argparse
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_launchers.plan.common_flags import parse_set
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.plan.flags import flag_words, normalize, normalize_setting, served_name, token_count
from vllm_launchers.vllm.flags.changes import FlagValue, whole_number
from vllm_launchers.vllm.flags.speculation import speculates, speculation_flags


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("max-num-seqs=128", "max-num-seqs", 128),
        ("--max_num_seqs=128", "max-num-seqs", 128),
        ("gpu-memory-utilization=0.90", "gpu-memory-utilization", 0.9),
        ("gpu-memory-utilization=.9", "gpu-memory-utilization", 0.9),
        ("gpu-memory-utilization=1.", "gpu-memory-utilization", 1.0),
        ("x=.", "x", "."),
        ("x=1e-3", "x", 0.001),
        ("x=1e3", "x", "1e3"),
        ("max-model-len=4k", "max-model-len", "4k"),
        ("max-model-len=-1", "max-model-len", "-1"),
        ("enforce-eager=true", "enforce-eager", True),
        ("enable-prefix-caching=False", "enable-prefix-caching", False),
        ("no-enable-prefix-caching=true", "enable-prefix-caching", False),
        ("no-enable-prefix-caching=false", "enable-prefix-caching", True),
        ("no-such-flag=3", "no-such-flag", 3),
        ("tp=2", "tensor-parallel-size", 2),
        ("served-model-name=1.10", "served-model-name", "1.10"),
        ('served-model-name=["a", "b"]', "served-model-name", '["a", "b"]'),
        ("served-model-name=a,b", "served-model-name", "a,b"),
        ("seed=007", "seed", "007"),
        ("hf-overrides.rope_theta=1000", "hf-overrides.rope_theta", 1000),
        ('speculative-config={"method": "ngram"}', "speculative-config", '{"method": "ngram"}'),
        ("x=a=b", "x", "a=b"),
        ("compilation-config.custom_ops+=none", "compilation-config.custom_ops+", "none"),
        ("x=nan", "x", "nan"),
        ("x=" + "9" * 400, "x", "9" * 400),
    ],
)
def test_parse_set(word: str, name: str, value: FlagValue) -> None:
    parsed = parse_set(word)
    assert parsed == (name, value)
    assert type(parsed[1]) is type(value)


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("enforce-eager", "such as enforce-eager=true"),
        ("max-num-seqs", "such as max-num-seqs=128"),
        ("kv-cache-dtype", "such as kv-cache-dtype=auto"),
        ("of-a-plugin", "such as of-a-plugin=…"),
        ("max-num-seqs=", "--unset"),
        ("=3", "is not a flag name"),
        ("a b=3", "is not a flag name"),
        ("MAX=3", "is not a flag name"),
        ("no-no-x=true", "is not a flag name"),
        ("api-key=hunter2", "export VLLM_API_KEY"),
        ("--hf_token=hunter2", "export HF_TOKEN"),
        ("host=0.0.0.0", "--host"),
        ("port=1", "--port"),
        ("model=x", "--model"),
        ("x=\x00", "NUL byte"),
    ],
)
def test_invalid_settings_are_refused(word: str, part: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse_set(word)
    assert part in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_flag_words() -> None:
    flags: dict[str, FlagValue] = {
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "disable-log-stats": False,
        "headless": True,
        "max-num-seqs": 4,
        "gpu-memory-utilization": 0.9,
        "chat-template": "-odd",
        "seed-shift": -0.5,
        "compilation-config.x": True,
        "compilation-config.y": False,
    }
    assert flag_words(flags) == (
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--headless",
        "--max-num-seqs",
        "4",
        "--gpu-memory-utilization",
        "0.9",
        "--chat-template=-odd",
        "--seed-shift=-0.5",
        "--compilation-config.x",
        "true",
        "--compilation-config.y",
        "false",
    )


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        *[(4096, 4096), ("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("1t", 10**12)],
        *[("1.5K", None), ("1.5", None), ("auto", None), ("-1", None), (-1, None), (True, None), (None, None)],
        *[("9" * 400, None), ("4x", None), ("", None)],
    ],
)
def test_token_count(value: object, tokens: int | None) -> None:
    assert token_count(value) == tokens


NAMES = st.from_regex(r"[a-mo-z][a-z0-9]{1,8}(-[a-z][a-z0-9]{0,6}){0,3}", fullmatch=True).filter(
    lambda name: name not in {"model", "host", "port", "uds", "api-key", "hf-token"} and len(name) > 3
)
VALUES = st.one_of(
    st.booleans(),
    st.integers(min_value=-(10**17), max_value=10**17),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=12),
)


@given(NAMES)
def test_every_spelling_of_a_name_is_normalized(name: str) -> None:
    written = {name, f"--{name}", name.replace("-", "_"), f"--no-{name}", f"no_{name}", f"  {name} "}
    assert {normalize(word) for word in written} == {name}


@given(NAMES, VALUES)
def test_values_round_trip(name: str, value: FlagValue) -> None:
    read = parse_set(f"{name}={value}")
    assert read[0] == name
    assert str(read[1]).lower() == str(value).lower() or float(read[1]) == float(value)
    assert normalize_setting(*read) == read


@given(st.text(max_size=40))
def test_any_text_is_a_setting_or_an_error(text: str) -> None:
    try:
        name, _ = parse_set(text)
    except FlagError as error:
        message = str(error)
    else:
        message = ""
        assert normalize(name) == name
    assert message.isprintable()


@given(NAMES, st.text(min_size=1, max_size=12).filter(lambda text: "\0" not in text))
def test_argparse_reads_the_written_flags(name: str, value: str) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(f"--{name}", dest="it")
    assert parser.parse_args(list(flag_words({name: value}))).it == value


def test_context_of_minus_one_means_auto() -> None:
    assert parse_set("max-model-len=-1") == ("max-model-len", "-1")
    assert flag_words({"max-model-len": "-1"}) == ("--max-model-len=-1",)


def test_vllms_aliases_are_their_flags() -> None:
    """They have one dash, and vLLM refuses them with two."""
    assert normalize("-ac.backend") == "attention-config.backend"
    assert normalize("-dc") == "diffusion-config"
    assert (normalize("-n"), normalize("-r"), normalize("-dpl")) == ("nnodes", "node-rank", "data-parallel-size-local")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("qwen", ("qwen",)),
        ("a,b c", ("a,b c",)),
        ('["qwen"]', ("qwen",)),
        (' ["qwen", "org/default"] ', ("qwen", "org/default")),
        ("[x", ("[x",)),
    ],
)
def test_served_names_are_separate_words_and_the_first_counts(value: str, names: tuple[str, ...]) -> None:
    flags = {"served-model-name": value, "max-num-seqs": 8}
    assert flag_words(flags) == ("--served-model-name", *names, "--max-num-seqs", "8")
    assert served_name(flags, "org/model") == names[0]


def test_default_served_name_is_the_models() -> None:
    assert served_name({}, "org/model") == served_name({"served-model-name": ""}, "org/model") == "org/model"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("[]", "the list is empty"),
        ("[null]", "null can't be one of them"),
        ('["a", ""]', '"" can\'t be one of them'),
        ('["-a", "b"]', '"-a" begins with a dash'),
        (r'["a\u0000"]', r'"a\u0000" is not printable'),
        (r'["\ud800"]', r'"\ud800" is not printable'),
        *((broken, "it is not valid JSON") for broken in ("[a]", '["a",]', '["a",', '["a')),
    ],
)
def test_invalid_list_of_served_names_is_refused(value: str, why: str) -> None:
    with pytest.raises(FlagError, match=f"several as a JSON list .*: {re.escape(why)}$"):
        parse_set(f"served-model-name={value}")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("cudagraph-capture-sizes", "[1, 2, 4]", ("1", "2", "4")),
        ("lora-modules", '["sql=/a", {"name": "b", "path": "/b"}]', ("sql=/a", '{"name": "b", "path": "/b"}')),
        ("lora-modules", '{"name": "b", "path": "/b"}', ('{"name": "b", "path": "/b"}',)),
        ("logits-processors", '["one.Processor", "two.Processor"]', ("one.Processor", "two.Processor")),
    ],
)
def test_flags_with_several_values_take_a_json_list(name: str, value: str, words: tuple[str, ...]) -> None:
    assert flag_words(dict([parse_set(f"{name}={value}")])) == (f"--{name}", *words)


def test_flag_is_repeated_where_vllm_appends_its_values() -> None:
    assert flag_words({"middleware": '["a.b", "c.d"]'}) == ("--middleware", "a.b", "--middleware", "c.d")
    assert flag_words({"middleware": "a.b"}) == ("--middleware", "a.b")


@pytest.mark.parametrize("name", ["collect-detailed-traces", "ignore-patterns"])
def test_flag_that_takes_several_values_since_0_10(name: str) -> None:
    assert flag_words({name: '["model", "worker"]'}) == (f"--{name}", "model", "worker")


def test_other_flags_that_look_like_a_list_are_one_word() -> None:
    assert flag_words({"allowed-origins": '["*"]'}) == ("--allowed-origins", '["*"]')


@pytest.mark.parametrize(
    ("flags", "drafts"),
    [
        ({}, False),
        ({"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'}, True),
        ({"speculative-config.method": "ngram"}, True),
        ({"spec-method": "mtp"}, True),
        ({"spec-model": "a/b"}, True),
        ({"spec-tokens": 3}, False),
        ({"speculative-config": "null"}, False),
        ({"spec-method": ""}, False),
        ({"max-num-seqs": 4}, False),
    ],
)
def test_any_speculation_flag_enables_speculative_decoding(flags: dict[str, FlagValue], drafts: bool) -> None:
    assert speculates(flags) is drafts
    assert speculation_flags({**flags, "max-num-seqs": 4}) == tuple(name for name in flags if name != "max-num-seqs")


@pytest.mark.parametrize(
    ("value", "number"),
    [(4, 4), ("007", 7), ("4k", 4000), ("auto", 1), ("", 1), (0, 1), ("-1", 1), (-1, 1), (True, 1), (4.0, 1)],
)
def test_whole_number_may_be_text(value: FlagValue, number: int) -> None:
    assert whole_number({"max-num-seqs": value}, "max-num-seqs") == number
    assert whole_number({}, "max-num-seqs", 5) == 5
