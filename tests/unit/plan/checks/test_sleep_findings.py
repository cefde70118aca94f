"""Sleep mode in a plan: where it is refused or warned about, and where level 2 must not be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_launchers.host.environment import HostEnvironment
from vllm_launchers.plan.checks.sleep import DEVELOPERS, level_2_doubt, level_2_problem, sleep_findings
from vllm_launchers.plan.findings import Level
from vllm_launchers.plan.flags import SLEEP_MODE
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, Quantization

NVFP4 = ModelFacts("m", quantization=Quantization("modelopt_fp4", 4, 16))
GEMMA = ModelFacts("m", architecture="Gemma3ForConditionalGeneration")
LLAMA = ModelFacts("m", architecture="LlamaForCausalLM")


@pytest.fixture
def found(plan: Callable[..., Plan]) -> Callable[..., list[tuple[str, Level]]]:
    def found(
        *, facts: ModelFacts | None = LLAMA, shared: bool = False, set: Any = None, **other: Any
    ) -> list[tuple[str, Level]]:
        made = plan(set={SLEEP_MODE: True, **(set or {})}, **other)
        inputs = PlanInputs(facts=facts, environment=HostEnvironment(shared=shared))
        return [(one.code, one.level) for one in sleep_findings(made, inputs)]

    return found


def test_sleep_flag_enables_its_routes(plan: Callable[..., Plan]) -> None:
    assert plan(set={SLEEP_MODE: True}).environment[DEVELOPERS] == "1"
    assert DEVELOPERS not in plan().environment


def test_loopback_server_has_no_sleep_findings(found: Callable[..., object]) -> None:
    assert found() == []
    assert found(host="::1") == []
    assert found(build="simulated") == []


@pytest.mark.parametrize(
    ("given", "code", "level"),
    [
        ({"host": "0.0.0.0"}, "sleep_exposed", Level.ERROR),
        ({"host": "192.168.1.5"}, "sleep_exposed", Level.ERROR),
        ({"shared": True}, "sleep_exposed", Level.WARNING),
        ({"build": "cpu"}, "sleep_unsupported", Level.ERROR),
        ({"version": "0.8.4"}, "sleep_unsupported", Level.ERROR),
        ({"version": "0.14.1"}, "sleep_bug", Level.WARNING),
        ({"version": "0.15.0"}, "sleep_bug", Level.WARNING),
        ({"set": {"enable-lora": True}, "facts": NVFP4}, "sleep_bug", Level.ERROR),
        ({"set": {"kv-offloading-backend": "native"}}, "sleep_bug", Level.WARNING),
        ({"set": {"kv-transfer-config": "{}"}}, "sleep_bug", Level.WARNING),
        ({"set": {"kv-transfer-config.kv_connector": "NixlConnector"}}, "sleep_bug", Level.WARNING),
    ],
    ids=str,
)
def test_sleep_settings_are_refused_or_warned_about(
    found: Callable[..., object], given: dict[str, Any], code: str, level: Level
) -> None:
    assert found(**given) == [(code, level)]


@pytest.mark.parametrize(
    "given", [{"version": "0.13.0"}, {"version": "0.16.0"}, {"set": {"enable-lora": True}}], ids=str
)
def test_unrelated_settings_have_no_sleep_findings(found: Callable[..., object], given: dict[str, Any]) -> None:
    assert found(**given) == []


@pytest.mark.parametrize(
    ("flags", "release", "facts", "word"),
    [
        ({}, (0, 10, 1), LLAMA, "0.10.2"),
        ({"enable-lora": True}, (0, 33, 0), LLAMA, "#39934"),
        ({}, (0, 33, 0), GEMMA, "Gemma"),
    ],
    ids=["no route", "LoRA", "Gemma"],
)
def test_level_2_is_refused(flags: Any, release: Any, facts: ModelFacts, word: str) -> None:
    assert word in level_2_problem(flags, release, facts)


def test_level_2_is_accepted_or_doubtful_elsewhere() -> None:
    assert level_2_problem({}, (0, 33, 0), LLAMA) == level_2_problem({}, None, None) == ""
    assert level_2_doubt({}, LLAMA) == level_2_doubt({}, None) == ""
    assert "#28606" in level_2_doubt({}, NVFP4)
    assert "#25800" in level_2_doubt({"kv-cache-dtype": "fp8"}, LLAMA)
