"""Attached endpoints as part of the fleet: their records and views, attaching and detaching."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.attached import (
    DETACHED,
    LOCK,
    Endpoint,
    api_key_of,
    attached_folder,
    check_variable,
    endpoint_of,
    first_record,
    is_recorded,
    name_for,
    read_endpoint,
    spec_of,
    start_recorder,
)
from vllm_console.fleet.snapshot import ServerView
from vllm_console.fleet.watched_server import Identity, JudgeContext, WatchedServer, record_identity
from vllm_console.history.time_view import TimeView
from vllm_console.text import plain
from vllm_launchers.addresses import is_loopback, is_wildcard, server_url
from vllm_launchers.errors import NotFoundError, OperationError, RefusedError, UsageError
from vllm_launchers.keeper import client, folders, wire
from vllm_launchers.keeper.errors import BadNameError, NoSuchServerError
from vllm_launchers.keeper.files import RECORD
from vllm_launchers.keeper.records import Exit, ServerRecord, State
from vllm_launchers.launch.server_records import KnownRecords, ServerRecords, read_changed
from vllm_launchers.private import ATTACHED, lock, locked, make_folder, open_file, own_folder
from vllm_launchers.values import replace as replace_value

if TYPE_CHECKING:
    from vllm_console.fleet.removed import RemovedServers
    from vllm_console.load.client import ApiAccess

CHECK_SECONDS = 5.0
"""How often to check that an endpoint has a recorder."""

RECORDER_ENDS_SECONDS = 12.0
"""How long a recorder may take to end: longer than a response may take."""

NOT_RECORDED = "not scraped: this console is read-only and starts no recorder"
LOCK_SECONDS = 0.5
"""How often to check for a record that a recorder has rewritten in the meantime."""

_SETTING_ASIDE = "record.detaching"
_ATTACHING = ".attaching"

ATTACH_SECONDS = 15.0
"""How long to wait for another command that is attaching: longer than its recorder may take to end."""


class AllRecords:
    """The records of this user's servers and of attached endpoints."""

    def __init__(self, servers: ServerRecords, attached: AttachedServers) -> None:
        self._servers, self._attached = servers, attached

    def read(self) -> tuple[list[ServerRecord], list[str]]:
        """All records, and a sentence for each one that can't be read; a server hides an endpoint of its name."""
        servers, problems = self._servers.read()
        names = {record.name for record in servers}
        attached, more = self._attached.read()
        return servers + [record for record in attached if record.name not in names], problems + more


