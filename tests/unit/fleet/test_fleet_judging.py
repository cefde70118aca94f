"""How the fleet evaluates servers: from their history, from the GPUs, and with a request if one seems to hang."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from vllm_console.cli.servers import describe_server, status_document
from vllm_console.diagnosis.finding import Severity
from vllm_console.fleet import judge
from vllm_console.fleet.board import SharedBoard
from vllm_console.fleet.gpus import FleetGpus
from vllm_console.fleet.judge import Judge, OneToken, _facts, _with_log, slowest_link
from vllm_console.fleet.watched_server import JudgeContext, WatchedServer
from vllm_console.history.exact import exact_value
from vllm_console.history.gpu_samples import GPU_SAMPLES
from vllm_console.history.store import HISTORY, HistoryWriter
from vllm_console.history.time_view import LIVE
from vllm_console.history.timeline import Timeline
from vllm_console.metrics.quantile import Quantiles
from vllm_console.metrics.sample import EngineSample, Histogram, Sample, Window
from vllm_console.metrics.window import without_rates
from vllm_console.runs.store import FILE_NAME, RunName, RunStore
from vllm_console.settings import Config, ConfigError, gpu_reserves, read_settings
from vllm_console.ui.screens.describe import describe_lines
from vllm_launchers import values
from vllm_launchers.host.board import Board, Claim
from vllm_launchers.host.gpu.host import Gpu, GpuClaim, Host, Link
from vllm_launchers.host.gpu.sharing import GpuShare
from vllm_launchers.keeper.files import LOG
from vllm_launchers.keeper.records import Generation, LaunchSpec, ProcessIdentity, ServerRecord, State
from vllm_launchers.keeper.server_client import client_of
from vllm_launchers.launch.details import Details, pack, unpack
from vllm_launchers.listeners import Owner
from vllm_launchers.plan.budget.budget import CONTEXT_GIB, GpuShape
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.presets.model import Objectives
from vllm_launchers.probe.environment import PROBE
from vllm_launchers.probe.plugin import vllm_console_probe as plugin
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.modelfacts.read import model_facts

NOW = 2_000_000.0
ITSELF = Owner.of(os.getpid()) or Owner(0, 0)
SERVER = ProcessIdentity(ITSELF.pid, ITSELF.start_time, "boot")
"""This process acts as the server."""
OBJECTIVES = Objectives(ttft_p99_seconds=2.0, itl_p99_seconds=0.1, kv_cache_usage=0.8, preemption_rate=0.02)
BOUNDS = (0.01, 0.1, 1.0, float("inf"))


def sample(at: float, *, usage: float = 0.5, tokens: float | None = None) -> Sample:
    """A sample of a server with steady traffic; ``tokens`` fixes its counters."""
    done = (at - NOW + 3600) * 10 if tokens is None else tokens
    itl = Histogram(BOUNDS, (0.0, done, done, done), done * 0.03)
    ttft = Histogram(BOUNDS, (0.0, done / 20, done / 20, done / 20), done / 20 * 0.05)
    engine = EngineSample(
        requests_running=4, requests_waiting=0, kv_cache_usage=usage, preemptions_total=0,
        prefix_cache_queries_total=done, prefix_cache_hits_total=done / 2, prompt_tokens_total=done,
        generation_tokens_total=done, requests_finished_total=done / 20, histograms={"itl": itl, "ttft": ttft},
    )  # fmt: skip
    return Sample(at, {"0": engine}, kv_cache_tokens=50_000, model_name="m")


def record(
    port: int = 1,
    state: State = State.READY,
    reason: str = "",
    flags: Any = None,
    secrets: tuple[str, ...] = (),
    **more: Any,
) -> ServerRecord:
    details = Details(
        preset="chatbot", model="Qwen/Qwen3-8B-AWQ", flags=flags or {}, objectives=OBJECTIVES, gpus=(0,), **more
    )
    spec = LaunchSpec(("vllm",), "127.0.0.1", port, secret_names=secrets, details=pack(details))
    generation = Generation(1, spec, NOW - 3600, ready_at=NOW - 3500)
    return ServerRecord("chat", state, NOW - 300, NOW - 3600, (generation,), reason=reason, server=SERVER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server's folder with a history of ten minutes under pressure."""
    writer = HistoryWriter(tmp_path / HISTORY)
    for second in range(600):
        writer.append(sample(NOW - 600 + second, usage=0.9))
    writer.close()
    return tmp_path


def test_selected_server_is_judged_by_its_history(folder: Path) -> None:
    watched = WatchedServer(folder, interactive=False)
    assert watched.view(record(), NOW, selected=False, load="", context=JudgeContext()).findings == ()
    (finding,) = watched.view(record(), NOW, selected=True, load="", context=JudgeContext()).findings
    assert finding.code == "kv_cache_pressure"
    assert finding.measures[0].source == "objectives of preset chatbot"
    assert finding.since <= NOW - 570
    watched.close()


def test_queue_older_than_the_first_sample_is_found(tmp_path: Path) -> None:
    """Ten-second rows do not show its shortest length; one-second rows reach back half an hour."""
    writer = HistoryWriter(tmp_path / HISTORY)
    for second in range(0, 1200, 3):
        seen = sample(NOW - 1200 + second)
        engine = replace(seen.engines["0"], requests_waiting=0 if second < 300 else 40)
        writer.append(replace(seen, engines={"0": engine}))
    writer.close()
    watched = WatchedServer(tmp_path, interactive=False)
    (found,) = watched.view(record(), NOW, selected=True, load="", context=JudgeContext()).findings
    watched.close()
    assert found.code == "oversubscribed_compute"
    assert abs(found.since - (NOW - 900)) <= 10


