"""The palette lists what can be done on the screen that it is opened on, and nothing else."""

from __future__ import annotations

from textual.command import CommandPalette
from textual.widgets import OptionList


async def opened(c):
    await c.press("ctrl+p")
    await c.until(lambda: isinstance(c.app.screen, CommandPalette))
    options = c.app.screen.query_one(OptionList)
    await c.until(lambda: options.option_count > 3)
    return "\n".join(str(options.get_option_at_index(at).prompt) for at in range(options.option_count))


async def test_on_what_is_read_only_what_holds_everywhere(console):
    async with console() as c:
        assert "Restart the selected server" in await opened(c)
        await c.press("escape")
        for key in ("d", "i", "question_mark"):
            await c.press(key)
            await c.until(lambda: c.app.screen is not c.app.operations)
            listed = await opened(c)
            assert "Restart the selected server" not in listed, key
            assert "Quit; servers stay up" in listed
            await c.press("escape", "escape")
            await c.until(lambda: c.app.screen is c.app.operations)


async def test_none_over_a_question(console):
    async with console() as c:
        await c.press("s")
        await c.sees("Stop chat?")
        await c.press("ctrl+p")
        await c.press("n")
        await c.until(lambda: c.app.screen is c.app.operations, "the question was answered, not a palette")
