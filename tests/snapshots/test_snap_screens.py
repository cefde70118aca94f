"""Screenshots of the launch screen, the flag editor and the log, at three sizes and without color."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input

from vllm_console.fleet.types import PresetProblem
from vllm_console.ui.parts.staging import MeasuredTraffic
from vllm_console.ui.screens.flags import FlagsScreen
from vllm_console.ui.screens.launch import LaunchScreen
from vllm_console.ui.screens.log import LogScreen
from vllm_console.ui.widgets.log_view import LogView
from vllm_launchers.errors import OperationError
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.launch.place import GpuRequest, find_place
from vllm_launchers.plan.budget.budget import GpuBudget, MemoryBudget
from vllm_launchers.plan.choices.choice import Choice, Source
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, Quantization
from vllm_launchers.vllm.modelfacts.local import LocalModel, LocalModels

SIZES = [(80, 24), (120, 40), (200, 60), (60, 15), (200, 20)]

LOG = "".join(
    [
        "(APIServer pid=7) INFO 11-20 10:03:52 [api_utils.py:286] non-default args: {'port': 8120}\n",
        "(EngineCore pid=8) WARNING 11-20 10:03:57 [cpu.py:224] Triton is not installed.\n",
        "Loading safetensors checkpoint shards:   0%\rLoading safetensors checkpoint shards: 100%\n",
        "INFO:     127.0.0.1:51234 - \"GET /health HTTP/1.1\" 200 OK\n",
        "Traceback (most recent call last):\n",
        '  File "vllm/v1/core/kv_cache_utils.py", line 684, in _check_enough_kv_cache_memory\n',
        "    raise ValueError(\n",
        "ValueError: To serve at least one request with the models's max seq len (2048), more memory is needed.\n",
    ]
)  # fmt: skip


LOOKS = 4
"""How many times in a row nothing must change until a screen is complete; a log is read in steps 10 ms apart."""


def planning(screen: object) -> bool:
    """Whether the launch screen is still planning the current choices."""
    return isinstance(screen, LaunchScreen) and not screen.planner.fresh


def working(app: App[None]) -> bool:
    """Whether anything is pending: a plan, a response of the fleet, a part of a log."""
    return (
        planning(app.screen)
        or any(worker.is_running for worker in app.workers if worker.group != "log")
        or any(view.page.busy or view.page.counting for view in app.screen.query(LogView))
        or any(thread.name == "read log" for thread in threading.enumerate())
    )


def settled(*keys: str, ready: str = "") -> Callable[[Pilot[None]], object]:
    """Wait until a text is shown, press keys, and wait until nothing changes."""

    async def run(pilot: Pilot[None]) -> None:
        deadline = time.monotonic() + 60

        def text() -> str:
            return "\n".join("".join(s.text for s in strip) for strip in pilot.app.screen._compositor.render_strips())

        while ready not in text() or planning(pilot.app.screen):  # keys apply to what is planned
            assert time.monotonic() < deadline, text()
            await asyncio.sleep(0.02)
        await pilot.press(*keys)
        before, same, deadline = "", 0, time.monotonic() + 30
        while same < LOOKS:
            assert time.monotonic() < deadline, text()
            await asyncio.sleep(0.012)
            for field in pilot.app.screen.query(Input):  # a key may have added one
                field.cursor_blink = False  # otherwise the screenshot depends on when it is taken
            await pilot.pause()
            now = "" if working(pilot.app) else text()
            same = same + 1 if now and now == before else 0
            before = now

    return run


FINDINGS = (
    PlanFinding("kv_small", Level.ERROR, "One request of 32,768 tokens needs 4.0 GiB of KV cache and there are 3.1 "
            "GiB: lower --max-model-len to 25,000, or give it --kv-cache-dtype fp8.",
            Changes(set={"max-model-len": 25_000}), surely=False),
    PlanFinding("memory_held", Level.WARNING, "GPU 2: anna holds 2.0 GiB (pid 4711), so that 0.92 of it is not free.",
            Changes(set={"gpu-memory-utilization": 0.88})),
    PlanFinding("prefix_caching", Level.ADVICE, "60 % of a prompt was seen before: prefix caching saves its prefill."),
)  # fmt: skip


@pytest.fixture
def fleet(fakes):
    fleet = fakes.FakeFleet(fakes.chat)
    fleet.findings = FINDINGS
    gpus = tuple(GpuBudget(index, 47.5, 33.8, 2.1, 0.7, 6.2, others_gib=2.0 * (index == 2)) for index in (2, 3))
    assumed = ("the model's config has no head size: 128 was taken (hidden size / heads)",)
    fleet.memory = MemoryBudget(33.8, 2.1, 0.7, 6.2, 163_840, 40_632, 32_768, 1.24, 21.4, gpus, assumed=assumed)
    place = find_place(GpuRequest({"tensor-parallel-size": 2}, fakes.VLLM), read_host(Path("4xa6000")), "auto", ())
    plan = fleet.plan

    def planned(request):
        words = ("/opt/vllm/bin/vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--port", "8000")
        made = plan(request)
        return replace(
            made,
            argv=(*words, *made.argv[3:]),
            environment={"VLLM_NO_USAGE_STATS": "1"},
            secrets=("HF_TOKEN",),
            gpus=place.gpus,
            placement=place.reason,
            sets=place.sets,
        )

    fleet.plan = planned
    problem = PresetProblem("~/.config/vllm-console/presets/mine.toml", "unknown key 'modle'; did you mean 'model'?")
    fleet.presets = lambda: (fakes.PRESETS, (problem,))
    return fleet


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("section", ["presets", "settings", "plan"])
def test_launch(snap_compare, alone, fleet, size, section):
    keys = ["tab"] * ["presets", "settings", "plan"].index(section)
    assert snap_compare(
        alone(lambda: LaunchScreen(fleet)), terminal_size=size, run_before=settled(*keys, ready="long-document")
    )


@pytest.mark.parametrize("screen", ["launch", "flags", "log"])
@pytest.mark.parametrize("look_name", ["light", "no-color", "ascii"])
def test_appearance(snap_compare, alone, fleet, fakes, look, tmp_path, monkeypatch, screen, look_name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.log").write_text(LOG * 12)
    staged = {"max-num-seqs": 128, "enable-prefix-caching": None}
    make, ready = {
        "launch": (lambda: LaunchScreen(fleet), "long-document"),
        "flags": (lambda: FlagsScreen(fakes.chat(fakes.NOW), staged, fakes.FakeFleet(fakes.chat)), "max-num-seqs"),
        "log": (lambda: LogScreen("chat", "server.log"), "ValueError"),
    }[screen]
    options = look(look_name)
    app = alone(make)
    app.ascii = options["ascii"]
    assert snap_compare(app, terminal_size=(80, 24), run_before=settled("down", ready=ready))


def test_launch_without_color(snap_compare, alone, fleet, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    run = settled("tab", "tab", "down", ready="long-document")
    assert snap_compare(alone(lambda: LaunchScreen(fleet)), terminal_size=(80, 24), run_before=run)


def test_launch_in_ascii(snap_compare, alone, fleet):
    app = alone(lambda: LaunchScreen(fleet))
    app.ascii = True
    assert snap_compare(app, terminal_size=(80, 24), run_before=settled("tab", "tab", ready="long-document"))


def test_launch_typing(snap_compare, alone, fleet):
    """A value is planned while it is typed."""
    run = settled("tab", *["down"] * 7, "enter", *"0.5", ready="long-document")
    assert snap_compare(alone(lambda: LaunchScreen(fleet)), terminal_size=(80, 24), run_before=run)


def test_launch_adding(snap_compare, alone, fleet):
    run = settled("a", *"cache", ready="long-document")
    assert snap_compare(alone(lambda: LaunchScreen(fleet)), terminal_size=(80, 24), run_before=run)


@pytest.mark.parametrize("size", SIZES)
def test_launch_choosing_a_model(snap_compare, alone, fleet, size):
    """The models of this machine with the plan's verdict on each."""
    known = (
        ("Qwen/Qwen3-8B-AWQ", 6.1, ModelFacts("", parameters=8_190_000_000, quantization=Quantization("awq", 4))),
        ("meta-llama/Llama-3.1-8B-Instruct", 15.0, ModelFacts("", parameters=8_030_000_000, dtype="bfloat16")),
        ("meta-llama/Llama-3.3-70B-Instruct", 131.4, ModelFacts("", parameters=70_600_000_000, dtype="bfloat16")),
    )
    models = [
        LocalModel(name, "cache", f"/hub/{name}", int(gib * 2**30), replace(facts, max_context=131_072))
        for name, gib, facts in known
    ]
    models.append(LocalModel("org/tokenizer", "cache", "/hub/org/tokenizer", 3_000_000, problem="no config.json"))
    fleet.local_models, fleet.findings, plan = LocalModels(tuple(models)), (), fleet.plan

    def planned(request):
        made = plan(request)
        large = request.model is not None and "70B" in request.model
        return replace(made, memory=replace(made.memory, kv_gib=-60.0)) if large else made

    fleet.plan = planned
    run = settled("tab", "enter", "down", ready="long-document")
    assert snap_compare(alone(lambda: LaunchScreen(fleet)), terminal_size=size, run_before=run)