@pytest.mark.parametrize(
    ("other", "recorded_host", "where"),
    [
        ({}, None, "GPU 1"),
        ({"free_gib": 10.0, "used_gib": 38.0}, None, None),
        ({"name": "NVIDIA T400"}, None, None),
        ({"lost": "it fell off the bus"}, None, None),
        ({"mig_mode": True}, None, None),
        ({"claims": (GpuClaim("bob", NOW, "training", words="claimed by bob"),)}, None, None),
        ({}, "elsewhere", "another GPU"),
    ],
)
def test_second_server_is_suggested_on_a_gpu_that_is_free(
    other: dict[str, Any], recorded_host: str | None, where: str | None
) -> None:
    watching = Judge("chat")
    for second in range(120):
        seen = sample(NOW - 120 + second)
        waiting = replace(seen.engines["0"], requests_waiting=float(second), kv_cache_usage=0.99)
        watching.append(replace(seen, engines={"0": waiting}), 1)
    own = Gpu(index=0, name="NVIDIA L40S", memory_gib=48.0, free_gib=8.0, used_gib=40.0)
    free = replace(Gpu(index=1, name="NVIDIA L40S", memory_gib=48.0, free_gib=47.5, used_gib=0.5), **other)
    gpus = SimpleNamespace(host=lambda: Host(gpus=(own, free)), recorded=False, recorded_host=None)
    details = Details(objectives=OBJECTIVES, gpus=(0,), recorded_host=recorded_host)
    found = watching.findings(record(), details, JudgeContext(gpus=cast(Any, gpus)), NOW)
    (why,) = [one.fixes[-1].why for one in found if one.code == "oversubscribed_memory"]
    fewer = "end fewer concurrent requests"
    alone = f"S{fewer}, or start a second server on another machine: no GPU like its own is free here."
    assert why == (f"Start a second server on {where}, or s{fewer}." if where else alone)


def test_shorter_context_holds_requests_from_before_a_restart() -> None:
    """The findings of a run begin anew, but its traffic does not."""
    bounds = (1000.0, 2000.0, 50_000.0, float("inf"))
    generation = record().current
    second_run = values.replace(generation, number=2, ready_at=NOW - 300)
    restarted = values.replace(record(), generations=(generation, second_run))

    def offered(before: float, bounds_before: tuple[float, ...] = bounds) -> set[object]:
        judge = Judge("chat")
        for second in range(0, 600, 2):
            number, length = (1, before) if second < 300 else (2, 800.0)
            count = float(second % 300)
            ends = bounds_before if number == 1 else bounds
            counts = tuple(count if length <= bound else 0.0 for bound in ends)
            histogram = Histogram(ends, counts, count * length)
            one = sample(NOW - 600 + second)
            engine = replace(one.engines["0"], histograms={"prompt_tokens": histogram, "generation_tokens": histogram})
            judge.append(replace(one, engines={"0": engine}), number)
        details = replace(unpack(generation.spec.details), flags={"max-model-len": 32_768})
        found = judge.findings(restarted, details, JudgeContext(may_ask=False), NOW)
        fixes = [fix for one in found if one.code == "context_unused" for fix in one.fixes]
        return {fix.changes.set["max-model-len"] for fix in fixes}

    assert offered(800.0) == {2560}
    assert offered(1500.0) == {5120}
    assert offered(20_000.0) == set()
    assert offered(400.0, (500.0, float("inf"))) == {2560}, "its context was shorter, and so are its buckets"


def test_console_judges_every_server(folder: Path) -> None:
    watched = WatchedServer(folder, interactive=True)
    view = watched.view(record(), NOW, selected=False, load="", context=JudgeContext())
    assert [finding.code for finding in view.findings] == ["kv_cache_pressure"]
    for state in (State.STOPPED, State.STARTING):
        gone = watched.view(record(state=state), NOW, selected=True, load="", context=JudgeContext())
        assert gone.findings == ()
    watched.close()


def test_nothing_is_reported_without_a_history(tmp_path: Path) -> None:
    watched = WatchedServer(tmp_path, interactive=True)
    assert watched.view(record(), NOW, selected=True, load="", context=JudgeContext()).findings == ()


def test_full_disk_is_the_reason_for_missing_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = WatchedServer(folder, interactive=False)
    full = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)

    def notice(now: float, state: State = State.READY) -> str:
        return watched.view(record(state=state), now, selected=True, load="").notice

    assert notice(NOW) == ""
    assert notice(NOW + 20) == f"no metrics are recorded: the disk of {folder.parents[1]} is full"
    assert notice(NOW + 20, State.STOPPED) == ""
    full.f_bavail = 1000
    assert notice(NOW + 20) == ""
    watched.close()


