"""For any model, machine and traffic, vLLM accepts the choices."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.choice_inputs import choice_inputs
from vllm_launchers.host.gpu.host import Gpu, Host, Link
from vllm_launchers.plan.choices.choice import Choice
from vllm_launchers.plan.choices.choose import choose, suggest
from vllm_launchers.presets.model import FlagSetting, Workload
from vllm_launchers.presets.rules import FLAG_RULES
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, Quantization

TYPES = (LayerKind.FULL, LayerKind.SLIDING, LayerKind.LINEAR)

workloads = st.builds(
    Workload,
    input_tokens_p95=st.integers(1, 300_000),
    output_tokens_p95=st.integers(1, 50_000),
    prefix_reuse=st.floats(0, 1),
    concurrency=st.integers(1, 3000),
)
quantizations = st.sampled_from(
    [None, Quantization("awq", 4, 128), Quantization("fp8", 8, block=(128, 128)), Quantization("gptq", 4, -1)]
)
models = st.builds(
    ModelFacts,
    model=st.just("made/model"),
    layers=st.lists(st.sampled_from(TYPES), min_size=1, max_size=6).map(lambda kinds: tuple(kinds * 6)),
    heads=st.sampled_from([None, 1, 14, 25, 28, 32, 40, 64, 128]),
    kv_heads=st.sampled_from([None, 1, 2, 4, 5, 8]),
    head_dim=st.sampled_from([None, 64, 128]),
    intermediate_size=st.sampled_from([None, 768, 18_944, 28_672]),
    experts=st.sampled_from([None, 1, 128]),
    window=st.sampled_from([None, 128, 4096]),
    max_context=st.one_of(st.none(), st.integers(128, 300_000)),
    dtype=st.sampled_from([None, "bfloat16", "float32"]),
    quantization=quantizations,
    weight_bytes=st.one_of(st.none(), st.integers(10**8, 8 * 10**11)),
    multimodal=st.booleans(),
)


@st.composite
def hosts(draw: st.DrawFn) -> Host | None:
    count = draw(st.integers(0, 8))
    gib = draw(st.sampled_from([None, 15.0, 24.0, 48.0, 79.6, 179.0]))
    capability = draw(st.sampled_from([None, "7.5", "8.6", "8.9", "9.0", "12.0"]))
    name = draw(st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA RTX A6000", "made up"]))
    busy = draw(st.sets(st.integers(0, 7)))
    members = tuple(
        Gpu(i, f"GPU-{i}", name, gib, (1.0 if i in busy else gib) if gib else None, (), compute_capability=capability)
        for i in range(count)
    )
    kinds = st.sampled_from(["NV4", "PIX", "NODE", "SYS"])
    links = tuple(Link(a, b, draw(kinds)) for a in range(count) for b in range(a + 1, count))
    return draw(st.sampled_from([None, Host(gpus=members, links=links), Host(gpus=members)]))


def number(found: dict[str, Choice], name: str, default: int = 1) -> int:
    choice = found.get(name)
    value = choice.value if choice is not None else None
    assert value is None or (isinstance(value, int) and not isinstance(value, bool))
    return default if value is None else value


def accepted(found: dict[str, Choice], facts: ModelFacts | None, host: Host | None, workload: Workload) -> None:
    for choice in found.values():
        rule = FLAG_RULES.get(choice.flag)
        assert choice.value is None or rule is None or rule.allows(choice.value), choice
        assert choice.reason
        assert "\n" not in choice.reason + choice.tradeoff
    length, sequences = number(found, "max-model-len"), number(found, "max-num-seqs")
    batched, tensor = number(found, "max-num-batched-tokens"), number(found, "tensor-parallel-size")
    stages, copies = number(found, "pipeline-parallel-size"), number(found, "data-parallel-size")
    assert batched >= sequences
    chunked = found["enable-chunked-prefill"].value
    assert chunked is not False or batched >= length
    limit = facts.max_context if facts is not None else None
    assert limit is None or length <= limit
    wanted = workload.input_tokens_p95 + workload.output_tokens_p95
    assert length >= min(wanted, limit or wanted)
    there = len(host.gpus) if host is not None else 0
    assert tensor * stages * copies <= max(1, there)
    if facts is not None:
        assert not facts.heads or facts.heads % tensor == 0
        kv_heads = facts.kv_heads
        assert not kv_heads or kv_heads % tensor == 0 or tensor % kv_heads == 0
        assert stages == 1 or stages <= len(facts.layers)
        mixture = (facts.experts or 1) > 1
        assert mixture or "enable-expert-parallel" not in found
        assert facts.quantization is None or found.get("quantization") is None or found["quantization"].value is None
    fp8 = [name for name in ("quantization", "kv-cache-dtype") if name in found and found[name].value == "fp8"]
    if fp8:
        assert host is not None
        capability = float(host.gpus[0].compute_capability or 0)
        assert capability >= (8.9 if "quantization" in fp8 else 8.0)
        assert all(found[name].tradeoff for name in fp8)


@settings(max_examples=150, deadline=None)
@given(
    facts=st.one_of(st.none(), models),
    host=hosts(),
    workload=workloads,
    release=st.sampled_from([None, (0, 10, 2), (0, 33, 0)]),
    build=st.sampled_from(["cuda", "cpu", None]),
)
def test_choices_are_accepted_by_vllm(
    facts: ModelFacts | None, host: Host | None, workload: Workload, release: Any, build: str | None
) -> None:
    choices = choose({}, Changes(), choice_inputs(workload, facts, host, release, build))
    found = {choice.flag: choice for choice in choices}
    assert len(found) == len(choices)
    accepted(found, facts, host if build != "cpu" else None, workload)


@settings(max_examples=60, deadline=None)
@given(
    facts=models,
    host=hosts(),
    workload=workloads,
    sequences=st.one_of(st.none(), st.integers(1, 4000)),
    batched=st.one_of(st.none(), st.integers(1, 20_000)),
    length=st.one_of(st.none(), st.integers(1, 300_000)),
    chunked=st.one_of(st.none(), st.booleans()),
)
def test_choices_fit_the_set_flags(
    facts: ModelFacts,
    host: Host | None,
    workload: Workload,
    sequences: int | None,
    batched: int | None,
    length: int | None,
    chunked: bool | None,
) -> None:
    asked = {"max-num-seqs": sequences, "max-num-batched-tokens": batched, "max-model-len": length}
    mine = {name: value for name, value in {**asked, "enable-chunked-prefill": chunked}.items() if value is not None}
    found = {c.flag: c for c in choose({}, Changes(mine), choice_inputs(workload, facts, host, (0, 33, 0), "cuda"))}
    for name, value in mine.items():
        assert found[name].value == value
    if sequences is None or batched is None:
        assert number(found, "max-num-batched-tokens") >= number(found, "max-num-seqs")
    if batched is None and chunked is False:
        assert number(found, "max-num-batched-tokens") >= number(found, "max-model-len")


@settings(max_examples=60, deadline=None)
@given(facts=models, host=hosts(), workload=workloads)
def test_suggestions_are_stable(facts: ModelFacts, host: Host | None, workload: Workload) -> None:
    running: dict[str, Any] = {"max-model-len": 100, "max-num-seqs": 3, "max-num-batched-tokens": 512}
    for _ in range(2):
        changes = suggest(running, choice_inputs(workload, facts, host, (0, 33, 0), "cuda"))
        running |= {choice.flag: choice.value for choice in changes}
    assert suggest(running, choice_inputs(workload, facts, host, (0, 33, 0), "cuda")) == ()
    assert running["max-num-batched-tokens"] >= running["max-num-seqs"]


@settings(max_examples=60, deadline=None)
@given(facts=models, workload=workloads, more=st.integers(1, 8))
def test_more_traffic_never_shortens_the_context(facts: ModelFacts, workload: Workload, more: int) -> None:
    longer = Workload(workload.input_tokens_p95 * more, workload.output_tokens_p95, workload.prefix_reuse, 1)
    preset = {"seed": FlagSetting(value=1, why="always")}
    lengths = [
        next(
            c.value
            for c in choose(preset, Changes(), choice_inputs(one, facts, None, None, None))
            if c.flag == "max-model-len"
        )
        for one in (workload, longer)
    ]
    assert isinstance(lengths[0], int)
    assert isinstance(lengths[1], int)
    assert lengths[0] <= lengths[1]
