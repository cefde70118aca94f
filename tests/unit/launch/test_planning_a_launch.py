"""A launch planned from its inputs: flags, GPUs, memory, and what prevents it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.errors import OperationError
from vllm_launchers.host.environment import HostEnvironment
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import Gpu, Holder, Host, MigInstance
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack, unpack
from vllm_launchers.launch.earlier_starts import own_start, remember_start, report_store
from vllm_launchers.launch.errors import NoPlaceError, UnfitError
from vllm_launchers.launch.launch_plan import LaunchPlan, plan_launch
from vllm_launchers.launch.place import GpuFinder
from vllm_launchers.launch.planner import Planner
from vllm_launchers.launch.refusal import fix_options, refuse_unfit
from vllm_launchers.launch.resolved_request import ResolvedRequest
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.load import read_presets
from vllm_launchers.presets.model import Workload
from vllm_launchers.units import GIB
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.flags.releases import known_or_assumed
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts

VLLM = Engine(EngineKind.VLLM, ("/opt/vllm",), "0.33.0", "cuda", "/opt/vllm")
EIGHT = ModelFacts(
    model="/models/eight", source="folder", architecture="LlamaForCausalLM", layers=(LayerKind.FULL,) * 32,
    hidden_size=4096, intermediate_size=14336, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256,
    max_context=131_072, dtype="bfloat16", weight_bytes=16 * 10**9, bytes_to_download=0,
)  # fmt: skip
SEVENTY = replace(EIGHT, model="/models/seventy", layers=(LayerKind.FULL,) * 80, heads=64, hidden_size=8192,
                  intermediate_size=28672, weight_bytes=141 * 10**9)  # fmt: skip
LOG = (
    "INFO 01-01 00:00:01 [gpu_model_runner.py:1] Model loading took 15.50 GiB memory and 3.1 seconds\n"
    "INFO 01-01 00:00:02 [gpu_worker.py:1] Available KV cache memory: 30.00 GiB\n"
    "INFO 01-01 00:00:03 [kv_cache_utils.py:1] GPU KV cache size: 245,760 tokens\n"
    "INFO 01-01 00:00:03 [kv_cache_utils.py:1] Maximum concurrency for 4,096 tokens per request: 60.00x\n"
)

Make = Callable[..., LaunchPlan]


@pytest.fixture
def ask() -> Callable[..., ResolvedRequest]:
    def ask(
        place: str | None = "offered", *, set: Any = None, unset: tuple[str, ...] = (), **more: Any
    ) -> ResolvedRequest:
        preset = read_presets(None)[0][more.pop("preset", "chatbot")]

        more = {"gpu_finder": GpuFinder(place)} | more if place is not None else more
        model = more.pop("model", "/models/eight")
        engine = more.pop("engine", VLLM)
        return ResolvedRequest(preset, engine, Changes(set or {}, unset), model, "127.0.0.1", 8000, {}, **more)

    return ask


def host(name: str) -> Host:
    return read_host(Path(name))


def test_cpu_build_has_neither_gpus_nor_their_speed(ask: Callable[..., ResolvedRequest]) -> None:
    inputs = PlanInputs(EIGHT, host=host("4xa6000"))
    assert plan_launch(ask(), inputs).plan.paces is not None
    on_cpu = replace(VLLM, build="cpu")
    plan = plan_launch(ask(engine=on_cpu), inputs).plan
    assert plan.paces is None
    launch = plan_launch(ask("", engine=on_cpu, gpus=(0,)), inputs)
    assert (launch.plan.gpus, launch.details.gpus) == ((), ())
    assert "cpu_no_gpu" in [finding.code for finding in launch.plan.findings]


def test_no_more_gpus_than_the_model_needs(ask: Callable[..., ResolvedRequest]) -> None:
    one = plan_launch(ask(), PlanInputs(EIGHT, host=host("8xh100"))).plan
    assert len(one.gpus) == 1
    more = plan_launch(ask(model="/models/seventy"), PlanInputs(SEVENTY, host=host("8xh100"))).plan
    assert more.flags["tensor-parallel-size"] == len(more.gpus)
    assert len(more.gpus) in (2, 4)
    assert more.memory is not None
    assert more.memory.fits
    assert [gpu.index for gpu in more.memory.per_gpu] == list(more.gpus)
    assert not [found for found in more.findings if found.level is Level.ERROR]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"gpu-memory-utilization": 9}, "--gpu-memory-utilization 9"),
        ({"max-num-seqs": 99999999999}, "--max-num-seqs 99999999999 with steps of 4,096 tokens"),
        ({"kv-cache-dtype": True}, "--kv-cache-dtype True"),
        ({"kv-cache-dtype": "foo"}, "--kv-cache-dtype foo"),
        ({"num-gpu-blocks-override": -1}, "--num-gpu-blocks-override -1"),
        ({"kv-cache-memory-bytes": -1}, "--kv-cache-memory-bytes -1"),
        ({"quantization": "foo"}, "--quantization foo"),
        ({"quantization": "awq"}, "--quantization awq"),
        ({"max-model-len": 10**6}, "--max-model-len 1000000"),
        ({"kv-transfer-config": "{bad"}, "--kv-transfer-config {bad"),
        ({"hf-overrides": "{bad"}, "--hf-overrides {bad"),
        ({"block-size": 7}, "--block-size 7"),
        ({"hf-overrides": "[1]"}, "--hf-overrides [1]"),
        (
            {"speculative-config.method": "ngram", "speculative-config.num_speculative_tokens": -4},
            "--speculative-config.method ngram --speculative-config.num_speculative_tokens -4",
        ),
    ],
)
def test_no_memory_is_planned_for_a_refused_flag(
    ask: Callable[..., ResolvedRequest], flags: dict[str, Any], refused: str
) -> None:
    plan = plan_launch(ask(set=flags), PlanInputs(EIGHT, known_or_assumed("0.33.0"), host("8xh100"))).plan
    assert (plan.memory, plan.paces, plan.alternatives, plan.unestimated) == (None, None, (), f"vLLM refuses {refused}")
    assert len(plan.gpus) == 1, "no GPUs are taken for an amount that nobody needs"
    found = [one for one in plan.findings if one.level is Level.ERROR]
    allowed = {"flag_value", "batch_too_small", "block_size", "context_over_model", "quantization_without_checkpoint"}
    assert {one.code for one in found} <= allowed


def test_no_memory_is_planned_for_what_the_assumed_release_refuses(ask: Callable[..., ResolvedRequest]) -> None:
    unknown = Engine(EngineKind.VLLM, ("vllm",), None, None, "")
    plan = plan_launch(ask(set={"block-size": 0}, engine=unknown), PlanInputs(EIGHT, host=host("8xh100"))).plan
    assert (plan.memory, plan.unestimated) == (None, "vLLM 0.33.0 refuses --block-size 0")
    warnings = {one.code: one.message for one in plan.findings if one.level is Level.WARNING}
    assert warnings["flag_value"].endswith("(another release may differ)")
    assert warnings["engine_version_unknown"].startswith("no vLLM was found")


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"hf-overrides": '{"rope_theta": 1e6, "num_hidden_layers": 2}'}, "num_hidden_layers"),
        ({"hf-overrides.text_config.hidden_size": 64}, "text_config"),
        ({"hf-overrides": '{"max_position_embeddings": 4096}'}, "max_position_embeddings"),
    ],
)
def test_no_memory_is_planned_for_a_changed_config(
    ask: Callable[..., ResolvedRequest], flags: dict[str, Any], key: str
) -> None:
    inputs = PlanInputs(EIGHT, known_or_assumed("0.33.0"), host("8xh100"))
    plan = plan_launch(ask(set=flags, unset=("max-model-len",)), inputs).plan
    assert (plan.memory, plan.paces) == (None, None)
    assert plan.unestimated == f"the effect of {key} in --hf-overrides is not considered"
    assert not [one for one in plan.findings if one.level is Level.ERROR]


@pytest.mark.parametrize(
    "changed",
    [
        '{"architectures": ["Other"]}',
        '{"architectures": ["Other"], "is_original_qwen3_reranker": true}',
        '{"rope_scaling": {}}',
        '{"n_positions": 9000}',
    ],
)
def test_memory_is_planned_for_a_config_whose_changes_need_none(
    ask: Callable[..., ResolvedRequest], changed: str
) -> None:
    inputs = PlanInputs(EIGHT, known_or_assumed("0.33.0"), host("8xh100"))
    plan = plan_launch(ask(set={"hf-overrides": changed}), inputs).plan
    assert plan.memory is not None
    assert not plan.unestimated


def test_memory_is_planned_if_a_value_is_refused_only_with_other_flags(ask: Callable[..., ResolvedRequest]) -> None:
    """The tensor parallel size is chosen later."""
    inputs = PlanInputs(SEVENTY, known_or_assumed("0.33.0"), host("8xh100"))
    plan = plan_launch(ask(set={"decode-context-parallel-size": 2}, model="/models/seventy"), inputs).plan
    assert plan.memory is not None
    assert not plan.unestimated


def test_memory_is_planned_in_spite_of_a_refused_flag_that_needs_none(ask: Callable[..., ResolvedRequest]) -> None:
    inputs = PlanInputs(EIGHT, known_or_assumed("0.33.0"), host("8xh100"))
    plan = plan_launch(ask(set={"uvicorn-log-level": "loud"}), inputs).plan
    assert [one.code for one in plan.findings if one.level is Level.ERROR] == ["flag_value"]
    assert plan.memory is not None
    assert not plan.unestimated


def test_measured_traffic_replaces_the_presets(ask: Callable[..., ResolvedRequest]) -> None:
    seen = Workload(12_000, 2_000, 0.0, 8)
    plan = plan_launch(ask(workload=seen), PlanInputs(EIGHT, host=host("8xh100"))).plan
    length = plan.flags["max-model-len"]
    assert isinstance(length, int)
    assert length >= 14_000
    assert {c.flag: c.source for c in plan.choices}["max-model-len"] == "workload"


def test_restart_keeps_earlier_choices(ask: Callable[..., ResolvedRequest]) -> None:
    """Choices made at the start remain with their sources; only what the user changes differs."""
    first = plan_launch(ask(model="/models/seventy"), PlanInputs(SEVENTY, host=host("8xh100")))
    details = unpack(pack(Details.of(first.plan, read_presets(None)[0]["chatbot"])))
    assert details.gpus_chosen
    again = ResolvedRequest(
        details.as_preset(), VLLM, Changes({"max-num-seqs": 32}), details.model, "127.0.0.1", 8000, {},
        gpus=details.gpus, sources=details.sources, workload=None,
        gpu_finder=GpuFinder(again=True, chosen=True),
    )  # fmt: skip
    plan = plan_launch(again, PlanInputs(SEVENTY, host=host("8xh100"))).plan
    assert dict(plan.flags) == {**first.plan.flags, "max-num-seqs": 32}
    assert plan.gpus == first.plan.gpus
    sources = {choice.flag: choice.source for choice in plan.choices}
    assert sources["tensor-parallel-size"] == "machine"
    assert sources["max-num-seqs"] == "you"
    assert sources["max-model-len"] == "preset"


def test_restart_with_more_gpus_moves_and_reports_it(ask: Callable[..., ResolvedRequest]) -> None:
    preset = Details.of(plan_launch(ask(), PlanInputs(EIGHT)).plan, read_presets(None)[0]["chatbot"]).as_preset()
    again = ResolvedRequest(preset, VLLM, Changes({"tensor-parallel-size": 2}), "/models/eight", "127.0.0.1", 8000, {},
                            gpus=(1,), sources={}, gpu_finder=GpuFinder(again=True, chosen=True))  # fmt: skip
    plan = plan_launch(again, PlanInputs(EIGHT, host=host("4xa6000"))).plan
    assert len(plan.gpus) == 2
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, plan.gpus))
    assert [found.level for found in plan.findings if found.code == "gpus_moved"] == [Level.WARNING]


def test_larger_gpus_are_taken_if_the_first_are_too_small(ask: Callable[..., ResolvedRequest]) -> None:
    small = Gpu(0, "GPU-0", "NVIDIA L4", 22.5, 22.4, used_gib=0.1, compute_capability="8.9")
    large = Gpu(1, "GPU-1", "NVIDIA L40S", 45.0, 44.0, used_gib=1.0, compute_capability="8.9")
    busy = replace(large, used_by=(Holder(7, "anna", 0.9, command="python"),))
    plan = plan_launch(ask(set={"max-model-len": 100_000}), PlanInputs(EIGHT, host=Host(gpus=(small, busy)))).plan
    assert plan.gpus == (1,)
    assert plan.memory is not None
    assert plan.memory.fits


def ready(resolved: LaunchPlan, folder: Path) -> ServerRecord:
    preset = read_presets(None)[0]["chatbot"]
    predicted = {name: resolved.details.predicted[name] for name in ("weights_gib", "kv_gib")}
    details = replace(Details.of(resolved.plan, preset), gpu_kind=resolved.details.gpu_kind, predicted=predicted)
    spec = LaunchSpec(argv=resolved.plan.argv, host="127.0.0.1", port=8000, details=pack(details))
    (folder / "server.log").write_text("an earlier generation\n" + LOG)
    offset = len("an earlier generation\n")
    return ServerRecord("chat", State.READY, 2.0, 1.0, (Generation(1, spec, 1.0, 2.0),), log_offset=offset)


def test_reported_memory_replaces_and_corrects_the_estimate(
    ask: Callable[..., ResolvedRequest], tmp_path: Path
) -> None:
    known = PlanInputs(EIGHT, host=host("4xa6000"))
    reports = report_store(tmp_path)
    first = plan_launch(ask(), known, reports)
    assert first.plan.memory is not None
    assert first.plan.memory.source == "estimate"
    assert remember_start(reports, tmp_path, ready(first, tmp_path))

    same = plan_launch(ask(), known, reports)
    assert same.plan.memory is not None
    assert (same.plan.memory.source, same.plan.memory.kv_tokens) == ("engine", 245_760)
    assert same.plan.estimated == first.plan.memory
    assert first.plan.estimated is None
    assert (
        same.details.predicted == first.details.predicted
    )  # the estimate stored with the next report is never a corrected one

    other = plan_launch(ask(set={"max-num-seqs": 64}), known, reports)
    assert other.plan.memory is not None
    assert other.plan.memory.source == "estimate, corrected"
    assert other.plan.memory.weights_gib == pytest.approx(15.5)
    elsewhere = plan_launch(ask(), PlanInputs(EIGHT, host=host("8xh100")), reports)
    assert elsewhere.plan.memory is not None
    assert elsewhere.plan.memory.source == "estimate"


def test_simulated_start_corrects_only_simulated_ones(ask: Callable[..., ResolvedRequest], tmp_path: Path) -> None:
    simulated = Engine(EngineKind.SIMULATED, ("python",), "0.33.0", "simulated", "")
    reports, known = report_store(tmp_path), PlanInputs(EIGHT, host=host("4xa6000"))
    first = plan_launch(ask(engine=simulated), known, reports)
    assert remember_start(reports, tmp_path, ready(first, tmp_path))
    again, real = plan_launch(ask(engine=simulated), known, reports), plan_launch(ask(), known, reports)
    assert again.plan.memory is not None
    assert (again.plan.memory.source, again.plan.memory.kv_tokens) == ("engine", 245_760)
    assert real.plan.memory is not None
    assert real.plan.memory.source == "estimate"


def test_start_disturbed_by_a_neighbor_corrects_nothing(ask: Callable[..., ResolvedRequest], tmp_path: Path) -> None:
    known = PlanInputs(EIGHT, host=host("4xa6000"))
    reports, first = report_store(tmp_path), plan_launch(ask(), known)
    record = ready(first, tmp_path)
    with (tmp_path / "server.log").open("a") as log:
        log.write("Actual usage is 15.5 GiB for weight, 0.5 GiB for peak activation, 7.98 GiB for non-torch memory\n")
    assert own_start(tmp_path, record) is None
    assert not remember_start(reports, tmp_path, record)
    again = plan_launch(ask(), known, reports)
    assert again.plan.memory is not None
    assert again.plan.memory.source == "estimate"


def test_restart_uses_the_servers_own_log(ask: Callable[..., ResolvedRequest], tmp_path: Path) -> None:
    """Even if no report was stored, as by a read-only console."""
    known = PlanInputs(EIGHT, host=host("4xa6000"))
    first = plan_launch(ask(), known)
    own = own_start(tmp_path, ready(first, tmp_path))
    staged = plan_launch(ask(set={"max-num-seqs": 64}), known, report_store(tmp_path), own)
    assert staged.plan.memory is not None
    assert staged.plan.memory.source == "estimate, corrected"


def test_block_override_says_nothing_about_memory(ask: Callable[..., ResolvedRequest], tmp_path: Path) -> None:
    """vLLM logs the available memory, but the tokens of the overridden blocks."""
    known = PlanInputs(EIGHT, host=host("4xa6000"))
    own = own_start(tmp_path, ready(plan_launch(ask(set={"num-gpu-blocks-override": 40}), known), tmp_path))
    assert own is not None
    assert "kv_gib" not in own.predicted


def test_limited_cache_is_planned_with_its_blocks(ask: Callable[..., ResolvedRequest], tmp_path: Path) -> None:
    """Even after a start has reported the memory that it could have had."""
    known, reports = PlanInputs(EIGHT, host=host("4xa6000")), report_store(tmp_path)
    limit = {"num-gpu-blocks-override": 40}
    first = plan_launch(ask(set=limit), known, reports).plan.memory
    assert first is not None
    assert first.kv_bytes_per_token is not None
    assert first.kv_gib == pytest.approx(40 * 16 * first.kv_bytes_per_token / GIB)
    remember_start(reports, tmp_path, ready(plan_launch(ask(set=limit), known), tmp_path))
    again = plan_launch(ask(set=limit), known, reports).plan.memory
    assert again is not None
    assert again.source == "engine"
    assert again.kv_gib == pytest.approx(first.kv_gib)
    assert [gpu.kv_gib for gpu in again.per_gpu] == pytest.approx([gpu.kv_gib for gpu in first.per_gpu])


def plan_with(*found: PlanFinding) -> Plan:
    return Plan("chatbot", "m", VLLM, "127.0.0.1", 8000, (), {}, {}, {}, findings=found)


SURE = PlanFinding("flag_unknown", Level.ERROR, "no such flag", Changes({"a": True}, ("b",)))
PASSING = PlanFinding("memory_held", Level.ERROR, "anna holds it", surely=False)
HURTS = PlanFinding("utilization_high", Level.WARNING, "much")


@pytest.mark.parametrize(
    ("found", "force", "standing"),
    [
        ((HURTS,), False, ()),
        ((SURE, PASSING), False, (SURE, PASSING)),
        ((SURE, PASSING), True, (SURE,)),
        ((PASSING, HURTS), False, (PASSING,)),
        ((PASSING, HURTS), True, ()),
    ],
)
def test_findings_that_block_a_start(
    found: tuple[PlanFinding, ...], force: bool, standing: tuple[PlanFinding, ...]
) -> None:
    if not standing:
        refuse_unfit(plan_with(*found), force=force)
        return
    with pytest.raises(UnfitError) as raised:
        refuse_unfit(plan_with(*found), force=force)
    assert raised.value.findings == standing
    assert raised.value.forceable is (SURE not in found)
    assert raised.value.exit_code == 1
    for one in standing:
        assert f"{one.message} [{one.code}]" in str(raised.value)
    assert ("--force" in str(raised.value)) is (SURE not in found)


def test_fix_is_shown_as_command_options() -> None:
    assert fix_options(Changes({"max-model-len": 8192, "x": True}, ("y",))) == (
        "--set max-model-len=8192 --set x=true --unset y"
    )
    assert fix_options(Changes({"speculative-config": '{"a": 1}'})) == """--set 'speculative-config={"a": 1}'"""


def test_engine_that_cannot_be_launched_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OperationError, match="no vLLM was found on PATH"):
        Planner(tmp_path, nothing, nothing).engine("auto", None)
    wrapper = tmp_path / "vllm"
    wrapper.write_text('#!/bin/sh\nexec docker run vllm/vllm-openai "$@"\n')
    wrapper.chmod(0o755)
    with pytest.raises(OperationError, match=f"{wrapper}: runs vLLM in Docker.*install vLLM in an environment"):
        Planner(tmp_path, nothing, nothing).engine("auto", None)
    gone = str(tmp_path / "gone")
    with pytest.raises(OperationError, match=f"{gone}: does not exist.*runs vLLM in Docker"):
        Planner(tmp_path, nothing, nothing, (gone,)).engine("auto", None)


def test_fixed_cache_size_is_judged_by_the_start_that_suggested_it(
    ask: Callable[..., ResolvedRequest], tmp_path: Path
) -> None:
    known, reports = PlanInputs(EIGHT, host=host("4xa6000")), report_store(tmp_path)
    suggested = 20 * GIB
    record = ready(plan_launch(ask(), known, reports), tmp_path)
    with (tmp_path / "server.log").open("a") as log:
        log.write(f"INFO 01-01 00:00:04 [x.py:1] config with `--kv-cache-memory={suggested}` (20.0 GiB) to fit into ")
        log.write("requested memory, or `--kv-cache-memory=22222222222` (20.70 GiB) to fully utilize gpu memory.\n")

    def found(**flags: Any) -> PlanFinding | None:
        changes = {name.replace("_", "-"): value for name, value in flags.items()}
        plan = plan_launch(ask(set=changes), known, reports).plan
        return next((one for one in plan.findings if one.code == "kv_cache_fixed"), None)

    unknown = found(kv_cache_memory_bytes=suggested)
    assert unknown is not None
    assert (unknown.level, unknown.fix) == (Level.ADVICE, None)
    remember_start(reports, tmp_path, record)
    assert found() is None
    pinned, more = found(kv_cache_memory_bytes=suggested), found(kv_cache_memory_bytes=suggested + 1)
    other = found(kv_cache_memory_bytes=suggested, max_num_seqs=64)
    assert pinned is not None
    assert pinned.level is Level.ADVICE
    assert "whatever --gpu-memory-utilization says" in pinned.message
    for worse in (more, other):
        assert worse is not None
        assert worse.level is Level.WARNING
        assert worse.fix == Changes(unset=("kv-cache-memory-bytes",))


def inputs_with(name: str, devices: str, facts: ModelFacts | None = EIGHT) -> PlanInputs:
    """A host on which a server inherits ``CUDA_VISIBLE_DEVICES``."""
    return PlanInputs(facts, host=host(name), environment=HostEnvironment(variables={"CUDA_VISIBLE_DEVICES": devices}))


@pytest.mark.parametrize("place", ["auto", "offered"])
def test_gpus_are_chosen_among_the_visible_ones(ask: Callable[..., ResolvedRequest], place: str) -> None:
    assert plan_launch(ask(place), PlanInputs(EIGHT, host=host("8xh100"))).plan.gpus != (5,)
    plan = plan_launch(ask(place), inputs_with("8xh100", "5")).plan
    assert plan.gpus == (5,)
    assert "devices_overridden" not in [found.code for found in plan.findings]
    plan = plan_launch(ask(place, model="/models/seventy"), inputs_with("8xh100", "6,7", SEVENTY)).plan
    assert (plan.gpus, plan.flags["tensor-parallel-size"]) == ((6, 7), 2)


def test_refused_choice_names_the_variable_that_limits_it(ask: Callable[..., ResolvedRequest]) -> None:
    inputs = inputs_with("4xa6000", "0")
    with pytest.raises(NoPlaceError, match=r"\(CUDA_VISIBLE_DEVICES=0 hides the other GPUs\)"):
        plan_launch(ask("auto", set={"gpu-memory-utilization": 0.9}), inputs)


def test_slice_is_chosen_among_the_visible_ones(ask: Callable[..., ResolvedRequest]) -> None:
    for part in host("1xa100-mig").gpus[0].mig:
        inputs = inputs_with("1xa100-mig", part.uuid, None)
        plan = plan_launch(ask(set={"gpu-memory-utilization": 0.1}), inputs).plan
        assert plan.environment["CUDA_VISIBLE_DEVICES"] == part.uuid


def test_free_one_of_several_visible_slices_is_chosen(ask: Callable[..., ResolvedRequest]) -> None:
    slices = tuple(MigInstance(f"MIG-{n}", "3g.40gb", 39.5, free, n, 0) for n, free in ((1, 1.0), (2, 39.0)))
    whole = Gpu(0, "GPU-0", "NVIDIA A100-SXM4-80GB", 79.6, 40.0, compute_capability="8.0", mig_mode=True, mig=slices)
    environment = HostEnvironment(variables={"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"})
    plan = plan_launch(ask("auto"), PlanInputs(EIGHT, host=Host(gpus=(whole,)), environment=environment)).plan
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == "MIG-2"


@pytest.mark.parametrize(("devices", "gpu"), [("6,7,-1", 6), ("7,", 7)])
def test_entries_after_an_invalid_one_are_hidden(ask: Callable[..., ResolvedRequest], devices: str, gpu: int) -> None:
    assert plan_launch(ask("auto"), inputs_with("8xh100", devices)).plan.gpus == (gpu,)


@pytest.mark.parametrize(("devices", "shown"), [("", "''"), ("NoDevFiles", "NoDevFiles"), ("-1,0", "-1,0")])
def test_no_gpu_is_chosen_if_all_are_hidden(ask: Callable[..., ResolvedRequest], devices: str, shown: str) -> None:
    inputs = inputs_with("8xh100", devices)
    for place in ("auto", "offered"):
        with pytest.raises(NoPlaceError, match=f"^CUDA_VISIBLE_DEVICES={shown} hides all GPUs: name GPUs with --gpus"):
            plan_launch(ask(place), inputs)
    simulated = replace(VLLM, kind=EngineKind.SIMULATED, build="simulated")
    for request in (ask(engine=replace(VLLM, build="cpu")), ask(engine=simulated)):
        assert plan_launch(request, inputs).plan.gpus == ()
    again = ask(gpus=(3,), gpu_finder=GpuFinder(again=True, chosen=True))
    assert plan_launch(again, inputs).plan.gpus == (3,)


L40S = tuple(Gpu(n, f"GPU-{n}", "NVIDIA L40S", 44.9, 44.5, used_gib=0.4, compute_capability="8.9") for n in range(8))


@pytest.mark.parametrize(
    ("gigabytes", "way"),
    [(250, "make more GPUs visible in CUDA_VISIBLE_DEVICES, or use"), (450, "even all 8 GPUs of this machine are too")],
)
def test_hidden_gpus_count_as_gpus_of_the_machine(
    ask: Callable[..., ResolvedRequest], gigabytes: int, way: str
) -> None:
    large = replace(SEVENTY, weight_bytes=gigabytes * 10**9)
    environment = HostEnvironment(variables={"CUDA_VISIBLE_DEVICES": "0,1"})
    plan = plan_launch(ask("auto"), PlanInputs(large, host=Host(gpus=L40S), environment=environment)).plan
    found = {one.code: one.message for one in plan.findings}
    assert way in found["weights_do_not_fit"]
    assert ("such machines" in found.get("other_tool", "")) is (gigabytes == 450)


def test_other_gpus_of_another_model_may_be_enough(ask: Callable[..., ResolvedRequest]) -> None:
    inputs = PlanInputs(EIGHT, host=Host(gpus=(SLOW, replace(L40S[0], index=1))))
    plan = plan_launch(ask("", gpus_unnamed=True), inputs).plan
    (error,) = [one for one in plan.findings if one.code == "weights_do_not_fit"]
    assert error.message.endswith("; use other or more GPUs, or use a quantized or smaller model")
    large = replace(inputs, facts=replace(EIGHT, weight_bytes=800 * 10**9))
    (error,) = [one for one in plan_launch(ask("", gpus_unnamed=True), large).plan.findings if one.level is Level.ERROR]
    assert "even both GPUs of this machine are too few" in error.message


@pytest.mark.parametrize(("devices", "warned"), [("5", True), ("0,1", False), ("", True)])
def test_named_gpus_that_are_not_visible_are_warned_about(
    ask: Callable[..., ResolvedRequest], devices: str, warned: bool
) -> None:
    plan = plan_launch(ask("", gpus=(0,)), inputs_with("8xh100", devices)).plan
    assert plan.gpus == (0,)
    assert ("devices_overridden" in [found.code for found in plan.findings]) is warned


def test_overridden_variable_is_quoted_and_of_no_interest_on_the_cpu(ask: Callable[..., ResolvedRequest]) -> None:
    def found(engine: Engine) -> list[str]:
        plan = plan_launch(ask("", gpus=(0,), engine=engine), inputs_with("8xh100", "")).plan
        return [one.message for one in plan.findings if one.code == "devices_overridden"]

    assert found(VLLM) == ["CUDA_VISIBLE_DEVICES='' from your environment is overridden by the selected GPUs, 0"]
    assert found(replace(VLLM, build="cpu")) == []


SLOW = Gpu(0, "GPU-0", "NVIDIA RTX A2000", 6.0, 5.9, used_gib=0.1, compute_capability="8.6")
FAST = Gpu(1, "GPU-1", "NVIDIA H100 80GB HBM3", 79.6, 79.1, used_gib=0.5, compute_capability="9.0")


def ordered(plan: Plan) -> tuple[str | None, list[str]]:
    return plan.environment.get("CUDA_DEVICE_ORDER"), [one.message for one in plan.findings if one.code == "gpu_order"]


@pytest.mark.parametrize(("variables", "first"), [({}, SLOW), ({"CUDA_VISIBLE_DEVICES": "1"}, FAST)])
def test_different_gpus_are_numbered_as_planned(
    ask: Callable[..., ResolvedRequest], variables: dict[str, str], first: Gpu
) -> None:
    inputs = PlanInputs(EIGHT, host=Host(gpus=(SLOW, FAST)), environment=HostEnvironment(variables=variables))
    launch = plan_launch(ask("", gpus_unnamed=True), inputs)
    order, found = ordered(launch.plan)
    assert (order, launch.details.gpu_kind) == ("PCI_BUS_ID", first.name)
    assert f"The first one that vLLM uses is {first.label}; choose others with --gpus" in found[0]


def test_order_is_left_to_those_who_set_it_or_need_none(ask: Callable[..., ResolvedRequest]) -> None:
    def order(*gpus: Gpu, set: dict[str, str] | None = None, **request: Any) -> tuple[str | None, list[str]]:
        inputs = PlanInputs(EIGHT, host=Host(gpus=gpus), environment=HostEnvironment(variables=set or {}))
        return ordered(plan_launch(ask("", gpus_unnamed=True, **request), inputs).plan)

    assert order(SLOW, FAST, set={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == (None, [])
    assert order(SLOW, FAST, set={"CUDA_VISIBLE_DEVICES": "GPU-1"}) == (None, [])
    assert order(SLOW, FAST, set={"CUDA_VISIBLE_DEVICES": ""}) == (None, [])
    assert order(FAST, replace(FAST, index=2)) == (None, [])
    for build in ("cpu", "rocm", "xpu"):
        assert order(SLOW, FAST, engine=replace(VLLM, build=build)) == (None, [])
    assert order(SLOW, FAST, gpu_finder=GpuFinder(again=True)) == (None, [])
    assert order(SLOW, FAST, standby_of="chat") == (None, [])