def test_findings_and_panes_show_the_same_latencies() -> None:
    """A finding once showed ``ITL p99 is 974ms`` above a pane with 838ms: an estimate, up to ten seconds old."""
    judge = Judge("chat")
    for second in range(300):
        seen = sample(NOW - 300 + second)
        engine, done = seen.engines["0"], (second + 1) * 10.0
        itl = Histogram(BOUNDS, (0.0, done / 2, done, done), done * 0.3)
        judge.append(replace(seen, engines={"0": replace(engine, histograms={"itl": itl})}), 1)

    def shown(minute: Window | None) -> tuple[str, str]:
        (found,) = judge.findings(record(), Details(objectives=OBJECTIVES), JudgeContext(), NOW, minute=minute)
        assert found.code == "slow_tokens"
        return found.symptom, found.measures[0].value

    def exactly(value: float) -> Window:
        one = exact_value(value)
        return Window(NOW - 60, NOW, latencies={"itl": Quantiles(600.0, 0.3, one, one, one, exact=True)})

    estimated, figure = shown(None)
    assert estimated == f"ITL p99 of the last minute is {figure}; the objective is 100ms."
    assert figure.startswith("~")
    assert shown(exactly(0.838)) == ("ITL p99 of the last minute is 838ms; the objective is 100ms.", "838ms")
    assert shown(exactly(0.5))[1] == "500ms", "also between two frames"
    assert "; now 90ms" in shown(exactly(0.09))[0]


def test_findings_and_panes_show_the_same_preemptions() -> None:
    """A finding once showed ``79 preemptions in the last minute`` beside a pane with 76/min: its frames are older."""
    judge, timeline = Judge("chat"), Timeline(5.0, 10)
    total = 0.0
    for second in range(304):
        seen = sample(NOW - 300 + second)
        total += 2.0 if second < 280 else 1.0
        engine = replace(seen.engines["0"], preemptions_total=total, requests_finished_total=10.0 * second)
        seen = replace(seen, engines={"0": replace(engine, requests_running=4.0)})
        judge.append(seen, 1)
        timeline.append(seen, 1)

    def shown(minute: Window | None) -> tuple[str, list[str]]:
        (found,) = judge.findings(record(), Details(objectives=OBJECTIVES), JudgeContext(), NOW + 4, minute=minute)
        assert (found.code, found.recovering) == ("preempting", False)
        return found.symptom, [one.value for one in found.measures[:2]]

    older, _ = shown(None)
    assert older == "99 preemptions in the last minute, 0.17 per finished request."
    window = timeline.window()
    assert window is not None
    assert (window.preemptions_per_minute, window.preemption_share) == (96.0, 0.16)
    same = "96 preemptions in the last minute, 0.16 per finished request."
    assert shown(window) == (same, ["0.16", "96/min"])
    half = replace(window, start=window.end - 30)
    assert shown(half)[0] == "48 preemptions in the last minute, 0.16 per finished request.", "as many as were seen"
    ended = replace(without_rates(window), requests_running=0.0, latencies={"itl": Quantiles(9.0, 0.1)})
    assert shown(ended)[0] == older, "rates after a load are not those of the last minute"


def test_late_tokens_are_explained_by_recorded_steps(tmp_path: Path) -> None:
    writer, segments = HistoryWriter(tmp_path / HISTORY), plugin.Segments(tmp_path / PROBE, "steps", {})
    offset = time.monotonic() - time.time()
    for second in range(300):
        seen = sample(NOW - 300 + second)
        engine, done = seen.engines["0"], (second + 1) * 10.0
        itl = Histogram(BOUNDS, (0.9 * done, 0.95 * done, done, done), done * 0.02)
        writer.append(replace(seen, engines={"0": replace(engine, histograms={"itl": itl})}))
        at = NOW - 300 + second + 0.5 + offset
        segments.write([plugin.STEP.pack(at, 0, 4, 0, 0.5, *[-1] * 3, 0, 4, 0, 4, 0.5, 0.5, -1, -1, -1, 0)])
    writer.close()
    watched = WatchedServer(tmp_path, interactive=False)
    (found,) = watched.view(record(), NOW, selected=True, load="", context=JudgeContext()).findings
    watched.close()
    assert found.code == "slow_tokens"
    assert "180 of 180 such steps computed no prompt. A possible cause is other work on this GPU." in found.cause


def test_full_cache_of_a_cpu_build_is_freed_from_its_block_override(folder: Path) -> None:
    (folder / LOG).write_text(
        "INFO 11-20 10:01:38 [kv_cache_utils.py:2619] Overriding num_gpu_blocks=3200 with num_gpu_blocks_override=160\n"
    )
    seen = record(flags={"num-gpu-blocks-override": 160})
    engine = Engine(EngineKind.VLLM, (), "0.32.0", "cpu", "")
    details = replace(unpack(seen.current.spec.details), engine=engine, gpus=())
    spec = values.replace(seen.current.spec, details=pack(details))
    seen = values.replace(seen, generations=(values.replace(seen.current, spec=spec),))
    watched = WatchedServer(folder, interactive=False)
    (found,) = watched.view(seen, NOW, selected=True, load="", context=JudgeContext()).findings
    watched.close()
    assert (found.code, found.fixes[0].changes) == ("kv_cache_pressure", Changes(unset=("num-gpu-blocks-override",)))
    assert "limits the KV cache to 50,000 tokens; 1,000,000 would fit" in found.fixes[0].why


def test_health_503_is_a_dead_engine(tmp_path: Path) -> None:
    watched = WatchedServer(tmp_path, interactive=True)
    dead = record(state=State.UNRESPONSIVE, reason="/health on port 1: HTTP 503 (3 times in a row)")
    (finding,) = watched.view(dead, NOW, selected=False, load="", context=JudgeContext()).findings
    assert finding.code == "engine_dead"
    assert finding.since == NOW - 300


