"""Decides whether a server gets the probe, which records each engine step and each request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from vllm_launchers.probe.environment import probe_variables
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Flags

ProbeWish = Literal["auto", "on", "off"]
"""``auto``: with the simulated engine and the releases in `TESTED`; ``on``: with any release that supports it."""

TESTED = frozenset({(0, 27, 1), (0, 29, 0), (0, 31, 0), (0, 32, 0)})
"""vLLM releases with which the probe was tested."""

FIRST = (0, 11, 1)
"""First vLLM release that loads stat logger plugins."""


class ProbePlan(msgspec.Struct, frozen=True):
    """The environment variables that add the probe to a planned server, or why it gets none (a clause)."""

    variables: Mapping[str, str] = msgspec.field(default_factory=dict)
    why_not: str = ""


def plan_probe(engine: Engine, flags: Flags, environment: Mapping[str, str], wish: ProbeWish, asked: bool) -> ProbePlan:
    """Decide. ``environment`` is the server's complete one; ``asked``: an option set ``wish``, not the settings."""
    if wish == "off":
        return ProbePlan(why_not="--no-probe was given" if asked else 'the settings have probe = "off"')
    if why_not := _impossible(engine, flags) or (_untested(engine) if wish == "auto" else ""):
        return ProbePlan(why_not=why_not)
    return ProbePlan(probe_variables(environment))


def _impossible(engine: Engine, flags: Flags) -> str:
    if flags.get("disable-log-stats") is True:
        return "--disable-log-stats turns vLLM's statistics off"
    if engine.kind is EngineKind.SIMULATED:
        return ""
    if engine.release is not None and engine.release < FIRST:
        return f"{engine.label} supports no statistics plugins; {'.'.join(map(str, FIRST))} is the first that does"
    return ""


def _untested(engine: Engine) -> str:
    if engine.kind is EngineKind.SIMULATED or engine.release in TESTED:
        return ""
    label = "this vLLM (version unknown)" if engine.release is None else engine.label
    return f"not tested with {label}. --probe turns it on"