class AttachedServers:
    """The attached endpoints of one state folder."""

    def __init__(self, state: Path, *, interactive: bool, read_only: bool) -> None:
        self._state, self._interactive, self._read_only = state, interactive, read_only
        self._known: KnownRecords = {}
        self._watched: dict[Identity, WatchedServer] = {}
        self._checked: dict[str, tuple[float, bool]] = {}

    # -- views -----------------------------------------------------------------------------------------------------

    def read(self) -> tuple[list[ServerRecord], list[str]]:
        """The endpoints' records by name, and a sentence for each one that can't be read."""
        return read_changed(
            self._known,
            self._folders(),
            lambda name: folders.stamp(attached_folder(self._state, name)),
            lambda name: read_endpoint(attached_folder(self._state, name))[0],
        )

    def names(self) -> list[str]:
        """The names of the endpoints whose records can be read."""
        return [record.name for record in self.read()[0]]

    def _folders(self) -> list[str]:
        try:
            names = os.listdir(self._state / ATTACHED)  # noqa: PTH208 - only names are needed
        except OSError:
            return []
        return sorted(name for name in names if folders.NAME.fullmatch(name))

    def views(
        self, records: Sequence[ServerRecord], now: float, selected: str | None, time_view: TimeView
    ) -> list[ServerView]:
        """The endpoints now; start missing recorders, and forget endpoints that are gone."""
        present = {record_identity(record) for record in records}
        for gone in [key for key in self._watched if key not in present]:
            if (watched := self._watched.pop(gone, None)) is not None:
                watched.close()
            self._checked.pop(gone[0], None)
        return [self._view(record, now, selected, time_view) for record in records]

    def _view(self, record: ServerRecord, now: float, selected: str | None, time_view: TimeView) -> ServerView:
        chosen, key = record.name == selected, record_identity(record)
        if key not in self._watched:
            folder = attached_folder(self._state, record.name)
            self._watched[key] = WatchedServer(folder, interactive=self._interactive)
        watched = self._watched[key]
        # Its GPUs are on another machine, and nothing but metrics may be requested.
        context = JudgeContext(may_ask=False)
        view = watched.view(record, now, selected=chosen, load="", context=context, startup_stages=False)
        if chosen and self._interactive:
            view = watched.in_time(view, record, now, time_view)
        return self._as_attached(view, record)

    def earlier(self, record: ServerRecord, view: ServerView, at: float) -> ServerView:
        """An endpoint at an earlier moment."""
        watched = self._watched.get(record_identity(record))
        return self._as_attached(watched.earlier(view, record, at), record) if watched is not None else view

    def _as_attached(self, view: ServerView, record: ServerRecord) -> ServerView:
        endpoint = endpoint_of(record)
        if endpoint is None:
            return view
        server, is_recorded = endpoint.address, self._is_recorded(record.name)
        notices = (endpoint.notice, "" if is_recorded else NOT_RECORDED)
        return replace(
            view,
            ours=False,
            attached=endpoint,
            host=server.host,
            port=server.port,
            tls=server.tls,
            contacted=is_recorded and record.state is not State.STARTING,
            log_path="",
            no_probe="",
            previous_flags=None,
            notice="; ".join(dict.fromkeys(filter(None, (*notices, view.notice)))),
        )

    def _is_recorded(self, name: str) -> bool:
        """Whether an endpoint has a recorder; starts a missing one unless this console is read-only."""
        at, found = self._checked.get(name, (float("-inf"), False))
        if time.monotonic() - at < CHECK_SECONDS:
            return found
        found = is_recorded(attached_folder(self._state, name))
        if not found and not self._read_only:
            with contextlib.suppress(OSError):
                start_recorder(self._state, name)
                found = True
        self._checked[name] = (time.monotonic(), found)
        return found

    def close(self) -> None:
        """Close open files; recorders keep running."""
        for watched in tuple(self._watched.values()):  # a snapshot that hangs may still be running
            watched.close()
        self._watched.clear()

    # -- verbs -----------------------------------------------------------------------------------------------------

    def attach(self, url: str, name: str | None, key_env: str, ca: str, own: Mapping[int, ServerView]) -> str:
        """Record an endpoint and start its recorder; return its name. The endpoint need not answer.

        Attaching the same endpoint again by its name replaces its key variable and certificates. ``own`` maps ports to
        this user's servers.

        Raises:
            OperationError: the name is taken, or nothing can be written.
            UsageError: an argument is invalid.
        """
        endpoint = _checked(url, key_env, ca)
        here = own.get(endpoint.address.port)
        if here is not None and is_loopback(endpoint.host) and _may_answer(here.host, endpoint.host):
            raise OperationError(f"{endpoint.url} is {here.name}, one of your own servers: it is already in the table")
        folder = self._state / ATTACHED
        busy = OperationError(f"another command is attaching an endpoint ({folder}): try again")
        try:
            own_folder(self._state)
            make_folder(folder)
            with locked(folder / _ATTACHING, ATTACH_SECONDS, busy):
                return self._attach(endpoint, name)
        except OSError as error:
            raise OperationError(f"{folder} can't be written: {error.strerror}") from error

    def _attach(self, endpoint: Endpoint, name: str | None) -> str:
        present = {record.name: found for record in self.read()[0] if (found := endpoint_of(record)) is not None}
        known = next((one for one, found in present.items() if found.address == endpoint.address), None)
        if known is not None and name in (None, known):
            return self._renew(known, endpoint)
        if known is not None:
            raise OperationError(f"{endpoint.url} is attached already, as {known}")
        chosen = name if name is not None else self._free_name(name_for(endpoint.url), present)
        if chosen in present or client.exists(self._state, chosen):
            raise OperationError(f"there is a server called '{chosen}' already: choose another --name")
        folder = attached_folder(self._state, chosen)
        try:
            make_folder(folder)
            folders.write_record(folder, first_record(chosen, endpoint, time.time()))
            start_recorder(self._state, chosen)
        except OSError as error:
            _delete(folder)
            raise OperationError(f"{folder} can't be written: {error.strerror}") from error
        return chosen

    def _free_name(self, wanted: str, present: dict[str, Endpoint]) -> str:
        name, number = wanted, 1
        while name in present or client.exists(self._state, name):
            number += 1
            name = f"{wanted}-{number}"
        return name

    def _renew(self, name: str, endpoint: Endpoint) -> str:
        """Attach an endpoint again, keeping its history."""
        with self._set_aside(name) as folder:
            record = wire.loads((folder / _SETTING_ASIDE).read_bytes())
            details = {key: value for key, value in record.current.spec.details.items() if key != "attached"}
            started = getattr(endpoint_of(record), "started", "")
            new = replace_value(record.current, spec=spec_of(replace(endpoint, started=started), details))
            again = replace_value(
                record,
                state=State.STARTING,
                state_since=time.time(),
                reason="",
                generations=(*record.generations[:-1], new),
            )
            folders.write_record(folder, again)
            (folder / _SETTING_ASIDE).unlink()
        start_recorder(self._state, name)
        self._checked.pop(name, None)
        return name

    def detach(self, name: str, removed: RemovedServers, hosts: Sequence[str] = ()) -> tuple[ServerRecord, bool]:
        """Detach an endpoint; its history is kept for replays. Returns its last record, and whether there is any
        history.

        ``hosts`` are attached machines, which the error message lists as well.

        Raises:
            OperationError: its recorder does not end, or its history can't be kept.
            NotFoundError, RefusedError: no endpoint of that name is attached.
        """
        try:
            record, _ = read_endpoint(attached_folder(self._state, name))
        except (BadNameError, NoSuchServerError):
            record = None
        if record is None:
            with contextlib.suppress(BadNameError):
                if client.exists(self._state, name):
                    raise RefusedError(f"{name} is a server of your own: 'vllm-console remove {name}' removes it")
            known = ", ".join([*self.names(), *hosts]) or "none"
            raise NotFoundError(f"no endpoint is attached as '{plain(name)}'; attached: {known}")
        if (watched := self._watched.pop(record_identity(record), None)) is not None:
            watched.close()
        with self._set_aside(name) as folder:
            kept = removed.keep(folder, name, record.created_at)
            _delete(folder)
        now = time.time()
        how = Exit(now, code=None, signal=None, requested=True, reason=DETACHED)
        ended = replace_value(record.current, ended_at=now, exit=how)
        return replace_value(record, generations=(*record.generations[:-1], ended)), kept

    @contextlib.contextmanager
    def _set_aside(self, name: str):  # type: ignore[no-untyped-def]
        """Make an endpoint's recorder end; if the body fails, restore the record."""
        folder = attached_folder(self._state, name)
        record, aside = folder / RECORD, folder / _SETTING_ASIDE
        try:
            record.rename(aside)
            opened = open_file(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            deadline = time.monotonic() + RECORDER_ENDS_SECONDS
            try:
                while True:
                    try:
                        lock(opened, LOCK_SECONDS)
                        break
                    except OSError:
                        if time.monotonic() > deadline:
                            raise
                    with contextlib.suppress(FileNotFoundError):
                        record.rename(aside)  # its recorder has just rewritten it
            finally:
                os.close(opened)
            yield folder
        except OSError as error:
            raise OperationError(f"{name}: {error.strerror or error} ({folder})") from error
        finally:
            if aside.exists() and not record.exists():
                aside.rename(record)


def without_attached(views: Sequence[ServerView]) -> list[ServerView]:
    """The servers without those that are also attached, by a loopback address: the endpoint stands for them."""
    local = [(view.port, one.host) for view in views if (one := view.attached) is not None and is_loopback(one.host)]

    def twice(view: ServerView) -> bool:
        observed = not view.ours and not view.remote and view.attached is None
        return observed and any(view.port == port and _may_answer(view.host, host) for port, host in local)

    return [view for view in views if not twice(view)]


def _delete(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def endpoint_access(endpoint: Endpoint) -> ApiAccess:
    """How to access an endpoint: with its own key, and no other.

    Raises:
        UsageError: an HTTP header cannot carry the key.
    """
    from vllm_console.load.client import ApiAccess

    return ApiAccess(api_key_of(endpoint), endpoint.key_env, endpoint.ca)


def _may_answer(bound: str, host: str) -> bool:
    """Whether a server that binds ``bound`` may answer at this loopback address or name."""
    is_name, bound = _is_localhost(host), bound.strip("[]")
    if is_wildcard(bound):
        return is_name or ":" in bound or ":" not in host
    local = "127.0.0.1" if _is_localhost(bound) else bound
    return local in (("127.0.0.1", "::1") if is_name else (host,))


def _is_localhost(host: str) -> bool:
    return host.lower().removesuffix(".") == "localhost"


def _checked(url: str, key_env: str, ca: str) -> Endpoint:
    from vllm_console.metrics.scrape import ScrapeError, verifying

    server = server_url(url)
    endpoint = Endpoint(server.base, check_variable(key_env) if key_env else "", asked_at=time.time())
    api_key_of(endpoint)
    if ca:
        if not server.tls:
            raise UsageError("--ca is for https addresses")
        endpoint = replace(endpoint, ca=str(Path(ca).expanduser().absolute()))
        if not Path(endpoint.ca).is_file():  # reading a pipe would block
            raise UsageError(f"--ca {plain(ca, 200)} is not a file")
        try:
            verifying(endpoint.ca)
        except ScrapeError as error:
            raise UsageError(str(error)) from error
    return endpoint
