"""Values set by the user or a preset are kept; each choice names its source."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from fakes.choice_inputs import choice_inputs
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.plan.choices.choice import Choice, Source
from vllm_launchers.plan.choices.choose import choose, suggest
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.presets.load import read_presets
from vllm_launchers.presets.model import FlagSetting, Workload
from vllm_launchers.vllm.flags.changes import Changes, FlagValue
from vllm_launchers.vllm.modelfacts.facts import ModelFacts

Chosen = Callable[..., dict[str, Choice]]
CHAT = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=64)


def test_user_precedes_preset_and_traffic(chosen: Chosen) -> None:
    preset = {"max-model-len": FlagSetting(value=8192, why="as tried"), "max-num-seqs": FlagSetting(value=7, why="few")}
    found = chosen("8b", "h100", preset=preset, set={"--max_num_seqs": 9, "enforce-eager": True})
    assert found["max-model-len"] == Choice("max-model-len", 8192, "as tried", Source.PRESET)
    assert found["max-num-seqs"] == Choice("max-num-seqs", 9, "set by you", Source.YOU)
    assert found["enforce-eager"].source is Source.YOU
    assert found["max-num-batched-tokens"].source is Source.WORKLOAD


def test_presets_own_value_stays_the_presets(chosen: Chosen) -> None:
    preset = {"max-num-seqs": FlagSetting(value=7, why="few")}
    assert chosen("8b", "h100", preset=preset, set={"max-num-seqs": 7})["max-num-seqs"].reason == "few"


def test_unset_flag_is_left_to_vllm(chosen: Chosen) -> None:
    preset = {"max-num-seqs": FlagSetting(value=7, why="few")}
    found = chosen("8b", "h100", preset=preset, unset=("max_num_seqs", "max-model-len", "never-set"))
    assert (found["max-num-seqs"].value, found["max-num-seqs"].source) == (None, Source.YOU)
    assert found["max-model-len"].value is None
    assert "never-set" not in found


def test_preset_order_is_kept_and_unset_flags_are_last(models: dict[str, ModelFacts]) -> None:
    preset = read_presets()[0]["chatbot"]
    choices = choose(preset.flags, Changes({"seed": 1}), choice_inputs(CHAT, models["8b"], None, (0, 33, 0), "cuda"))
    names = [choice.flag for choice in choices]
    assert names[: len(preset.flags)] == list(preset.flags)
    assert names[len(preset.flags)] == "seed"
    unset = [choice.value is None for choice in choices]
    assert unset == sorted(unset)


@pytest.mark.parametrize("name", ["chatbot", "code-generation", "long-document", "batch"])
def test_shipped_presets_are_unchanged(name: str, models: dict[str, ModelFacts]) -> None:
    preset = read_presets()[0][name]
    choices = choose(preset.flags, Changes(), choice_inputs(preset.workload, models["8b"], None, (0, 33, 0), "cuda"))
    set_flags = {choice.flag: choice.value for choice in choices if choice.value is not None}
    assert set_flags == {flag: setting.value for flag, setting in preset.flags.items()}
    assert all(choice.reason for choice in choices)


def test_invalid_name_is_refused(chosen: Chosen) -> None:
    with pytest.raises(FlagError):
        chosen("8b", "h100", set={"port": 1})


RUNS: Mapping[str, FlagValue] = {
    "gpu-memory-utilization": 0.9, "max-model-len": 32_768, "max-num-seqs": 128, "max-num-batched-tokens": 8192,
    "enable-prefix-caching": False, "enable-chunked-prefill": True,
}  # fmt: skip


def seen(
    models: dict[str, ModelFacts], host: Host | None, runs: Mapping[str, FlagValue], longest: float = 3200
) -> dict[str, Choice]:
    inputs = choice_inputs(CHAT, models["8b"], host, (0, 33, 0), "cuda", longest=longest)
    return {c.flag: c for c in suggest(runs, inputs)}


def test_suggestion_contains_only_differences(
    models: dict[str, ModelFacts], hosts: dict[str, Callable[[], Host]]
) -> None:
    found = seen(models, hosts["h100"](), RUNS)
    assert {name: choice.value for name, choice in found.items()} == {
        "max-model-len": 4096,
        "enable-prefix-caching": True,
    }
    assert all(choice.source is Source.WORKLOAD and choice.reason for choice in found.values())
    assert seen(models, hosts["h100"](), {**RUNS, "max-model-len": "4K", "enable-prefix-caching": True}) == {}


def test_suggestion_ignores_noise(models: dict[str, ModelFacts]) -> None:
    runs = {**RUNS, "enable-prefix-caching": True, "max-num-batched-tokens": 2048}
    assert seen(models, None, {**runs, "max-model-len": 4400, "max-num-seqs": 120}) == {}
    assert set(seen(models, None, {**runs, "max-model-len": 5000, "max-num-seqs": 120})) == {"max-model-len"}


def test_sufficient_step_is_kept(models: dict[str, ModelFacts]) -> None:
    runs = {**RUNS, "enable-prefix-caching": True, "max-model-len": 4096, "max-num-batched-tokens": 1024}
    assert seen(models, None, runs) == {}  # 64 streams and their prompts take 192 tokens per step
    assert set(seen(models, None, {**runs, "max-num-batched-tokens": 256})) == {"max-num-batched-tokens"}
    short = {**runs, "max-num-batched-tokens": 256}
    inputs = choice_inputs(CHAT, models["8b"], None, (0, 33, 0), "cuda")
    assert suggest(short, inputs, keep=("max-num-batched-tokens",)) == (), "a finding asked for short steps"
    long = Workload(input_tokens_p95=60_000, output_tokens_p95=4000, prefix_reuse=0.5, concurrency=64)
    found = suggest(runs, choice_inputs(long, models["8b"], None, (0, 33, 0), "cuda"))
    assert {choice.flag: choice.value for choice in found}["max-num-batched-tokens"] == 8192


def test_suggestion_does_not_change_the_gpus(
    models: dict[str, ModelFacts], hosts: dict[str, Callable[[], Host]]
) -> None:
    crowd = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=500)
    found = suggest(RUNS, choice_inputs(crowd, models["8b"], hosts["8xh100"](), (0, 33, 0), "cuda"))
    names = {choice.flag for choice in found}
    assert names.isdisjoint({"data-parallel-size", "tensor-parallel-size", "pipeline-parallel-size"})
    assert "kv-cache-dtype" not in names  # it affects the quality of outputs, so it is left to the user


@pytest.mark.parametrize(
    ("present", "longest", "length"),
    [
        (32_768, 30_050, None),
        (32_768, 16_000, 20_480),
        (32_768, 3300, 5120),
        (32_768, math.inf, None),
        ("auto", 3300, None),
        (None, 3300, 5120),
        (None, 120_000, None),
        (4096, 4096, None),
    ],
)
def test_context_holds_the_longest_request(
    models: dict[str, ModelFacts], present: FlagValue | None, longest: float, length: int | None
) -> None:
    """32,768 → 4,096 was once suggested, from the p95, while 4% of the requests had more than 20,000 tokens."""
    runs = {name: value for name, value in RUNS.items() if name != "max-model-len"}
    found = seen(models, None, runs if present is None else {**runs, "max-model-len": present}, longest)
    assert ("max-model-len" in found) == (length is not None)
    if length is not None:
        assert found["max-model-len"].value == length
        assert f"No request took, or is known to ask for, more than {longest:,}" in found["max-model-len"].reason
        assert "max_tokens" in found["max-model-len"].tradeoff


def test_steps_hold_the_longest_prompt_that_an_unset_context_allows(models: dict[str, ModelFacts]) -> None:
    """Without chunked prefill vLLM rejects steps that are shorter than its context, here the model's."""
    inputs = choice_inputs(CHAT, models["8b"], None, (0, 33, 0), "cuda", longest=math.inf)
    found = suggest({"enable-chunked-prefill": False}, inputs, keep=("enable-chunked-prefill",))
    steps = {choice.flag: choice.value for choice in found}["max-num-batched-tokens"]
    assert isinstance(steps, int)
    assert steps >= 131_072


def test_set_flag_without_a_suggestion_is_kept(models: dict[str, ModelFacts]) -> None:
    found = seen(models, None, {"max-model-len": 4096})
    assert set(found) == {"max-num-seqs", "max-num-batched-tokens", "enable-prefix-caching", "enable-chunked-prefill"}
