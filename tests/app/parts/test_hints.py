"""The demo's hints: shown one after another, gone when followed or hidden, and never covering anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fakes import made_runs
from vllm_console.fleet.snapshot import PreparedRestart
from vllm_console.runs.compare import ComparisonVerdict, compare
from vllm_launchers.keeper.records import PreparationStep, State


async def test_a_hint_gives_way_to_the_next_when_it_is_followed(console, fakes, tmp_path: Path) -> None:
    generation = [3]

    def chat(at):
        return replace(fakes.pressed(at), generation=generation[0])

    hidden = tmp_path / "hidden"
    fleet = fakes.FakeFleet(chat)
    fleet.comparison = compare(*made_runs.pair(made_runs.minutes(1), made_runs.minutes(2)))
    async with console(fleet=fleet, hints=hidden) as c:
        await c.sees("hint 1/4  i shows the findings of chat")
        await c.press("c")  # there is a verdict from the start
        await c.until(lambda: c.app.screen is not c.app.operations)
        await c.press("escape")
        await c.sees("hint 1/4")
        await c.press("i")
        await c.until(lambda: c.app.screen is not c.app.operations)
        await c.press("escape")
        await c.sees("hint 2/4  f stages the best fix")
        await c.press("f")
        await c.sees("hint 3/4  r, then y, restarts chat")
        generation[0] = 4
        await c.sees("hint 4/4  Wait for a verdict above, then press c.")
        assert not hidden.exists()
        await c.press("c")
        await c.until(lambda: c.app.screen is not c.app.operations)
        await c.press("escape")
        await c.until(lambda: "hint" not in c.text, "no hint")
        assert hidden.exists()


async def test_a_comparison_without_a_verdict_leaves_its_hint(console, fakes, tmp_path: Path) -> None:
    generation = [3]

    def chat(at):
        return replace(fakes.pressed(at), generation=generation[0])

    fleet = fakes.FakeFleet(chat)
    fleet.comparison = compare(*made_runs.pair(made_runs.minutes(1), made_runs.minutes(2, 2)))
    assert fleet.comparison.verdict is ComparisonVerdict.TOO_LITTLE
    async with console(fleet=fleet, hints=tmp_path / "hidden") as c:
        await c.press("f")
        await c.sees("hint 3/4")
        generation[0] = 4
        await c.sees("hint 4/4")
        await c.press("c")
        await c.sees("Not enough data")
        await c.press("escape")
        await c.until(lambda: c.app.screen is c.app.operations)
        await c.sees("hint 4/4")
        fleet.comparison = compare(*made_runs.pair(made_runs.minutes(1), made_runs.minutes(2)))
        await c.press("c")
        await c.until(lambda: not c.app.operations.hints.shown)


async def test_the_verdict_on_an_earlier_change_is_not_that_on_a_restart_just_begun(
    console, fakes, tmp_path: Path
) -> None:
    now = {"generation": 3}
    fleet = fakes.FakeFleet(lambda at: replace(fakes.pressed(at), **now))
    earlier = compare(*made_runs.pair(made_runs.minutes(1), made_runs.minutes(2)))
    after = replace(earlier.after, run=replace(earlier.after.run, generation=3))
    fleet.last_changes["chat"] = replace(earlier, after=after)
    async with console(fleet=fleet, hints=tmp_path / "hidden") as c:
        await c.press("f")
        await c.sees("hint 3/4")
        await c.until(lambda: c.app.operations.changes.judged(c.app.operations.live), "a verdict on the earlier change")
        now.update(generation=4, state=State.STARTING)
        await c.sees("hint 4/4  Wait for a verdict above, then press c.")


async def test_a_step_taken_early_needs_no_hint_any_more(console, fakes, tmp_path: Path) -> None:
    async with console(fakes.chat, hints=tmp_path / "hidden") as c:
        await c.press("left_square_bracket")
        await c.sees("hint 3/4")


async def test_a_restart_that_is_prepared_takes_no_step_back_and_its_fix_is_not_offered(
    console, fakes, tmp_path: Path
) -> None:
    now = {}

    class Fleet(fakes.FakeFleet):
        def restart(self, name, changes, options):
            super().restart(name, changes, options)
            applied = tuple(f"{flag} 256 → {value}" for flag, value in changes.set.items())
            now["restart"] = PreparedRestart(self.at, PreparationStep.IMPORTING, self.at, applied)
            return self._view(name)

    fleet = Fleet(lambda at: replace(fakes.pressed(at), **now))
    async with console(fleet=fleet, hints=tmp_path / "hidden") as c:
        await c.sees("f stage fix")
        await c.press("f")
        await c.sees("hint 3/4  r, then y, restarts chat")
        await c.press("r", "y")
        await c.sees("loading vLLM")
        await c.sees("hint 3/4  chat is restarting with the change; wait until it is ready")
        await c.lacks("stage fix")
        now.clear()
        now["generation"] = fakes.pressed(0).generation + 1
        await c.sees("hint 4/4")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_escape_hides_them_for_good_and_they_cover_nothing(console, fakes, tmp_path: Path, size) -> None:
    hidden = tmp_path / "hidden"
    async with console(fakes.pressed, hints=hidden, size=size) as c:
        await c.sees("esc hides hints")
        for text in ("q quit", "stage  a adjust"):
            await c.sees(text)
        await c.until(lambda: c.text.count("hint") == 2, "the hint and its key")
        lines = c.text.splitlines()
        assert len(next(row for row in lines if "hint 1/4" in row)) <= size[0]
        assert "…" not in next(row for row in lines if "hint 1/4" in row)
        await c.press("escape")
        await c.until(lambda: "hint" not in c.text, "no hint")
        assert hidden.exists()
        assert not hidden.stat().st_mode & 0o077, "readable by its user alone"
    async with console(fakes.chat) as c:
        await c.lacks("hint")


async def test_escape_drops_what_is_staged_first(console, fakes, tmp_path: Path) -> None:
    async with console(fakes.chat, hints=tmp_path / "hidden") as c:
        await c.press("left_square_bracket")
        await c.sees("hint 3/4")
        await c.lacks("hides hints")
        await c.press("escape")
        await c.sees("Dropped --max-num-seqs 256 → 128.")
        await c.sees("hint 2/4")
        await c.sees("esc hides hints")


async def test_an_empty_console_offers_presets_models_and_the_demo(console, fakes) -> None:
    async with console(fleet=fakes.FakeFleet()) as c:
        for text in ("n  launches one from a preset", "M  lists the models", "E  opens the demo"):
            await c.sees(text)
        await c.press("M")
        await c.until(lambda: c.app.screen is not c.app.operations)
        await c.until(lambda: c.app.screen.editor.picking, "the list of models")
        await c.press("escape")
        await c.until(lambda: c.app.screen is c.app.operations)
        await c.press("E")
        await c.until(lambda: c.app.demo_wanted)


async def test_the_demo_does_not_take_the_place_of_a_console_with_servers(console, fakes) -> None:
    async with console(fakes.chat) as c:
        await c.press("E")
        await c.sees("'vllm-console demo' in another terminal")
        assert not c.app.demo_wanted


async def test_on_another_server_the_last_hint_names_the_one_that_was_restarted(console, fakes, tmp_path: Path) -> None:
    generation = [3]

    def chat(at):
        return replace(fakes.pressed(at), generation=generation[0])

    async with console(chat, fakes.coder, hints=tmp_path / "hidden") as c:
        await c.press("f")
        await c.sees("hint 3/4")
        generation[0] = 4
        await c.sees("hint 4/4  Wait for a verdict above")
        await c.press("j")
        await c.sees("hint 4/4  select chat, which was restarted; then c compares its runs")
        await c.press("k")
        await c.sees("hint 4/4  Wait for a verdict above")


async def test_a_restart_without_a_change_follows_no_hint(console, fakes, tmp_path: Path) -> None:
    generation = [3]

    def chat(at):
        return replace(fakes.pressed(at), generation=generation[0])

    async with console(chat, hints=tmp_path / "hidden") as c:
        await c.sees("hint 1/4")
        generation[0] = 4
        await c.until(lambda: c.app.operations.live.generation == 4)
        await c.sees("hint 1/4")
        await c.press("f")
        await c.sees("hint 3/4")
        generation[0] = 5
        await c.sees("hint 4/4")


async def test_no_verdict_is_awaited_on_a_restart_that_failed(console, fakes, tmp_path: Path) -> None:
    state, generation = [State.READY], [3]

    def chat(at):
        return replace(fakes.pressed(at), generation=generation[0], state=state[0])

    async with console(chat, hints=tmp_path / "hidden") as c:
        await c.press("f")
        await c.sees("hint 3/4")
        state[0], generation[0] = State.STARTING, 4
        await c.sees("hint 4/4  Wait for a verdict above")
        state[0] = State.FAILED
        await c.sees("hint 4/4  c compares the runs")
