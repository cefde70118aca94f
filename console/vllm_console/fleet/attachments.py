"""What is attached to a fleet: endpoints at URLs, and the fleets of other machines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_console.fleet.other_servers import FIRST_ANSWER_SECONDS
from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.fleet.types import HOSTS
from vllm_launchers.errors import NotFoundError, OperationError
from vllm_launchers.keeper import client

if TYPE_CHECKING:
    from vllm_console.fleet.access import ServerAccess
    from vllm_console.fleet.attached_servers import AttachedServers
    from vllm_console.fleet.remote_hosts import RemoteHost, RemoteHosts
    from vllm_console.fleet.runs import RunHistory, RunRecorder

HOSTS_ANSWER_SECONDS = 12.0
"""How long a command waits for attached machines to answer."""


class Attachments:
    """Attaches and detaches endpoints and machines, and acts on the servers of attached machines.

    Owns the connections to the machines; the endpoints' records and views are those of ``endpoints``. Snapshots include
    the machines' servers if ``show_hosts``.
    """

    def __init__(
        self,
        state: Path,
        access: ServerAccess,
        endpoints: AttachedServers,
        recorder: RunRecorder,
        history: RunHistory,
        snapshot: Callable[[], FleetSnapshot],
        *,
        interactive: bool,
        show_hosts: bool,
    ) -> None:
        self._state, self._access, self._endpoints = state, access, endpoints
        self._recorder, self._history, self._snapshot = recorder, history, snapshot
        self._interactive, self._show_hosts = interactive, show_hosts

    def attach(self, url: str, name: str | None = None, *, key_env: str = "", ca: str = "") -> str:
        """Attach the vLLM endpoint at a URL: record it from now on, never change it. Returns its name.

        ``key_env`` names the environment variable with its API key, ``ca`` a file of certificates to trust.

        Raises:
            OperationError: the name is taken, or the endpoint is attached under another one.
            RefusedError: this console is read-only.
            UsageError: an argument is invalid.
        """
        self._access.refuse_read_only()
        own = {server.port: server for server in self._snapshot().servers if server.ours and server.pid}
        return self._endpoints.attach(url, name, key_env, ca, own)

    def attach_host(self, url: str, name: str | None) -> RemoteHost:
        """Attach the fleet of a machine reachable by ssh: ``ssh://[user@]host[:port][/path/to/vllm-console]``.

        Raises:
            OperationError: the name is taken.
            RefusedError, UsageError: this console is read-only; the address is invalid.
        """
        from vllm_console.fleet.remote_hosts import host_from

        self._access.refuse_read_only()
        host = host_from(url, name)
        if client.exists(self._state, host.name) or host.name in self._endpoints.names():
            raise OperationError(f"there is a server called '{host.name}' already: choose another --name")
        self._hosts.attach(host)
        return host

    def detach(self, name: str) -> bool:
        """Detach an endpoint or a machine; an endpoint's history is kept for replays. Returns whether there is any.

        Raises:
            OperationError: its recorder does not end.
            NotFoundError: nothing of that name is attached.
            RefusedError: this console is read-only, or the name is not that of an attached endpoint.
        """
        self._access.refuse_read_only()
        if self._has_hosts and self._hosts.detach(name):
            return False
        self._recorder.catch_up()
        self._snapshot()  # records its runs
        hosts = [host.name for host in self._hosts.hosts()] if self._has_hosts else []
        record, kept = self._endpoints.detach(name, self._history.removed, hosts)
        self._recorder.enter(record)
        return kept

    def act(self, name: str, verb: str, **more: Any) -> ServerView | None:
        """Carry out an action on ``HOST/NAME``; return the server as last seen. None for a server of this machine.

        Raises:
            UnfitError, OperationError: it failed there.
            NotFoundError: no such machine is attached, or the server is gone.
            RefusedError: this console is read-only.
        """
        if "/" not in name:
            return None
        from vllm_console.fleet.remote_hosts import split_host

        if (found := split_host(name)) is None:
            return None
        self._access.refuse_read_only()
        host, server = found
        there = self._hosts.connection(host)
        there.do(verb, server, **more)
        view = next((one for one in there.views()[0] if one.name == name), None)
        if view is None:
            raise NotFoundError(f"{name} is gone")
        return view

    def host_views(self, selected: str | None) -> tuple[list[ServerView], list[str]]:
        """The servers of the attached machines, and notices; empty unless ``show_hosts``."""
        if not self._show_hosts or not ("_hosts" in self.__dict__ or self._has_hosts):
            return [], []
        return self._hosts.views(selected)

    def close(self) -> None:
        """End all connections."""
        self._endpoints.close()
        if "_hosts" in self.__dict__:
            self._hosts.close()

    @property
    def _has_hosts(self) -> bool:
        return (self._state / HOSTS).exists()

    @cached_property
    def _hosts(self) -> RemoteHosts:
        # Imported lazily: most users have no attached machine.
        from vllm_console.fleet.remote_hosts import RemoteHosts

        patience = FIRST_ANSWER_SECONDS if self._interactive else HOSTS_ANSWER_SECONDS
        return RemoteHosts(self._state, patience, read_only=self._access.read_only)
