"""A server that answered differently after it had slept, or could not be woken up. Pure."""

from __future__ import annotations

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_launchers.keeper.records import Sleep, SleepStep
from vllm_launchers.plan.model import Changes

SHOWN_SECONDS = 1800.0
"""How long it is reported: the server that answers since then is another process."""


def after_sleep(sleep: Sleep | None, now: float) -> Finding | None:
    """The finding about a server's last waking up; None if it went well, or is long ago. ``now`` in Unix seconds."""
    if sleep is None or sleep.step not in (SleepStep.MISMATCH, SleepStep.FAILED) or now - sleep.step_at > SHOWN_SECONDS:
        return None
    if sleep.step is SleepStep.FAILED:
        return Finding(
            "wake_up_failed",
            Severity.CRITICAL,
            sleep.step_at,
            f"Putting it to sleep or waking it up failed: {sleep.message}.",
            "It was started anew, since the state of its weights was not known.",
            fixes=(_OTHER_LEVEL[sleep.level],),
        )
    return Finding(
        "wrong_answers_after_sleep",
        Severity.CRITICAL,
        sleep.step_at,
        f"After waking up from level {sleep.level} it answered {len(sleep.differing)} of {sleep.checked} golden "
        "prompts differently.",
        "Its weights were not what they were before. It was started anew; answers that it gave in between are suspect.",
        (
            Measure(
                "golden prompts answered differently", str(len(sleep.differing)), "0", "answers when it became ready"
            ),
        ),
        (_OTHER_LEVEL[sleep.level],),
    )


_OTHER_LEVEL = {
    1: Fix(Changes(), "Stop and start this server instead of letting it sleep, until its vLLM is another one."),
    2: Fix(Changes(), "Let it sleep at level 1, which keeps the weights instead of loading them again."),
}