def judged(gpu: Gpu, context: JudgeContext, *, flags: Any = None) -> dict[str, Any]:
    """Findings of a server under pressure whose GPU is sampled for a minute."""
    judge = Judge("chat")
    for second in range(120):
        judge.append(sample(NOW - 120 + second, usage=0.9), 1)
        judge.add_gpus(Host(gpus=(gpu,)), (0,), NOW - 120 + second)
    details = Details(preset="chatbot", model="Qwen/Qwen3-8B-AWQ", flags=flags or {}, objectives=OBJECTIVES, gpus=(0,))
    return {one.code: one for one in judge.findings(record(), details, context, NOW)}


CARD = Gpu(index=0, name="NVIDIA L40S", memory_gib=45.0, free_gib=6.0, used_gib=39.0, used_by=(), utilization=90.0)


def test_fixes_respect_the_gpu_and_its_other_tenants() -> None:
    def offered(context: JudgeContext, gpu: Gpu = CARD) -> list[dict[str, Any]]:
        found = judged(gpu, context, flags={"gpu-memory-utilization": 0.8})
        return [dict(fix.changes.set) for fix in found["kv_cache_pressure"].fixes]

    assert offered(JudgeContext())[:2] == [{"kv-cache-dtype": "fp8"}, {"gpu-memory-utilization": 0.92}]
    for context in (JudgeContext(reserves=(GpuShare(0, gib=5.0),)), JudgeContext(shares=(GpuShare(0, gib=1.0),))):
        assert all("gpu-memory-utilization" not in changes for changes in offered(context))
    assert {"kv-cache-dtype": "fp8"} not in offered(JudgeContext(), replace(CARD, name="Tesla T4"))


def test_simulated_server_has_the_gpu_that_it_simulates() -> None:
    def offered(**environment: str) -> list[dict[str, Any]]:
        judge = Judge("chat")
        for second in range(120):
            judge.append(sample(NOW - 120 + second, usage=0.9), 1)
        simulated = Engine(EngineKind.SIMULATED, (), "0.33.0", "simulated", "")
        details = Details(model="Qwen/Qwen3-8B", engine=simulated, environment=environment, objectives=OBJECTIVES)
        (found,) = judge.findings(record(), details, JudgeContext(), NOW)
        return [dict(fix.changes.set) for fix in found.fixes]

    fp8_cache, fp8_weights = {"kv-cache-dtype": "fp8"}, {"quantization": "fp8_per_tensor"}
    assert fp8_cache not in offered()  # on an A6000, vLLM refuses it
    assert offered(SIMULATED_GPU="L40S")[:2] == [fp8_weights, fp8_cache]
    assert offered(SIMULATED_GPU="H100 80GB")[:2] == [fp8_weights, fp8_cache]
    assert fp8_cache not in offered(SIMULATED_GPU="Tesla T4")


def test_fix_that_the_servers_vllm_refuses_is_not_offered() -> None:
    def offered(version: str, **flags: Any) -> list[dict[str, Any]]:
        judge = Judge("chat")
        for second in range(120):
            judge.append(sample(NOW - 120 + second, usage=0.9), 1)
        engine = Engine(EngineKind.VLLM, (), version, "cuda", "")
        details = Details(model="Qwen/Qwen3-8B", engine=engine, gpu_kind="L40S", flags=flags, objectives=OBJECTIVES)
        (found,) = judge.findings(record(), details, JudgeContext(), NOW)
        return [dict(fix.changes.set) for fix in found.fixes]

    assert {"quantization": "fp8"} in offered("0.30.0")
    assert {"quantization": "fp8_per_tensor"} in offered("0.33.0")
    assert not any("quantization" in one for one in offered("0.33.0", dtype="float32"))
    fewer = {"max-num-seqs"}
    assert any(one.keys() == fewer for one in offered("0.33.0"))
    assert not any(one.keys() == fewer for one in offered("0.33.0", **{"max-num-seqs": 8, "max-num-active-seqs": 8}))


@pytest.mark.parametrize(
    ("gpu", "flags", "release", "sizes"),
    [
        ("RTX A6000", {}, "0.33.0", (256, 2048)),
        ("H100 80GB", {}, "0.33.0", (1024, 8192)),
        ("B200", {}, "0.33.0", (1024, 16384)),
        ("B200", {}, "0.27.1", (1024, 8192)),
        ("B200", {"performance-mode": "throughput"}, "0.33.0", (2048, 32768)),
        ("H100 80GB", {"max-num-batched-tokens": 512}, "0.33.0", (512, 512)),
        ("H100 80GB", {"max-num-batched-tokens": 512, "max-num-seqs": 256}, "0.33.0", (256, 512)),
    ],
)
def test_unset_limits_are_those_of_the_plan(gpu: str, flags: Any, release: str, sizes: tuple[int, int]) -> None:
    engine = Engine(EngineKind.VLLM, (), release, "cuda", "")
    details = Details(model="Qwen/Qwen3-8B", engine=engine, gpu_kind=gpu, flags=flags)
    assert _facts(details, None).batch_sizes == sizes


