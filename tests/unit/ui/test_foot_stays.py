"""The foot stands at the foot of the screen, however long the message is and whichever pane is shown."""

from __future__ import annotations

from pathlib import Path

from vllm_launchers.machine.gpu.document import read_host

LONG = (
    "A sentence that is a good deal longer than eighty cells, so that it takes a second line of the screen, or a third."
)


async def test_the_keys_stay_in_sight_beside_the_gpus(console, fakes):
    fleet = fakes.FakeFleet(*fakes.EVERY_STATE)
    fleet.gpus = {"host": read_host(Path("8xh100"))}
    async with console(fleet=fleet, size=(80, 24)) as c:
        screen = c.app.operations

        async def stands() -> None:
            await c.until(lambda: screen._message.size.height > 1, "a message of two lines")
            await c.sees("NV18")
            await c.until(lambda: "q quit" in c.text.splitlines()[-1], "the keys in the last line")
            assert screen.max_scroll_y == 0

        c.app.say(LONG)
        await c.press("6")
        await stands()
        c.app._forget_message()
        await c.until(lambda: screen._message.size.height == 1)
        assert "q quit" in c.text.splitlines()[-1]
        c.app.say(LONG)
        await stands()
        await c.press("j", "left_square_bracket", "left_curly_bracket")
        await stands()
