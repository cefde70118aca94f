"""A model as table cells."""

from __future__ import annotations

import pytest

from vllm_console.model_text import fit_text, model_cells, parameters_text, weights_text
from vllm_console.text import count, objectives_text, seconds, size
from vllm_launchers.plan.model import MemoryFit
from vllm_launchers.presets.model import Objectives
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, Quantization
from vllm_launchers.vllm.modelfacts.local import LocalModel


def test_unknown_is_a_dash():
    assert model_cells(LocalModel("a", "cache", "/a", problem="no config")) == ("–", "–", "–", "–")
    assert fit_text(None) == fit_text(MemoryFit()) == "–"


def test_values_have_units():
    facts = ModelFacts("a", parameters=8_190_000_000, max_context=40_960, quantization=Quantization("fp8", 8))
    assert model_cells(LocalModel("a", "cache", "/a", 6 * 2**30, facts)) == ("6.0 GiB", "fp8", "8.2B", "40,960")
    assert (size(3_000_000), parameters_text(494_000_000), parameters_text(235e9)) == ("2.9 MiB", "494M", "235B")


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (seconds(0.0009994), "999µs"),
        (seconds(0.0009996), "1.0ms"),
        (seconds(0.9994), "999ms"),
        (seconds(0.9996), "1.0s"),
        (seconds(9.96), "10s"),
        (count(9_999.6), "10.0k"),
        (count(99_970), "100k"),
        (count(999_499), "999k"),
        (count(999_999), "1.0M"),
        (count(-999_999), "-1.0M"),
        (count(999_999_999), "1.0G"),
        (size(1023), "1023 B"),
        (size(2**20 - 1), "1 MiB"),
        (size(2**30 - 1), "1.0 GiB"),
    ],
)
def test_rounded_numbers_have_the_next_unit(shown, text):
    assert shown == text


def test_objectives_have_the_units_of_measured_values():
    limits = Objectives(ttft_p99_seconds=1.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)
    assert objectives_text(limits) == "TTFT p99 ≤ 1.0s, ITL p99 ≤ 100ms, KV cache ≤ 85%, preemptions ≤ 0.02/request"


def test_model_that_does_not_fit_differs_from_one_that_cannot_start():
    assert fit_text(MemoryFit(True, "", 54_800)) == "✓ 54.8k tokens"
    assert fit_text(MemoryFit(True, "", 54_800, incomplete="has no model-2.safetensors")) == "! incomplete"
    assert fit_text(MemoryFit(False, "3 GiB are missing.")) == "✗ too large"
    assert fit_text(MemoryFit(True, "FP8 is not supported")) == fit_text(MemoryFit(None, "no vLLM")) == "! error"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (ModelFacts("a", dtype="bfloat16"), "bf16"),
        (ModelFacts("a"), "–"),
        (ModelFacts("a", quantization=Quantization("awq", 4, 128)), "awq 4-bit"),
        (ModelFacts("a", quantization=Quantization("compressed-tensors", 8, floating=True)), "fp8"),
        (ModelFacts("a", quantization=Quantization("compressed-tensors", 4)), "int4"),
        (ModelFacts("a", quantization=Quantization("mxfp4", 4, 32)), "mxfp4"),
    ],
)
def test_weight_format_text(facts, text):
    assert weights_text(LocalModel("a", "cache", "/a", facts=facts)) == text
