"""The server filter and its input."""

from __future__ import annotations

import re

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Input

from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import LineView, line
from vllm_console.ui.theme import DIM, KEY, WARN
from vllm_launchers.keeper.records import State
from vllm_launchers.patterns import lazy_pattern

_GPU = lazy_pattern(r"\bgpu[ :]+(?=\d)")


def matches(text: str, server: ServerView, snapshot: FleetSnapshot) -> bool:
    """Whether each word of a filter matches a server's name, model, preset, state, owner, host, port or GPUs.

    ``sim`` matches simulated engines, whose names the table marks with it. A GPU is written as ``gpu0``, ``gpu 0`` or
    by its name. An unreachable machine always matches, since its servers are unknown.
    """
    words = _GPU.sub("gpu", text.casefold()).split()
    if not words or (server.machine and server.state is State.UNRESPONSIVE):
        return True
    host, on = snapshot.host, snapshot.gpus_of(server)
    gpus = [gpu for gpu in (host.gpus if host is not None else ()) if gpu.index in on]
    facts = [server.marked_name, server.model, server.preset, server.state_text, server.owner, server.where]
    facts += ["you"] if server.ours else []
    facts += [*(f"gpu{index}" for index in server.gpus), *(gpu.name or "" for gpu in gpus)]
    facts += [f":{server.port}"] if server.port else []
    known = [fact.casefold() for fact in facts]
    return all(any(_holds(fact, word) for fact in known) for word in words)


def _holds(fact: str, word: str) -> bool:
    """Whether a fact matches a word; ``gpu1`` does not match ``gpu10``."""
    return fact == word if re.fullmatch(r"gpu\d+", word) and fact.startswith("gpu") else word in fact


class FilterLine(Horizontal):
    """A prompt, the input (with id ``filter``), and the number of matching servers."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.display = False
        hint = "name, model, preset, state, gpu0, :8000, owner"
        self._input = Input(id="filter", placeholder=hint, compact=True, select_on_focus=False)
        self._count = LineView(id="filter-count")

    def compose(self) -> ComposeResult:
        """Yield prompt, input and count."""
        yield LineView(id="filter-prompt")
        yield self._input
        yield self._count

    def on_mount(self) -> None:
        """Show the prompt and size it to its text."""
        text = f" {key_of('filter')} "
        prompt = self.query_one("#filter-prompt", LineView)
        prompt.styles.width = cell_len(text)
        prompt.show([line((text, KEY))])

    def open(self, text: str) -> None:
        """Open the input with ``text``."""
        self.display = True
        self._input.value = text
        self.screen.set_focus(self._input)  # right away: the next keys belong to it

    def close(self) -> None:
        """Hide the filter input."""
        self.display = False
        self.screen.set_focus(None)

    def show_count(self, matching: int, every: int) -> None:
        """Show how many servers match."""
        number, clears = f"{matching} of {every}", f" · {key_of('clear')} clears "
        self._count.styles.width = cell_len(number + clears)
        self._count.show([line((number, None if matching else WARN), (clears, DIM))])
