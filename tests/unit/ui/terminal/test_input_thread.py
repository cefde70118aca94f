"""Keys are read without polling: the thread sleeps until a key arrives or it is ended."""

from __future__ import annotations

import os
import select

from vllm_console.ui.terminal.driver import ConsoleDriver, WakingEvent


def test_event_is_readable_while_it_is_set() -> None:
    """It wakes a thread that waits for keys, once or for as long as it is set."""
    event = WakingEvent()
    assert not select.select([event.descriptor], [], [], 0)[0]
    event.set()
    event.set()
    assert select.select([event.descriptor], [], [], 0)[0] == [event.descriptor]
    assert event.is_set()
    event.clear()
    assert not select.select([event.descriptor], [], [], 0)[0]
    assert not event.is_set()
    event.clear()  # clearing an unset event: nothing to read, and it does not block


def test_keys_are_read_after_invalid_utf8(monkeypatch) -> None:
    """For example from a terminal with another encoding, or after pasting binary data."""
    driver = ConsoleDriver.__new__(ConsoleDriver)
    reads, writes = os.pipe()
    driver.fileno, driver._debug = reads, False
    driver.exit_event = driver._input_ends = WakingEvent()
    read: list[str] = []
    monkeypatch.setattr(driver, "process_message", lambda event: read.append(event.character))
    os.write(writes, b"a\xff\xfc" + "\u00fc".encode() + b"b")
    os.close(writes)
    driver.run_input_thread()
    os.close(reads)
    assert "".join(read).replace("\ufffd", "") == "a\u00fcb"
