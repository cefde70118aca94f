"""The finding about speculative decoding: drafts that are hardly ever accepted."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.frame_sums import MINUTE, mean, observed
from vllm_console.diagnosis.live.rule import Evidence, Judgement
from vllm_console.metrics.sample import ACCEPTED
from vllm_launchers.vllm.flags.changes import Changes

FLAGS = ("speculative-config", "spec-method", "spec-model", "spec-tokens")
"""What turns speculative decoding on."""


class DraftsRejected:
    """Speculative decoding is on, and hardly any drafted token is accepted.

    How long a step would take without drafts is unknown, so this is no judgement of speed: below this acceptance there
    is next to nothing to gain, however fast the steps are.
    """

    code = "drafts_rejected"
    LOW, ENOUGH, SPAN, DRAFTS = 0.1, 0.2, 5 * MINUTE, 500
    """Accepted tokens per draft, frames, and the fewest drafts in them."""

    def verdicts(self, evidence: Evidence) -> Sequence[Judgement]:
        """By the accepted tokens per draft over five minutes, where there were enough drafts."""
        found = []
        for at, accepted in enumerate(observed(evidence.frames, ACCEPTED, self.SPAN)):
            per_draft = mean(accepted)
            if accepted is None:
                found.append(Judgement.UNKNOWN)
            elif per_draft is None or accepted.count < self.DRAFTS or at + 1 < self.SPAN:
                found.append(Judgement.BETWEEN)
            else:
                bad, good = per_draft < self.LOW, per_draft > self.ENOUGH
                found.append(Judgement.BAD if bad else Judgement.GOOD if good else Judgement.BETWEEN)
        return found

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How many tokens are accepted, of how many."""
        accepted = observed(evidence.frames, ACCEPTED, self.SPAN)[-1]
        per_draft = mean(accepted) or 0.0
        most = len(accepted.bounds) - 1 if accepted is not None else 0
        limit = self.LOW if per_draft < self.LOW else self.ENOUGH  # until which it stays open
        measures = (Measure("acceptance length", f"{1 + per_draft:.2f}", f"{1 + limit:g}", "built-in"),)
        symptom = f"Speculative decoding drafts up to {most} tokens, of which {per_draft:.2f} are accepted."
        cause = "These answers are hard to draft. Drafting and verifying takes time in each step."
        flags = tuple(flag for flag in evidence.flags if flag.partition(".")[0] in FLAGS)
        why = f"Without drafts a step gives 1 token per sequence instead of {1 + per_draft:.2f}, and computes fewer."
        fix = Fix(Changes(unset=flags), why, "Traffic that is easier to draft would be served more slowly.")
        return Finding(self.code, Severity.NOTE, since, symptom, cause, measures, (fix,) if flags else ())
