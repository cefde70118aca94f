"""Keys are read without asking for them again and again: the thread sleeps until there is one, or until it is ended."""

from __future__ import annotations

import select

from vllm_console.ui.terminal.driver import WakingEvent


def test_an_event_is_readable_while_it_is_set() -> None:
    """A thread that waits for keys is woken by it, once or for as long as it is set."""
    event = WakingEvent()
    assert not select.select([event.descriptor], [], [], 0)[0]
    event.set()
    event.set()
    assert select.select([event.descriptor], [], [], 0)[0] == [event.descriptor]
    assert event.is_set()
    event.clear()
    assert not select.select([event.descriptor], [], [], 0)[0]
    assert not event.is_set()
    event.clear()  # of one that is not set: nothing to read, and it does not wait
