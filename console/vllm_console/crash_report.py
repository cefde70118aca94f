"""Reports of unexpected exceptions, with secrets redacted, and a sentence that says where the report is."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from vllm_console import __version__
from vllm_console.text import plain
from vllm_launchers.secrets import is_secret_name, redact, redact_argv

FOLDER = "crashes"
KEPT = 20
"""Maximum number of reports; older ones are deleted."""

SHORTEST_SECRET = 8
"""Minimum length of secret variables' values to redact everywhere; shorter values would match common words."""


def write_report(error: BaseException, words: Sequence[str], state: Path | None = None, *, demo: bool = False) -> str:
    """Write a report of an unexpected exception; return the sentence to show.

    ``words`` is the command line, ``state`` the state folder if it is not the default. Never raises for disk errors:
    the sentence then includes the report's content. The ``demo`` always stops its servers when it ends.
    """
    what = plain(_blank(f"{type(error).__name__}: {error}").splitlines()[0])[:300]
    fault = f"internal error: {what}. {'The demo has stopped its servers' if demo else 'Servers keep running'}"
    text = report(error, words)
    try:
        path = _write(text, state)
    except OSError as trouble:
        why = os.strerror(trouble.errno or 0)
        return f"{fault}. The report could not be saved ({why}):\n{text}"
    return f"{fault}. The report {path} has secrets redacted; please attach it to an issue"


def report(error: BaseException, words: Sequence[str]) -> str:
    """The report: versions, command line and traceback; no variable values, secrets redacted."""
    lines = [
        f"vllm-console {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}, pid {os.getpid()}",
        f"terminal {os.environ.get('TERM', 'unknown')}, "
        + ("over SSH" if "SSH_CONNECTION" in os.environ else "not over SSH")
        + (", in tmux" if "TMUX" in os.environ else ""),
        "command " + " ".join(["vllm-console", *redact_argv(words)]),
        "",
        "".join(traceback.format_exception(error)),
    ]
    return "\n".join(plain(line) for line in _blank("\n".join(lines)).splitlines()) + "\n"


def reports(state: Path) -> list[Path]:
    """The reports below a state folder, newest last."""
    with contextlib.suppress(OSError):
        return sorted((state / FOLDER).glob("crash-*.txt"))
    return []


def _blank(text: str) -> str:
    values = [value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= SHORTEST_SECRET]
    return redact(text, values)


def _write(text: str, state: Path | None) -> Path:
    from vllm_launchers.keeper.folders import default_root
    from vllm_launchers.private import open_file, own_folder

    state = state or default_root()
    folder = state / FOLDER
    own_folder(state)
    own_folder(folder)
    path = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}.txt"
    opened = open_file(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
    with os.fdopen(opened, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    for old in reports(state)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def in_threads(words: Sequence[str], state: Path | None, messages: list[str], *, demo: bool = False) -> None:
    """From now on, report exceptions that end a thread, and add their sentence to ``messages``.

    Python would print them over the screen. A lost terminal is not reported, because there is no screen left to show
    it.
    """

    def hook(args: threading.ExceptHookArgs) -> None:
        gone = isinstance(args.exc_value, OSError) and args.exc_value.errno == errno.EIO
        if args.exc_value is not None and not gone and not isinstance(args.exc_value, SystemExit):
            messages.append(write_report(args.exc_value, words, state, demo=demo))

    threading.excepthook = hook
