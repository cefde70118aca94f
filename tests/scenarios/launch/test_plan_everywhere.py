"""Every preset with several models on every recorded host: plans that contradict neither themselves nor vLLM."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from vllm_console.cli.plan_text import plan_document, plan_lines
from vllm_launchers.host.gpu.document import host_from_topo, read_host
from vllm_launchers.host.gpu.host import Gpu, GpuClaim, Holder, Host, Link
from vllm_launchers.launch.errors import NoPlaceError
from vllm_launchers.launch.lasting_fixes import with_fix, with_lasting_fixes
from vllm_launchers.launch.launch_plan import plan_launch
from vllm_launchers.launch.place import GpuFinder
from vllm_launchers.launch.resolved_request import ResolvedRequest
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.proposals import Target, newly_refused
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.flags.check_value import refused_together
from vllm_launchers.vllm.flags.releases import release_table
from vllm_launchers.vllm.modelfacts.facts import expert_split_problem, split_problem
from vllm_launchers.vllm.modelfacts.known import known_facts, siblings

PRESETS = read_presets(None)[0]
HOSTS_FOLDER = Path(__file__).parents[3] / "launchers/vllm_launchers/host/gpu/hosts"


def made(count: int, kind: str, gpu: str) -> Host:
    """A host with equal links of one kind between all pairs of GPUs."""
    names = [f"GPU{i}" for i in range(count)]
    rows = [" ".join([name, *("X" if other == name else kind for other in names), "0-7", "0"]) for name in names]
    return host_from_topo("\n".join([" ".join([*names, "CPU", "Affinity", "NUMA", "Affinity"]), *rows]), gpu)


HOSTS = {path.stem: read_host(path) for path in sorted(HOSTS_FOLDER.glob("*.json"))} | {
    "4xl40s-switch": made(4, "PIX", "L40S"),
    "8xh200": made(8, "NV18", "H200"),
    "2xa6000-apart": made(2, "SYS", "RTX A6000"),
    "2xrtx3090-pcie": made(2, "PHB", "RTX 3090"),
    "2xh100": made(2, "NV18", "H100"),
}
MODELS = (
    "Qwen/Qwen3-8B-AWQ",
    "Qwen/Qwen3-4B-Instruct-2507-FP8",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-32B-Instruct-AWQ",
    "Qwen/Qwen2.5-72B-Instruct",
    "casperhansen/llama-3.3-70b-instruct-awq",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B-FP8",
    "deepseek-ai/DeepSeek-R1",
    "openai/gpt-oss-120b",
)
SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


def plan(
    preset: str,
    model: str,
    host: Host,
    changes: Changes | None = None,
    gpus: tuple[int, ...] = (),
    place: str = "offered",
) -> Plan:
    engine = Engine(EngineKind.VLLM, ("/opt/vllm",), "0.33.0", "cuda", "/opt/vllm", "")
    ask = ResolvedRequest(
        PRESETS[preset], engine, changes or Changes(), model, "127.0.0.1", 8000, {}, gpus=gpus,
        gpu_finder=GpuFinder("" if gpus else place),
        gpus_unnamed=not place and not gpus,
    )  # fmt: skip
    return plan_launch(ask, PlanInputs(known_facts(model), host=host)).plan


def laid(made: Plan) -> tuple[int, ...]:
    return tuple(int(made.flags.get(name, 1)) for name in SIZES)


def oldest(host: Host) -> float:
    return min(float(gpu.compute_capability or 0) for gpu in host.gpus)


def contradictions(made: Plan, host: Host, model: str) -> Iterator[str]:
    """Statements of a plan that are wrong, or that vLLM would refuse."""
    tensor, stages, copies = laid(made)
    reasons = " ".join(f"{choice.reason} {choice.tradeoff}" for choice in made.choices)
    codes = {finding.code for finding in made.findings if finding.level is Level.ERROR}
    facts = known_facts(model)
    assert facts is not None
    if made.memory is not None and not made.memory.fits and not codes & {"weights_do_not_fit", "kv_too_small"}:
        yield "there is no room, and nothing says so"
    fits = made.memory is not None and made.memory.fits and (tensor, stages, copies) == (1, 1, 1)
    if "The model fits on one GPU" in reasons and not fits and not host.gpus[0].mig_mode:
        yield "it says that the model fits on one GPU"
    if re.search(r"\d copies", reasons) and copies == 1:
        yield "it speaks of copies that there are not"
    if split_problem(facts, tensor):
        yield "its heads do not divide"
    if made.flags.get("enable-expert-parallel") is not True and expert_split_problem(facts, tensor * copies):
        yield "its experts do not divide"
    offered = [made.flags, *(one.changes.set for one in made.alternatives)]
    offered += [finding.fix.set for finding in made.findings if finding.fix is not None]
    if oldest(host) < 8.9 and any(str(flags.get("kv-cache-dtype", "")).startswith("fp8") for flags in offered):
        yield "it has or offers an FP8 cache that vLLM refuses"
    if made.alternatives:
        yield from _rows(made)


def _rows(made: Plan) -> Iterator[str]:
    first, *others = made.alternatives
    if not first.chosen or any(one.chosen for one in others):
        yield "not one row alone is the plan"
    if (first.layout.tensor, first.layout.pipeline, first.layout.data) != laid(made):
        yield "the plan's row has another layout"
    if made.memory is not None and abs(first.kv_gib - max(0.0, made.memory.kv_gib)) > 0.8:
        yield "the plan's row holds something else"
    for one in made.alternatives:
        if "answers" in one.reason and "answers" in one.tradeoff.lower():
            yield f"{one.label}: says twice that answers change"
        if one.paces is None or one.paces.one is None or one.paces.full is None:
            continue
        if one.paces.full.tokens_per_second + 1e-6 < one.paces.one.tokens_per_second:
            yield f"{one.label}: more requests give fewer tokens"
        if one.concurrent_requests is not None and one.paces.full.concurrency > one.concurrent_requests:
            yield f"{one.label}: more run than find room"


def with_room(host: Host, *free: float, user: str = "anna") -> Host:
    """The host with that much memory free on each GPU; the rest is held by this user, or by our server `other`."""

    def one(gpu: Gpu, left: float) -> Gpu:
        used = (gpu.memory_gib or 0.0) - left
        server = "other" if user == "me" else ""
        held = (Holder(4711, user, used, server=server, command="python"),) if used > 1 else ()
        return replace(gpu, free_gib=left, used_gib=used, used_by=held)

    return replace(host, gpus=tuple(one(gpu, left) for gpu, left in zip(host.gpus, free, strict=True)))


def uneven(large: float, small: float) -> Host:
    """One 80 GiB GPU and two 48 GiB GPUs, with that much memory free."""
    kinds = (("NVIDIA A100-SXM4-80GB", 80.0, "8.0"), *[("NVIDIA RTX A6000", 48.0, "8.6")] * 2)
    gpus = [Gpu(at, f"GPU-{at}", name, gib, compute_capability=able) for at, (name, gib, able) in enumerate(kinds)]
    links = tuple(Link(a, b, "PIX") for a in range(3) for b in range(a + 1, 3))
    return with_room(Host(gpus=tuple(gpus), links=links), large, small, small)


def starts(made: Plan) -> bool:
    """Whether it fits where it is placed, as far as the plan knows."""
    return made.memory is not None and made.memory.fits and not any(one.level is Level.ERROR for one in made.findings)


LARGE_MODEL = "openai/gpt-oss-120b"
"""It fits on one 80 GiB GPU, or on two 48 GiB GPUs."""


@pytest.mark.parametrize("user", ["anna", "me"])
def test_layout_is_not_chosen_for_a_gpu_that_others_hold(user: str) -> None:
    held = plan("batch", LARGE_MODEL, with_room(uneven(79.5, 47.5), 71.0, 47.5, 47.5, user=user))
    assert (held.gpus, starts(held)) == ((1, 2), True)
    assert starts(plan("batch", LARGE_MODEL, uneven(79.5, 47.5)))


def test_layout_is_not_chosen_for_a_gpu_that_others_have_claimed() -> None:
    host = uneven(79.5, 47.5)
    claim = GpuClaim("anna", 0.0, "training", words="claimed until 18:00 by anna: training")
    claimed = replace(host, gpus=(replace(host.gpus[0], claims=(claim,)), *host.gpus[1:]))
    made = plan("batch", LARGE_MODEL, claimed)
    assert (made.gpus, starts(made)) == ((1, 2), True)


@pytest.mark.parametrize(
    ("free", "most"), [((44.6, 44.6, 44.6, 44.6), 4), ((44.6, 5.0, 44.6, 44.6), 1), ((44.6, 44.6, 5.0, 44.6), 2)]
)
def test_layouts_without_named_gpus_fit_on_the_first_visible_ones(free: tuple[float, ...], most: int) -> None:
    host = with_room(HOSTS["4xl40s-switch"], *free)
    model = "Qwen/Qwen3-4B-Instruct-2507-FP8"
    made = plan("chatbot", model, host, place="")
    assert starts(made)
    offered = [one for one in made.alternatives if one.model is None and one.fits]
    assert max(one.layout.total for one in offered) == most
    for one in offered:
        assert starts(plan("chatbot", model, host, one.changes, place="")), one.label


@pytest.mark.parametrize("name", HOSTS)
def test_plans_on_recorded_hosts_have_no_contradictions(name: str) -> None:
    host, found = HOSTS[name], []
    for preset in PRESETS:
        for model in MODELS:
            try:
                made = plan(preset, model, host)
            except NoPlaceError:
                continue
            found += [f"{preset}, {model}: {text}" for text in contradictions(made, host, model)]
            lines = " ".join(" ".join(plan_lines(made)).split())
            found += [f"{preset}, {model}: {text}" for text in re.findall(r"(?<![\d.,])1 (?:\w+ )?requests\b", lines)]
            assert plan_document(made)["alternatives"] is not None
    assert not found


@pytest.mark.parametrize("name", ["4xl40s-switch", "8xh200", "2xa6000-apart", "2xrtx3090-pcie", "4xa6000"])
@pytest.mark.parametrize("model", [MODELS[0], MODELS[4], MODELS[5], MODELS[6], MODELS[7]])
def test_applied_alternative_becomes_the_shown_plan(name: str, model: str) -> None:
    host = HOSTS[name]
    made = plan("chatbot", model, host)
    for row in made.alternatives:
        again = plan("chatbot", row.model or model, host, row.changes)
        assert laid(again) == (row.layout.tensor, row.layout.pipeline, row.layout.data), row.label
        assert again.memory is not None
        assert max(0.0, again.memory.kv_gib) == pytest.approx(row.kv_gib, abs=0.5), row.label
        assert again.memory.fits == row.fits
        assert row.fits or row.chosen
        assert not row.fits or not [finding for finding in again.findings if finding.level is Level.ERROR], row.label


@pytest.mark.parametrize("host", ["2xrtx3090", "2xrtx3090-pcie", "4xa6000", "2xa6000-apart", "1xa100-mig"])
@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_uses_an_fp8_cache_where_vllm_refuses_it(preset: str, host: str) -> None:
    made = plan(preset, PRESETS[preset].model, HOSTS[host])
    assert "kv-cache-dtype" not in made.flags
    assert "fp8_kv_slow" not in [finding.code for finding in made.findings]


def test_alternatives_use_no_fp8_cache_where_vllm_refuses_it() -> None:
    made = plan("chatbot", MODELS[0], HOSTS["4xa6000"], Changes(set={"kv-cache-dtype": "fp8"}))
    assert [one.kv_cache_dtype for one in made.alternatives if not one.chosen] == ["auto"] * (
        len(made.alternatives) - 1
    )
    assert made.alternatives[0].kv_cache_dtype == "fp8"
    (found,) = [one for one in made.findings if one.code == "fp8_unsupported"]
    assert found.level is Level.WARNING


@pytest.mark.parametrize(
    "flags",
    [
        {"decode-context-parallel-size": 2},
        {"tensor-parallel-size": 4, "decode-context-parallel-size": 4},
        {"data-parallel-size": 2, "data-parallel-size-local": 2},
    ],
)
def test_layouts_do_not_contradict_set_flags(flags: Flags) -> None:
    made = plan("chatbot", "Qwen/Qwen2.5-7B-Instruct", HOSTS["4xl40s-switch"], Changes(set=flags))
    table = release_table("0.33.0")
    assert refused_together(table, made.flags) == []
    model = known_facts("Qwen/Qwen2.5-7B-Instruct")
    assert all(not newly_refused(Target(table, model), made.flags, one.changes) for one in made.alternatives)


def test_split_cache_takes_as_many_gpus_even_over_slow_links() -> None:
    split = Changes(set={"decode-context-parallel-size": 4})
    cut = plan("chatbot", "Qwen/Qwen2.5-7B-Instruct", made(4, "SYS", "RTX A6000"), split)
    assert laid(cut) == (4, 1, 1)
    assert refused_together(release_table("0.33.0"), cut.flags) == []


def test_slow_links_are_named_even_where_they_are_faster() -> None:
    host, model = made(4, "SYS", "RTX 6000 Ada"), "meta-llama/Llama-3.3-70B-Instruct"
    staged = plan("chatbot", model, host)
    assert laid(staged) == (1, 4, 1)
    (found,) = [one for one in staged.findings if one.code == "tensor_parallel_faster"]
    assert found.fix is not None
    cut = plan("chatbot", model, host, found.fix)
    assert laid(cut) == (4, 1, 1)
    (finding,) = [one for one in cut.findings if one.code == "tp_over_pcie"]
    assert (finding.level, finding.fix) == (Level.ADVICE, None)  # must not advise back and forth
    assert "for PP 4" in finding.message
    apart = plan("chatbot", MODELS[5], HOSTS["2xa6000-apart"], Changes(set={"tensor-parallel-size": 2}))
    (slow,) = [one for one in apart.findings if one.code == "tp_over_pcie"]
    assert slow.level is Level.WARNING


def test_slightly_less_capacity_is_traded_for_much_more_speed() -> None:
    few = plan("chatbot", "Qwen/Qwen2.5-32B-Instruct", made(4, "NV2", "V100-SXM2-32GB"))
    assert laid(few) == (4, 1, 1)
    held = {one.label: one.concurrent_requests or 0.0 for one in few.alternatives}
    assert held["TP 4"] < 48 < held["TP 2 × PP 2"]  # 48 are requested


SMALLER = (MODELS[0], MODELS[1], MODELS[2], MODELS[3], MODELS[4], MODELS[7])
ASKED: tuple[Flags, ...] = (
    {}, {"tensor-parallel-size": 2}, {"max-model-len": 32_768},
    *({"kv-cache-memory-bytes": size} for size in ("1G", "20G", "40G", "80G")),
    *({"num-gpu-blocks-override": size} for size in (4, 600, 10_000, 40_000, 200_000)),
)  # fmt: skip


def errors_of(made: Plan) -> Counter[str]:
    return Counter(finding.code for finding in made.findings if finding.level is Level.ERROR)


@pytest.mark.parametrize(("name", "seed"), [("4xa6000", 2), ("4xa6000", 6), ("2xrtx3090-pcie", 1)])
def test_applied_fix_lasts_and_causes_no_new_error(name: str, seed: int) -> None:
    """With fewer and more GPUs given than needed, and with none; on the first host, others hold memory."""
    host, some, wrong = HOSTS[name], Random(seed), []
    every = tuple(gpu.index for gpu in host.gpus)
    for _ in range(24):
        preset, model, flags = some.choice(("chatbot", "batch")), some.choice(SMALLER), some.choice(ASKED)
        gpus, place = some.choice([((), "offered"), ((), ""), ((), ""), (every[:1], ""), (every[:2], ""), (every, "")])
        asked = Changes(set=flags)
        try:
            made = plan(preset, model, host, asked, gpus, place)
        except NoPlaceError:
            continue
        known = errors_of(made)
        for found in made.findings:
            if found.fix is None:
                continue
            again = errors_of(plan(preset, model, host, with_fix(asked, found.fix), gpus, place))
            if not again <= known or (found.level is Level.ERROR and again[found.code] == known[found.code]):
                wrong.append((preset, model, flags, gpus, place, found.code, found.fix, again))
    assert not wrong


def test_smaller_cache_is_offered_with_a_fitting_layout() -> None:
    """Without a layout it would need fewer GPUs, but each would hold more of the weights and have less room."""
    host, model = HOSTS["4xa6000"], "Qwen/Qwen3-4B-Instruct-2507-FP8"
    asked = Changes(set={"num-gpu-blocks-override": 200_000})
    made = plan("chatbot", model, host, asked, place="")
    (found,) = [one for one in made.findings if one.code == "kv_cache_too_large"]
    assert found.fix is not None
    again = plan("chatbot", model, host, with_fix(asked, found.fix), place="")
    assert laid(again) == laid(made)
    assert again.memory is not None
    assert all(gpu.free_gib >= 0 for gpu in again.memory.per_gpu)


@pytest.mark.parametrize("host", ["4xl40s-switch", "8xh200", "2xh100"])
@pytest.mark.parametrize("model", [MODELS[0], MODELS[2], MODELS[4], MODELS[7]])
@pytest.mark.parametrize("blocks", [4, 600])
def test_few_blocks_take_no_more_gpus(host: str, model: str, blocks: int) -> None:
    """A block holds no more tokens over more GPUs; it is the override that is too small."""
    asked = Changes(set={"num-gpu-blocks-override": blocks})
    free, few = plan("chatbot", model, HOSTS[host]), plan("chatbot", model, HOSTS[host], asked)
    assert laid(few) == laid(free)
    small = [one for one in few.findings if one.code == "kv_too_small"]
    assert len(small) == (blocks == 4 and free.memory is not None and free.memory.fits)
    for finding in small:
        assert "--num-gpu-blocks-override 4 limits it, and without it fits" in finding.message
        assert finding.fix == Changes(unset=("num-gpu-blocks-override",))


def test_fix_without_a_possible_plan_is_not_offered() -> None:
    fix = Changes(set={"tensor-parallel-size": 2})
    found = PlanFinding("weights_do_not_fit", Level.ERROR, "", fix)
    made = replace(plan("chatbot", MODELS[0], HOSTS["2xh100"]), findings=(found,))

    def refused(_: Changes) -> Plan:
        raise NoPlaceError("needs 2 GPUs but has GPU 0")

    assert [one.fix for one in with_lasting_fixes(made, refused).findings] == [None]
    held = replace(made, findings=())
    assert [one.fix for one in with_lasting_fixes(made, lambda _: held).findings] == [fix]


def test_gpu_slice_is_not_timed_as_the_whole() -> None:
    made = plan("chatbot", MODELS[1], HOSTS["1xa100-mig"])
    assert made.memory is not None
    assert made.paces is None
    assert all(one.paces is None for one in made.alternatives)


def test_default_preset_starts_on_a_single_3090_and_a6000() -> None:
    for host in ("2xrtx3090", "4xa6000"):
        made = plan("chatbot", PRESETS["chatbot"].model, HOSTS[host])
        assert made.memory is not None
        assert made.memory.fits
        assert not [finding for finding in made.findings if finding.level is Level.ERROR]


def test_plan_below_its_workload_names_what_would_hold_more() -> None:
    short = Changes(set={"max-model-len": 4096, "tensor-parallel-size": 2})
    made = plan("chatbot", "Qwen/Qwen2.5-72B-Instruct", HOSTS["2xh100"], short)
    (found,) = [one for one in made.findings if one.code == "workload_not_held"]
    assert found.fix is not None
    assert "of 64 requests" in found.message
    assert "Qwen/Qwen2.5-72B-Instruct-AWQ" in " ".join(siblings("Qwen/Qwen2.5-72B-Instruct"))
    assert "Qwen/Qwen2.5-72B-Instruct-" in found.message


def test_deliberate_use_of_few_gpus_is_reported() -> None:
    made = plan("batch", "Qwen/Qwen3-8B-AWQ", HOSTS["4xl40s-switch"])
    assert laid(made) == (1, 1, 1)
    (found,) = [one for one in made.findings if one.code == "workload_not_held"]
    assert "Few GPUs are used, leaving the rest to others: 4 GPUs" in found.message


def test_json_has_a_pace_and_a_row_per_alternative() -> None:
    document = plan_document(plan("chatbot", MODELS[5], HOSTS["2xa6000-apart"]))
    pace = document["pace"]
    assert set(pace) == {"1", "8", "full"}
    assert pace["1"]["concurrency"] == 1
    assert pace["1"]["tokens_per_second"] == pytest.approx(1 / pace["1"]["tpot_seconds"], rel=0.01)
    rows = document["alternatives"]
    assert [row["chosen"] for row in rows].count(True) == 1
    keys = {
        "tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel", "gpus", "kv_cache_dtype", "model",
        "weights_gib_per_gpu", "kv_gib_per_gpu", "kv_tokens", "concurrent_requests", "pace", "tradeoff", "chosen",
        "reason", "changes",
    }  # fmt: skip
    for row in rows:
        assert keys <= set(row)
        assert row["gpus"] == row["tensor_parallel"] * row["pipeline_parallel"] * row["data_parallel"]
        assert row["reason"]
    copies = next(row for row in rows if row["data_parallel"] == 2)
    staged = next(row for row in rows if row["pipeline_parallel"] == 2)
    assert copies["concurrent_requests"] < 15
    assert staged["concurrent_requests"] > 35
    assert copies["pace"]["full"]["tokens_per_second"] < staged["pace"]["full"]["tokens_per_second"]
    assert copies["pace"]["full"]["concurrency"] < 15


def test_unknown_values_are_null() -> None:
    host = made(2, "PIX", "RTX PRO 4000 Blackwell")
    document = plan_document(plan("chatbot", MODELS[0], host))
    assert document["pace"] is None
    assert all(row["pace"] is None for row in document["alternatives"])
