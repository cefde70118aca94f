"""A question that opens late is confirmed only once there was time to read it."""

from __future__ import annotations

import pytest

from vllm_console.ui.screens import dialogs
from vllm_console.ui.screens.dialogs import Confirm, DialogAnswer


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("key", ["y", "p"])
async def test_an_answer_to_a_question_that_has_just_appeared(host, monkeypatch, late, key):
    monkeypatch.setattr(dialogs, "UNREAD_SECONDS", 3600.0)
    purged = []
    other = DialogAnswer("p", "purge", lambda: purged.append(True))
    app = host(lambda: Confirm("Remove chat?", ["Deletes its log."], "remove", late=late, other=other))
    async with app.run_test() as pilot:
        await app.sees("Remove chat?")
        await pilot.press(key)
        if late:
            await app.sees("Remove chat?")
            assert not app.results
            monkeypatch.setattr(dialogs, "UNREAD_SECONDS", 0.0)
            await pilot.press(key)
        await app.lacks("Remove chat?")
        assert app.results == [key == "y"]
        assert bool(purged) is (key == "p")


@pytest.mark.parametrize("key", ["n", "q", "escape"])
async def test_it_can_be_declined_at_once(host, monkeypatch, key):
    monkeypatch.setattr(dialogs, "UNREAD_SECONDS", 3600.0)
    app = host(lambda: Confirm("Stop chat?", [], "stop", late=True))
    async with app.run_test() as pilot:
        await app.sees("Stop chat?")
        await pilot.press(key)
        await app.lacks("Stop chat?")
        assert app.results == [False]
