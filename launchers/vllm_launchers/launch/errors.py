"""Errors of launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm_launchers.errors import OperationError, RefusedError
from vllm_launchers.vllm.flags.changes import Changes

if TYPE_CHECKING:
    from vllm_launchers.plan.findings import PlanFinding
    from vllm_launchers.plan.placement import Placement


def read_only_error(why: str) -> RefusedError:
    """Error for any change in a read-only console; ``why`` says what made it read-only (may be empty)."""
    cause = f" ({why})" if why else ""
    return RefusedError(f"this console is read-only{cause}: nothing was changed")


class WayOut(msgspec.Struct, frozen=True):
    """A way to make a launch fit: a change of flags (``fix``), or servers of this user to ``stop``; or only advice.

    ``text`` ends the sentence that says why there is no place. ``of_command`` says whether it is about options of a
    command, which means nothing on a screen.
    """

    text: str
    fix: Changes | None = None
    stop: tuple[str, ...] = ()
    of_command: bool = False


class NoPlaceError(OperationError):
    """No set of GPUs is suitable. ``sets`` are the candidates, ``ways`` possible ways out, both best first.

    ``problem`` is the sentence without a way out; the error's text has the first one.
    """

    def __init__(self, problem: str, sets: Sequence[Placement] = (), ways: Sequence[WayOut] = ()) -> None:
        super().__init__(problem + (ways[0].text if ways else ""))
        self.problem, self.sets, self.ways = problem, tuple(sets), tuple(ways)

    @property
    def fix(self) -> Changes | None:
        """The change of flags with which it would fit; None if there is none."""
        return self.ways[0].fix if self.ways else None

    @property
    def only_of_command(self) -> bool:
        """Whether the way out in its text is about options of a command."""
        return bool(self.ways) and self.ways[0].of_command


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
