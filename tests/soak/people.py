"""Console users: each opens the real program in a terminal, presses keys, and exits in a different way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

from fakes.terminal import Terminal
from soak.journal import RUN, STOP, UNSURE, Order
from soak.schedule import Action
from soak.world import PROGRAM, World

END_SECONDS = 400.0
"""Timeout for a console to exit after a request, on the slowest machine."""
BETWEEN_KEYS = 0.15


@contextlib.contextmanager
def console(world: World, action: Action, *words: str) -> Iterator[Terminal]:
    """The program in a terminal, once it shows something. At the end, its screen is searched for secrets."""
    columns, rows = ((80, 24), (120, 40), (200, 60))[action.chance % 3]
    terminal = Terminal([*PROGRAM, *words], columns, rows, world.env)
    try:
        terminal.wait_for("Servers", END_SECONDS)
        yield terminal
    finally:
        terminal.close()
        world.look_at(f"the screen of {action}", bytes(terminal.raw).decode(errors="replace") + terminal.text)
        world.journal.happened(action.kind)


def _type(terminal: Terminal, keys: tuple[str, ...]) -> None:
    for key in keys:
        if terminal.process.poll() is not None:
            return
        terminal.press(key)
        until = time.monotonic() + BETWEEN_KEYS
        while (left := until - time.monotonic()) > 0:
            terminal.pump(left)


def _leave(world: World, action: Action, terminal: Terminal, wanted: tuple[int, ...] = (0,)) -> str:
    """Wait for it to exit; it must have restored the terminal."""
    code = terminal.wait_end(END_SECONDS)
    if code not in wanted:
        world.journal.blame(f"{action}: it ended with {code}\n{terminal.text}")
    if not terminal.restored():
        world.journal.blame(f"{action}: the terminal was not given back: {bytes(terminal.raw[-300:])!r}")
    return f"exit {code}"


def quits(world: World, action: Action) -> str:
    """Press ``ctrl+q`` on any screen."""
    with console(world, action) as terminal:
        _type(terminal, action.words)
        return _quit(world, action, terminal)


def _quit(world: World, action: Action, terminal: Terminal) -> str:
    deadline = time.monotonic() + END_SECONDS
    while terminal.process.poll() is None and time.monotonic() < deadline:
        _type(terminal, ("\x1b", "\x1b", "\x1b", "\x11"))
        until = time.monotonic() + 2.0
        while terminal.process.poll() is None and time.monotonic() < until:
            terminal.pump(0.1)
    return _leave(world, action, terminal)


def is_killed(world: World, action: Action) -> str:
    with console(world, action) as terminal:
        _type(terminal, action.words)
        world.journal.kill(terminal.process.pid)
        terminal.process.kill()
        terminal.process.wait(END_SECONDS)
    return "SIGKILL"


def is_ended(world: World, action: Action) -> str:
    with console(world, action) as terminal:
        _type(terminal, action.words)
        terminal.process.send_signal(signal.SIGTERM)
        return _leave(world, action, terminal, wanted=(0, 143))


def is_hung_up(world: World, action: Action) -> str:
    """SIGHUP to its whole session, as sshd sends it."""
    with console(world, action) as terminal:
        _type(terminal, action.words)
        os.killpg(terminal.process.pid, signal.SIGHUP)
        return _leave(world, action, terminal, wanted=(0, 129))


def is_closed(world: World, action: Action) -> str:
    with console(world, action) as terminal:
        _type(terminal, action.words)
        terminal.hang_up()
        try:
            terminal.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            world.journal.blame(f"{action}: it goes on without its terminal")
    return "closed"


def may_only_look(world: World, action: Action) -> str:
    """``--read-only`` with arbitrary keys: any change would count as an unrequested order."""
    with console(world, action, "--read-only") as terminal:
        _type(terminal, action.words)
        return _quit(world, action, terminal)


def acts(world: World, action: Action) -> str:
    """Filter for one server, then restart or stop it and confirm."""
    with console(world, action) as terminal:
        began = time.time()
        _type(terminal, ("/",))
        terminal.wait_for("name, model, preset", END_SECONDS)
        _type(terminal, (*action.server, "\r"))
        terminal.wait_for(f"Servers matching '{action.server}'", END_SECONDS)
        _type(terminal, (*action.words[0], "y"))
        wanted = frozenset({RUN, STOP})
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            terminal.pump(0.2)
        left = _quit(world, action, terminal)
        world.journal.order(Order(action.server, wanted, began, time.time(), UNSURE))
        return left
