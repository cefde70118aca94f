"""Which preset a launch begins with: the one that was used last, unless that does not fit and another one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_console.fleet.snapshot import LaunchRequest
from vllm_console.fleet.verbs import FleetError
from vllm_launchers.plan.model import fit_of

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet


def first_fitting(fleet: LocalFleet, requests: Sequence[LaunchRequest]) -> LaunchRequest | None:
    """The first of these launches that fits and can start; None if none does.

    Plans them one after the other: seconds at most.
    """
    return next((request for request in requests if fits(fleet, request)), None)


def fits(fleet: LocalFleet, request: LaunchRequest) -> bool:
    """Whether a launch fits and can start, as far as its plan knows."""
    try:
        found = fit_of(fleet.plan(request))
    except FleetError:
        return False
    return found.fits is not False and not found.error
