"""The executable and its version. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.plan.checks.asked import simulated
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.model import EngineKind, Plan

OLDEST = (0, 10, 0)
"""The first release whose flags, defaults and log are known well."""

NEWEST = (0, 33, 0)
"""The last release that was looked at."""


def engine_missing(problem: str) -> Finding:
    """No vLLM can be run; ``problem`` is the sentence that says why."""
    return Finding("engine_missing", Level.ERROR, problem)


def engine_findings(plan: Plan) -> Iterator[Finding]:
    """Versions that are not known, too old or too new, and what the installation itself says."""
    engine = plan.engine
    if simulated(plan):
        return
    release = engine.release
    if engine.kind is EngineKind.VLLM and release is None:
        note = engine.note or "the version of this vLLM is not known"
        text = f"{note}: its flags and defaults are taken for those of the newest release"
        yield Finding("engine_version_unknown", Level.WARNING, text)
    elif engine.note:
        yield Finding("engine_note", Level.ADVICE, engine.note)
    if release is not None and release < OLDEST:
        text = f"vLLM {engine.version} is older than 0.10, from which on this console knows flags and log; upgrade it"
        yield Finding("engine_old", Level.WARNING, text)
    if release is not None and release[:2] > NEWEST[:2]:
        text = f"vLLM {engine.version} is newer than 0.33: defaults that it changed are not known here"
        yield Finding("engine_new", Level.ADVICE, text)
