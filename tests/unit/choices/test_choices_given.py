"""What a person or a preset set stays; each choice says where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from vllm_launchers.machine.gpu.host import Host
from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.choices.choose import choose, suggest
from vllm_launchers.plan.choices.extras import with_lora, with_speculation
from vllm_launchers.plan.choices.model import Choice, Source
from vllm_launchers.plan.errors import FlagError
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.plan.model import Changes
from vllm_launchers.presets.load import read_presets
from vllm_launchers.presets.model import FlagSetting, FlagValue, Workload

Chosen = Callable[..., dict[str, Choice]]
CHAT = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=64)


def test_you_before_preset_before_traffic(chosen: Chosen) -> None:
    preset = {"max-model-len": FlagSetting(value=8192, why="as tried"), "max-num-seqs": FlagSetting(value=7, why="few")}
    found = chosen("8b", "h100", preset=preset, set={"--max_num_seqs": 9, "enforce-eager": True})
    assert found["max-model-len"] == Choice("max-model-len", 8192, "as tried", Source.PRESET)
    assert found["max-num-seqs"] == Choice("max-num-seqs", 9, "you set it", Source.YOU)
    assert found["enforce-eager"].source is Source.YOU
    assert found["max-num-batched-tokens"].source is Source.WORKLOAD


def test_the_presets_own_value_stays_the_presets(chosen: Chosen) -> None:
    preset = {"max-num-seqs": FlagSetting(value=7, why="few")}
    assert chosen("8b", "h100", preset=preset, set={"max-num-seqs": 7})["max-num-seqs"].reason == "few"


def test_what_is_left_out_is_left_to_vllm(chosen: Chosen) -> None:
    preset = {"max-num-seqs": FlagSetting(value=7, why="few")}
    found = chosen("8b", "h100", preset=preset, unset=("max_num_seqs", "max-model-len", "never-set"))
    assert (found["max-num-seqs"].value, found["max-num-seqs"].source) == (None, Source.YOU)
    assert found["max-model-len"].value is None
    assert "never-set" not in found


def test_order_is_the_presets_and_what_is_left_to_vllm_comes_last(models: dict[str, ModelFacts]) -> None:
    preset = read_presets()[0]["chatbot"]
    choices = choose(preset.flags, Changes({"seed": 1}), CHAT, models["8b"], None, (0, 33, 0), "cuda")
    names = [choice.flag for choice in choices]
    assert names[: len(preset.flags)] == list(preset.flags)
    assert names[len(preset.flags)] == "seed"
    unset = [choice.value is None for choice in choices]
    assert unset == sorted(unset)


@pytest.mark.parametrize("name", ["chatbot", "code-generation", "long-document", "batch"])
def test_shipped_presets_stay_as_they_are(name: str, models: dict[str, ModelFacts]) -> None:
    preset = read_presets()[0][name]
    choices = choose(preset.flags, Changes(), preset.workload, models["8b"], None, (0, 33, 0), "cuda")
    set_flags = {choice.flag: choice.value for choice in choices if choice.value is not None}
    assert set_flags == {flag: setting.value for flag, setting in preset.flags.items()}
    assert all(choice.reason for choice in choices)


def test_a_wrong_name_is_refused(chosen: Chosen) -> None:
    with pytest.raises(FlagError):
        chosen("8b", "h100", set={"port": 1})


RUNS: Mapping[str, FlagValue] = {
    "gpu-memory-utilization": 0.9, "max-model-len": 32_768, "max-num-seqs": 128, "max-num-batched-tokens": 8192,
    "enable-prefix-caching": False, "enable-chunked-prefill": True,
}  # fmt: skip


def seen(models: dict[str, ModelFacts], host: Host | None, runs: Mapping[str, FlagValue]) -> dict[str, Choice]:
    return {c.flag: c for c in suggest(runs, CHAT, models["8b"], host, (0, 33, 0), "cuda")}


def test_a_suggestion_is_only_what_differs(models: dict[str, ModelFacts], hosts: dict[str, Callable[[], Host]]) -> None:
    found = seen(models, hosts["h100"](), RUNS)
    assert {name: choice.value for name, choice in found.items()} == {
        "max-model-len": 4096,
        "enable-prefix-caching": True,
    }
    assert all(choice.source is Source.WORKLOAD and choice.reason for choice in found.values())
    assert seen(models, hosts["h100"](), {**RUNS, "max-model-len": "4K", "enable-prefix-caching": True}) == {}


def test_a_suggestion_does_not_chase_noise(models: dict[str, ModelFacts]) -> None:
    runs = {**RUNS, "enable-prefix-caching": True, "max-num-batched-tokens": 2048}
    assert seen(models, None, {**runs, "max-model-len": 4400, "max-num-seqs": 120}) == {}
    assert set(seen(models, None, {**runs, "max-model-len": 5000, "max-num-seqs": 120})) == {"max-model-len"}


def test_a_step_that_does_for_the_traffic_stays(models: dict[str, ModelFacts]) -> None:
    runs = {**RUNS, "enable-prefix-caching": True, "max-model-len": 4096, "max-num-batched-tokens": 1024}
    assert seen(models, None, runs) == {}  # 64 streams and their prompts take 192 tokens a step
    assert set(seen(models, None, {**runs, "max-num-batched-tokens": 256})) == {"max-num-batched-tokens"}
    long = Workload(input_tokens_p95=60_000, output_tokens_p95=4000, prefix_reuse=0.5, concurrency=64)
    found = suggest(runs, long, models["8b"], None, (0, 33, 0), "cuda")
    assert {choice.flag: choice.value for choice in found}["max-num-batched-tokens"] == 8192


def test_a_suggestion_leaves_the_gpus_alone(
    models: dict[str, ModelFacts], hosts: dict[str, Callable[[], Host]]
) -> None:
    crowd = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=500)
    found = suggest(RUNS, crowd, models["8b"], hosts["8xh100"](), (0, 33, 0), "cuda")
    names = {choice.flag for choice in found}
    assert names.isdisjoint({"data-parallel-size", "tensor-parallel-size", "pipeline-parallel-size"})
    assert "kv-cache-dtype" in names


def test_what_is_set_without_a_suggestion_stays(models: dict[str, ModelFacts]) -> None:
    found = seen(models, None, {"max-model-len": 4096})
    assert set(found) == {"max-num-seqs", "max-num-batched-tokens", "enable-prefix-caching", "enable-chunked-prefill"}


def test_speculation() -> None:
    (draft,) = with_speculation("made/draft-0.5b", 4)
    assert draft.value == '{"model": "made/draft-0.5b", "num_speculative_tokens": 4}'
    assert draft.price
    (looked_up,) = with_speculation("ngram", 3, (0, 10, 0))
    assert looked_up.value == '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    assert "0.13" in with_speculation("made/draft", 4, (0, 13, 0))[0].price
    assert "0.13" not in with_speculation("made/draft", 4, (0, 33, 0))[0].price


@pytest.mark.parametrize(("model", "tokens"), [("", 3), (" ", 3), ("--x", 3), ("made/draft", 0), ("ngram", 1000)])
def test_speculation_that_cannot_be(model: str, tokens: int) -> None:
    with pytest.raises(ValueError, match=r"draft model|guessed"):
        with_speculation(model, tokens)


@pytest.mark.parametrize(("rank", "step"), [(1, 8), (8, 8), (9, 16), (64, 64), (200, 256), (512, 512)])
def test_lora(rank: int, step: int) -> None:
    flags = {choice.flag: choice.value for choice in with_lora(rank, 3)}
    assert flags == {"enable-lora": True, "max-loras": 3, "max-lora-rank": step}


def test_lora_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="rank of 513"):
        with_lora(513, 1)
    with pytest.raises(ValueError, match="adapter"):
        with_lora(8, 0)


def test_what_is_asked_for_by_name_is_set_and_gives_way_to_you(chosen: Chosen) -> None:
    extra = (*with_speculation("ngram", 3), *with_lora(16, 2))
    found = chosen("8b", "h100", extra=extra, set={"max-loras": 5})
    assert found["speculative-config"].source is Source.YOU
    assert found["max-loras"].value == 5
    assert found["max-num-batched-tokens"].value == 8192
    assert "Guessed" in found["max-num-batched-tokens"].reason
    words = flag_words({name: choice.value for name, choice in found.items() if choice.value is not None})
    assert "--enable-lora" in words
