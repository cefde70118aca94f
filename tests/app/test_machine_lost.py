"""A machine whose connection is lost is one row instead of its servers, which come back unchanged."""

from __future__ import annotations

from functools import partial


def selected(c):
    return c.app.operations.selected_name


async def test_the_cursor_waits_on_the_machine_and_returns_to_its_server(console, fakes):
    first, second = partial(fakes.there, name="box/bulk"), fakes.there
    async with console(fakes.chat, first, second) as c:
        await c.press("G")
        await c.until(lambda: selected(c) == "box/chat")
        c.fleet.makers = [fakes.chat, fakes.lost]
        await c.until(lambda: selected(c) == "box")
        await c.sees("No route to host")
        c.fleet.makers = [fakes.chat, first, second]
        await c.until(lambda: selected(c) == "box/chat")


async def test_the_cursor_does_not_return_once_it_was_moved(console, fakes):
    async with console(fakes.chat, fakes.there) as c:
        await c.press("G")
        c.fleet.makers = [fakes.chat, fakes.lost]
        await c.until(lambda: selected(c) == "box")
        await c.press("k")
        c.fleet.makers = [fakes.chat, fakes.there]
        await c.sees("box/chat")
        assert selected(c) == "chat"


async def test_the_cursor_stays_on_the_machine_if_its_server_is_gone(console, fakes):
    other = partial(fakes.there, name="box/other")
    async with console(fakes.chat, fakes.there, fakes.docs) as c:
        await c.press("down")
        await c.until(lambda: selected(c) == "box/chat")
        c.fleet.makers = [fakes.chat, fakes.docs, fakes.lost]
        await c.until(lambda: selected(c) == "box")
        c.fleet.makers = [fakes.chat, fakes.docs, other]
        await c.until(lambda: selected(c) == "box/other")
        c.fleet.makers = [fakes.chat, fakes.docs, other, fakes.there]
        await c.sees("box/chat")
        assert selected(c) == "box/other"


async def test_a_filter_for_its_servers_does_not_hide_the_machine(console, fakes):
    async with console(fakes.docs, fakes.there) as c:
        await c.press("slash", *"box/", "enter")
        await c.lacks("docs")
        c.fleet.makers = [fakes.docs, fakes.lost]
        await c.sees("unreachable since")
        assert "No route to host" in c.text
        c.fleet.makers = [fakes.docs, fakes.there]
        await c.until(lambda: selected(c) == "box/chat")


async def test_where_the_log_and_the_requests_are(console, fakes):
    async with console(fakes.there) as c:
        await c.sees("vllm-console logs box/chat")
        await c.press("7")
        await c.sees("vllm-console requests box/chat")
        assert "was not started here" not in c.text
