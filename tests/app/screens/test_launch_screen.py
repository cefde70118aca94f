"""The launch screen and its keys."""

from __future__ import annotations

import threading

import msgspec
import pytest
from msgspec.structs import replace

from vllm_console.fleet.types import PresetProblem
from vllm_console.ui.screens.launch import LaunchScreen
from vllm_launchers.errors import OperationError
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.vllm.flags.changes import Changes

TALL = (160, 50)


@pytest.fixture
def fleet(fakes):
    class Fleet(fakes.FakeFleet):
        problems = ()
        refusal = ""
        requests = []  # noqa: RUF012 - replaced below
        hold = None

        def presets(self):
            return fakes.PRESETS, self.problems

        def plan(self, request: LaunchRequest):
            self.requests.append(request)
            if self.refusal:
                raise OperationError(self.refusal)
            engine = fakes.SIMULATED if request.engine == "simulated" else fakes.VLLM
            return replace(super().plan(request), engine=engine, port=request.port or 8000)

        def start(self, request: LaunchRequest):
            if self.hold is not None:
                self.hold.wait(20)
            return super().start(request)

    fleet = Fleet()
    fleet.requests = []
    return fleet


def starts(fleet):
    return [call[1] for call in fleet.calls if call[0] == "start"]


async def test_shows_presets_settings_with_reasons_and_the_command_line(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "/opt/vllm/bin/vllm serve" in app.text())
        text = app.text()
        assert "code-generation" in text
        assert "max-num-seqs" in text
        assert "preset: many short chats at once" in text
        assert "workload: 95 % of conversations" in text
        assert "vLLM 0.33.0 cuda" in text


async def test_launches_with_ctrl_s_and_gives_the_server_back(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet, "batch"))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: fleet.requests)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.results)
    assert starts(fleet) == [LaunchRequest(preset="batch", place="offered")]
    assert app.results[0].name == "docs"


async def test_edits_change_the_plan_and_are_launched(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: fleet.requests)
        await pilot.press("down", "enter")  # the settings of the second preset
        await pilot.press("down", "space", "space")  # engine: auto → vLLM → simulated
        await wait_until(pilot, lambda: "a simulation" in app.text())
        await pilot.press("down", "down", "down", "enter", *"8123", "enter")
        await pilot.press("down", "enter")
        app.screen.entry.value = "64"
        await pilot.press("enter")
        await wait_until(pilot, lambda: "--max-num-seqs 64" in app.text())
        await app.sees("1 changed")
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.results)
    assert starts(fleet) == [
        LaunchRequest(
            "code-generation", engine="simulated", port=8123, changes=Changes(set={"max-num-seqs": 64}), place="offered"
        )
    ]


async def test_flags_are_added_removed_and_taken_back(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: fleet.requests)
        await pilot.press("a")
        app.screen.entry.value = "enforce_eager"
        await pilot.press("enter")
        await wait_until(pilot, lambda: fleet.requests[-1].changes == Changes(set={"enforce-eager": True}))
        await pilot.press("a")
        app.screen.entry.value = "max-model-len=8K"
        await pilot.press("enter")
        await wait_until(pilot, lambda: "max-model-len" in fleet.requests[-1].changes.set)
        await pilot.press("u", *["up"] * 9, *["down"] * 5, "delete")
        await wait_until(
            pilot,
            lambda: fleet.requests[-1].changes == Changes(set={"enforce-eager": True}, unset=("max-num-seqs",)),
        )
        await wait_until(pilot, lambda: "unset" in app.text())
        await pilot.press("u")
        await wait_until(pilot, lambda: fleet.requests[-1].changes == Changes(set={"enforce-eager": True}))


async def test_edits_of_a_preset_are_kept_while_others_are_looked_at(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: fleet.requests)
        await pilot.press("a")
        app.screen.entry.value = "max-num-seqs=7"
        await pilot.press("enter", "shift+tab", "down")
        await wait_until(pilot, lambda: fleet.requests[-1] == LaunchRequest("code-generation", place="offered"))
        await pilot.press("up")
        await wait_until(pilot, lambda: fleet.requests[-1].changes == Changes(set={"max-num-seqs": 7}))


async def test_a_plan_that_cannot_be_is_one_sentence_and_is_not_launched(host, wait_until, fleet):
    fleet.refusal = "port 8000 is taken by pid 4242 (python); choose another"
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "port 8000 is taken by pid 4242" in app.text())
        await pilot.press("f")
        await wait_until(pilot, lambda: "No flag fixes this: port 8000 is taken by pid 4242" in app.text())
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: "Not launched" in app.text())
    assert starts(fleet) == []


