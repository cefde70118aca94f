"""Choosing a model on the launch screen: models on this machine, whether they fit, and any hub id."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from vllm_console.ui.screens.launch import LaunchScreen
from vllm_launchers.errors import OperationError
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, Quantization
from vllm_launchers.vllm.modelfacts.local import LocalModel, LocalModels

TALL = (160, 50)


def model(name, **facts):
    return LocalModel(name, "cache", f"/hub/{name}", 6 * 2**30, ModelFacts(name, max_context=40_960, **facts))


MODELS = LocalModels(
    (
        model("Qwen/Qwen3-8B-AWQ", parameters=8_190_000_000, quantization=Quantization("awq", 4)),
        model("meta-llama/Llama-3.1-8B", parameters=8_030_000_000, dtype="bfloat16"),
        model("meta-llama/Llama-3.3-70B", parameters=70_600_000_000, dtype="bfloat16"),
        LocalModel("org/tokenizer", "cache", "/hub/t", 2**20, problem="no config.json in the cache"),
    ),
    ("/data/models can't be read: Permission denied",),
)


@pytest.fixture
def fleet(fakes):
    class Fleet(fakes.FakeFleet):
        requests = ()
        refused = broken = ""
        reads = 0
        hold = None

        def models(self):
            self.reads += 1
            if self.hold is not None:
                self.hold.wait(20)
            return super().models()

        def plan(self, request):
            self.requests = (*self.requests, request)
            if request.model == self.refused:
                raise OperationError("no GPU has room")
            if request.model == self.broken:
                raise RuntimeError("NVML went away")
            plan = super().plan(request)
            if request.model and "70B" in request.model:
                return replace(plan, memory=replace(plan.memory, kv_gib=-20.0))
            return plan

    fleet = Fleet()
    fleet.local_models = MODELS
    return fleet


async def opened(pilot, wait_until, fleet):
    """Open the picker on the model's field."""
    await wait_until(pilot, lambda: fleet.requests)
    await pilot.press("tab", "enter")


def row(app, name):
    """The row of a model in the list, which is to the right of the presets."""
    rows = (text.rpartition("│ │")[2] for text in app.text().splitlines())
    return next((text for text in rows if f" {name}" in text), "")


async def test_models_are_listed_with_what_the_plan_says_of_each(host, wait_until, fleet):
    fleet.refused = "meta-llama/Llama-3.1-8B"
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await opened(pilot, wait_until, fleet)
        await wait_until(pilot, lambda: "✗ too large" in row(app, "meta-llama/Llama-3.3-70B"))
        shown = row(app, "Qwen/Qwen3-8B-AWQ")
        assert all(text in shown for text in ("6.0 GiB", "awq 4-bit", "8.2B", "40,960", "✓ "))
        assert "tokens" in shown
        assert "! error" in row(app, "meta-llama/Llama-3.1-8B ")
        await app.sees("Permission denied")
        await pilot.press("down", "down")
        await wait_until(pilot, lambda: "no GPU has room" in app.text())
    planned = [request.model for request in fleet.requests if request.model]
    assert "org/tokenizer" not in planned, "nothing is known of it: nothing is guessed"


async def test_a_plan_that_breaks_is_shown_beside_its_model_and_the_others_are_planned(host, wait_until, fleet):
    fleet.broken = "Qwen/Qwen3-8B-AWQ"
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await opened(pilot, wait_until, fleet)
        await wait_until(pilot, lambda: "✗ too large" in row(app, "meta-llama/Llama-3.3-70B"))
        assert "! error" in row(app, "Qwen/Qwen3-8B-AWQ")


async def test_the_list_is_narrowed_while_typing_and_enter_takes_the_picked_one(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await opened(pilot, wait_until, fleet)
        await wait_until(pilot, lambda: row(app, "Qwen/Qwen3-8B-AWQ"))
        await pilot.press("ctrl+u", *"llama 70b")
        await wait_until(pilot, lambda: row(app, "meta-llama/Llama-3.3-70B") and not row(app, "Qwen/Qwen3-8B-AWQ"))
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: app.screen.planner.draft.text("model") == "meta-llama/Llama-3.3-70B")
        await wait_until(pilot, lambda: "serve meta-llama/Llama-3.3-70B" in app.text())


