"""LoRA adapters that clients may load: off by default, and a plan says which clients could load them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_launchers.host.environment import HostEnvironment
from vllm_launchers.plan.checks.model import adapter_findings
from vllm_launchers.plan.findings import Level
from vllm_launchers.plan.flags import LORA
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import API_KEY
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.model_folder import RUNTIME_LORA
from vllm_launchers.vllm.modelfacts.facts import ModelFacts

ON = {RUNTIME_LORA: "True"}


@pytest.mark.parametrize(
    ("environment", "host", "shared", "keyed", "expected"),
    [
        ({}, "0.0.0.0", True, False, []),
        ({RUNTIME_LORA: "yes"}, "0.0.0.0", True, False, []),
        (ON, "127.0.0.1", False, False, []),
        (ON, "127.0.0.1", True, True, []),
        (ON, "127.0.0.1", True, False, [Level.WARNING]),
        (ON, "0.0.0.0", False, True, [Level.WARNING]),
        (ON, "0.0.0.0", False, False, [Level.ERROR]),
    ],
)
def test_clients_that_can_load_adapters_are_reported(
    plan: Callable[..., Plan],
    environment: dict[str, str],
    host: str,
    shared: bool,
    keyed: bool,
    expected: list[Level],
) -> None:
    made = plan(set={LORA: True}, environment=environment, host=host, secrets=(API_KEY,) if keyed else ())
    inputs = PlanInputs(environment=HostEnvironment(shared=shared))
    assert [one.level for one in adapter_findings(made, inputs)] == expected


def test_variable_without_the_flag_has_no_effect(plan: Callable[..., Plan]) -> None:
    assert [one.code for one in adapter_findings(plan(environment=ON), PlanInputs())] == ["adapters_off"]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"lora-modules": "sql=/adapters/sql"}, True),
        ({"lora-modules": "sql=/adapters/sql", LORA: False}, True),
        ({"lora-modules": "sql=/adapters/sql", LORA: True}, False),
        ({"lora-modules": "None"}, False),
    ],
)
def test_adapters_need_the_flag_that_loads_them(
    plan: Callable[..., Plan], flags: dict[str, Any], refused: bool
) -> None:
    """vLLM accepts the flags, but exits once the model is loaded."""
    found = [(one.code, one.level, one.fix) for one in adapter_findings(plan(set=flags), PlanInputs())]
    assert found == [("adapters_off", Level.ERROR, Changes(set={LORA: True}))] * refused


TEXT_ONLY = ModelFacts("org/text", source="folder", architecture="LlamaForCausalLM")
SEEING = ModelFacts("org/images", source="folder", architecture="LlavaForConditionalGeneration", multimodal=True)


@pytest.mark.parametrize(
    "flag", [{"default-mm-loras": '{"image": "/adapter"}'}, {"default-mm-loras.image": "/adapter"}]
)
def test_adapters_of_modalities_need_a_model_that_has_them(plan: Callable[..., Plan], flag: dict[str, Any]) -> None:
    def found(facts: ModelFacts | None, **more: Any) -> list[tuple[str, Level, Changes | None]]:
        made = plan(set={**flag, **more})
        return [(one.code, one.level, one.fix) for one in adapter_findings(made, PlanInputs(facts))]

    fix = Changes(unset=tuple(flag))
    assert found(TEXT_ONLY, **{LORA: True}) == [("adapters_of_modalities", Level.ERROR, fix)]
    assert found(SEEING, **{LORA: True}) == []
    assert found(None, **{LORA: True}) == []
    assert found(SEEING) == [("adapters_off", Level.WARNING, fix)]


def test_empty_adapters_of_modalities_are_none(plan: Callable[..., Plan]) -> None:
    for empty in ("{}", "null", "None"):
        assert list(adapter_findings(plan(set={"default-mm-loras": empty}), PlanInputs(TEXT_ONLY))) == []
