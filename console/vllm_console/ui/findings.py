"""A common form for findings of a running server and the diagnosis of a failed one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.style import Style

from vllm_console.diagnosis.finding import Cause, Diagnosis, Finding, Fix, Measure, Severity, title_of_code
from vllm_console.fleet.markers import flag_change
from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import percent, plain, shortened
from vllm_console.ui.theme import ACCENT, BAD, OK, WARN
from vllm_launchers.keeper.records import State
from vllm_launchers.vllm.flags.changes import Changes, Edits, Flags, unapplied

SIGNS: dict[Severity, tuple[str, Style]] = {
    Severity.CRITICAL: ("✗", BAD),
    Severity.WARNING: ("!", WARN),
    Severity.NOTE: ("i", ACCENT),
    Severity.GOOD: ("✓", OK),
}
"""Sign and color per severity. The sign alone tells them apart."""

MAKES_WORSE = "to make it worse"
"""Predicted effect of a fix that would worsen its finding."""

UNSURE = 0.7
"""Causes with a lower confidence are shown with it."""

_CAUSES = {
    Cause.KV_CACHE_TOO_SMALL: "KV cache too small for max-model-len",
    Cause.OOM_RUNTIME: "out of GPU memory while serving",
    Cause.OOM_GRAPH_CAPTURE: "out of GPU memory while capturing CUDA graphs",
    Cause.GATED: "gated model, or no HF token",
    Cause.TP_NOT_DIVISOR: "TP size does not divide the heads",
    Cause.UNSUPPORTED_BY_GPU: "quantization or dtype unsupported by this GPU",
    Cause.TOKENIZER: "tokenizer or chat template",
    Cause.DRIVER: "driver and CUDA mismatch",
    Cause.NCCL: "NCCL failure",
    Cause.OTHER: "failed",
}


class ServerFinding(msgspec.Struct, frozen=True):
    """A finding of a running server, or why a server failed.

    ``line`` is the log line that shows the failure; ``code`` identifies the finding of a running server.
    """

    severity: Severity
    title: str
    since: float | None
    symptom: str
    cause: str = ""
    measures: tuple[Measure, ...] = ()
    fixes: tuple[Fix, ...] = ()
    line: str = ""
    code: str = ""
    load: tuple[str, int] | None = None
    """Our own load on the server and its pid; see `ServerView.load_behind`."""

    @property
    def flag_fixes(self) -> tuple[Fix, ...]:
        """The fixes that change flags, best first."""
        return tuple(fix for fix in self.fixes if not fix.changes.empty)


def findings_of(server: ServerView) -> tuple[ServerFinding, ...]:
    """Return a server's findings, worst first."""
    if server.moment is not None:
        return tuple(_finding(server, finding) for finding in server.findings)
    if server.state is State.FAILED:
        return (_failure(server.diagnosis, server.state_since),) if server.diagnosis is not None else ()
    return tuple(_finding(server, finding) for finding in server.findings) if server.state.alive else ()


def unjudged(server: ServerView) -> str:
    """``KV cache 99% (limit 85%): a finding if …`` while usage exceeds its objective but is no finding; else empty."""
    usage = server.window.kv_cache_usage_max if server.window is not None else None
    objective = server.objectives.kv_cache_usage if server.objectives is not None else None
    known = worst_sign(server) is not None
    if server.state is not State.READY or server.moment is not None or known:
        return ""
    if usage is None or objective is None or usage <= objective:
        return ""
    return f"KV cache {percent(usage)} (limit {percent(objective)}): becomes a finding after 30s"


def worst_sign(server: ServerView) -> tuple[str, Style] | None:
    """The sign of a running server's worst problem; None if there is none worse than a note."""
    if not (server.state.alive or server.moment is not None) or not server.findings:
        return None
    severity = server.findings[0].severity
    return SIGNS[severity] if severity in (Severity.CRITICAL, Severity.WARNING) else None


def _finding(server: ServerView, finding: Finding) -> ServerFinding:
    return ServerFinding(
        finding.severity,
        title_of_code(finding.code),
        finding.since,
        plain(finding.symptom),
        plain(finding.cause),
        finding.measures,
        finding.fixes,
        code=finding.code,
        load=server.load_behind(finding.code),
    )


def _failure(found: Diagnosis, since: float) -> ServerFinding:
    title = _CAUSES.get(found.cause) or title_of_code(found.cause)
    if found.cause is not Cause.OTHER and found.confidence < UNSURE:
        title += f" ({found.confidence:.0%} sure)"
    evidence = plain(found.evidence)
    unnamed = found.cause is Cause.OTHER and evidence
    also = ", ".join(_CAUSES.get(cause) or title_of_code(cause) for cause in found.also)
    return ServerFinding(
        Severity.WARNING if found.cause is Cause.INTERRUPTED else Severity.CRITICAL,
        title,
        since,
        evidence if unnamed else plain(found.explanation),
        f"Possibly also: {also}." if also else "",
        fixes=found.fixes,
        line=f"line {found.line}: {evidence}" if found.line is not None else evidence,
    )


def edits_of(flags: Flags, fix: Fix) -> Edits:
    """Return the changes of a fix, leaving out flags the server already runs with."""
    return unapplied(flags, fix.changes.edits)


def staged_fix(server: ServerView, fixes: Sequence[Fix], staged: Edits) -> int | None:
    """Index of the fix that is staged now, or None."""
    if not staged:
        return None
    return next((index for index, fix in enumerate(fixes) if edits_of(server.flags, fix) == staged), None)


def being_applied(server: ServerView, fixes: Sequence[Fix]) -> bool:
    """Whether a restart being prepared changes exactly the flags that one of the fixes changes."""
    restart = server.restart
    if restart is None or not restart.under_way:
        return False
    applied = {change.partition(" ")[0] for change in restart.changes}
    return any(edits_of(server.flags, fix).keys() == applied for fix in fixes)


def flag_change_text(flags: Flags, changes: Changes) -> str:
    """A change and the current value: ``--max-num-seqs 256 → 128``."""
    return ", ".join(flag_change(flag, flags.get(flag), value) for flag, value in changes.edits.items())


def fix_texts(flags: Flags, fix: Fix, effect: str = "") -> list[str]:
    """A fix in one line, from the full text to ever shorter ones.

    It has the change, the predicted effect if known, and the trade-off (or else the reason); without a change, the
    advice. If the fix makes the finding worse, even the shortest text says so.
    """
    if fix.changes.empty:
        return shortened(fix.why)
    change, about = flag_change_text(flags, fix.changes), with_tradeoff("", fix.tradeoff)
    if not fix.tradeoff:
        about = [*(f": {text}" for text in shortened(fix.why) if text), ""]
    return [head + text for head in with_effect(change, ", ", effect) for text in about]


def with_effect(text: str, between: str, effect: str) -> list[str]:
    """A text followed by a predicted effect, if any, then without it; that it makes the finding worse always stays."""
    if not effect:
        return [text]
    return [f"{text}{between}{effect}", f"{text}{between}predicted {MAKES_WORSE}" if MAKES_WORSE in effect else text]


def with_tradeoff(text: str, tradeoff: str) -> list[str]:
    """A text followed by a trade-off, most detailed first; the last one has no trade-off."""
    return [*(f"{text}. Trade-off: {one}" for one in shortened(tradeoff) if one), text]
