"""Data-parallel ranks: one row for all of them, or with a key one row for each."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_console.metrics.sample import EngineSample, Sample


def ranks(fakes, number=2):
    def maker(at):
        engines = {
            str(rank): EngineSample(kv_cache_usage=0.1 * rank, requests_running=rank, requests_waiting=7 - rank)
            for rank in range(number)
        }
        return replace(fakes.chat(at), name="ranks", sample=Sample(at, engines))

    return maker


async def test_a_key_shows_each_rank_below_its_server_and_their_sum_again(console, fakes):
    async with console(ranks(fakes), fakes.docs) as c:
        assert "rank 1" not in c.text
        assert "N ranks" in c.text.splitlines()[-1]
        await c.press("N")
        await c.sees("rank 1")
        rows = [row for row in c.text.splitlines() if row.startswith("│") and "%" in row][:3]
        assert [words in row for words, row in zip(("rank 0", "rank 1"), rows[1:], strict=True)] == [True, True]
        assert "10%" in rows[2]
        await c.press("down")
        await c.until(lambda: c.app.operations.selected_name == "docs", "ranks are no servers: the cursor skips them")
        await c.press("up", "N")
        await c.lacks("rank 1")


async def test_a_server_with_one_engine_has_none_to_show(console, fakes):
    async with console(fakes.chat) as c:
        assert "N ranks" not in c.text
        await c.press("N")
        await c.sees("chat has no data-parallel ranks")


async def test_a_click_on_a_rank_is_one_on_its_server(console, fakes):
    async with console(fakes.docs, ranks(fakes)) as c:
        await c.press("down", "N")
        await c.sees("rank 1")
        await c.press("up")
        await c.until(lambda: c.app.operations.selected_name == "docs")
        row = next(at for at, text in enumerate(c.text.splitlines()) if "rank 1" in text)
        await c.pilot.click(offset=(8, row))
        await c.until(lambda: c.app.operations.selected_name == "ranks")


async def test_more_ranks_than_rows_scroll_and_keep_their_server_in_sight(console, fakes):
    async with console(fakes.docs, ranks(fakes, 30), size=(80, 24)) as c:
        await c.press("down", "N")
        await c.sees("rank 2")
        assert "▸ ranks" in c.text.replace("!", " ")
