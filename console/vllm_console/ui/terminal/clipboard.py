"""Copy text to the terminal's clipboard with OSC 52; inside tmux, which ignores that by default, to tmux's buffer."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial

from textual.app import App

from vllm_console.text import plain
from vllm_console.ui.threads import in_thread

TMUX_SECONDS = 3.0
"""How long tmux may take to accept a text."""


def copy(app: App[None], text: str, what: str, say: Callable[[str], object]) -> None:
    """Copy ``text`` and report where it went; ``what`` names it at the start of the sentence."""
    app.copy_to_clipboard(text)
    if not os.environ.get("TMUX"):
        say(f"{what} copied to the terminal's clipboard (OSC 52).")
        return

    async def to_tmux() -> None:
        wrong = await in_thread(partial(load_tmux_buffer, text), "tmux buffer")
        if wrong:
            say(f"{what} not copied: {wrong}. Sent by OSC 52, which tmux ignores unless set-clipboard is on.")
        else:
            say(f"{what} copied to tmux's buffer: prefix ] pastes it.")

    app.run_worker(to_tmux(), name="copy", group="copy")


def load_tmux_buffer(text: str) -> str:
    """Put ``text`` into the buffer of the surrounding tmux; returns an error message, or an empty string.

    ``-w`` makes tmux pass it on to its own terminal's clipboard; tmux before 3.2 lacks that flag. Blocks for a few
    seconds at most.
    """
    tmux = shutil.which("tmux")
    if tmux is None:
        return "there is no tmux command on PATH"
    wrong = ""
    for flags in (["-w"], []):
        try:
            done = subprocess.run(
                [tmux, "load-buffer", *flags, "-"],
                input=text.encode(errors="replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=TMUX_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"tmux did not accept it within {TMUX_SECONDS:.0f}s"
        except OSError as error:
            return f"tmux could not be run: {error.strerror}"
        if done.returncode == 0:
            return ""
        wrong = plain(done.stderr.decode(errors="replace").strip(), 120) or f"tmux exited with {done.returncode}"
    return wrong
