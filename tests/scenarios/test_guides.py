"""Claims of operating guides about vLLM, run in the model: the verdicts of ``docs/guides.md`` are its results."""

from __future__ import annotations

import pytest

from guides.claim import Claim, Outcome, Verdict
from guides.table import TOPICS

CLAIMS = [claim for claims in TOPICS.values() for claim in claims]


@pytest.mark.xdist_group("guides")  # shares the runs with the check that the document is current
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_guide_claim_is_judged_by_the_models_result(claim: Claim) -> None:
    assert claim.outcome.verdict is claim.verdict, claim.filled(claim.gives)
    assert claim.outcome.explained, f"{claim.filled(claim.gives)}: {claim.filled(claim.reason)}"


def test_claim_verdict_depends_on_its_condition() -> None:
    assert Outcome({}, as_claimed=True).verdict is Verdict.HOLDS
    assert Outcome({}, as_claimed=False, with_condition=True).verdict is Verdict.CONDITIONAL
    assert Outcome({}, as_claimed=False).verdict is Verdict.WRONG


def test_claims_have_unique_names() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
