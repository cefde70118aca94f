"""Findings about servers that answered differently after sleep or could not wake up, and about sleeping pairs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.finding import PAIR_ASLEEP, Finding, Fix, Measure, Severity
from vllm_launchers.keeper.records import Sleep, SleepStep
from vllm_launchers.vllm.flags.changes import Changes

SWITCH_SECONDS = 30.0
"""How long both servers of a pair may sleep during a switch: until the memory of the first is free."""
SHOWN_SECONDS = 1800.0
"""How long a problem is reported: the server that answers since then is another process."""


def after_sleep(sleep: Sleep | None, now: float) -> Finding | None:
    """The finding about a server's last wake-up; None if it went well or is long ago. ``now`` is in Unix seconds."""
    if sleep is None or sleep.step not in (SleepStep.MISMATCH, SleepStep.FAILED) or now - sleep.step_at > SHOWN_SECONDS:
        return None
    if sleep.step is SleepStep.FAILED:
        return Finding(
            "wake_up_failed",
            Severity.CRITICAL,
            sleep.step_at,
            f"Putting it to sleep or waking it up failed: {sleep.message}.",
            "It was restarted because the state of its weights was unknown.",
            fixes=(_OTHER_LEVEL[sleep.level],),
        )
    return Finding(
        "wrong_answers_after_sleep",
        Severity.CRITICAL,
        sleep.step_at,
        f"After waking up from level {sleep.level} it answered {len(sleep.differing)} of {sleep.checked} golden "
        "prompts differently.",
        "Its weights had changed. It was restarted; answers given in between are suspect.",
        (
            Measure(
                "golden prompts answered differently", str(len(sleep.differing)), "0", "answers when it became ready"
            ),
        ),
        (_OTHER_LEVEL[sleep.level],),
    )


def pair_asleep(pair: tuple[str, str], steps: Sequence[SleepStep], since: float, now: float) -> Finding | None:
    """The finding that a server and its partner both sleep since ``since``; None while they may be switching."""
    if now - since < SWITCH_SECONDS or any(step is not SleepStep.ASLEEP for step in steps):
        return None
    return Finding(
        PAIR_ASLEEP,
        Severity.CRITICAL,
        since,
        f"{pair[0]} and {pair[1]} share GPUs and are both asleep: neither of the pair serves.",
        "Both were put to sleep, or a switch ended before the other one was woken up.",
        fixes=tuple(Fix(Changes(), f"Wake {name} up: vllm-console wake {name}.") for name in pair),
    )


_OTHER_LEVEL = {
    1: Fix(Changes(), "Stop and start this server instead of putting it to sleep until its vLLM is updated."),
    2: Fix(Changes(), "Use sleep level 1, which keeps the weights instead of reloading them."),
}
