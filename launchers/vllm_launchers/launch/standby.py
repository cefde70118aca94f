"""A standby pair: two servers on the same GPUs, of which one sleeps while the other serves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from vllm_launchers import private
from vllm_launchers.errors import NotFoundError, OperationError, UsageError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import ServerRecord, State
from vllm_launchers.launch.details import unpack
from vllm_launchers.launch.place import kept_devices
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.flags import SLEEP_MODE
from vllm_launchers.vllm.flags.changes import Changes

SWITCH_LOCK = "switch.lock"


def sharing(records: Sequence[ServerRecord], name: str) -> list[ServerRecord]:
    """The other servers on a server's GPUs: its partner and earlier partners. At most one of them may be awake."""
    details = {record.name: unpack(record.current.spec.details) for record in records}
    found, reached = [name] if name in details else [], {name}
    for one in found:  # the list grows during the loop
        for other, its in details.items():
            linked = its.standby_of == one or details[one].standby_of == other
            if (
                linked
                and other not in reached
                and (its.gpus == details[one].gpus or {*its.gpus} & {*details[one].gpus})
            ):
                reached.add(other)
                found.append(other)
    return [record for record in records if record.name in found[1:]]


def partner_of(records: Sequence[ServerRecord], name: str) -> ServerRecord | None:
    """The other server of a pair, preferably an awake one. None if it is gone, or has ended and was the later one."""
    standby = next((unpack(one.current.spec.details).standby_of for one in records if one.name == name), "")
    others = [one for one in sharing(records, name) if one.needs_keeper or one.name == standby]
    return max(others, key=_claim, default=None)


def _claim(record: ServerRecord) -> tuple[bool, bool, bool]:
    """Sort key: awake before asleep, asleep before ended."""
    alive = record.state.alive
    return alive and record.state is not State.ASLEEP, alive, record.needs_keeper


@contextlib.contextmanager
def one_switch(state: Path, records: Sequence[ServerRecord], name: str) -> Iterator[None]:
    """Lock the servers on a server's GPUs without waiting, so that two of them never wake up at once.

    Raises:
        OperationError: one of them is being switched to or started.
    """
    first = min([name, *(one.name for one in sharing(records, name))])
    path = folders.server_folder(state, first) / SWITCH_LOCK
    busy = OperationError(f"another command wakes up or starts {name} or its partner; try again later")
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(private.locked(path, 0.0, busy))
        except OSError as error:
            raise OperationError(f"{path}: can't be locked: {error.strerror}") from error
        yield


def find_other(records: Sequence[ServerRecord], name: str) -> ServerRecord:
    """The server that a new one should become the standby of.

    Raises:
        NotFoundError: there is no such server.
        OperationError: it does not run, can't sleep, or has a partner already.
    """
    found = next((record for record in records if record.name == name), None)
    if found is None:
        raise NotFoundError(
            f"no server is called '{name}'; your servers: {', '.join(r.name for r in records) or 'none'}"
        )
    if not found.state.alive:
        raise OperationError(f"{name} is {found.state}: a standby shares the GPUs of a server that runs")
    if not found.current.spec.sleep_mode:
        raise OperationError(
            f"{name} was started without sleep mode. To enable it, run: "
            f"vllm-console restart {name} --set {SLEEP_MODE}=true"
        )
    partner = partner_of(records, name)
    if partner is not None and partner.needs_keeper:
        raise OperationError(f"{name} and {partner.name} are a standby pair already: stop {partner.name} first")
    return found


def refuse_awake(other: ServerRecord) -> None:
    """Raise OperationError unless the server on the GPUs is asleep: awake, it holds their memory."""
    if other.state is not State.ASLEEP:
        raise OperationError(
            f"{other.name} is {other.state} and holds the GPUs' memory: put it to sleep first: "
            f"vllm-console sleep {other.name}"
        )


def refuse_beside_partner(records: Sequence[ServerRecord], record: ServerRecord) -> None:
    """Raise OperationError if this server is not serving and its partner is awake: both need the same GPU memory."""
    partner = partner_of(records, record.name)
    if partner is None or not partner.state.alive or partner.state is State.ASLEEP:
        return
    if record.state is State.ASLEEP or not record.state.alive:
        raise OperationError(
            f"{record.name} is {record.state}, and {partner.name} has its GPUs: put {partner.name} to sleep first: "
            f"vllm-console sleep {partner.name}"
        )


def standby_request(request: LaunchRequest, other: ServerRecord) -> LaunchRequest:
    """The request with sleep mode and the GPUs of ``other``.

    Raises:
        UsageError: it names other GPUs.

    """
    details = unpack(other.current.spec.details)
    gpus = details.gpus
    if (request.gpus and request.gpus != gpus) or request.place not in ("", "offered"):
        raise UsageError(f"--standby-of {other.name} takes the GPUs of {other.name}: omit --gpus")
    changes = Changes(set={**request.changes.set, SLEEP_MODE: True}, unset=request.changes.unset)
    environment = {**request.environment, **kept_devices(details.environment, gpus)}
    return replace(request, gpus=gpus, place="", changes=changes, environment=environment)