@pytest.mark.parametrize("flag", [{"num-gpu-blocks-override": 1000}, {"kv-cache-memory-bytes": 2**30}])
@pytest.mark.parametrize("release", ["0.19.1", "0.33.0"])
def test_cache_without_its_limit_has_the_planned_size(flag: Any, release: str) -> None:
    engine = Engine(EngineKind.VLLM, (), release, "cuda", "")
    others = {"max-num-seqs": 64, "max-model-len": 8192, "gpu-memory-utilization": 0.9}
    details = Details(model="Qwen/Qwen3-8B", engine=engine, gpu_kind="H100 80GB", flags={**others, **flag})
    known = model_facts("Qwen/Qwen3-8B")
    plan = estimate(known, others, [GpuShape("H100 80GB")], release=engine.release, environment={})
    assert plan is not None
    assert _facts(details, None).cache_free_gib == pytest.approx(plan.kv_gib)
    # The CUDA context is overhead outside of the share; CUDA graphs are inside it since 0.20.
    rest = plan.per_gpu[0].total_gib * 0.9 - plan.weights_gib - plan.kv_gib
    graphs = plan.graphs_gib if release == "0.33.0" else 0.0
    assert rest == pytest.approx(plan.overhead_gib - CONTEXT_GIB + graphs)
    unlimited = Details(model="Qwen/Qwen3-8B", engine=engine, gpu_kind="H100 80GB", flags=others)
    assert _facts(unlimited, None).cache_free_gib is None


def test_sequences_with_states_follow_the_log() -> None:
    engine = Engine(EngineKind.VLLM, (), "0.33.0", "cuda", "")
    flags = {"max-num-seqs": 64, "max-model-len": 8192}
    details = Details(model="Qwen/Qwen3.5-27B-FP8", engine=engine, gpu_kind="H100 80GB", flags=flags)
    facts = _facts(details, None)
    plan = estimate(model_facts(details.model), flags, [GpuShape("H100 80GB")], release=engine.release)
    assert plan is not None
    assert plan.most_sequences is not None
    assert plan.kv_tokens is not None
    assert _with_log(facts, details, []).most_sequences == plan.most_sequences
    logged = [f"INFO GPU KV cache size: {round(plan.kv_tokens * 0.9):,} tokens"]
    assert _with_log(facts, details, logged).most_sequences == pytest.approx(0.9 * plan.most_sequences, abs=1)
    eager = replace(details, flags={**flags, "enforce-eager": True})
    assert _with_log(facts, eager, logged).most_sequences is None


def test_reserve_comes_from_the_settings() -> None:
    assert "gpu_memory_below_reserve" in judged(CARD, JudgeContext(reserves=(GpuShare(0, fraction=0.2),)))
    assert "gpu_memory_below_reserve" not in judged(CARD, JudgeContext(reserves=(GpuShare(0, fraction=0.1),)))


def test_gpus_of_a_recorded_host_are_not_judged() -> None:
    source = FleetGpus(Path("4xa6000"), Path())
    assert source.host() is not None
    assert JudgeContext(source).host is None


def hot_since(at: float, until: float = NOW) -> list[str]:
    """Lines of the samples file: GPU 0 is too hot from ``at`` on."""
    lines = []
    for seen in range(int(NOW) - 600, int(until), 5):
        gpu = {"index": 0, "name": "NVIDIA L40S", "utilization": 90, "throttle": ["too hot (hardware)"][: seen >= at]}
        lines.append(json.dumps({"at": float(seen), "gpus": [gpu], "links": []}, separators=(",", ":")))
    return lines


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A server's folder within a state folder, with ten healthy minutes."""
    folder = tmp_path / "servers" / "chat"
    folder.mkdir(parents=True)
    writer = HistoryWriter(folder / HISTORY)
    for second in range(0, 600, 2):
        writer.append(sample(NOW - 600 + second))
    writer.close()
    return folder


@pytest.mark.parametrize("interactive", [False, True], ids=["command", "console"])
def test_recorded_gpu_samples_count_from_the_first_snapshot(served: Path, interactive: bool) -> None:
    def found(
        *lines: str, gpus: FleetGpus | None = None, board: SharedBoard | None = None, **more: Any
    ) -> dict[str, float]:
        (served.parents[1] / GPU_SAMPLES).write_text("\n".join(lines))
        watched = WatchedServer(served, interactive=interactive)
        view = watched.view(record(**more), NOW, selected=True, load="", context=JudgeContext(gpus, board=board))
        watched.close()
        return {one.code: one.since for one in view.findings}

    assert "gpu_throttled" not in found()
    begun = found(*hot_since(NOW - 300), "", '{"at":', "no json")
    assert abs(begun["gpu_throttled"] - (NOW - 300)) <= 10, "the start is known from the recorders"
    assert "gpu_throttled" not in found(*hot_since(NOW - 300, until=NOW - 60)), "no sample for a minute"
    assert "gpu_throttled" not in found(*hot_since(NOW - 300), gpus=FleetGpus(Path("4xa6000"), Path()))
    simulated = Engine(EngineKind.SIMULATED, (), "0.33.0", "simulated", "")
    for host in (None, "gpubox"):
        assert "gpu_throttled" not in found(*hot_since(NOW - 300), engine=simulated, recorded_host=host)
    board = SharedBoard(served, watched=False, read_only=True)
    claim = Claim((0,), NOW - 200, time.time() + 3600, "training", uid=os.getuid() + 1, user="anna")
    board.latest = lambda: Board(served, NOW, (claim,))  # type: ignore[method-assign]
    assert abs(found(*hot_since(NOW), board=board)["gpu_claimed"] - (NOW - 200)) <= 10