async def test_tab_completes_by_prefix_and_by_the_first_match(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await opened(pilot, wait_until, fleet)
        await wait_until(pilot, lambda: row(app, "Qwen/Qwen3-8B-AWQ"))
        await pilot.press("ctrl+u", *"qwen/q")
        await wait_until(pilot, lambda: app.screen.entry._suggestion)
        await pilot.press("tab")
        await wait_until(pilot, lambda: app.screen.entry.value == "Qwen/Qwen3-8B-AWQ")
        await pilot.press("ctrl+u", *"70b", "tab")
        await wait_until(pilot, lambda: app.screen.entry.value == "meta-llama/Llama-3.3-70B")


async def test_a_hub_id_that_is_not_here_is_taken_as_typed(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await opened(pilot, wait_until, fleet)
        await wait_until(pilot, lambda: row(app, "Qwen/Qwen3-8B-AWQ"))
        await pilot.press("ctrl+u", *"org/new")
        await wait_until(pilot, lambda: "enter accepts a hub id or a folder as typed" in app.text())
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen.planner.draft.text("model") == "org/new")


async def test_reading_slowly_blocks_nothing_and_models_are_read_once(host, wait_until, fleet):
    fleet.hold = threading.Event()
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await opened(pilot, wait_until, fleet)
        await wait_until(pilot, lambda: "reading models…" in app.text())
        await pilot.press("ctrl+u", *"org/x")
        await wait_until(pilot, lambda: app.screen.entry.value == "org/x")
        fleet.hold.set()
        await wait_until(pilot, lambda: "enter accepts a hub id or a folder as typed" in app.text())
        await pilot.press("escape", "enter")
        await wait_until(pilot, lambda: row(app, "Qwen/Qwen3-8B-AWQ"))
        assert fleet.reads == 1


async def test_the_verdicts_are_of_the_launch_as_it_is_now(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await opened(pilot, wait_until, fleet)
        await wait_until(pilot, lambda: len(app.screen.picker.fits) == 3)
        await pilot.press("escape", "down", "space")  # another engine
        await wait_until(pilot, lambda: fleet.requests[-1].engine == "vllm")
        await pilot.press("up", "enter")
        await wait_until(
            pilot,
            lambda: {r.model for r in fleet.requests if r.engine == "vllm"} >= {one.model for one in MODELS.models[:3]},
        )


@pytest.mark.parametrize("size", [(80, 24), (50, 16)])
async def test_the_picker_keeps_to_its_size(host, wait_until, fleet, size):
    fleet.local_models = LocalModels(tuple(model(f"org/a-model-with-quite-a-long-name-{n}") for n in range(60)))
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=size) as pilot:
        await opened(pilot, wait_until, fleet)
        await wait_until(pilot, lambda: "long-name-0" in app.text() and "more" in app.text())
        await pilot.press(*["down"] * 40)
        await wait_until(pilot, lambda: "▸ " in row(app, "") or "long-name-39" in app.text())
        assert all(len(text) <= size[0] for text in app.text().splitlines())


async def test_without_models_on_this_machine_it_reports_it_and_what_to_type(host, wait_until, fleet):
    fleet.local_models = LocalModels((), ())
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await opened(pilot, wait_until, fleet)
        await wait_until(pilot, lambda: "No models on this machine. Type a hub id or a folder" in app.text())


async def test_escape_goes_back_to_where_the_list_was_opened(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("M")
        await c.sees("Qwen/Qwen3-8B-AWQ")
        await c.press("escape")
        await c.until(lambda: c.app.screen is c.app.operations, "the screen where M was pressed")
        await c.press("M")
        await c.sees("Qwen/Qwen3-8B-AWQ")
        await c.press("down", "enter")
        await c.until(lambda: not c.app.screen.editor.typing)
        launch = c.app.screen
        await c.press("enter")
        await c.until(lambda: launch.editor.picking, "the list, opened from the settings")
        await c.press("escape")
        await c.until(lambda: not launch.editor.typing)
        assert c.app.screen is launch
