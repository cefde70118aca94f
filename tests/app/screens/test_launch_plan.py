"""The launch screen's plan while settings change: budget, findings, reasons, and what prevents a launch."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from vllm_console.ui.panes.launch_settings import setting_lines
from vllm_console.ui.parts.flag_catalog import FlagCatalog
from vllm_console.ui.parts.launch_draft import LaunchDraft
from vllm_console.ui.screens.launch import LaunchScreen
from vllm_launchers.errors import OperationError
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.vllm.flags.changes import Changes

SMALL, WIDE, TALL = (80, 24), (120, 40), (200, 60)
FIX = Changes(set={"max-model-len": 2048})
TOO_SMALL = PlanFinding("kv-too-small", Level.ERROR, "one request does not fit into the KV cache", FIX)
MAYBE = replace(TOO_SMALL, code="memory-held", message="anna holds 20.5 GiB of GPU 0 now", surely=False)
HURTS = PlanFinding("tp-over-pcie", Level.WARNING, "tensor parallelism crosses the CPU interconnect")
ADVICE = PlanFinding("prefix-caching", Level.ADVICE, "prompts repeat: prefix caching would help")
TO_SEQUENCES = ("tab", *["down"] * 5)


@pytest.fixture
def fleet(fakes):
    class Fleet(fakes.FakeFleet):
        requests = ()
        held = None

        def plan(self, request: LaunchRequest):
            self.requests = (*self.requests, request)
            if self.held is not None:
                self.held.wait(20)
            return super().plan(request)

    return Fleet()


@pytest.fixture
def screen(host, fleet):
    return host(lambda: LaunchScreen(fleet))


def starts(fleet):
    return [call[1] for call in fleet.calls if call[0] == "start"]


def flat(app):
    return " ".join(app.text().split())


async def planned(pilot, wait_until):
    """Wait until the screen shows an up-to-date plan."""
    await wait_until(pilot, lambda: pilot.app.screen.planner.fresh, "a plan")
    await pilot.pause()


@pytest.mark.parametrize("size", [SMALL, WIDE, TALL])
async def test_the_plan_shows_the_budget_with_its_legend(screen, wait_until, size):
    async with screen.run_test(size=size) as pilot:
        await pilot.press("tab", "tab")
        await wait_until(pilot, lambda: "█ weights" in screen.text())
        text = flat(screen)
        for part in (
            "≡ overhead",
            "▒ KV cache",
            "╳ others",
            "· left",
            "usable",
            "24.0",
            "estimate",
            "128 KiB per token",
        ):
            assert part in text
        assert "30× at 4,096" in text or "30× concurrent at 4,096" in text
        assert "64× at" in text
        assert "p95" in text
        assert "assumed: no workload was measured yet" in text


@pytest.mark.parametrize("section", [0, 1])
async def test_at_80_columns_budget_and_worst_finding_stay_in_sight(screen, fleet, wait_until, section):
    fleet.findings = (ADVICE, HURTS, TOO_SMALL)
    async with screen.run_test(size=SMALL) as pilot:
        await pilot.press(*["tab"] * section)
        await planned(pilot, wait_until)
        text = screen.text()
        assert "KV 15.0 GiB" in text
        assert "30× at 4,096" in text or "30× concurrent at 4,096" in text
        assert "one request does not fit into the KV cache" in text
        assert "f fix" in text


async def test_at_80_columns_the_plan_has_budget_findings_and_command(screen, fleet, fakes, wait_until):
    long = "a sentence of some length that does not end on the line that it began on, as sentences do, " * 2
    fleet.findings = (*(replace(HURTS, code=f"w{n}", message=long) for n in range(6)), TOO_SMALL)
    flags = [word for n in range(20) for word in (f"--some-long-flag-{n}", "value")]
    plan = fleet.plan
    fleet.plan = lambda request: replace(plan(request), argv=("vllm", "serve", "some/model", *flags))
    async with screen.run_test(size=SMALL) as pilot:
        await pilot.press("tab", "tab")
        await planned(pilot, wait_until)
        for _ in range(8):  # whichever finding is selected
            text = screen.text()
            assert "█ weights" in text
            assert "error kv-too-small: one request does not fit into the KV cache" in text
            assert "vllm serve some/model" in text
            assert "more lines; y copies all" in text
            await pilot.press("down")
            await pilot.pause()
        assert screen.screen._selected == 6
        await pilot.press("y")
        assert screen.clipboard.startswith("vllm serve some/model --some-long-flag-0 value")
        assert screen.clipboard.endswith("--some-long-flag-19 value")


async def test_every_keystroke_in_a_value_is_planned_before_enter(screen, fleet, wait_until):
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press(*TO_SEQUENCES, "down", "enter", *"0.5")  # gpu-memory-utilization, 0.92 before
        await wait_until(pilot, lambda: fleet.requests[-1].changes == Changes(set={"gpu-memory-utilization": 0.5}))
        await wait_until(pilot, lambda: "KV 4.9 GiB" in screen.text())
        await pilot.press("5")
        await wait_until(pilot, lambda: "KV 6.1 GiB" in screen.text())
        await pilot.press("escape")
        await wait_until(pilot, lambda: "KV 15.0 GiB" in screen.text())
        assert fleet.requests[-1].changes == Changes(), "esc cancel"


async def test_other_keys_change_nothing_while_a_value_is_typed(screen, fleet, wait_until):
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press(*TO_SEQUENCES, "enter", "tab", "pagedown", "ctrl+s")
        await wait_until(pilot, lambda: "First accept the value with enter" in screen.text())
        await pilot.press(*"64", "enter")
        await wait_until(pilot, lambda: fleet.requests[-1].changes == Changes(set={"max-num-seqs": 64}))
    assert starts(fleet) == []


async def test_a_wrong_value_is_reported_while_it_is_typed_and_not_planned(screen, fleet, wait_until):
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        count = len(fleet.requests)
        await pilot.press(*TO_SEQUENCES, "enter", *"256x")
        await wait_until(pilot, lambda: "not '256x'" in screen.text())
        await pilot.press("enter")
        assert screen.screen.editor.typing, "enter does not take it"
        await pilot.press("backspace")
        await wait_until(pilot, lambda: "not '256x'" not in screen.text())
        sequences = [request.changes.set.get("max-num-seqs", 256) for request in fleet.requests[count:]]
        assert set(sequences) <= {2, 25, 256}, "only what vLLM would take was planned"


async def test_choices_of_a_flag_are_gone_through_and_each_is_planned(screen, fleet, wait_until):
    async with screen.run_test(size=WIDE) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("a", *"kv-cache-dtype", "enter", "down", "down")
        await wait_until(pilot, lambda: fleet.requests[-1].changes.set.get("kv-cache-dtype") == "bfloat16")
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: fleet.requests[-1].changes == Changes(set={"kv-cache-dtype": "fp8"}))
        await wait_until(pilot, lambda: "246,100 tokens" in screen.text() or "246k tokens" in screen.text())


async def test_reasons_tradeoffs_and_sources_stand_beside_the_flags(screen, wait_until):
    async with screen.run_test(size=TALL) as pilot:
        await pilot.press(*TO_SEQUENCES, "down", "down")
        await wait_until(pilot, lambda: "trade-off: Longer" in screen.text())
        text = flat(screen)
        assert "preset: the server has the card" in text
        assert "workload: 95 % of conversations" in text
        assert "vLLM's choice machine: There is room without FP8" in text


@pytest.mark.parametrize("height", [7, 8, 12, 30])
def test_a_description_that_has_no_room_says_that_it_goes_on(fakes, height):
    draft = LaunchDraft(fakes.PRESETS[0])
    catalog = FlagCatalog(fakes.FLAG_TABLE)
    for cursor in range(len(draft.names)):
        told = [strip.text for strip in setting_lines(draft, None, catalog, (56, 60), cursor, active=True)]
        shown = [strip.text for strip in setting_lines(draft, None, catalog, (56, height), cursor, active=True)]
        assert len(shown) <= height
        assert shown[-1].endswith(" …") or shown[-1] == told[-1]


def test_reasons_and_tradeoffs_are_whole_where_there_is_room_and_a_row_each_where_not(fakes):
    draft = LaunchDraft(fakes.PRESETS[0])
    plan = draft.planned(fakes.FakeFleet().plan(LaunchRequest("chatbot")), "chatbot-2")

    def shown(height):
        strips = setting_lines(draft, plan, FlagCatalog(fakes.FLAG_TABLE), (84, height), 0, False)
        return ["".join(segment.text for segment in strip) for strip in strips]

    whole = " ".join(" ".join(shown(40)).split())
    assert "longer ones would take cache from all others · trade-off: Longer conversations are refused." in whole
    assert len(shown(12)) == len(draft.names) + 2
    short = shown(8)
    assert len(short) == 8
    assert "more" in short[-1]


async def test_findings_come_with_level_code_and_sentence_the_worst_first(screen, fleet, wait_until):
    fleet.findings = (ADVICE, HURTS, MAYBE)
    async with screen.run_test(size=WIDE) as pilot:
        await planned(pilot, wait_until)
        text = screen.text()
        places = [text.index(words) for words in (
            "✗ error memory-held: anna holds", "! warning tp-over-pcie: tensor", "i advice prefix-caching: prompts"
        )]  # fmt: skip
        assert places == sorted(places)
        assert "1 error · 1 warning" in text


async def test_a_key_fixes_the_worst_and_the_selected_one(screen, fleet, wait_until):
    other = replace(HURTS, fix=Changes(set={"max-num-seqs": 8}, unset=("enable-prefix-caching",)))
    fleet.findings = (TOO_SMALL, other)
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("f")
        await wait_until(pilot, lambda: "kv-too-small: max-model-len 4096 → 2048" in screen.text())
        await wait_until(pilot, lambda: fleet.requests[-1].changes == FIX)
        fleet.findings = (other,)
        await planned(pilot, wait_until)
        await pilot.press("tab", "u")  # the cursor is on the fixed setting
        await wait_until(pilot, lambda: fleet.requests[-1].changes == Changes())
        fleet.findings = (TOO_SMALL, other)
        await pilot.press("delete", "u")
        await planned(pilot, wait_until)
        await pilot.press("tab", "down", "f")
        await wait_until(pilot, lambda: fleet.requests[-1].changes == other.fix)


async def test_nothing_is_fixed_where_nothing_can_be(screen, fleet, wait_until):
    fleet.findings = (HURTS,)
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("f")
        await wait_until(pilot, lambda: "No flag change fixes this." in screen.text())
        assert fleet.requests[-1].changes == Changes()


async def test_an_error_stops_the_launch_with_its_sentence(screen, fleet, wait_until):
    fleet.findings = (HURTS, TOO_SMALL)
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("ctrl+s", "ctrl+s")
        await wait_until(pilot, lambda: "Not launched: one request does not fit" in screen.text())
    assert starts(fleet) == []


@pytest.mark.parametrize(("finding", "force"), [(HURTS, False), (MAYBE, True)])
async def test_what_may_be_gone_over_wants_one_more_press(screen, fleet, wait_until, finding, force):
    fleet.findings = (finding,)
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: "ctrl+s again launches anyway" in screen.text())
        await pilot.press("tab", "down", "ctrl+s")
        assert starts(fleet) == [], "something else was done in between"
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: screen.results)
    assert [request.force for request in starts(fleet)] == [force]


async def test_a_plan_with_advice_alone_is_launched(screen, fleet, wait_until):
    fleet.findings = (ADVICE,)
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: screen.results)


async def test_a_launch_waits_for_the_plan_of_what_stands_now(screen, fleet, wait_until):
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        fleet.held = threading.Event()
        fleet.findings = (TOO_SMALL,)
        await pilot.press("tab", "down", "space", "ctrl+s")
        await wait_until(pilot, lambda: "Planning first" in screen.text())
        assert starts(fleet) == []
        fleet.held.set()
        await wait_until(pilot, lambda: "Not launched: one request does not fit" in screen.text())
    assert starts(fleet) == []


async def test_while_it_is_worked_out_the_plan_before_stays(screen, fleet, wait_until):
    async with screen.run_test(size=WIDE) as pilot:
        await planned(pilot, wait_until)
        fleet.held = threading.Event()
        await pilot.press("tab", "down", "space")
        await wait_until(pilot, lambda: "planning…" in screen.text())
        assert "█ weights" in screen.text()
        fleet.held.set()
        await wait_until(pilot, lambda: "planning…" not in screen.text())


async def test_what_a_refused_start_says_is_planned_for_again(screen, fleet, wait_until):
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        fleet.error, fleet.findings = OperationError("GPU 0 was taken this very second"), (MAYBE,)
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: "taken this very second" in screen.text())
        await wait_until(pilot, lambda: "anna holds 20.5 GiB" in screen.text())


@pytest.mark.parametrize(
    ("build", "gpus", "words"),
    [
        ("cuda", (0,), "no model data for meta-llama/Llama-3.1-8B-Instruct"),
        ("cuda", (), "no GPU here to plan for"),
        ("cpu", (), "a CPU build"),
    ],
)
async def test_what_is_not_known_of_the_memory_is_reported_in_a_line(
    screen, fleet, fakes, wait_until, build, gpus, words
):
    plan, fleet.memory = fleet.plan, None
    engine = replace(fakes.VLLM, build=build)
    fleet.plan = lambda request: replace(plan(request), gpus=gpus, engine=engine)
    async with screen.run_test(size=SMALL) as pilot:
        await wait_until(pilot, lambda: words in flat(screen))
        await pilot.press("tab", "tab")
        await wait_until(pilot, lambda: words in flat(screen))
        assert "vllm serve" in screen.text()


async def test_the_engines_own_figures_are_distinguished_from_an_estimate(screen, fleet, fakes, wait_until):
    estimated = fakes.memory_of({})
    fleet.memory = replace(estimated, source="engine", weights_gib=5.6, kv_gib=14.3, kv_tokens=117_000)
    plan = fleet.plan
    fleet.plan = lambda request: replace(plan(request), estimated=estimated)
    async with screen.run_test(size=SMALL) as pilot:
        await pilot.press("tab", "tab")
        await wait_until(pilot, lambda: "as reported by the engine" in screen.text())
        assert "estimated before: weights 5.3 → 5.6 GiB · KV cache 15.0 → 14.3 GiB (−5%)" in screen.text()


async def test_adding_a_flag_searches_all_of_them(screen, fleet, wait_until):
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("a")
        await wait_until(pilot, lambda: "Add a flag" in screen.text() and "12 flags of vLLM 0.33.0" in screen.text())
        await pilot.press(*"transfer")
        await wait_until(pilot, lambda: "kv-transfer-config" in screen.text())
        assert "max-num-seqs" not in screen.text()
        await pilot.press("enter")
        await wait_until(pilot, lambda: "kv-transfer-config:\n" in screen.text() and " enter accept" in screen.text())
        await pilot.press(*"{}", "enter")
        await wait_until(pilot, lambda: fleet.requests[-1].changes == Changes(set={"kv-transfer-config": "{}"}))


async def test_the_footer_shows_the_keys_that_hold_while_something_is_typed(screen, fleet, wait_until):
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        assert "ctrl+s launch" in screen.text()
        await pilot.press("a")
        await wait_until(pilot, lambda: " enter add  ↑ ↓ choose  tab complete  esc cancel" in screen.text())
        assert "ctrl+s launch" not in screen.text()
        await pilot.press("escape")
        await wait_until(pilot, lambda: "ctrl+s launch" in screen.text())
        screen.screen.go_to("name")
        await pilot.press("enter")
        await wait_until(pilot, lambda: " enter accept  esc cancel" in screen.text())
        await pilot.press(*"mine")
        row = next(y for y, text in enumerate(screen.text().splitlines()) if "enter accept" in text)
        await pilot.click(offset=(3, row))
        await wait_until(pilot, lambda: fleet.requests[-1].name == "mine", "a click on a key is the key")


async def test_another_match_is_picked_with_the_arrows(screen, fleet, wait_until):
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("a", *"dtype", "down", "down", "up", "down", "enter")
        await wait_until(pilot, lambda: "kv-cache-dtype:\n" in screen.text() and " enter accept" in screen.text())
        await pilot.press("escape", "a")
        screen.screen.entry.value = "number kv format"  # words of its description
        await pilot.pause()
        await pilot.press("enter")
        await wait_until(pilot, lambda: "kv-cache-dtype:\n" in screen.text() and " enter accept" in screen.text())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("max-num-sequenzes", "did you mean max-num-seqs?"),
        ("max-num-sequenzes=7", "did you mean --max-num-seqs"),
        ("max-num-seqs=many", "whole number"),
        ("api-key=sk-1", "can't be set here"),
    ],
)
async def test_what_cannot_be_added_is_reported_at_once_and_not_taken(screen, fleet, wait_until, typed, said):
    async with screen.run_test(size=(100, 30)) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("a")
        screen.screen.entry.value = typed
        await wait_until(pilot, lambda: said in flat(screen), said)
        await pilot.press("enter")
        await wait_until(pilot, lambda: said in flat(screen), said)
        assert screen.screen.editor.typing
    assert fleet.requests[-1].changes == Changes()


async def test_a_flag_that_was_chosen_can_be_changed_and_left_out(screen, fleet, wait_until):
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press(*TO_SEQUENCES, "down", "delete")  # gpu-memory-utilization, which the preset does not set
        await wait_until(pilot, lambda: fleet.requests[-1].changes == Changes(unset=("gpu-memory-utilization",)))
        await wait_until(pilot, lambda: "unset" in screen.text())
        await pilot.press("u")
        await wait_until(pilot, lambda: fleet.requests[-1].changes == Changes())


async def test_the_bar_is_drawn_in_ascii_where_the_terminal_has_no_more(fleet, wait_until, host):
    app = host(lambda: LaunchScreen(fleet))
    app.ascii = True
    async with app.run_test(size=WIDE) as pilot:
        await wait_until(pilot, lambda: "# weights = overhead % KV cache x others . left" in flat(app))
        assert app.text().isascii()


def many_flags(plan, count):
    return replace(plan, flags={**plan.flags, **{f"flag-{n}": n for n in range(count)}})


async def test_the_plan_takes_what_it_needs_and_flags_get_all_other_rows(screen, fleet, wait_until):
    plan = fleet.plan
    fleet.plan = lambda request: many_flags(plan(request), 10)
    async with screen.run_test(size=WIDE) as pilot:
        await planned(pilot, wait_until)
        await wait_until(pilot, lambda: "flag-9" in screen.text())
        assert "ready to launch" in screen.text()
        assert "vllm serve" in screen.text()
        blank = [text for text in screen.text().splitlines() if not text[33:].strip(" │")]
        assert len(blank) <= 4, screen.text()


async def test_sections_are_drawn_for_their_size_whenever_they_get_it(screen, wait_until):
    async with screen.run_test(size=WIDE) as pilot:
        await planned(pilot, wait_until)
        await wait_until(pilot, lambda: screen.text().count("╰") == 3)
        screen.screen.query_one("#launch-note").styles.height = 6
        await wait_until(pilot, lambda: screen.screen.query_one("#launch-note").size.height == 6)
        await wait_until(pilot, lambda: screen.text().count("╰") == 3)


async def test_where_memory_is_not_known_nothing_is_called_ready(screen, fleet, wait_until):
    plan = fleet.plan
    fleet.plan = lambda request: replace(plan(request), memory=None)
    async with screen.run_test(size=WIDE) as pilot:
        await wait_until(pilot, lambda: "! memory not checked" in screen.text())
        assert "ready to launch" not in screen.text()


def test_each_flag_has_a_row_before_a_reason_has_two_and_reasons_are_whole_where_rows_are_left(fakes):
    draft, catalog = LaunchDraft(fakes.PRESETS[0]), FlagCatalog(fakes.FLAG_TABLE)
    plan = draft.planned(fakes.FakeFleet().plan(LaunchRequest("chatbot")), "chatbot-2")
    needed = len(draft.names) + 2

    def shown(height, width=80):
        return [strip.text for strip in setting_lines(draft, plan, catalog, (width, height), 0, active=False)]

    tight, some, roomy = shown(needed), shown(needed + 2), shown(60)
    words = "longer ones would take cache from all others"
    assert words in " ".join(" ".join(shown(60, 66)).split()), "beside the plan, on a wide screen, too"
    assert all(any(name in text for text in tight) for name in draft.names)
    assert not any("more" in text for text in tight[-1:])
    reasons = " ".join(plan.reasons.values()).split()
    cut = [text.rstrip().removesuffix(" …").split()[-1] for text in tight if text.rstrip().endswith("…")]
    assert cut
    assert all(word in reasons for word in cut), "none is cut in the middle of a word"
    assert len(some) > len(tight)
    assert all(any(name in text for text in some) for name in draft.names)
    assert not any("…" in text for text in roomy)
    preset = fakes.PRESETS[0]
    name, flag = next(iter(preset.flags.items()))
    long = replace(preset, flags={**preset.flags, name: replace(flag, why="A reason of many words. " * 16 + "End.")})
    lines = setting_lines(LaunchDraft(long), None, catalog, (70, 80), 0, active=False)
    assert any("End." in strip.text for strip in lines), "a long one, too"


async def test_presets_come_in_order_of_use(host, wait_until, fleet, made):
    fleet.known_runs = [made.run(3, preset="batch"), made.run(2, preset="long-document"), made.run(1, preset="batch")]
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=WIDE) as pilot:
        await planned(pilot, wait_until)
        text = app.text()
        places = [text.index(name) for name in ("batch", "long-document", "chatbot", "code-generation")]
        assert places == sorted(places)
        assert app.screen.planner.draft.preset.name == "batch", "what was used last is chosen"


async def test_where_runs_cannot_be_read_presets_come_as_they_are(host, wait_until, fleet):
    def unreadable(_name=None):
        raise OperationError("the store of runs is damaged")

    fleet.runs = unreadable
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=WIDE) as pilot:
        await planned(pilot, wait_until)
        assert app.screen.planner.draft.preset.name == "chatbot"


def only_fits(fleet, *names):
    """Make the plan refuse all presets but these."""
    plan = fleet.plan

    def judged(request):
        if request.preset not in names:
            raise OperationError("the server needs 2 GPUs, each with 21.6 GiB free")
        return plan(request)

    fleet.plan = judged


async def test_where_the_preset_used_last_does_not_fit_it_opens_at_the_first_that_does(host, wait_until, fleet, made):
    fleet.known_runs = [made.run(2, preset="long-document"), made.run(1, preset="batch")]
    only_fits(fleet, "chatbot", "code-generation")
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=WIDE) as pilot:
        await wait_until(pilot, lambda: "long-document does not fit now; chatbot does" in flat(app))
        assert app.screen.planner.draft.preset.name == "chatbot"
        await wait_until(pilot, lambda: "ready to launch" in app.text())


async def test_where_no_preset_fits_it_stays_at_the_one_used_last_and_says_why(host, wait_until, fleet, made):
    fleet.known_runs = [made.run(2, preset="long-document")]
    only_fits(fleet)
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=WIDE) as pilot:
        await wait_until(pilot, lambda: "needs 2 GPUs, each with" in flat(app))
        assert app.screen.planner.draft.preset.name == "long-document"


async def test_a_preset_that_fits_does_not_replace_what_was_chosen_meanwhile(host, wait_until, fleet, made):
    fleet.known_runs = [made.run(2, preset="long-document")]
    only_fits(fleet, "chatbot")
    plan, fleet.held = fleet.plan, threading.Event()
    waiting = threading.Event()

    def held(request):
        waiting.set()
        fleet.held.wait(20)
        return plan(request)

    fleet.plan = held
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=WIDE) as pilot:
        await wait_until(pilot, waiting.is_set)
        await pilot.press("tab")
        fleet.held.set()
        await planned(pilot, wait_until)
        await pilot.app.workers.wait_for_complete()
        assert app.screen.planner.draft.preset.name == "long-document"


NO_ROOM = (
    "weights (756.0 GiB per GPU) and activations (1.7 GiB) exceed what --gpu-memory-utilization 0.92 allows (42.2 GiB) "
    "by 715.4 GiB; use a quantized or smaller model, or more GPUs"
)
NO_GPUS = (
    "tensor-parallel-size 4 needs 4 GPUs that belong to nobody else, and of the 8 of this machine 6 are taken: 0 and 1 "
    "by anna's server training-eval (claimed until 18:00), 2 by bert's notebook, 3, 4 and 5 by carla's fine-tuning "
    "job; wait for them, or use --set tensor-parallel-size=2, for which GPUs 6 and 7 are free and linked by NVLink"
)


@pytest.mark.parametrize("section", [0, 1, 2])
@pytest.mark.parametrize(("size", "message"), [((60, 15), NO_ROOM), (SMALL, NO_GPUS)], ids=["60x15", "80x24"])
async def test_an_error_is_whole_on_a_small_screen_also_when_it_stops_the_launch(
    screen, fleet, wait_until, size, message, section
):
    fleet.findings = (replace(TOO_SMALL, message=message), HURTS)
    async with screen.run_test(size=size) as pilot:
        await pilot.press(*["tab"] * section)
        await planned(pilot, wait_until)
        await wait_until(pilot, lambda: message in flat(screen), "the error")
        assert "1 error · 1 warning" in screen.text().splitlines()[0]
        assert section == 2 or "f fix" in screen.text()
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: f"Not launched: {message[:60]}" in flat(screen), "why nothing is launched")
        assert section == 2 or flat(screen).count(message[:60]) == 1, "nothing is shown twice"


async def test_going_to_another_section_takes_back_the_first_press_of_a_launch(screen, fleet, wait_until):
    fleet.findings = (HURTS,)
    async with screen.run_test(size=SMALL) as pilot:
        await planned(pilot, wait_until)
        await pilot.press("ctrl+s", "tab", "ctrl+s")
        await wait_until(pilot, lambda: "ctrl+s again launches anyway" in screen.text())
        assert starts(fleet) == []
