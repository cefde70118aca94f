"""The engine's own verdict in the findings of a plan replaces what is known about its release."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from vllm_launchers.plan.engine_verdict import EngineAnswer, EngineVerdict, format_verdict, question, with_verdict
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes

DEAD = PlanFinding("flag_dead", Level.ERROR, "vLLM 0.33 refuses --swap-space: …", Changes(unset=("swap-space",)))
LONG = PlanFinding(
    "context_over_model", Level.ERROR, "--max-model-len 9999 is above 4096", Changes(set={"max-model-len": 4096})
)
IGNORED = PlanFinding("flag_dead", Level.WARNING, "vLLM 0.33 takes --old but ignores it")
MEMORY = PlanFinding("memory_held", Level.ERROR, "anna holds 20 GiB", surely=False)
ACCEPTED = EngineVerdict(EngineAnswer.ACCEPTED, version="0.33.0+cpu")

Make = Callable[..., Plan]


@pytest.fixture
def found(plan: Make) -> Plan:
    return replace(plan(), findings=(DEAD, LONG, MEMORY, IGNORED))


def test_acceptance_replaces_only_flag_errors(found: Plan) -> None:
    judged = with_verdict(found, ACCEPTED)
    assert judged.findings == (MEMORY, IGNORED)
    assert judged.verdict is ACCEPTED
    assert format_verdict(judged, ACCEPTED) == "vLLM 0.33.0 accepts these flags"


def test_parser_acceptance_keeps_configuration_errors(found: Plan) -> None:
    verdict = replace(ACCEPTED, parser_only=True)
    assert with_verdict(found, verdict).findings == (LONG, MEMORY, IGNORED)
    assert "parser accepts" in format_verdict(found, verdict)


def test_refusal_replaces_the_finding_of_its_flag_and_keeps_the_fix(found: Plan) -> None:
    message = "vllm: error: unrecognized arguments: --swap-space 4"
    judged = with_verdict(found, EngineVerdict(EngineAnswer.REFUSED, message, "0.33.0"))
    refusal, *others = judged.findings
    assert others == [LONG, MEMORY, IGNORED], "vLLM stops at its first error"
    assert refusal == PlanFinding(
        "vllm_refuses", Level.ERROR, f"vLLM 0.33.0 refuses: {message}", DEAD.fix, surely=False
    )


def test_configuration_error_names_its_flag(found: Plan) -> None:
    judged = with_verdict(
        found, EngineVerdict(EngineAnswer.REFUSED, "User-specified max_model_len (9999) is\n  too long")
    )
    assert LONG not in judged.findings
    assert judged.findings[0].fix == LONG.fix
    assert judged.findings[0].message == "vLLM 0.33.0 cuda refuses: User-specified max_model_len (9999) is; too long"


def test_other_refusal_has_its_own_fix(found: Plan) -> None:
    fix = Changes(set={"max-num-seqs": 1})
    judged = with_verdict(found, EngineVerdict(EngineAnswer.REFUSED, "max_num_seqs must be positive", fix=fix))
    assert judged.findings[0].fix == fix
    assert judged.findings[1:] == found.findings


def test_only_the_newest_refusal_is_kept(found: Plan) -> None:
    once = with_verdict(found, EngineVerdict(EngineAnswer.REFUSED, "no"))
    again = with_verdict(once, EngineVerdict(EngineAnswer.REFUSED, "never"))
    assert [one.message for one in again.findings if one.code == "vllm_refuses"] == ["vLLM 0.33.0 cuda refuses: never"]


def test_unknown_verdict_changes_no_finding(found: Plan) -> None:
    judged = with_verdict(found, EngineVerdict(EngineAnswer.UNKNOWN, "it is a container"))
    assert judged.findings == found.findings


def test_simulated_verdict_is_not_called_vllms(plan: Make) -> None:
    simulated = plan(build="simulated")
    assert format_verdict(simulated, replace(ACCEPTED, version="")) == "simulated 0.33.0 accepts these flags"


def test_verdict_depends_on_flags_and_variables_not_the_address(plan: Make) -> None:
    one = plan()
    assert question(one) == question(plan(port=8001))
    assert question(one) != question(plan(set={"max-num-seqs": 3}))
    assert question(one) != question(plan(environment={"A": "b"}))
