"""Attached endpoints: vLLM servers run by other machines or programs; read over HTTP, never changed.

``<state>/attached/<name>/`` (mode 0700) holds ``record.json``, a server's record without a process, and the history.
`attach` writes the record once; after that, only the endpoint's recorder does (`vllm_console.attached_recorder`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from vllm_console.history.store import HISTORY
from vllm_launchers.addresses import ServerUrl, is_loopback, server_url
from vllm_launchers.errors import UsageError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.errors import KeeperError, NoSuchServerError
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.private import ATTACHED, open_file
from vllm_launchers.typed_decoding import convert

LOCK = f"{HISTORY}.lock"
"""Held by the recorder, so that there is only one, and by whoever takes over the history."""

DETACHED = "detached"
"""How the run of a detached endpoint ended: nobody knows more, since it may still run."""

VARIABLE = lazy_pattern(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class Endpoint(msgspec.Struct, frozen=True):
    """Where an attached endpoint is, and what is known about it besides its metrics.

    ``url`` is its base URL, ``key_env`` names the variable with its API key (empty: none), ``ca`` a file of
    certificates to trust. ``asked_at`` (Unix seconds) is when it was attached with these. ``keyed`` is whether its
    recorder found a key in that variable. ``notice`` is a clause to show to users. ``started`` distinguishes its
    process from the one after a restart; empty if unknown.
    """

    url: str
    key_env: str = ""
    ca: str = ""
    asked_at: float = 0.0
    keyed: bool = False
    notice: str = ""
    started: str = ""

    @property
    def host(self) -> str:
        """The name or address of its host, or of an attached machine."""
        return urlsplit(self.url).hostname or ""

    @property
    def address(self) -> ServerUrl:
        """Its URL, in parts."""
        return server_url(self.url)


def check_variable(name: str) -> str:
    """The name of an environment variable. Raises UsageError if it is not a valid name; it may be the key itself."""
    if not VARIABLE.fullmatch(name):
        raise UsageError("--key-env takes the name of a variable that holds the key, not the key itself")
    return name


def name_for(url: str) -> str:
    """A server name derived from a URL's host and port."""
    server = server_url(url)
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{server.host}-{server.port}").lstrip("._-")
    return words[:55] or "endpoint"


def api_key_of(endpoint: Endpoint) -> str:
    """The endpoint's API key from its own variable; empty without one.

    Raises:
        UsageError: an HTTP header cannot carry it.
    """
    key = os.environ.get(endpoint.key_env, "") if endpoint.key_env else ""
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"the API key in {endpoint.key_env} has characters that no HTTP header can carry")
    return key


def clear_text_notice(endpoint: Endpoint) -> str:
    """The warning about a key that is sent without encryption; empty if there is none."""
    if endpoint.keyed and not endpoint.address.tls and not is_loopback(endpoint.host):
        return f"its API key is sent to {endpoint.host} without encryption (http)"
    return ""


# -- records -----------------------------------------------------------------------------------------------------------


def attached_folder(state: Path, name: str) -> Path:
    """The folder of an attached endpoint, which may not exist. Raises `BadNameError`."""
    return state / ATTACHED / folders.check_name(name)


def record_folder(state: Path, record: ServerRecord) -> Path:
    """The folder of a server's record, or of an attached endpoint's."""
    attached = "attached" in record.current.spec.details
    return attached_folder(state, record.name) if attached else folders.server_folder(state, record.name)


def first_record(name: str, endpoint: Endpoint, now: float) -> ServerRecord:
    """The record of an endpoint that was just attached: nothing is known yet."""
    return ServerRecord(name, State.STARTING, now, now, (Generation(1, spec_of(endpoint, {}), now),))


def spec_of(endpoint: Endpoint, details: Mapping[str, Any]) -> LaunchSpec:
    """The spec of an endpoint's run: nothing is launched, so only the console's part has content."""
    kept = {name: value for name, value in details.items() if value is not None}
    return LaunchSpec((), "127.0.0.1", 0, details=kept | {"attached": msgspec.to_builtins(endpoint)})


def endpoint_of(record: ServerRecord) -> Endpoint | None:
    """The endpoint of a record; None for a server of this machine."""
    found = record.current.spec.details.get("attached")
    if found is None:
        return None
    try:
        endpoint = convert(found, Endpoint)
        server_url(endpoint.url)
    except (ValueError, UsageError):
        return None
    return endpoint


def read_endpoint(folder: Path) -> tuple[ServerRecord, Endpoint]:
    """The record in a folder.

    Raises:
        NoSuchServerError: there is none.
        KeeperError: it can't be read, or is not that of an attached endpoint.
    """
    record = folders.read_record(folder)
    endpoint = endpoint_of(record)
    if endpoint is None:
        raise KeeperError(f"{folder / 'record.json'} is not the record of an attached endpoint")
    return record, endpoint


def is_recorded(folder: Path) -> bool:
    """Whether a recorder is running for an endpoint."""
    try:
        opened = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False


def start_recorder(state: Path, name: str) -> None:
    """Start an endpoint's recorder in its own session; it exits if another one is running.

    It inherits no secret except the endpoint's own key. Raises OSError.
    """
    import subprocess
    import sys

    from vllm_launchers.secrets import is_secret_name

    folder = attached_folder(state, name)
    with contextlib.suppress(NoSuchServerError):
        _, endpoint = read_endpoint(folder)
        own = endpoint.key_env
        environment = {key: value for key, value in os.environ.items() if key == own or not is_secret_name(key)}
        log = open_file(folder / "recorder.log", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            subprocess.Popen(
                [sys.executable, "-m", "vllm_console.attached_recorder", str(state), name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(log)
