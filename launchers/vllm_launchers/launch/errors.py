"""Errors of user requests. Each message is one clear sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_launchers.keeper.errors import BadNameError, ElsewhereError, KeeperError, NoSuchServerError

if TYPE_CHECKING:
    from vllm_launchers.plan.findings import PlanFinding
    from vllm_launchers.plan.placement import Placement


class FleetError(Exception):
    """Something could not be done. The first line is one clear sentence; ``exit_code`` is the command's exit code."""

    exit_code = 1


class NotFoundError(FleetError):
    """No server or preset of that name."""

    exit_code = 3


class RefusedError(FleetError):
    """The server belongs to another user, or the console is read-only."""

    exit_code = 4


def read_only_error(why: str) -> RefusedError:
    """The refusal of any change; ``why`` is what makes the console read-only, or nothing."""
    cause = f" ({why})" if why else ""
    return RefusedError(f"this console is read-only{cause}: nothing was changed")


class UsageError(FleetError):
    """The request is invalid."""

    exit_code = 2


class NoPlaceError(FleetError):
    """No set of GPUs is suitable. ``sets`` are the candidates, best first."""

    def __init__(self, text: str, sets: Sequence[Placement] = ()) -> None:
        super().__init__(text)
        self.sets = tuple(sets)


class UnfitError(FleetError):
    """The plan of a launch has errors: ``findings``. ``forceable`` says whether ``force`` helps."""

    def __init__(self, text: str, findings: Sequence[PlanFinding] = (), *, forceable: bool = False) -> None:
        super().__init__(text)
        self.findings, self.forceable = tuple(findings), forceable


@contextlib.contextmanager
def keeper_errors() -> Iterator[None]:
    """Raise the errors of the keeper's client as those of this module."""
    try:
        yield
    except BadNameError as error:
        raise UsageError(str(error)) from error
    except NoSuchServerError as error:
        raise NotFoundError(str(error)) from error
    except ElsewhereError as error:
        raise RefusedError(str(error)) from error
    except KeeperError as error:
        raise FleetError(str(error)) from error


def node_alone(name: str, node: str) -> str:
    """Why one node of several is not restarted or changed, and what to do. ``node``: which one it is."""
    return (
        f"{name} is {node}: a node can't be restarted, changed or put to sleep alone. Stop it, which ends the others "
        "too, then start every node again with 'start … --nodes'"
    )
