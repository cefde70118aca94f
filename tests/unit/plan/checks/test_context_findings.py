"""The longest context of a model with a config changed by ``--hf-overrides``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.plan.findings import PlanFinding
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, decode_context_problem

Find = Callable[..., list[PlanFinding]]

MODEL = ModelFacts(model="/models/small", architecture="LlamaForCausalLM", source="folder", max_context=4096)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def over(find: Find, flags: dict[str, Any], **case: Any) -> PlanFinding | None:
    asked = {"max-model-len": 16_384, **flags}
    found = [one for one in find(**{"facts": MODEL, "set": asked, **case}) if one.code == "context_over_model"]
    return found[0] if found else None


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_yarn_alone_does_not_extend_the_context(find: Find, name: str) -> None:
    finding = over(find, {"hf-overrides": json.dumps({name: YARN})})
    assert finding is not None
    assert "set max_position_embeddings in --hf-overrides as well" in finding.message
    assert finding.fix is not None
    fixed = json.loads(str(finding.fix.set["hf-overrides"]))
    assert fixed == {name: YARN, "max_position_embeddings": 16_384}
    assert over(find, {"hf-overrides": json.dumps(fixed)}) is None


def test_yarn_set_by_single_keys(find: Find) -> None:
    flags = {"hf-overrides.rope_parameters.rope_type": "yarn", "hf-overrides.rope_parameters.factor": 4}
    finding = over(find, flags)
    assert finding is not None
    assert finding.fix == Changes(set={"hf-overrides.max_position_embeddings": 16_384})


def test_earlier_release_may_apply_the_factor(find: Find) -> None:
    assert over(find, {"hf-overrides": json.dumps({"rope_scaling": YARN})}, version="0.29.0") is None


@pytest.mark.parametrize(("version", "most"), [("0.32.0", 4096), ("0.30.0", 4096), ("0.29.0", 8192)])
def test_yarn_in_the_config_lengthens_the_context_only_in_earlier_releases(find: Find, version: str, most: int) -> None:
    finding = over(find, {}, facts=replace(MODEL, stretched_context=8192), version=version)
    assert finding is not None
    assert finding.fix == Changes(set={"max-model-len": most})


@pytest.mark.parametrize(
    ("tensor", "shards", "problem"),
    [
        (4, 2, "it needs more GPUs per engine than its 8 KV heads"),
        (16, 4, "it can be at most 2: each of its 8 KV heads is on as many GPUs"),
        (24, 3, "it must divide its 4 query heads per KV head"),
        (16, 2, ""),
        (1, 1, ""),
    ],
)
def test_decode_context_parallelism_needs_copies_of_kv_heads(tensor: int, shards: int, problem: str) -> None:
    facts = replace(MODEL, heads=32, kv_heads=8)
    assert f"it {decode_context_problem(facts, tensor, shards)}" == (problem or "it ")
    assert decode_context_problem(replace(facts, kv_lora_rank=512), tensor, shards) == ""


def test_model_with_a_text_config_has_no_such_fix(find: Find) -> None:
    finding = over(find, {"hf-overrides": json.dumps({"rope_scaling": YARN})}, facts=replace(MODEL, multimodal=True))
    assert finding is not None
    assert finding.fix == Changes(set={"max-model-len": 4096})


def test_override_unrelated_to_the_context(find: Find) -> None:
    finding = over(find, {"hf-overrides.hidden_act": "silu"})
    assert finding is not None
    assert finding.fix == Changes(set={"max-model-len": 4096})


def test_fix_next_to_single_keys_is_a_single_key(find: Find) -> None:
    """vLLM drops an object that is given next to single keys."""
    keys = {"hf-overrides.rope_parameters.rope_type": "yarn", "hf-overrides.rope_parameters.factor": 4}
    finding = over(find, {"hf-overrides": '{"hidden_act": "silu"}', **keys})
    assert finding is not None
    assert finding.fix == Changes(set={"hf-overrides.max_position_embeddings": 16_384})


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "factor": 4.0}},
        {"rope_parameters": {"full_attention": YARN}},
        {"max_position_embeddings": 16_384},
        {"text_config": {"max_position_embeddings": 16_384}},
        {"model_type": "other"},
    ],
)
def test_override_that_may_extend_the_context_is_accepted(find: Find, changed: dict[str, Any]) -> None:
    assert over(find, {"hf-overrides": json.dumps(changed)}) is None
    assert over(find, {"hf-overrides": "{"}) is None


@pytest.mark.parametrize(
    "flags", [{"hf-overrides": '{"max_position_embeddings": 2048}'}, {"hf-overrides.max_position_embeddings": 2048}]
)
def test_override_that_lowers_the_context_counts(find: Find, flags: dict[str, Any]) -> None:
    model = replace(MODEL, positions=4096)
    finding = over(find, {"max-model-len": 4096, **flags}, facts=model)
    assert finding is not None
    assert "exceeds the 2,048 tokens that --hf-overrides sets" in finding.message
    assert finding.fix == Changes(set={"max-model-len": 2048})
    assert over(find, {"max-model-len": 2048, **flags}, facts=model) is None
    assert over(find, {"max-model-len": 4096, **flags}) is None  # rotary embeddings may extend it


@pytest.mark.parametrize("rope", [{"rope_type": "llama3", "factor": 8.0}, {"rope_type": "default"}])
def test_rotary_embedding_that_does_not_lengthen_has_no_fix_of_its_own(find: Find, rope: dict[str, Any]) -> None:
    finding = over(find, {"hf-overrides": json.dumps({"rope_parameters": rope})})
    assert finding is not None
    assert finding.fix == Changes(set={"max-model-len": 4096})
    assert "YaRN" not in finding.message


@pytest.mark.parametrize(
    ("changed", "most"),
    [
        ({"model_max_length": 2048}, 2048),
        ({"model_max_length": 8192}, 8192),
        ({"seq_length": 2048}, 2048),
        ({"seq_length": 8192}, 4096),
        ({"max_position_embeddings": 8192, "n_positions": 6000}, 6000),
        ({"sliding_window": 512}, 4096),
    ],
)
def test_smallest_length_of_the_config_counts(find: Find, changed: dict[str, int], most: int) -> None:
    model, flags = replace(MODEL, positions=4096), {"hf-overrides": json.dumps(changed)}
    finding = over(find, flags, facts=model)
    assert finding is not None
    assert finding.fix == Changes(set={"max-model-len": most})
    assert over(find, {**flags, "max-model-len": most}, facts=model) is None


def test_disabled_window_limits_the_context(find: Find) -> None:
    model = replace(MODEL, positions=4096, layers=(LayerKind.SLIDING,) * 2, window=512)
    flags: dict[str, Any] = {"max-model-len": 1024}
    assert over(find, flags, facts=model) is None
    finding = over(find, {**flags, "disable-sliding-window": True}, facts=model)
    assert finding is not None
    assert "exceeds the sliding window of /models/small, 512 tokens" in finding.message
    assert finding.fix == Changes(set={"max-model-len": 512})
    assert over(find, {"max-model-len": 512, "disable-sliding-window": True}, facts=model) is None
    chunked = replace(model, layers=(LayerKind.CHUNKED,) * 2)
    assert over(find, {**flags, "disable-sliding-window": True}, facts=chunked) is None


def test_disabled_window_of_an_override_limits_the_context(find: Find) -> None:
    model, flags = replace(MODEL, positions=4096), {"hf-overrides": '{"sliding_window": 512}'}
    finding = over(find, {"max-model-len": 1024, **flags, "disable-sliding-window": True}, facts=model)
    assert finding is not None
    assert finding.fix == Changes(set={"max-model-len": 512})
    assert over(find, {"max-model-len": 1024, **flags}, facts=model) is None


def test_longer_context_for_the_traffic_is_one_that_an_override_allows(find: Find) -> None:
    model, flags = replace(MODEL, positions=4096), {"max-model-len": 1024, "hf-overrides": '{"n_positions": 2048}'}
    (short,) = [one for one in find(facts=model, set=flags) if one.code == "context_below_traffic"]
    assert "the model supports at most 2,048" in short.message
    assert short.fix is None
