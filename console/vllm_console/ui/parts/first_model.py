"""What a first launch offers: a model that is on this machine, where a preset's own would have to be downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.fleet.snapshot import LaunchRequest, Preset
from vllm_console.ui.parts.first_preset import fits

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.vllm.modelfacts.local import LocalModel

MOST_PLANNED = 8
"""Models that are planned until one fits."""


def first_models(
    fleet: LocalFleet, models: Sequence[LocalModel], presets: Sequence[Preset], request: LaunchRequest
) -> Mapping[str, str]:
    """By preset, the largest model of this machine that fits and can start; nothing for a preset whose own is here.

    Plans some of them: seconds at most.
    """
    models = [one for one in models if one.facts is not None and not one.problem]
    here = {one.model for one in models}
    missing = [preset.name for preset in presets if preset.model not in here]
    if not missing:
        return {}
    by_size = sorted(models, key=lambda one: one.disk_bytes or 0, reverse=True)
    found = next((one.model for one in by_size[:MOST_PLANNED] if fits(fleet, replace(request, model=one.model))), None)
    return dict.fromkeys(missing, found) if found is not None else {}