def test_launch_memory_not_known(snap_compare, alone, fleet):
    fleet.memory, fleet.findings = None, ()
    run = settled("tab", "tab", ready="long-document")
    assert snap_compare(alone(lambda: LaunchScreen(fleet)), terminal_size=(80, 24), run_before=run)


def test_launch_refused(snap_compare, alone, fleet):
    def refuse(request):
        raise OperationError("port 8000 is taken by python (pid 4242, owner anna): choose another with the port field")

    fleet.plan = refuse
    app = alone(lambda: LaunchScreen(fleet))
    assert snap_compare(app, terminal_size=(120, 40), run_before=settled("tab", "down", ready="long-document"))


@pytest.mark.parametrize("size", SIZES)
def test_flags(snap_compare, alone, fakes, size):
    staged = {"max-num-seqs": 128, "kv-cache-dtype": "fp8", "enable-prefix-caching": None}
    app = alone(lambda: FlagsScreen(fakes.chat(fakes.NOW), staged, fakes.FakeFleet(fakes.chat)))
    assert snap_compare(app, terminal_size=size, run_before=settled("down", "down", ready="max-num-seqs"))


@pytest.mark.parametrize("size", SIZES[:2])
def test_flags_from_traffic(snap_compare, alone, fakes, size):
    choices = (
        Choice("max-model-len", 1152, "95 % of requests stay below 1,100 tokens.", Source.WORKLOAD, "Longer: refused."),
        Choice("max-num-seqs", 64, "40 requests are in flight at p95.", Source.WORKLOAD),
    )
    seen = MeasuredTraffic("2,400 requests in 60 minutes: prompts of 900 tokens at p95.", choices)
    app = alone(lambda: FlagsScreen(fakes.chat(fakes.NOW), {}, fakes.FakeFleet(fakes.chat), seen))
    assert snap_compare(app, terminal_size=size, run_before=settled(ready="max-num-seqs"))


def test_flags_wrong_value(snap_compare, alone, fakes):
    app = alone(lambda: FlagsScreen(fakes.coder(fakes.NOW), {}, fakes.FakeFleet(fakes.coder)))
    keys = ("enter", "end", "backspace", "backspace", "backspace", "x", "enter")
    assert snap_compare(app, terminal_size=(80, 24), run_before=settled(*keys, ready="max-num-seqs"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "keys",
    [(), ("slash", *"value", "enter"), ("m", *"value", "enter"), ("t",)],
    ids=["following", "search", "matching", "time"],
)
def test_log(snap_compare, alone, tmp_path, monkeypatch, size, keys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.log").write_text(LOG * 12)
    app = alone(lambda: LogScreen("chat", "server.log", simulated=True))
    assert snap_compare(app, terminal_size=size, run_before=settled(*keys, ready="ValueError"))


def test_log_without_color(snap_compare, alone, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.log").write_text(LOG * 12)
    app = alone(lambda: LogScreen("chat", "server.log"))
    assert snap_compare(app, terminal_size=(80, 24), run_before=settled("v", ready="ValueError"))
