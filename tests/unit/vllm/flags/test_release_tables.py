"""The table of releases: the flags of each vLLM, and which release applies to a version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.flag_history import last_release
from vllm_launchers.vllm.flags import releases
from vllm_launchers.vllm.flags.flag_table import FlagSpec, ValueKind
from vllm_launchers.vllm.flags.releases import (
    RELEASES,
    first_release,
    release_table,
    variable_releases,
)
from vllm_launchers.vllm.release_defaults import NEWEST, default_utilization, parse_release

DATA = Path(releases.__file__).with_suffix(".json")


@pytest.mark.parametrize(
    ("version", "spoken_for"),
    [
        ("0.33.0", "0.33.0"),
        ("v0.33", "0.33.0"),
        ("0.32.0+cpu", "0.32.0"),
        ("0.32.1rc2", "0.32.0"),
        ("0.20.1", "0.20.0"),
        ("0.20.7", "0.20.2"),
        ("0.17.0", "0.17.1"),
        ("0.11.0", "0.11.0.post2"),
        ("0.11.1", "0.11.0.post2"),
        ("0.10.1", "0.10.1.1"),
        ("0.9.0", "0.9.2"),
        ("0.8.5.post1", "0.8.5"),
        ("0.34.0", "0.33.0"),
        ("1.0", "0.33.0"),
    ],
)
def test_nearest_release_for_a_version(version: str, spoken_for: str) -> None:
    assert release_table(version).version == spoken_for


@pytest.mark.parametrize("version", ["0.8.4", "0.6.6.post1", "0.0.1"])
def test_older_releases_are_unknown(version: str) -> None:
    assert release_table(version) is None


@pytest.mark.parametrize("version", ["", "latest", "0", "x.y", "0.33.0;rm", "٠.٣٣"])
def test_invalid_version_is_refused(version: str) -> None:
    assert parse_release(version) is None
    assert release_table(version) is None


def test_releases_match_the_data_in_order() -> None:
    assert tuple(json.loads(DATA.read_text())["releases"]) == RELEASES
    numbers = [parse_release(release) for release in RELEASES]
    assert numbers == sorted(numbers, key=lambda n: n or (0, 0, 0))
    assert None not in numbers


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_has_complete_flags(release: str) -> None:
    table = release_table(release)
    assert table.source == "release"
    assert {"max-model-len", "gpu-memory-utilization", "tensor-parallel-size", "kv-cache-dtype"} <= set(table.flags)
    for name, spec in table.flags.items():
        assert spec.name == name
        assert isinstance(spec.kind, ValueKind)
        assert all(isinstance(getattr(spec, name), tuple) for name in FlagSpec.__struct_fields__ if name == "words")
        assert spec.default is None or isinstance(spec.default, str)
        assert all(alias.startswith("-") for alias in spec.aliases)
        if spec.choices and spec.default is not None and not spec.many:
            assert spec.default in spec.choices, name
        if spec.kind is ValueKind.BOOL:
            assert spec.default in (None, "true", "false"), name
    assert {"VLLM_PORT", "VLLM_API_KEY", "VLLM_LOGGING_LEVEL"} <= table.variables


@pytest.mark.parametrize(("release", "flags"), [("0.10.1.1", 171), ("0.18.1", 226), ("0.25.1", 270), ("0.33.0", 320)])
def test_number_of_flags_of_a_release(release: str, flags: int) -> None:
    """vLLM's parser has one more: the model, which has no name."""
    assert len(release_table(release).flags) == flags


@pytest.mark.parametrize(
    ("release", "default"), [("0.8.5", "0.9"), ("0.19.1", "0.9"), ("0.20.0", "0.92"), ("0.33.0", "0.92")]
)
def test_changed_default(release: str, default: str) -> None:
    spec = release_table(release).flags["gpu-memory-utilization"]
    assert spec.default == default
    assert (spec.above, spec.maximum) == (0, 1)


def test_flags_are_added_and_removed() -> None:
    assert release_table("0.17.1").get("swap-space") is not None
    assert release_table("0.18.1").get("swap-space") is None
    assert (first_release("swap-space"), last_release("swap-space")) == ("0.8.5", "0.17.1")
    assert release_table("0.12.0").get("attention-backend") is None
    assert (first_release("attention-backend"), last_release("attention-backend")) == ("0.13.0", None)
    assert (first_release("no-such-flag"), last_release("no-such-flag")) == (None, None)


def test_choices_and_words() -> None:
    assert "int4_per_token_head" not in release_table("0.24.0").flags["kv-cache-dtype"].choices
    assert "int4_per_token_head" in release_table("0.25.1").flags["kv-cache-dtype"].choices
    newest = release_table("0.33.0").flags
    assert newest["kv-cache-dtype"].choices == ()
    assert "fp8" in newest["kv-cache-dtype"].words
    assert "bitsandbytes" not in newest["quantization"].words
    assert newest["max-lora-rank"].choices == ("1", "8", "16", "32", "64", "128", "256", "320", "512")
    assert newest["max-model-len"].words == ("auto", "-1")
    assert release_table("0.13.0").flags["max-model-len"].words == ()


@pytest.mark.parametrize("release", RELEASES)
def test_values_are_words(release: str) -> None:
    for spec in release_table(release).flags.values():
        assert not any(len(word) == 1 and not word.isdigit() for word in (*spec.words, *spec.choices)), spec.name


def test_kinds() -> None:
    flags = release_table("0.33.0").flags
    kinds = {
        "max-model-len": ValueKind.HUMAN_INT,
        "max-num-batched-tokens": ValueKind.HUMAN_INT,
        "max-num-seqs": ValueKind.INT,
        "gpu-memory-utilization": ValueKind.FLOAT,
        "enable-prefix-caching": ValueKind.BOOL,
        "speculative-config": ValueKind.JSON,
        "served-model-name": ValueKind.TEXT,
        "allowed-origins": ValueKind.JSON_LIST,
    }
    assert {name: flags[name].kind for name in kinds} == kinds
    assert flags["enable-prefix-caching"].negatable
    assert not flags["headless"].negatable
    assert flags["served-model-name"].many
    assert flags["quantization"].nullable
    assert flags["tensor-parallel-size"].aliases == ("-tp",)
    assert flags["disable-cascade-attn"].deprecated
    assert flags["enable-log-requests"].opposite == "disable-log-requests"
    assert release_table("0.32.0").flags["enable-log-requests"].opposite == ""


def test_variables_are_added_and_removed() -> None:
    assert variable_releases("VLLM_ATTENTION_BACKEND") == ("0.8.5", "0.14.1")
    assert variable_releases("VLLM_PORT") == ("0.8.5", None)
    assert variable_releases("VLLM_LOG_LEVEL") is None
    assert "VLLM_ATTENTION_BACKEND" in release_table("0.14.1").variables
    assert "VLLM_ATTENTION_BACKEND" not in release_table("0.15.1").variables


def test_importing_reads_no_data() -> None:
    """Read-only commands must stay light."""
    script = (
        "import io, sys; opened = []; sys.addaudithook(lambda e, a: opened.append(str(a[0])) if e == 'open' else None);"
        "import vllm_launchers.vllm.flags.releases as r; assert not any('releases.json' in o for o in opened);"
        "r.release_table('0.33'); assert any('releases.json' in o for o in opened)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_default_utilization_matches_the_release_table() -> None:
    for version in RELEASES[1:]:  # the table's entries for the oldest are approximate
        flag = release_table(version).get("gpu-memory-utilization")
        assert flag is not None
        assert float(flag.default or 0) == default_utilization(parse_release(version)), version
    assert parse_release(RELEASES[-1]) == NEWEST
