"""Runs ``vllm-console`` under an audit hook that records started processes, signals and socket connections.

``python watched_program.py FILE [--each]``: with ``--each``, standard input has a JSON list of command lines to run in
sequence; otherwise it runs one command line, given in ``WORDS``. ``ADMIN`` is the path of an administrator's file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

EVENTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "os.kill",
     "os.killpg", "pty.spawn"}
)  # fmt: skip


def watch(path: str) -> None:
    """Install the hook; it cannot be removed."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(event: str, args: tuple[object, ...]) -> None:
        if event in EVENTS or (event == "socket.connect" and isinstance(args[1], str | bytes)):
            os.write(handle, f"{event} {args!r:.300}\n".encode())

    sys.addaudithook(note)


def closed_afterwards() -> list[Any]:
    """Fleets opened by a command from now on; a separate process would close them at exit."""
    from vllm_console.fleet.local import LocalFleet

    opened: list[Any] = []
    begin = LocalFleet.__init__

    def noted(self: LocalFleet, *words: Any, **more: Any) -> None:
        begin(self, *words, **more)
        opened.append(self)

    LocalFleet.__init__ = noted  # type: ignore[method-assign]
    return opened


def run(words: list[str], opened: list[Any]) -> dict[str, object]:
    """Run one command line; ``watch`` is ended after a second."""
    from vllm_console.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    if "watch" in words:
        threading.Timer(1.0, signal.raise_signal, [signal.SIGTERM]).start()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: object = main(words)
    except SystemExit as error:
        code = error.code
    while opened:
        opened.pop().close()
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    import vllm_console.settings as config

    if admin := os.environ.get("ADMIN"):
        config.ADMIN_CONFIG, config.ADMIN_UID = Path(admin), os.getuid()
    watch(sys.argv[1])
    if "--each" in sys.argv:
        opened = closed_afterwards()
        json.dump([run(words, opened) for words in json.load(sys.stdin)], sys.stdout)
    else:
        from vllm_console.cli.main import main

        sys.exit(main(os.environ.get("WORDS", "").split()))
