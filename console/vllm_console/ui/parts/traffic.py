"""The measured traffic of a server, and which flags it suggests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vllm_launchers.plan.choices.inputs import Choice

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet


class MeasuredTraffic(msgspec.Struct, frozen=True):
    """The traffic in one sentence, and the choices it suggests: none if there is too little, or the flags fit."""

    sentence: str
    choices: tuple[Choice, ...] = ()


def measured_traffic(fleet: LocalFleet, name: str) -> MeasuredTraffic:
    """Analyze a server's traffic. Blocks briefly.

    Raises:
        FleetError: there is no such server, or it is not ours.
    """
    seen = fleet.seen_workload(name)
    if seen is None or seen.workload is None:
        return MeasuredTraffic(seen.sentence if seen is not None else "No traffic recorded yet.")
    suggested = fleet.suggest(name, seen.workload, seen.room)
    choices = tuple(choice for choice in suggested if choice.value is not None)
    if not choices:
        return MeasuredTraffic(f"{seen.sentence} Its flags already fit this traffic.")
    return MeasuredTraffic(seen.sentence, choices)
