"""What is found of a server, a condition or a failure, in the one form in which it is shown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style

from vllm_console.diagnosis.causes import Cause
from vllm_console.diagnosis.model import Condition, Diagnosis, Measure, Remedy, Severity
from vllm_console.diagnosis.titles import title_of_code
from vllm_console.fleet.model import Changes, Flags, ServerView, State
from vllm_console.text import plain
from vllm_console.ui import staging
from vllm_console.ui.panes.bars import flag_text
from vllm_console.ui.staging import Staged
from vllm_console.ui.theme import ACCENT, BAD, OK, WARN

SIGNS: dict[Severity, tuple[str, Style]] = {
    Severity.CRITICAL: ("✗", BAD),
    Severity.WARNING: ("!", WARN),
    Severity.NOTE: ("i", ACCENT),
    Severity.GOOD: ("✓", OK),
}
"""A sign and a colour per severity: the sign alone tells them apart."""

UNSURE = 0.7
"""Below this confidence a cause is shown with it."""

_CAUSES = {
    Cause.KV_CACHE_TOO_SMALL: "KV cache too small for max-model-len",
    Cause.OOM_RUNTIME: "out of GPU memory while serving",
    Cause.OOM_GRAPH_CAPTURE: "out of GPU memory while capturing CUDA graphs",
    Cause.GATED: "gated model, or no HF token",
    Cause.TP_NOT_DIVISOR: "TP size does not divide the heads",
    Cause.UNSUPPORTED_BY_GPU: "quantization or dtype not for this GPU",
    Cause.TOKENIZER: "tokenizer or chat template",
    Cause.DRIVER: "driver and CUDA do not match",
    Cause.NCCL: "NCCL failure",
    Cause.OTHER: "failed",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """One finding: a condition of a running server, or why a server failed. ``line`` is the log line that shows it."""

    severity: Severity
    title: str
    since: float | None
    symptom: str
    cause: str = ""
    measures: tuple[Measure, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    line: str = ""

    @property
    def cures(self) -> tuple[Remedy, ...]:
        """The remedies that are changes of flags, the best first."""
        return tuple(remedy for remedy in self.remedies if not remedy.changes.empty)


def findings_of(server: ServerView) -> tuple[Shown, ...]:
    """What is found of a server, the gravest first."""
    if server.state is State.FAILED:
        return (_failure(server.diagnosis, server.state_since),) if server.diagnosis is not None else ()
    return tuple(_condition(condition) for condition in server.conditions) if server.state.alive else ()


def worst_sign(server: ServerView) -> tuple[str, Style] | None:
    """The sign of a problem that a running server has; None where there is none, or it is a mere note."""
    if not server.state.alive or not server.conditions:
        return None
    severity = server.conditions[0].severity
    return SIGNS[severity] if severity in (Severity.CRITICAL, Severity.WARNING) else None


def _condition(condition: Condition) -> Shown:
    return Shown(
        condition.severity,
        title_of_code(condition.code),
        condition.since,
        plain(condition.symptom),
        plain(condition.cause),
        condition.measures,
        condition.remedies,
    )


def _failure(found: Diagnosis, since: float) -> Shown:
    title = _CAUSES.get(found.cause) or title_of_code(found.cause)
    if found.cause is not Cause.OTHER and found.confidence < UNSURE:
        title += f" ({found.confidence:.0%} sure)"
    evidence = plain(found.evidence)
    unnamed = found.cause is Cause.OTHER and evidence
    also = ", ".join(_CAUSES.get(cause) or title_of_code(cause) for cause in found.also)
    return Shown(
        Severity.CRITICAL,
        title,
        since,
        evidence if unnamed else plain(found.explanation),
        f"May also play a part: {also}." if also else "",
        remedies=found.remedies,
        line=f"line {found.line}: {evidence}" if found.line is not None else evidence,
    )


def steps_of(flags: Flags, remedy: Remedy) -> Staged:
    """A remedy as staged steps; what the server has already is left out."""
    staged: Staged = ()
    for step in staging.staged_of(remedy.changes):
        staged = staging.stage(flags, staged, step)
    return staged


def staged_cure(server: ServerView, cures: Sequence[Remedy], staged: Staged) -> int | None:
    """Which of the cures is what is staged now, or None."""
    if not staged:
        return None
    same = staging.changes_of(staged)
    for index, remedy in enumerate(cures):
        if staging.changes_of(steps_of(server.flags, remedy)) == same:
            return index
    return None


def change_text(flags: Flags, changes: Changes) -> str:
    """A change beside what stands now: ``--max-num-seqs 256 → 128``."""
    parts = [f"--{name} {flag_text(flags.get(name))} → {flag_text(value)}" for name, value in changes.set.items()]
    parts += [f"--{name} {flag_text(flags.get(name))} → unset" for name in changes.unset]
    return ", ".join(map(plain, parts))


def remedy_text(flags: Flags, remedy: Remedy) -> str:
    """A remedy in one line: the change and its price (else its reason); without a change the advice."""
    if remedy.changes.empty:
        return plain(remedy.why)
    told = f". Price: {plain(remedy.price)}" if remedy.price else f": {plain(remedy.why)}"
    return change_text(flags, remedy.changes) + told
