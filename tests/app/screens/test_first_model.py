"""A first launch offers a local model instead of a download; later launches offer what was used before."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.ui.screens.launch import LaunchScreen
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.modelfacts.local import LocalModel, LocalModels


def model(name, gib, problem=""):
    return LocalModel(name, "cache", f"/hub/{name}", gib << 30, ModelFacts(name, max_context=4096), problem)


@pytest.fixture
def fleet(fakes):
    """A fleet with a broken model, one that is too large, one that fits, and a small one."""

    class Fleet(fakes.FakeFleet):
        def plan(self, request):
            plan = super().plan(request)
            if request.model == "org/large":
                return replace(plan, findings=(PlanFinding("weights_do_not_fit", Level.ERROR, "does not fit"),))
            return plan

    fleet = Fleet()
    names = (("org/small", 1), ("org/large", 90), ("org/fits", 8))
    fleet.local_models = LocalModels((*(model(*one) for one in names), model("org/half", 60, "not complete")))
    return fleet


async def test_the_largest_that_fits_is_offered_and_the_note_reports_it(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: "org/fits is on this machine" in app.text())
        draft = app.screen.planner.draft
        assert draft.request().model == "org/fits"
        await app.sees("org/fits, instead of")  # not only the preset's own model, which would not run
        assert not draft.any_touched, "leaving asks nothing"
        draft.put("model", draft.preset.model)
        assert draft.request().model is None


@pytest.mark.parametrize("why", ["ran", "own"])
async def test_what_ran_before_and_a_presets_own_model_stay(host, wait_until, fleet, fakes, why):
    if why == "ran":
        fleet.used_presets = lambda: ["chatbot"]
    else:
        fleet.local_models = LocalModels((model("meta-llama/Llama-3.1-8B-Instruct", 16), model("org/fits", 8)))
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.screen.planner.draft is not None and app.screen.planner.fresh)
        await app.workers.wait_for_complete()
        assert app.screen.planner.draft.request().model is None
        await app.lacks("is on this machine")
