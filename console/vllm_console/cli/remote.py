"""``vllm-console remote``: serve a console on another machine over standard input and output, through ssh."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from vllm_console import __version__
from vllm_console.cli.fleet_access import open_fleet
from vllm_launchers.errors import OperationError
from vllm_launchers.secrets import redact

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Set the description; the command has no arguments."""
    parser.description = (
        "Serve a console on another machine that has attached this one (attach ssh://HOST) and runs this command over "
        "ssh. It reads requests from standard input and writes answers to standard output, one JSON object per line."
    )


def run(args: argparse.Namespace) -> int:
    """Answer requests until the input ends."""
    from vllm_console.fleet.remote_protocol import LONGEST_LINE, PROTOCOL, ProtocolError, decode

    fleet = open_fleet(args, interactive=True, remote=False)
    answers = _Answers(fleet)
    try:
        hello = {"protocol": PROTOCOL, "version": __version__, "host": os.uname().nodename}
        answers.send({"hello": hello})
        while line := sys.stdin.buffer.readline(LONGEST_LINE):
            try:
                request = decode(line)
            except ProtocolError:
                return 1
            if request.get("do") == "snapshot":
                answers.answer(request)
            else:  # a verb takes long, and snapshots must continue
                threading.Thread(target=answers.answer_apart, args=(request,), daemon=True).start()
    except BrokenPipeError:
        return 0
    finally:
        fleet.close()
    return 0


class _Answers:
    """Answers the other console's requests, each with one line."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Write a line. Raises BrokenPipeError."""
        from vllm_console.fleet.remote_protocol import encode

        with self._lock:
            sys.stdout.write(encode(message).decode())
            sys.stdout.flush()

    def answer(self, request: dict[str, Any]) -> None:
        """Answer a request; a refusal by the fleet is an answer, too. Raises BrokenPipeError."""
        from vllm_console.fleet.remote_protocol import error_document

        try:
            found = self._result(request)
        except OperationError as error:
            found = {"error": error_document(error)}
        except Exception as error:  # noqa: BLE001 - request boundary: the other side waits for an answer
            found = {"error": {"message": f"unexpected error: {redact(repr(error))}", "code": OperationError.exit_code}}
        self.send({"id": request.get("id"), **found})

    def answer_apart(self, request: dict[str, Any]) -> None:
        """`answer`, in its own thread. A vanished client is noticed where requests are read."""
        with contextlib.suppress(BrokenPipeError):
            self.answer(request)

    def _result(self, request: dict[str, Any]) -> dict[str, Any]:
        from vllm_console.fleet.remote_protocol import decode_changes, decode_options, snapshot_document

        name = request.get("name")
        match request.get("do"):
            case "snapshot":
                selected = request.get("selected")
                found = self._fleet.snapshot(selected if isinstance(selected, str) else None)
                return {"snapshot": snapshot_document(found)}
            case "stop" if isinstance(name, str):
                self._fleet.stop(name)
            case "restart" if isinstance(name, str):
                options = decode_options(request.get("options"))
                self._fleet.restart(name, decode_changes(request.get("changes")), options)
            case _:
                raise OperationError("this vllm-console does not support the request: update it")
        return {"done": True}