def test_finding_older_than_its_evidence_keeps_its_start(tmp_path: Path) -> None:
    """After half an hour, its start once moved along with the clock."""
    folder = tmp_path / "servers" / "chat"
    folder.mkdir(parents=True)
    writer = HistoryWriter(folder / HISTORY)
    watched = WatchedServer(folder, interactive=True)

    def since(server: WatchedServer, now: float) -> float:
        view = server.view(record(), now, selected=True, load="", context=JudgeContext())
        return next(one.since for one in view.findings if one.code == "kv_cache_pressure")

    begin = NOW - 2400
    for second in range(0, 2400, 2):
        writer.append(sample(begin + second, usage=0.9))
        if second >= 1200 and second % 60 == 58:
            assert since(watched, begin + second) == pytest.approx(begin, abs=10)
    writer.close()
    watched.close()

    def by_a_new_console() -> float:
        new = WatchedServer(folder, interactive=True)
        found = since(new, NOW)
        new.close()
        return found

    assert by_a_new_console() == pytest.approx(NOW - 1800, abs=20), "its start was not recorded"
    named = RunName("chat-1", "chat", 1)
    store = RunStore(tmp_path / FILE_NAME)
    store.note_findings(named, {"kv_cache_pressure": [(begin - 600, begin + 60)]})
    assert by_a_new_console() == pytest.approx(NOW - 1800, abs=20), "that one has ended"
    for at in range(0, 2400, 100):
        store.note_findings(named, {"kv_cache_pressure": [(begin + at, begin + at)]})
    assert by_a_new_console() == begin - 600
    store.note_findings(named, {"kv_cache_pressure": [(begin - 3000, begin - 1580), (begin - 1200, begin - 950)]})
    assert by_a_new_console() == begin - 1200, "five minutes of recovery, after a minute with some slow requests"


def test_gpu_values_before_a_driver_hang_are_not_current() -> None:
    judge = Judge("chat")
    hot = replace(CARD, throttle=("too hot (hardware)",))
    for second in range(120):
        judge.append(sample(NOW - 120 + second), 1)
        judge.add_gpus(Host(gpus=(hot,), problem="driver not answering since 12:00:00"), (0,), NOW - 120 + second)
    found = judge.findings(record(), Details(objectives=OBJECTIVES, gpus=(0,)), JudgeContext(), NOW)
    assert [one.code for one in found] == ["healthy"]


def test_slowest_link_of_several_gpus() -> None:
    links = (Link(0, 1, "NV4"), Link(0, 2, "SYS"), Link(1, 2, "PHB"))
    host = Host(gpus=tuple(Gpu(index=index) for index in range(4)), links=links)
    assert slowest_link(host, (0, 1)) == "NV4"
    assert slowest_link(host, (0, 1, 2)) == "SYS"
    assert slowest_link(host, (0, 1, 3)) == ""
    assert slowest_link(host, (0,)) == ""


Answering = Callable[..., SimpleNamespace]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """``answering(status)`` starts a server on its own port; with status 0 it responds once its event is set."""
    servers = []

    def start(status: int) -> SimpleNamespace:
        seen = SimpleNamespace(requests=[], release=threading.Event())

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seen.requests.append((self.path, self.headers, self.rfile.read(int(self.headers["content-length"]))))
                if not status:
                    seen.release.wait(20)
                self.send_response(status or 200)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append((server, seen))
        seen.port = server.server_address[1]
        return seen

    yield start
    for server, seen in servers:
        seen.release.set()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("status", "silent"), [(200, 0.0), (401, None), (404, None), (500, None)])
def test_answer_counts_only_if_it_comes_from_the_engine(answering: Answering, status: int, silent: Any) -> None:
    seen = answering(status)
    request = OneToken()
    assert request.silent_seconds is None
    request.ask(client_of(record(seen.port), SERVER), "m")
    request.wait(60)
    assert request.silent_seconds == silent


