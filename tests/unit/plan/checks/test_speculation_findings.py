"""Speculative decoding that vLLM refuses once it has read the model and its draft model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.plan.checks.speculation import speculation_findings
from vllm_launchers.plan.findings import Level
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.installed_packages import ARCTIC_INFERENCE
from vllm_launchers.vllm.modelfacts.facts import ModelFacts

PLAIN = ModelFacts("org/draft", source="folder", architecture="LlamaForCausalLM")
HEAD = replace(PLAIN, architecture="LlamaForCausalLMEagle3")
OWN_LAYERS = replace(PLAIN, architecture="MiMoForCausalLM")
MTP = {"speculative-config": '{"method": "mtp", "num_speculative_tokens": 1}'}


@pytest.fixture
def codes(plan: Callable[..., Plan]) -> Callable[..., list[str]]:
    def codes(
        flags: dict[str, Any], *, facts: ModelFacts | None = PLAIN, draft: ModelFacts | None = PLAIN, **more: Any
    ) -> list[str]:
        return [one.code for one in speculation_findings(plan(set=flags, **more), PlanInputs(facts, draft=draft))]

    return codes


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative-config.model": "org/draft"},
        {"speculative-config": '{"model": "org/draft", "method": "eagle"}'},
        {"spec-model": "org/draft"},
    ],
)
def test_plain_draft_needs_a_number_of_tokens(codes: Callable[..., list[str]], flags: dict[str, Any]) -> None:
    assert codes(flags) == ["draft_uncounted"]
    assert codes(flags, draft=HEAD) == []
    assert codes(flags, draft=None) == []
    assert codes({**flags, "spec-tokens": 2}) == []


def test_block_of_dspark_is_its_number_of_tokens(codes: Callable[..., list[str]]) -> None:
    assert codes({"spec-model": "org/draft", "spec-method": "dspark"}) == []


def test_plain_model_has_no_layers_for_mtp(codes: Callable[..., list[str]]) -> None:
    assert codes(MTP) == ["no_mtp_layers"]
    assert codes({"spec-method": "qwen3_next_mtp", "spec-tokens": 1}) == ["no_mtp_layers"]
    assert codes(MTP, facts=OWN_LAYERS) == []
    assert codes(MTP, facts=None) == []
    assert codes({**MTP, "spec-model": "org/head"}, draft=HEAD) == []
    assert codes({**MTP, "spec-model": "org/model"}, model="org/model") == ["no_mtp_layers"]
    assert codes(MTP, model="/models/some-eagle3") == []


def test_plain_draft_is_no_draft_of_another_kind(codes: Callable[..., list[str]]) -> None:
    named = {"spec-model": "org/draft", "spec-tokens": 1}
    assert codes({**named, "spec-method": "mtp"}) == ["no_mtp_layers"]
    assert codes({"spec-model": "org/draft", "spec-method": "mtp"}) == ["no_mtp_layers"]
    assert codes({**named, "spec-method": "mlp_speculator"}) == ["no_mtp_layers"]
    assert codes({**named, "spec-method": "mtp"}, draft=None) == []
    assert codes({**named, "spec-method": "draft_model"}) == []
    assert codes({**named, "spec-method": "mtp", "spec-model": "org/eagle3-draft"}) == []


@pytest.mark.parametrize(
    "flags",
    [
        {"spec-method": "suffix"},
        {"speculative-config": '{"method": "suffix"}'},
        {"speculative-config.method": "suffix"},
    ],
)
def test_suffix_decoding_needs_its_package(plan: Callable[..., Plan], flags: dict[str, Any]) -> None:
    made = plan(set=flags)
    assert list(speculation_findings(made, PlanInputs())) == []
    lacking = replace(made, engine=replace(made.engine, lacks=(ARCTIC_INFERENCE,)))
    (found,) = speculation_findings(lacking, PlanInputs())
    assert (found.code, found.level, found.fix) == ("package_missing", Level.ERROR, Changes(unset=tuple(flags)))
    assert "pip install arctic-inference" in found.message
    elsewhere = replace(lacking, environment={"PYTHONPATH": "/packages"})
    (found,) = speculation_findings(elsewhere, PlanInputs())
    assert (found.level, found.fix) == (Level.WARNING, None)
    assert "unless a folder in PYTHONPATH has it" in found.message
    assert (
        list(speculation_findings(replace(lacking, flags={"spec-method": "ngram", "spec-tokens": 1}), PlanInputs()))
        == []
    )


@pytest.mark.parametrize(
    ("method", "architecture", "refused"),
    [
        ("eagle", "LlamaForCausalLM", False),
        ("eagle", "Qwen3ForCausalLM", True),
        ("eagle3", "Qwen3ForCausalLM", False),
        ("eagle3", "MistralForCausalLM", True),
        ("dflash", "LlamaForCausalLM", True),
        ("dflash", "DFlashDraftModel", False),
        ("draft_model", "Qwen3ForCausalLM", False),
    ],
)
def test_plain_model_is_a_head_only_where_vllm_has_one(
    codes: Callable[..., list[str]], method: str, architecture: str, refused: bool
) -> None:
    flags = {"spec-model": "org/draft", "spec-method": method, "spec-tokens": 1}
    draft = replace(PLAIN, architecture=architecture)
    assert codes(flags, draft=draft) == ["no_draft_head"] * refused
    assert codes(flags, draft=draft, version="0.31.0") == codes(flags, draft=draft, version=None) == []
