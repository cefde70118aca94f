"""The dialog that claims GPUs: its question and its answers stay visible, however much is claimed."""

from __future__ import annotations

from pathlib import Path

from vllm_launchers.host.board import Board, Claim


async def test_on_a_low_screen_claims_give_way_to_the_line_and_its_answers(console, fakes):
    claims = tuple(Claim((gpu,), fakes.NOW, fakes.NOW + 3600, "training", 4711, "anna") for gpu in range(8))
    async with console(size=(60, 15)) as c:
        c.fleet.on_board = Board(Path("/board"), fakes.NOW, claims)
        await c.press("C")
        await c.sees("enter claim or release")
        await c.sees("esc cancel")
        await c.sees("release yours:")
        await c.sees("more: vllm-console board")
        await c.press(*"7", "space", *"23:59", "enter")
        await c.until(lambda: c.fleet.calls[-1][0] == "claim")
