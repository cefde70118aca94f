"""While the console is paused, it says so, shows what is selected, and draws as usual."""

from __future__ import annotations


async def test_a_server_gone_to_is_polled_at_once(console):
    async with console() as c:
        await c.press("space")
        await c.sees("paused")
        await c.until(lambda: c.app._wake.is_set() is False)
        looks = c.fleet.looks
        await c.press("j")
        await c.until(lambda: c.app.snapshot.server("coder").series is not None, "the chart of the newly selected")
        assert c.app.polling.paused
        assert c.fleet.looks == looks + 1
        await c.lacks("waiting for")


async def test_what_is_shown_is_live_only_once_there_is_a_new_snapshot(console):
    async with console() as c:
        await c.sees("live · ")
        await c.press("space")
        await c.sees("paused")
        await c.until(lambda: c.app._wake.is_set() is False)
        c.fleet.open.clear()
        shown = c.app.snapshot
        await c.press("space")
        await c.sees("resuming")
        assert c.app.snapshot is shown
        assert "live · " not in c.text
        c.fleet.open.set()
        await c.sees("live · ")
        assert c.app.snapshot is not shown
        await c.lacks("resuming")


async def test_a_pause_before_a_new_snapshot_is_a_pause(console):
    async with console() as c:
        await c.press("space")
        await c.sees("paused")
        await c.until(lambda: c.app._wake.is_set() is False)
        c.fleet.open.clear()
        await c.press("space", "space")
        await c.sees("paused")
        assert "resuming" not in c.text
        c.fleet.open.set()


async def test_what_gets_another_size_is_drawn_for_it(console):
    """For example after a filter that matched fewer rows; nothing else requests a redraw before the next poll."""
    async with console() as c:
        await c.press("space")
        await c.sees("paused")
        await c.until(lambda: c.app._wake.is_set() is False)
        await c.until(lambda: "loading" not in c.text, "the charts")  # when they arrive, the table is drawn again
        c.app.operations._table.styles.height = 5
        await c.until(lambda: "nightly" not in c.text, "a table of three servers")
        c.app.operations.redraw()  # should restore its height, but has not yet
        await c.sees("nightly")
        await c.press("5")
        await c.until(
            lambda: any("5 Log" in row and len(row) == 120 for row in c.text.splitlines()), "all of its title"
        )


async def test_a_message_goes_after_its_time(console, monkeypatch):
    monkeypatch.setattr("vllm_console.ui.parts.messages.MESSAGE_SECONDS", 0.05)
    async with console() as c:
        await c.press("space")
        await c.press("y")
        await c.until(lambda: c.app.message is None, "the message goes")
        await c.lacks("copied")


async def test_a_message_says_that_figures_are_frozen_until_they_are_not(console):
    async with console() as c:
        await c.press("space")
        await c.sees("Paused: figures are frozen. space resumes.")
        await c.press("space")
        await c.lacks("figures are frozen")


async def test_every_verb_is_followed_by_a_poll(console):
    async with console() as c:
        for keys in (["b"], ["n"], ["x", "y"]):
            if not c.app.polling.paused:
                await c.press("space")
            await c.until(lambda: c.app.polling.paused and not c.app._wake.is_set())
            looks = c.fleet.looks
            await DO[keys[0]](c)
            await c.until(lambda looks=looks: c.fleet.looks > looks, f"a look after {keys}")
            assert c.app.polling.paused


async def load(c):
    await c.press("b", "y")


async def launch(c):
    await c.press("n")
    await c.until(lambda: c.app.screen is not c.app.operations and c.app.screen.planner.fresh, "a plan")
    await c.press("ctrl+s", "ctrl+s")
    await c.until(lambda: c.app.screen is c.app.operations, "launched")


async def stop(c):
    await c.press("s")
    await c.until(lambda: c.app.screen is not c.app.operations, "a question")
    await c.press("y")


DO = {"b": load, "n": launch, "x": stop}


async def test_a_question_leaves_the_picture_as_it_is(console):
    async with console() as c:
        await c.press("space")
        await c.until(lambda: c.app.polling.paused and not c.app._wake.is_set())
        looks = c.fleet.looks
        c.app.act("", lambda: "It was told.", lambda answer: answer, once="question")
        await c.sees("It was told.")
        c.app.act("", lambda: "more", lambda answer: answer, once="question")
        await c.sees("more")
        assert c.fleet.looks == looks


async def test_space_turns_the_page_of_what_is_read(console):
    async with console(size=(80, 12)) as c:
        for key in ("d", "i", "question_mark"):
            await c.press(key)
            await c.until(lambda: c.app.screen is not c.app.operations)
            await c.press("space")
            assert not c.app.polling.paused, key
            await c.press("escape")


async def test_space_shows_what_follows(console):
    async with console(size=(80, 24)) as c:
        await c.press("question_mark")
        await c.sees("Now: chat")
        await c.press("space")
        await c.until(lambda: "Now: chat" not in c.text, "the next page")
        await c.press("home")
        await c.sees("Now: chat")
