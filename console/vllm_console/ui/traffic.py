"""The traffic that a server has had, and what it asks to change of the server's flags."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_console.fleet.api import Fleet
from vllm_launchers.plan.choices.model import Choice


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen, in one sentence, and the choices that follow from it: none where it is too little, or fits."""

    sentence: str
    choices: tuple[Choice, ...] = ()


def seen_by(fleet: Fleet, name: str) -> Seen:
    """Look at a server's traffic. Blocks briefly.

    Raises:
        FleetError: there is no such server, or it is not ours.
    """
    seen = fleet.seen_workload(name)
    if seen is None or seen.workload is None:
        return Seen(seen.sentence if seen is not None else "Nothing of its traffic was recorded yet.")
    choices = tuple(choice for choice in fleet.suggest(name, seen.workload) if choice.value is not None)
    if not choices:
        return Seen(f"{seen.sentence} Its flags fit that already.")
    return Seen(seen.sentence, choices)
