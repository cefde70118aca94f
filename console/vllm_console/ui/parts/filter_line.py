"""Which servers a filter lets through, and the line it is typed into."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Input

from vllm_console.fleet.snapshot import ServerView
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import LineView, line
from vllm_console.ui.theme import DIM, KEY, WARN
from vllm_launchers.keeper.records import State
from vllm_launchers.patterns import lazy_pattern

if TYPE_CHECKING:
    from vllm_launchers.host.gpu.host import Host

_GPU = lazy_pattern(r"\bgpu[ :]+(?=\d)")


def matches(text: str, server: ServerView, host: Host | None) -> bool:
    """Whether a server's facts hold every word of a filter: name, model, preset, state, owner, host, port, GPUs.

    A GPU is written as ``gpu0``, ``gpu 0`` or by its name. A machine that can't be reached always passes: nobody knows
    which of its servers would.
    """
    words = _GPU.sub("gpu", text.casefold()).split()
    if not words or (server.machine and server.state is State.UNRESPONSIVE):
        return True
    gpus = [gpu for gpu in (host.gpus if host is not None else ()) if gpu.index in server.gpus]
    facts = [server.name, server.model, server.preset, server.state_text, "you" if server.ours else "", server.owner]
    facts += [server.where]
    facts += [*(f"gpu{index}" for index in server.gpus), *(gpu.name or "" for gpu in gpus)]
    facts += [f":{server.port}"] if server.port else []
    known = [fact.casefold() for fact in facts]
    return all(any(_holds(fact, word) for fact in known) for word in words)


def _holds(fact: str, word: str) -> bool:
    """Whether a fact holds a word; ``gpu1`` is not GPU 10."""
    return fact == word if re.fullmatch(r"gpu\d+", word) and fact.startswith("gpu") else word in fact


class FilterLine(Horizontal):
    """A prompt, what is typed, and how many servers match. Its input has the id ``filter``."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.display = False
        hint = "name, model, preset, state, gpu0, :8000, owner"
        self._input = Input(id="filter", placeholder=hint, compact=True, select_on_focus=False)
        self._count = LineView(id="filter-count")

    def compose(self) -> ComposeResult:
        """Prompt, input, count."""
        yield LineView(id="filter-prompt")
        yield self._input
        yield self._count

    def on_mount(self) -> None:
        """Show the prompt, which is as wide as its text."""
        text = f" {key_of('filter')} "
        prompt = self.query_one("#filter-prompt", LineView)
        prompt.styles.width = cell_len(text)
        prompt.show([line((text, KEY))])

    def open(self, text: str) -> None:
        """Let a filter be typed, beginning with ``text``."""
        self.display = True
        self._input.value = text
        self.screen.set_focus(self._input)  # at once: keys typed next are for it

    def close(self) -> None:
        """Away with it."""
        self.display = False
        self.screen.set_focus(None)

    def show_count(self, matching: int, every: int) -> None:
        """Say how many servers match."""
        number, clears = f"{matching} of {every}", f" · {key_of('clear')} clears "
        self._count.styles.width = cell_len(number + clears)
        self._count.show([line((number, None if matching else WARN), (clears, DIM))])
