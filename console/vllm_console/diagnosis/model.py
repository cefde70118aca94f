"""What a diagnosis says: a named failure or condition, what shows it, and the changes of flags that would mend it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_console.diagnosis.causes import Cause
from vllm_launchers.plan.model import Changes


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that mends something. ``why`` and ``price`` are one sentence each; ``price`` may be empty.

    ``changes`` is empty for a remedy that is no change of flags: then ``why`` says what to do.
    """

    changes: Changes
    why: str
    price: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a server failed. ``confidence`` is from 0 to 1; ``line`` is the number, from 1, of the line that shows it.

    ``evidence`` is that line's text; ``also`` are other causes that the log shows or that may lie behind it.
    """

    cause: Cause
    confidence: float
    line: int | None
    evidence: str
    explanation: str
    remedies: tuple[Remedy, ...] = ()
    also: tuple[Cause, ...] = ()


class Severity(StrEnum):
    """How bad a condition is: ``good`` is said plainly too."""

    CRITICAL = "critical"
    WARNING = "warning"
    NOTE = "note"
    GOOD = "good"


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that shows a condition: ``KV cache usage``, ``91 %``, against ``85 %`` from ``the preset's objectives``.

    ``limit`` and ``source`` are empty where a figure is only told.
    """

    name: str
    value: str
    limit: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """What is the matter with a running server, since when (Unix seconds), and what would mend it, the best first.

    ``code`` is stable (``kv_cache_pressure``, ``preempting``, …); ``symptom`` what a person sees, ``cause`` why, one
    short sentence each.
    """

    code: str
    severity: Severity
    since: float
    symptom: str
    cause: str
    measures: tuple[Measure, ...] = ()
    remedies: tuple[Remedy, ...] = ()
