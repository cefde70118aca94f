"""What is left of an unexpected exception: a report with secrets blanked, and one sentence that says where it lies."""

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
"""Older reports go."""

SHORTEST_SECRET = 8
"""Values of secret variables from this length on are blanked wherever they stand; shorter ones would blank words."""


def tell(error: BaseException, words: Sequence[str], state: Path | None = None) -> str:
    """Write a report of what was not expected; the sentence for the person who saw it happen.

    ``words`` are the command line's, ``state`` the state folder if it is not the usual one. Never raises for the disk's
    sake: then the sentence holds what a report would.
    """
    what = plain(_blank(f"{type(error).__name__}: {error}").splitlines()[0])[:300]
    fault = f"a fault of this program, not of yours: {what}. Servers go on"
    text = report(error, words)
    try:
        path = _write(text, state)
    except OSError as trouble:
        why = os.strerror(trouble.errno or 0)
        return f"{fault}. No report could be written ({why}), so here it is:\n{text}"
    return f"{fault}. The report {path} (secrets blanked) helps to mend it; please attach it to an issue"


def report(error: BaseException, words: Sequence[str]) -> str:
    """The report: versions, command line and where it happened; no values of variables, secrets blanked."""
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
    """The reports below a state folder, the newest last."""
    with contextlib.suppress(OSError):
        return sorted((state / FOLDER).glob("crash-*.txt"))
    return []


def _blank(text: str) -> str:
    values = [value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= SHORTEST_SECRET]
    return redact(text, values)


def _write(text: str, state: Path | None) -> Path:
    from vllm_launchers.keeper.store import default_root
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


def in_threads(words: Sequence[str], state: Path | None, told: list[str]) -> None:
    """From now on an exception that ends a thread is reported, and its sentence added to ``told``.

    Python would print it over the screen. That the terminal is gone is no fault: nobody is there to be told either.
    """

    def hook(args: threading.ExceptHookArgs) -> None:
        gone = isinstance(args.exc_value, OSError) and args.exc_value.errno == errno.EIO
        if args.exc_value is not None and not gone and not isinstance(args.exc_value, SystemExit):
            told.append(tell(args.exc_value, words, state))

    threading.excepthook = hook
