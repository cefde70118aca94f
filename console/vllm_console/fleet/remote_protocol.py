"""The protocol between two consoles over ssh: one JSON object per line, requests one way, answers the other.

The answering side greets first: ``{"hello": {"protocol": 1, "version": …, "host": …}}``. A request is ``{"id": 1, "do":
"snapshot", "selected": NAME}``, ``{"id": 2, "do": "stop", "name": NAME}`` or ``{"id": 3, "do": "restart", "name": NAME,
"changes": {…}, "options": {…}}``. The answer has its id and either ``snapshot``, ``done`` or ``error``; the error of a
refused plan includes its findings.
"""

from __future__ import annotations

import contextlib
import json
import re
from functools import cache
from typing import Any, get_type_hints

import msgspec
from msgspec.structs import replace

from vllm_console.fleet import snapshot as snapshot_module
from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.text import plain
from vllm_launchers.errors import OperationError, RefusedError, UsageError
from vllm_launchers.keeper import wire
from vllm_launchers.keeper.errors import RecordError
from vllm_launchers.launch.errors import UnfitError
from vllm_launchers.launch.request import RestartOptions
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.findings import PlanFinding
from vllm_launchers.values import Value
from vllm_launchers.vllm.flags.changes import Changes

PROTOCOL = 1

LONGEST_LINE = 32 << 20
"""Maximum length in bytes; a longer line ends the connection."""

MOST_SERVERS = 200

LEFT_OUT = frozenset({"restart", "startup", "probe", "markers", "folder", "log_path", "load_result", "pid"})
"""Fields of a server that are useful only on its own machine. The notice includes the progress of a restart."""

LARGEST_NUMBER = 1e16
"""Larger numbers are rejected, so that times are valid dates and sums finite."""

NAME = lazy_pattern(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")


class ProtocolError(Exception):
    """The other side violated the protocol. The message is one sentence."""


def encode(message: dict[str, Any]) -> bytes:
    """A message as a line, in ASCII because the other side may have any locale."""
    text = msgspec.json.encode(message, enc_hook=_encode_value).decode()
    if not text.isascii():
        text = re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    return text.encode() + b"\n"


def _encode_value(value: Any) -> Any:
    if isinstance(value, Value):
        return wire.to_plain(value)
    raise NotImplementedError


def decode(line: bytes) -> dict[str, Any]:
    """Parse a line. Raises `ProtocolError`."""
    try:
        message = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError("it sent something that is not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("it sent an invalid message")
    return message


def decode_changes(document: Any) -> Changes:
    """Parse the change of flags in a restart request. Raises UsageError if it is invalid."""
    try:
        return msgspec.convert(document or {}, Changes)
    except msgspec.ValidationError as error:
        raise UsageError(f"the flags that were sent can't be read ({error})") from error


def decode_options(document: Any) -> RestartOptions:
    """Parse the options of a restart request. Raises UsageError if they are invalid."""
    try:
        return msgspec.convert(document or {}, RestartOptions)
    except msgspec.ValidationError as error:
        raise UsageError(f"the options that were sent can't be read ({error})") from error


def error_document(error: OperationError) -> dict[str, Any]:
    """An error in the form of an answer."""
    document: dict[str, Any] = {"message": str(error), "code": error.exit_code}
    if isinstance(error, UnfitError):
        document |= {"findings": error.findings, "forceable": error.forceable}
    return document


def decode_error(document: dict[str, Any], host: str) -> OperationError:
    """The error in an answer, with the host's name before its message."""
    sentence = f"{host}: {plain(str(document.get('message')), 2000)}"
    if isinstance(document.get("findings"), list):
        with contextlib.suppress(msgspec.ValidationError):
            findings = msgspec.convert(document["findings"], tuple[PlanFinding, ...])
            return UnfitError(sentence, findings, forceable=document.get("forceable") is True)
    return (RefusedError if document.get("code") == RefusedError.exit_code else OperationError)(sentence)


def snapshot_document(snapshot: FleetSnapshot) -> dict[str, Any]:
    """A snapshot in the form of an answer."""
    servers = [_fields(server) for server in snapshot.servers[:MOST_SERVERS]]
    return {"at": snapshot.at, "notices": snapshot.notices, "servers": servers}


def _fields(server: ServerView) -> dict[str, Any]:
    found = {name: getattr(server, name) for name in ServerView.__struct_fields__ if name not in LEFT_OUT}
    if server.sample is not None:
        # Windows and charts already summarize the histograms, whose infinite last bounds JSON cannot express.
        engines = {label: replace(one, histograms={}) for label, one in server.sample.engines.items()}
        found["sample"] = replace(server.sample, engines=engines)
    return found


def views_of(document: Any, host: str) -> tuple[list[ServerView], list[str]]:
    """The servers in a snapshot answer as this console shows them, and the host's notices.

    Raises:
        ProtocolError: the answer is invalid.
    """
    try:
        if not _bounded(document):
            raise ValueError("a number is out of bounds")
        servers, notices = document["servers"], [str(one) for one in document.get("notices", ())]
        return [_view(one, host) for one in servers[:MOST_SERVERS]], notices[:20]
    except (TypeError, KeyError, AttributeError, ValueError, RecordError, RecursionError) as error:
        raise ProtocolError(f"its answer can't be read ({str(error)[:120]})") from error


def _bounded(value: Any) -> bool:
    """Whether all numbers in a document are within bounds."""
    if isinstance(value, dict):
        return all(map(_bounded, value.values()))
    if isinstance(value, list):
        return all(map(_bounded, value))
    return not isinstance(value, int | float) or abs(value) <= LARGEST_NUMBER


def _view(fields: dict[str, Any], host: str) -> ServerView:
    kinds = _kinds()
    known = {
        name: msgspec.convert(value, kinds[name], dec_hook=_decode_value)
        for name, value in fields.items()
        if name in kinds
    }
    view = ServerView(**known)
    if not NAME.fullmatch(view.name):
        raise ValueError("a server's name is invalid")
    # Its GPU indices are not this machine's.
    return replace(view, name=f"{host}/{view.name}", ours=False, remote=host, remote_ours=view.ours, gpus=())


@cache
def _kinds() -> dict[str, Any]:
    """The type of each transmitted field."""
    from vllm_console.diagnosis.finding import Diagnosis, Finding
    from vllm_console.diagnosis.objectives import Judged
    from vllm_console.load.tuner_progress import TunerProgress

    names: dict[str, Any] = {
        "Diagnosis": Diagnosis, "Finding": Finding, "Judged": Judged, "TunerProgress": TunerProgress
    }  # fmt: skip
    names |= dict.fromkeys(("Marker", "ProbeView", "Startup"), object)
    hints = get_type_hints(ServerView, vars(snapshot_module), names)
    return {name: hints[name] for name in ServerView.__struct_fields__ if name not in LEFT_OUT}


def _decode_value(kind: Any, raw: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Value):
        return wire.from_plain(kind, raw)
    raise NotImplementedError
