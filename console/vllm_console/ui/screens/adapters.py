"""Loading and unloading LoRA adapters of a running server: a small dialog."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from textual.strip import Strip

from vllm_console.fleet.adapters import limits_text, request_states
from vllm_console.text import count, plain, size
from vllm_console.ui.screens.dialogs import LineDialog
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import DIM, KEY, STRONG, WARN
from vllm_console.ui.widgets.draw import fit
from vllm_launchers.errors import UsageError

if TYPE_CHECKING:
    from vllm_console.fleet.adapters import Adapter, Adapters, Loaded
    from vllm_console.fleet.snapshot import ServerView
    from vllm_console.ui.app import ConsoleApp

MOST_SHOWN = 8

UNLOAD = "unload"


class AdapterDialog(LineDialog):
    """Shows the adapters and takes one line, ``NAME FOLDER`` or ``unload NAME``."""

    def __init__(self, found: Adapters) -> None:
        super().__init__("adapter", "load or unload", partial(_adapter_lines, found), parse_adapter_line)


def _adapter_lines(found: Adapters, width: int, rows: int) -> list[Strip]:
    """The adapters that fit, their number's limit, and how to load and unload one."""
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
    """An adapter in a line: name, requests, rank, size."""
    rank = f"rank {count(one.rank)}" if one.rank is not None else "rank unknown"
    return f"{one.name}  requests: {request_states(one)}  {rank}  {size(one.size)}"


def parse_adapter_line(text: str) -> tuple[str, str]:
    """An adapter's name and its folder, which is empty where it is to be unloaded.

    Raises:
        UsageError: it can't be understood.
    """
    name, _, rest = text.strip().partition(" ")
    if not name or not rest.strip():
        raise UsageError(f"type a name and a folder, or {UNLOAD} and a name")
    return (rest.strip(), "") if name == UNLOAD else (name, rest.strip())


def change_adapters(console: ConsoleApp, server: ServerView) -> None:
    """Ask what to load into a server of one's own or unload from it, and do it."""
    fleet, name = console.fleet, server.name

    def ask(found: Adapters) -> str:
        if found.fixed:
            # A command of another terminal does not know the demo's servers.
            console.say(f"{found.unable if console.polling.demo else found.fixed}.", WARN, about=name)
        elif console.operations.on_top:
            console.push_screen(AdapterDialog(found), typed)
        return ""

    def typed(text: str | None) -> None:
        if text is None:
            return
        adapter, folder = parse_adapter_line(text)
        if folder:
            load = partial(fleet.load_adapter, name, adapter, folder)
            console.act(f"Loading {adapter}…", load, done("served"), about=name)
        else:
            unload = partial(fleet.unload_adapter, name, adapter)
            console.act(f"Unloading {adapter}…", unload, done("unloaded"), about=name)

    def done(how: str) -> Callable[[Loaded], str]:
        def message(found: Loaded) -> str:
            return "; ".join([f"{name}: {found.name} is {how}", *found.notes]) + "."

        return message

    console.act("", lambda: fleet.adapters(name), ask, about=name, once=f"adapters of {name}")
