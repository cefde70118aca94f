"""LoRA adapters that clients may load: off by default, and a plan names the clients that could load them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_launchers.host.environment import HostEnvironment
from vllm_launchers.plan.checks.model import adapter_findings
from vllm_launchers.plan.findings import Level
from vllm_launchers.plan.flags import LORA
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Changes, Plan
from vllm_launchers.secrets import API_KEY
from vllm_launchers.vllm.model_folder import RUNTIME_LORA

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
    """vLLM accepts the flags, and ends once the model is loaded."""
    found = [(one.code, one.level, one.fix) for one in adapter_findings(plan(set=flags), PlanInputs())]
    assert found == [("adapters_off", Level.ERROR, Changes(set={LORA: True}))] * refused
