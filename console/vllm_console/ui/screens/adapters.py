"""A dialog that loads and unloads a running server's LoRA adapters."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.strip import Strip

from vllm_console.fleet.adapters import limits_text, request_states
from vllm_console.text import count, plain, size
from vllm_console.ui.screens.dialogs import LineDialog
from vllm_console.ui.terminal.clipboard import copy
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import DIM, KEY, STRONG
from vllm_console.ui.widgets.draw import fit
from vllm_launchers.errors import UsageError

if TYPE_CHECKING:
    from vllm_console.fleet.adapters import Adapter, Adapters, Loaded
    from vllm_console.fleet.snapshot import ServerView
    from vllm_console.ui.app import ConsoleApp

MOST_SHOWN = 8

UNLOAD = "unload"


class AdapterDialog(LineDialog):
    """Shows the adapters and reads one line: ``NAME FOLDER`` or ``unload NAME``."""

    def __init__(self, console: ConsoleApp, found: Adapters) -> None:
        super().__init__(
            "adapter", "load or unload", f"name and folder, or {UNLOAD} and a name", partial(_adapter_lines, found)
        )
        self._main, self._server = console, found.server

    def take(self, text: str) -> str:
        """Load or unload the named adapter."""
        fleet, server = self._main.fleet, self._server
        adapter, folder = parse_adapter_line(text)

        def done(found: Loaded) -> str:
            self.done()
            how = "served" if folder else "unloaded"
            return "; ".join([f"{server}: {found.name} is {how}", *found.notes]) + "."

        if folder:
            self._main.act("", lambda: fleet.load_adapter(server, adapter, folder), done, self.refuse, about=server)
            return f"loading {adapter}…"
        self._main.act("", lambda: fleet.unload_adapter(server, adapter), done, self.refuse, about=server)
        return f"unloading {adapter}…"


def _adapter_lines(found: Adapters, width: int, rows: int) -> list[Strip]:
    adapters = [adapter_text(one) for one in found.adapters[: max(1, min(MOST_SHOWN, rows - 6))]]
    if left := len(found.adapters) - len(adapters):
        adapters.append(f"and {left} more: vllm-console lora list {found.server}")
    return [
        line((fit(plain(f"LoRA adapters of {found.server}"), width).rstrip(), STRONG)),
        line((fit(limits_text(found), width).rstrip(), DIM)),
        *(line(fit(plain(text), width).rstrip()) for text in adapters or ["It serves none."]),
        line(),
        line("name and folder:  ", ("poems ~/adapters/poems", KEY)),
        line("to unload one:    ", (f"{UNLOAD} poems", KEY)),
    ]


def adapter_text(one: Adapter) -> str:
    """One line about an adapter: name, requests, rank, size."""
    rank = f"rank {count(one.rank)}" if one.rank is not None else "rank unknown"
    return f"{one.name}  requests: {request_states(one)}  {rank}  {size(one.size)}"


def parse_adapter_line(text: str) -> tuple[str, str]:
    """Parse an adapter's name and folder; the folder is empty to unload it.

    Raises:
        UsageError: the text can't be parsed.
    """
    name, _, rest = text.strip().partition(" ")
    if not name or not rest.strip():
        raise UsageError(f"type a name and a folder, or {UNLOAD} and a name")
    return (rest.strip(), "") if name == UNLOAD else (name, rest.strip())


def change_adapters(console: ConsoleApp, server: ServerView) -> None:
    """Open the adapter dialog, or explain why this server can't load adapters."""

    def ask(found: Adapters) -> str:
        if found.unable:
            _explain(console, found)
        else:
            console.push_screen(AdapterDialog(console, found))
        return ""

    once = f"adapters of {server.name}"
    console.late_screens.open("", lambda: console.fleet.adapters(server.name), ask, once=once, about=server.name)


def _explain(console: ConsoleApp, found: Adapters) -> None:
    """Explain why no adapter can be loaded, with the command that changes it."""
    demo = console.polling.demo  # commands in another terminal don't see the demo's servers
    command = found.command_for("NAME" if demo else found.server)
    how = "For a server of your own:" if demo else "To allow that, restart it:"
    yes, then = "" if demo else "copy the command", partial(copy, console, command, "Command", console.say)
    question = f"{found.server} can't load LoRA adapters"
    console.operations.verbs.ask(question, [f"{found.unable}. {how}", command], yes, then)