def test_one_token_is_requested_once_a_minute_with_the_key(answering: Answering, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    seen = answering(200)
    request = OneToken()
    for _ in range(3):
        request.ask(client_of(record(seen.port, secrets=("VLLM_API_KEY",)), SERVER), "m")
        request.wait(60)
        request.forget()
    ((path, headers, body),) = seen.requests
    assert path == "/v1/completions"
    assert headers["authorization"] == "Bearer secret"
    assert b'"max_tokens": 1' in body
    assert len(json.loads(body)["prompt"].split()) >= 32, "a short prompt must not be the first that a server sees"


def test_request_without_an_answer_is_growing_silence(answering: Answering, monkeypatch: Any) -> None:
    monkeypatch.setattr(judge, "DEADLINE_SECONDS", 0.2)
    seen = answering(0)
    request = OneToken()
    request.ask(client_of(record(seen.port), SERVER), "m")
    request.wait(60)
    first = request.silent_seconds
    assert first is not None
    assert 0.2 <= first < request.silent_seconds  # type: ignore[operator]
    request.forget()
    assert request.silent_seconds is None


def test_refused_connection_is_not_silence() -> None:
    request = OneToken()
    request.ask(client_of(record(1), SERVER), "m")
    request.wait(60)
    assert request.silent_seconds is None
    assert "refused" in request.refused


def test_key_invalid_in_a_header_is_reported(answering: Answering, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sec\nret")
    request = OneToken()
    request.ask(client_of(record(answering(200).port), SERVER), "m")
    request.wait(60)
    assert request.silent_seconds is None
    assert request.refused.startswith("it could not be sent: VLLM_API_KEY")


def silent(judge: Judge, seconds: int = 120) -> None:
    """Requests run without any progress."""
    for second in range(seconds):
        judge.append(sample(NOW - seconds + second, tokens=5000.0), 1)


def test_hang_is_reported_only_if_the_request_confirms_it(answering: Answering, monkeypatch: Any) -> None:
    monkeypatch.setattr("vllm_console.fleet.judge.HUNG_AFTER_SECONDS", 0.3)
    monkeypatch.setattr("vllm_console.diagnosis.live.engine.HUNG_AFTER_SECONDS", 0.3)
    hung, busy = answering(0), answering(200)
    for seen, expected in ((hung, ["engine_hung"]), (busy, [])):
        judge = Judge("chat")
        silent(judge)
        found = judge.findings(record(seen.port), Details(objectives=OBJECTIVES), JudgeContext(), NOW, wait=True)
        assert [one.code for one in found] == expected
        assert len(seen.requests) == 1


def test_hang_of_one_engine_is_reported_without_a_request(answering: Answering) -> None:
    def in_part(stands_still: float) -> Judge:
        """Engine 1 stops after that many seconds of three minutes; the others continue."""
        judge = Judge("chat")
        for second in range(180):
            at = NOW - 180 + second
            moves, stopped = sample(at).engines["0"], sample(NOW - 180 + min(second, stands_still)).engines["0"]
            judge.append(Sample(at, {"0": moves, "1": stopped, "2": moves}, 50_000, "m"), 1)
        return judge

    seen = answering(200)
    (found,) = in_part(60).findings(record(seen.port), Details(objectives=OBJECTIVES), JudgeContext(), NOW, wait=True)
    assert (found.code, found.severity) == ("engine_hung", Severity.WARNING)
    assert found.symptom == "Some engines seem to hang: requests run on engine 1, and no token for 2m00s from there."
    assert seen.requests == []
    well = in_part(150).findings(record(seen.port), Details(objectives=OBJECTIVES), JudgeContext(), NOW, wait=True)
    assert not well, "half a minute may be one long step, and is not healthy either"


def test_active_server_and_read_only_console_send_no_request(answering: Answering) -> None:
    seen = answering(200)
    judge = Judge("chat")
    silent(judge)
    (found,) = judge.findings(record(seen.port), Details(), JudgeContext(may_ask=False), NOW, wait=True)
    assert (found.code, found.severity) == ("engine_hung", Severity.WARNING)
    assert found.cause == ("Not confirmed by a one-token test request: a read-only console sends none.")
    moving = Judge("chat")
    for second in range(120):
        moving.append(sample(NOW - 120 + second), 1)
    found = moving.findings(record(seen.port), Details(objectives=OBJECTIVES), JudgeContext(), NOW, wait=True)
    assert [one.code for one in found] == ["healthy"]
    assert seen.requests == []


def test_reserves_in_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[reserve]\n0 = "4 GiB"\n1 = "10 %"\n')
    assert gpu_reserves(read_settings(path)) == (GpuShare(0, gib=4.0), GpuShare(1, fraction=0.1))
    assert gpu_reserves(Config()) == ()
    for line in ('0 = "much"', 'first = "4 GiB"'):
        path.write_text(f"[reserve]\n{line}\n")
        with pytest.raises(ConfigError, match="reserve"):
            read_settings(path)


def test_one_peak_is_not_marked_and_stays_healthy(tmp_path: Path) -> None:
    """Marks, findings and values are based on the same evaluation of the last minute."""
    writer = HistoryWriter(tmp_path / HISTORY)
    for second in range(600):
        writer.append(sample(NOW - 600 + second, usage=0.91 if second >= 596 else 0.5))
    writer.close()
    watched = WatchedServer(tmp_path, interactive=True)
    view = watched.view(record(), NOW, selected=True, load="", context=JudgeContext())
    watched.close()
    assert view.window is not None
    assert view.window.kv_cache_usage == 0.91
    assert not view.missed("kv_cache_usage")
    (healthy,) = [one for one in view.findings if one.code == "healthy"]
    usage = next(one for one in view.judged if one.name == "kv_cache_usage")
    assert (healthy.measures[0].value, healthy.measures[0].limit) == (usage.text, usage.limit_text)


def test_missed_objective_is_not_called_healthy(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / HISTORY)
    for second in range(600):
        writer.append(sample(NOW - 600 + second, usage=0.91 if second >= 575 else 0.5))
    writer.close()
    watched = WatchedServer(tmp_path, interactive=True)
    view = watched.view(record(), NOW, selected=True, load="", context=JudgeContext())
    watched.close()
    assert view.missed("kv_cache_usage")
    assert "healthy" not in [one.code for one in view.findings]


def test_command_line_has_required_variables_and_no_secret(tmp_path: Path) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "1", "NOTE": "a b", "SOME_API_KEY": "hf_abcdefghijklmnopqrstuv"}
    spec = LaunchSpec(("vllm", "serve", "m"), "127.0.0.1", 1, details=pack(Details(environment=variables)))
    launched = values.replace(record(), generations=(Generation(1, spec, NOW - 3600, ready_at=NOW - 3500),))
    watched = WatchedServer(tmp_path, interactive=False)
    view = watched.view(launched, NOW, selected=True, load="")
    watched.close()
    hidden = "SOME_API_KEY='•••'"
    assert view.command == ("CUDA_VISIBLE_DEVICES=1", "NOTE='a b'", hidden, "vllm", "serve", "m")
    assert f"  command     CUDA_VISIBLE_DEVICES=1 NOTE='a b' {hidden} vllm serve m" in describe_server(view, NOW)
    assert status_document(view)["env"]["CUDA_VISIBLE_DEVICES"] == "1"
    assert any("CUDA_VISIBLE_DEVICES=1" in strip.text for strip in describe_lines(view, NOW, 80))


def test_values_of_the_previous_run_are_not_judged_after_a_restart(folder: Path) -> None:
    before = record()
    again = Generation(2, before.current.spec, NOW - 5, ready_at=NOW - 1)
    watched = WatchedServer(folder, interactive=True)
    restarted = values.replace(before, generations=(*before.generations, again), state_since=NOW - 1)
    view = watched.view(restarted, NOW, selected=True, load="", context=JudgeContext())
    watched.close()
    assert (view.window, view.judged, view.missed("kv_cache_usage")) == (None, (), False)


@pytest.mark.parametrize("state", [State.STOPPED, State.READY])
def test_silent_server_keeps_its_last_frame(folder: Path, state: State) -> None:
    """Also a running server that is no longer recorded, in a newly opened console."""
    watched = WatchedServer(folder, interactive=True)
    later = NOW + 7200
    last = record(state=state)
    view = watched.view(last, later, selected=True, load="", context=JudgeContext())
    series = watched.in_time(view, last, later, LIVE).series
    watched.close()
    assert series is not None
    assert series.as_of == NOW - 1
    assert series.values["kv_cache_usage"][-1] == 0.9
    assert series.end == pytest.approx(NOW, abs=5)


def test_charts_change_only_at_the_end_of_a_point(tmp_path: Path) -> None:
    """Values change every second; a chart with five-second points changes when its next point ends."""
    writer = HistoryWriter(tmp_path / HISTORY)
    watched = WatchedServer(tmp_path, interactive=True)
    served, drawn = record(), []
    for second in range(-30, 11):
        writer.append(sample(NOW + second, usage=0.9 if second > 0 else 0.3), 1)
        view = watched.view(served, NOW + second + 0.2, selected=True, load="", context=JudgeContext())
        assert view.sample is not None
        assert view.sample.at == NOW + second
        series = watched.in_time(view, served, NOW + second + 0.2, LIVE).series
        assert series is not None
        if series.values["kv_cache_usage"][-1] is not None:
            drawn.append((second, series))
    watched.close()
    writer.close()
    ends = {second: series.end - NOW for second, series in drawn if second >= -5}
    assert ends == {second: 5 * ((second - 1) // 5) for second in ends}, "an end belongs to its point"
    assert len({id(series) for second, series in drawn if 1 <= second <= 5}) == 1
    assert [series.values["kv_cache_usage"][-1] for second, series in drawn if second in (5, 6)] == [0.3, 0.9]


def test_new_generation_has_no_metrics_until_it_answers(tmp_path: Path) -> None:
    """Metrics of the previous generation were once shown, and printed by ``status``."""
    writer = HistoryWriter(tmp_path / HISTORY)
    for second in range(60):
        writer.append(sample(NOW - 100 + second), 1)
    before = record()
    second_start = values.replace(before.current, number=2, started_at=NOW - 30, ready_at=None)
    starting = values.replace(
        before, state=State.STARTING, state_since=NOW - 30, generations=(before.current, second_start)
    )
    watched = WatchedServer(tmp_path, interactive=True)
    seen = watched.view(starting, NOW, selected=True, load="", context=JudgeContext())
    assert (seen.sample, seen.window) == (None, None)
    assert watched.in_time(seen, starting, NOW, LIVE).series is not None, "charts continue over a restart"
    assert status_document(seen)["metrics"] is None
    writer.append(sample(NOW - 1), 2)
    writer.close()
    seen = watched.view(starting, NOW, selected=True, load="", context=JudgeContext())
    assert seen.sample is not None
    assert seen.sample.at == NOW - 1
    assert status_document(seen)["metrics"]["requests_running"] is not None
    watched.close()


def test_automatic_restart_shows_no_values_of_the_old_process(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / HISTORY)
    for second in range(60):
        writer.append(sample(NOW - 100 + second), 1)
    writer.close()
    again = values.replace(record(state=State.STARTING), attempt=1, state_since=NOW - 20)
    watched = WatchedServer(tmp_path, interactive=True)
    assert watched.view(again, NOW, selected=True, load="", context=JudgeContext()).sample is None
    assert watched.view(record(), NOW, selected=True, load="", context=JudgeContext()).sample is not None
    watched.close()


def test_findings_persist_through_a_pause_and_end_with_the_traffic(folder: Path) -> None:
    """Five minutes after the last request, no finding about the cache or latencies is left."""
    watched = WatchedServer(folder, interactive=False)
    assert watched.view(record(), NOW, selected=True, load="", context=JudgeContext()).findings
    last = sample(NOW - 1, usage=0.9).engines["0"]
    over = replace(last, requests_running=0.0, requests_waiting=0.0)
    for begin, end, expected in ((0, 40, ["kv_cache_pressure"]), (40, 301, [])):
        writer = HistoryWriter(folder / HISTORY)
        for second in range(begin, end):
            writer.append(Sample(NOW + second, {"0": over}), 1)
        writer.close()
        found = watched.view(record(), NOW + end - 1, selected=True, load="", context=JudgeContext()).findings
        assert [finding.code for finding in found] == expected
    watched.close()