async def test_a_launch_that_fails_leaves_everything_as_it_was(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: fleet.requests)
        fleet.error = OperationError("the state folder is not writable")
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: "the state folder is not writable" in app.text())
        fleet.error = None
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.results)


async def test_a_slow_launch_is_done_once_and_keys_still_work(host, wait_until, fleet):
    fleet.hold = threading.Event()
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: fleet.requests)
        await pilot.press("ctrl+s", "ctrl+s", "tab", "escape")
        await wait_until(pilot, lambda: "Launching; this screen" in app.text())
        fleet.hold.set()
        await wait_until(pilot, lambda: app.results)
    assert len(starts(fleet)) == 1


async def test_a_wrong_value_is_refused_and_the_input_stays(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: fleet.requests)
        await pilot.press("tab", "down", "down", "down", "down", "enter", *"99999", "enter")
        await wait_until(pilot, lambda: "port must be a number from 1 to 65535" in app.text())
        assert app.screen.entry.display


async def test_escape_warns_once_before_changes_get_lost(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: fleet.requests)
        await pilot.press("tab", "down", "space")
        await wait_until(pilot, lambda: fleet.requests[-1].engine == "vllm")
        await pilot.press("escape")
        await wait_until(pilot, lambda: "Not launched yet" in app.text())
        assert app.results == []
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.results == [None])


async def test_files_that_cannot_be_used_are_named_and_disturb_nothing(host, wait_until, fleet):
    path = "/home/me/" + "deep/" * 20 + "p.toml"
    fleet.problems = (PresetProblem(path, f"{path}: key 'modle' is unknown; did you mean 'model'?"),)
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "p.toml  /home/me/deep" in app.text())
        await wait_until(pilot, lambda: app.text().count("/home/me") == 1, "the path is shown once")
        await app.sees("modle")
        await app.sees("chatbot")


async def test_at_80_columns_each_section_is_reached_by_tab(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "long-document" in app.text())
        await pilot.press("tab")
        await wait_until(pilot, lambda: "many short chats" in app.text())
        await pilot.press("tab")
        await wait_until(pilot, lambda: "vllm serve" in app.text())
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.results)
    assert len(starts(fleet)) == 1


async def test_text_from_outside_is_no_markup(host, wait_until, fleet, fakes):
    hostile = msgspec.structs.replace(fakes.PRESETS[0], title="[red]x[/]\x1b[2J", summary="[/nope]")
    fleet.presets = lambda: ((hostile,), ())
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "[red]x[/]" in app.text())
        await app.sees("[/nope]")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_where_no_vllm_is_found_it_says_that_the_engine_is_simulated_why_and_what_to_do(
    host, wait_until, fleet, fakes, monkeypatch, size
):
    """80 columns once only showed ``ready to launch`` for an engine that nobody had chosen."""
    monkeypatch.setattr(fleet, "engines", lambda: (fakes.SIMULATED,))
    planned = fleet.plan

    def without_a_gpu(request):
        plan = planned(request)
        memory = msgspec.structs.replace(plan.memory, assumed=("a simulated RTX A6000",))
        return msgspec.structs.replace(plan, memory=memory)

    monkeypatch.setattr(fleet, "plan", without_a_gpu)
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=size) as pilot:
        said = "No vLLM was found: this starts the simulated engine"
        await wait_until(pilot, lambda: said in app.text() and "ready to launch" in app.text())
        assert "'vllm-console engines install', or set vllm in config.toml." in " ".join(app.text().split())
        await app.sees("assumed: a simulated RTX A6000")  # the GPU of the memory values
        await pilot.press("shift+tab")
        await wait_until(pilot, lambda: "▸ What will run" in app.text())
        assert app.text().count(said) == 1
        await pilot.press("tab")
        await pilot.press("tab", "down", "space")  # the engine, as chosen by a user
        await wait_until(pilot, lambda: said not in app.text())


@pytest.mark.parametrize(("height", "seen"), [(15, "Throughput over latency"), (14, "… 1 more"), (12, "… 2 more")])
async def test_presets_in_few_rows_say_how_many_more_there_are(host, wait_until, fleet, height, seen):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=(60, height)) as pilot:
        await wait_until(pilot, lambda: seen in app.text())
        assert not [row for row in app.text().splitlines() if row.strip() == "…"]
