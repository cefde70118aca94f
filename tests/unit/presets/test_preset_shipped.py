"""The shipped presets have the documented values."""

from __future__ import annotations

import re

import pytest

from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.flags.changes import FlagValue

FIELD_VALUES: dict[str, dict[str, FlagValue]] = {
    "chatbot": {
        "gpu-memory-utilization": 0.92,
        "max-num-seqs": 256,
        "max-model-len": 4096,
        "enable-prefix-caching": True,
    },
    "code-generation": {"gpu-memory-utilization": 0.88, "max-num-seqs": 64, "max-model-len": 16384},
    "long-document": {
        "gpu-memory-utilization": 0.90,
        "max-num-seqs": 16,
        "max-model-len": 131072,
        "kv-cache-dtype": "fp8",
        "enable-prefix-caching": False,
    },
    "batch": {"gpu-memory-utilization": 0.95, "max-num-seqs": 512, "max-model-len": 4096},
}


def test_all_four_presets_are_valid() -> None:
    presets, problems = read_presets(None)
    assert problems == []
    assert set(presets) == set(FIELD_VALUES)
    assert all(preset.shipped for preset in presets.values())


@pytest.mark.parametrize("name", FIELD_VALUES)
def test_expected_values(name: str) -> None:
    flags = read_presets(None)[0][name].flags
    for flag, value in FIELD_VALUES[name].items():
        assert flags[flag].value == value


@pytest.mark.parametrize("name", FIELD_VALUES)
def test_every_flag_has_a_reason_and_the_workload_fits(name: str) -> None:
    preset = read_presets(None)[0][name]
    assert all(len(setting.why) > 30 for setting in preset.flags.values())
    assert preset.title
    assert preset.summary
    length = preset.flags["max-model-len"].value
    batched = preset.flags["max-num-batched-tokens"].value
    sequences = preset.flags["max-num-seqs"].value
    assert isinstance(length, int)
    assert preset.workload.input_tokens_p95 + preset.workload.output_tokens_p95 <= length
    assert isinstance(sequences, int)
    assert isinstance(batched, int)
    assert sequences <= batched
    assert preset.workload.concurrency <= sequences


def test_no_preset_sets_a_quantization_or_a_host() -> None:
    for preset in read_presets(None)[0].values():
        assert not {"quantization", "host", "port"} & set(preset.flags)


@pytest.mark.parametrize("name", FIELD_VALUES)
def test_reasons_apply_to_any_model(name: str) -> None:
    """A preset can be planned with another model or other flags, and its reasons are shown there too."""
    for flag, setting in read_presets(None)[0][name].flags.items():
        numbers = {found.replace(",", "") for found in re.findall(r"\d[\d,]*\d{3}|\d{3,}(?! pages)", setting.why)}
        assert numbers <= {str(setting.value)}, f"{flag}: {setting.why}"
        assert not re.search(r"\b[GM]i?B\b|model (?:could|can)\b", setting.why), f"{flag}: {setting.why}"
