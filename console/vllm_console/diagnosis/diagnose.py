"""From a dead server's log to a named cause, what shows it, and the changes that would mend it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.case import case_of
from vllm_console.diagnosis.causes import Cause
from vllm_console.diagnosis.failure_line import SIGKILL_CODES, failure_in
from vllm_console.diagnosis.model import Diagnosis
from vllm_console.diagnosis.remedies import remedies_for
from vllm_console.telemetry.loglines import parse_lines
from vllm_launchers.plan.model import Flags

KILLED = "It was killed (SIGKILL): by somebody, or by the kernel because the machine's memory ran out (see dmesg)."
UNNAMED = "The line shows what failed; it is none of the causes that have a name here."
NOTHING_SEEN = "Nothing in this log shows a failure."


def diagnose(lines: Sequence[str], exit_code: int | None = None, flags: Flags | None = None) -> Diagnosis:
    """Name why the server that wrote this log failed; `Cause.OTHER` where none of the names is surely right.

    ``exit_code`` is as Python gives it (negative: the signal), None if unknown. ``flags`` are those that it was started
    with; without them they are read from the log, where vLLM prints them.
    """
    parsed = list(parse_lines(lines))
    found = failure_in(parsed, exit_code)
    if found is None:
        if exit_code in SIGKILL_CODES:
            return Diagnosis(Cause.ENGINE_DIED, 0.6, None, "", KILLED)
        return Diagnosis(Cause.OTHER, 0.0, None, "", NOTHING_SEEN)
    remedies = remedies_for(case_of(found, parsed, flags))
    explanation = found.explanation or UNNAMED
    return Diagnosis(found.cause, found.confidence, found.number, found.text, explanation, remedies, found.also)
