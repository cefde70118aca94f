"""LoRA adapters in the console: shown in a server's description, loaded and unloaded by a dialog."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.fleet.adapters import Adapter, Adapters
from vllm_console.ui.screens.adapters import parse_adapter_line
from vllm_console.ui.screens.describe import describe_lines, serves_adapters
from vllm_launchers.errors import RefusedError, UsageError

POEMS = Adapter("poems", "/adapters/poems", "m", 8, 1_500_000, True, False)
CODE = Adapter("code", "/adapters/code", "m", None, None, None, None)
SERVED = Adapters("chat", True, True, 2, 4, 16, (POEMS, CODE))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 16)])
async def test_the_dialog_shows_adapters_and_loads_one(console, width, height):
    async with console(size=(width, height)) as c:
        c.fleet.lora = SERVED
        await c.press("F")
        await c.sees("LoRA adapters of chat")
        await c.sees("at most 2 per batch, 4 in host memory, rank 16")
        await c.sees("poems  requests: running  rank 8  1.4 MiB")
        await c.sees("enter load or unload")
        await c.press(*"tales", "enter")
        await c.sees("type a name and a folder, or unload and a name")
        await c.press("space", *"~/t", "enter")
        await c.until(lambda: ("load_adapter", "chat", "tales", "~/t") in c.fleet.calls)
        await c.sees("tales is served")


async def test_an_error_keeps_the_dialog_and_what_was_typed(console):
    async with console() as c:
        c.fleet.lora = SERVED
        c.fleet.lora_problem = RefusedError("its rank is 64, and --max-lora-rank is 16")
        await c.press("F")
        await c.sees("enter load or unload")
        await c.press(*"tales", "space", *"~/t", "enter")
        await c.sees("its rank is 64, and --max-lora-rank is 16")
        await c.sees("tales ~/t")
        c.fleet.lora_problem = None
        await c.press("2", "enter")
        await c.until(lambda: ("load_adapter", "chat", "tales", "~/t2") in c.fleet.calls)
        await c.sees("tales is served")
        await c.lacks("enter load or unload")


async def test_escape_closes_the_dialog_and_unload_unloads_an_adapter(console):
    async with console() as c:
        c.fleet.lora = SERVED
        await c.press("F")
        await c.sees("enter load or unload")
        await c.press("escape", "F")
        await c.sees("enter load or unload")
        await c.press(*"unload", "space", *"poems", "enter")
        await c.until(lambda: ("unload_adapter", "chat", "poems") in c.fleet.calls)
        await c.sees("poems is unloaded")
        assert not [call for call in c.fleet.calls if call[0] == "load_adapter"]


async def test_where_none_can_be_loaded_it_says_what_allows_it(console):
    async with console() as c:
        await c.press("F")
        await c.sees("runs without --enable-lora. To allow that, restart it:")
        await c.sees("vllm-console restart chat --set enable-lora=true")


async def test_in_the_demo_no_command_is_named_that_does_not_know_its_servers(console):
    async with console(demo=True) as c:
        await c.press("F")
        await c.sees("runs without --enable-lora. For a server of your own:")
        await c.sees("vllm-console restart NAME --set enable-lora=true")


async def test_read_only_and_servers_of_others_have_no_such_dialog(console, fakes):
    async with console(read_only=True) as c:
        c.fleet.lora = SERVED
        await c.press("F")
        await c.sees("read-only")
        assert not [call for call in c.fleet.calls if "adapter" in call[0]]
    async with console(fakes.observed) as c:
        c.fleet.lora = SERVED
        await c.press("F")
        await c.sees("was started by anna outside this console: read-only")


def test_what_is_typed_is_an_adapter_and_a_folder():
    assert parse_adapter_line(" poems  /my adapters/poems ") == ("poems", "/my adapters/poems")
    assert parse_adapter_line("unload poems") == ("poems", "")
    for text in ("", "poems", "unload ", "  "):
        with pytest.raises(UsageError):
            parse_adapter_line(text)


def test_a_described_server_shows_its_adapters_with_their_requests(fakes):
    server = replace(fakes.chat(fakes.NOW), flags={"enable-lora": True})
    assert serves_adapters(server)
    assert not serves_adapters(replace(server, ours=False))
    assert not serves_adapters(replace(server, flags={}))
    for width in (80, 120):
        lines = describe_lines(server, fakes.NOW, width, adapters=SERVED)
        text = "\n".join(one.text for one in lines)
        assert "LoRA adapters" in text
        assert any("poems" in one.text and "running" in one.text and "1.4 MiB" in one.text for one in lines)
        assert any("code" in one.text and "–" in one.text for one in lines)
        assert all(one.cell_length <= width for one in lines)
    none = describe_lines(server, fakes.NOW, 80, adapters=replace(SERVED, adapters=()))
    assert any("none is loaded" in one.text for one in none)
