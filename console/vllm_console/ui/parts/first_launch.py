"""Defaults of a launch: the first preset that fits, and a local model instead of a download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_launchers.errors import OperationError
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.model import fit_of
from vllm_launchers.presets.model import Preset

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.vllm.modelfacts.local import LocalModel


def first_fitting(fleet: LocalFleet, requests: Sequence[LaunchRequest]) -> LaunchRequest | None:
    """Return the first launch that fits and can start, or None.

    Plans them one after the other, which takes up to seconds.
    """
    return next((request for request in requests if fits(fleet, request)), None)


def fits(fleet: LocalFleet, request: LaunchRequest) -> bool:
    """Whether a launch fits and can start, as far as its plan knows."""
    try:
        found = fit_of(fleet.plan(request))
    except OperationError:
        return False
    return found.fits is not False and not found.error


MOST_PLANNED = 8


def first_models(
    fleet: LocalFleet, models: Sequence[LocalModel], presets: Sequence[Preset], request: LaunchRequest
) -> Mapping[str, str]:
    """Map presets whose own model is not on this machine to the largest local model that fits and can start.

    Plans up to `MOST_PLANNED` models, which takes up to seconds.
    """
    models = [one for one in models if one.facts is not None and not one.problem]
    here = {one.model for one in models}
    missing = [preset.name for preset in presets if preset.model not in here]
    if not missing:
        return {}
    by_size = sorted(models, key=lambda one: one.disk_bytes or 0, reverse=True)
    found = next((one.model for one in by_size[:MOST_PLANNED] if fits(fleet, replace(request, model=one.model))), None)
    return dict.fromkeys(missing, found) if found is not None else {}
