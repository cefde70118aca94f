"""Errors of launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_launchers.errors import OperationError, RefusedError

if TYPE_CHECKING:
    from vllm_launchers.plan.findings import PlanFinding
    from vllm_launchers.plan.placement import Placement


def read_only_error(why: str) -> RefusedError:
    """Error for any change in a read-only console; ``why`` says what made it read-only (may be empty)."""
    cause = f" ({why})" if why else ""
    return RefusedError(f"this console is read-only{cause}: nothing was changed")


class NoPlaceError(OperationError):
    """No set of GPUs is suitable. ``sets`` are the candidates, best first."""

    def __init__(self, text: str, sets: Sequence[Placement] = ()) -> None:
        super().__init__(text)
        self.sets = tuple(sets)


class UnfitError(OperationError):
    """The plan of a launch has errors: ``findings``. ``forceable`` says whether ``force`` helps."""

    def __init__(self, text: str, findings: Sequence[PlanFinding] = (), *, forceable: bool = False) -> None:
        super().__init__(text)
        self.findings, self.forceable = tuple(findings), forceable


def node_alone(name: str, node: str) -> str:
    """Why a single node of a multi-node server is not restarted or changed, and what to do instead."""
    return (
        f"{name} is {node}: a node can't be restarted, changed or put to sleep alone. Stop it, which ends the others "
        "too, then start every node again with 'start … --nodes'"
    )
