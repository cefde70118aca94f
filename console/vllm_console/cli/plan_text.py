"""A plan as a JSON document (a contract) and as text: a bar per GPU, capacity, flags with reasons, findings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.alternatives_text import alternative_text, alternatives_table, format_full, format_legend, format_pace
from vllm_console.cli.output import Document, fields
from vllm_console.model_text import no_estimate
from vllm_console.text import UNKNOWN, plain, size, sourced
from vllm_launchers.launch.refusal import fix_options
from vllm_launchers.plan.checks.check import errors
from vllm_launchers.plan.choices.layout import format_layout
from vllm_launchers.plan.command_line import assignments, command_line, line_word
from vllm_launchers.plan.engine_verdict import format_verdict
from vllm_launchers.plan.findings import Level
from vllm_launchers.secrets import redact_argv, redact_environment
from vllm_launchers.units import counted, three_digits

if TYPE_CHECKING:
    from vllm_launchers.plan.alternatives import Alternative
    from vllm_launchers.plan.budget.budget import GpuBudget, MemoryBudget
    from vllm_launchers.plan.engine_verdict import EngineVerdict
    from vllm_launchers.plan.findings import PlanFinding
    from vllm_launchers.plan.model import Plan
    from vllm_launchers.plan.nodes import NodesPlan
    from vllm_launchers.plan.pace import Pace, Paces

BAR = 40
WIDTH = 100
MOST_WRITTEN = 32
"""Flags longer than this get a line of their own."""
MARKS = "█≡▒╳·"
ASCII_MARKS = "#=+x."
"""Marks for weights, overhead with graphs, KV cache, others, free, as on the launch screen."""


def plan_document(plan: Plan) -> Document:
    """A plan as ``plan --json`` prints it. Sizes in GiB (2**30 bytes); null means unknown."""
    return {
        **fields(plan, "preset model host secrets gpus placement port"),
        "engine": str(plan.engine.kind),
        "engine_version": plan.engine.version,
        "argv": list(redact_argv(plan.argv)),
        "env": redact_environment({**plan.environment, **plan.probe.variables}),
        "probe": {"added": bool(plan.probe.variables), "why_not": plan.probe.why_not or None},
        "flags": dict(plan.flags),
        "memory": _memory(plan.memory) if plan.memory is not None else None,
        "no_estimate": no_estimate(plan) if plan.memory is None else None,
        "pace": _paces(plan.paces),
        "alternatives": [_alternative(one) for one in plan.alternatives],
        "estimated": _memory(plan.estimated) if plan.estimated is not None else None,
        "choices": [fields(one, "flag reason source tradeoff") | {"value": one.value} for one in plan.choices],
        "findings": [_finding(finding) for finding in plan.findings],
        "nodes": _nodes(plan.nodes) if plan.nodes is not None else None,
        "vllm_verdict": _vllm_verdict(plan.verdict) if plan.verdict is not None else None,
    }


def _nodes(nodes: NodesPlan) -> Document:
    layout, network = nodes.layout, nodes.network
    return {
        "count": len(nodes.nodes),
        "gpus_per_node": nodes.gpus_each,
        "tensor_parallel": layout.tensor,
        "pipeline_parallel": layout.pipeline,
        "across_nodes": nodes.across,
        "master_addr": nodes.master_addr or None,
        "master_port": nodes.master_port,
        "fits_one_node": nodes.fits_one,
        "network": None
        if network is None
        else {
            "bytes_per_token": round(network.bytes_per_token),
            "tokens_per_second": _round(network.tokens_per_second),
            "needed_gbits": _round(network.needed_gbits),
            **fields(network, "given_gbits formula"),
        },
        "per_node": [
            {
                "rank": node.rank,
                "headless": node.headless,
                "argv": list(redact_argv(node.argv)),
                "flags": dict(node.flags),
                "per_gpu": [_gpu(gpu) for gpu in node.memory],
            }
            for node in nodes.nodes
        ],
    }


def _vllm_verdict(verdict: EngineVerdict) -> Document:
    return {"verdict": str(verdict.answer), **fields(verdict, "message version parser_only")}


def _paces(paces: Paces | None) -> Document | None:
    """Seconds per generated token and generated tokens per second; null means unknown, or no room for that many."""
    if paces is None:
        return None
    return {"1": _pace(paces.one), "8": _pace(paces.some), "full": _pace(paces.full)}


def _pace(pace: Pace | None) -> Document | None:
    if pace is None:
        return None
    return {
        "concurrency": pace.concurrency,
        "tpot_seconds": round(pace.tpot_seconds, 5),
        "tokens_per_second": round(pace.tokens_per_second, 1),
    }


def _alternative(one: Alternative) -> Document:
    layout = one.layout
    return {
        "tensor_parallel": layout.tensor,
        "pipeline_parallel": layout.pipeline,
        "data_parallel": layout.data,
        "expert_parallel": one.expert_parallel,
        "gpus": layout.total,
        **fields(one, "kv_cache_dtype quantization model kv_tokens fits tradeoff chosen reason"),
        "weights_gib_per_gpu": _gib(one.weights_gib),
        "kv_gib_per_gpu": _gib(one.kv_gib),
        "concurrent_requests": _round(one.concurrent_requests),
        "holds_workload": one.serves,
        "pace": _paces(one.paces),
        "changes": {"set": dict(one.changes.set), "unset": list(one.changes.unset)},
    }


_PARTS = ("weights_gib", "overhead_gib", "graphs_gib", "kv_gib")
_PARTS_OF_GPU = ("others_gib", "free_gib", "total_gib")


def _memory(memory: MemoryBudget) -> Document:
    return {
        **{name: _gib(getattr(memory, name)) for name in _PARTS},
        **fields(memory, "kv_bytes_per_token kv_tokens max_model_len fits source assumed"),
        "max_concurrency": _round(memory.max_concurrency),
        "concurrency_p95": _round(memory.served_p95),
        "per_gpu": [_gpu(gpu) for gpu in memory.per_gpu],
    }


def _gpu(gpu: GpuBudget) -> Document:
    return {"index": gpu.index, **{name: _gib(getattr(gpu, name)) for name in (*_PARTS, *_PARTS_OF_GPU)}}


def _gib(value: float) -> float:
    return round(value, 3)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _finding(finding: PlanFinding) -> Document:
    fix = finding.fix
    return {
        **fields(finding, "code level message"),
        "fix": {"set": dict(fix.set), "unset": list(fix.unset)} if fix is not None else None,
        "forceable": not finding.surely if finding.level == "error" else True,
    }


def plan_lines(plan: Plan, *, ascii_only: bool = False) -> Iterator[str]:
    """A plan as text."""
    where = f"port {plan.port}" + (f", GPU {','.join(map(str, plan.gpus))}" if plan.gpus else "")
    yield plain(f"{plan.preset}: {plan.model} on {plan.engine.label}, {where}")
    if plan.placement:
        yield plain(f"GPU {plan.placement}")
    yield from _wrapped("", plain(_verdict(plan)))
    if plan.verdict is not None and plan.verdict.answer != "refused":  # a refusal is a finding
        yield from _wrapped("", plain(f"{format_verdict(plan, plan.verdict)}."))
    yield ""
    yield from _node_lines(plan, plan.nodes)
    yield from _memory_lines(plan, ascii_only)
    if plan.memory is not None and (before := plan.estimated) is not None:
        tokens = f", {before.kv_tokens:,} tokens" if before.kv_tokens is not None else ""
        yield f"estimated earlier: weights {before.weights_gib:.1f} GiB, KV cache {before.kv_gib:.1f} GiB{tokens}"
    yield from _alternative_lines(plan)
    yield ""
    width = max((len(_written(choice.flag, choice.value)) for choice in plan.choices), default=0)
    for choice in plan.choices:
        written = _written(choice.flag, choice.value)
        why = sourced(choice.source, choice.reason) + (f" Trade-off: {choice.tradeoff}" if choice.tradeoff else "")
        if len(written) > MOST_WRITTEN:
            yield f"  {written}"
            written = ""
        yield from _wrapped(f"  {written:<{min(width, MOST_WRITTEN)}}  ", plain(why))
    yield ""
    for finding in plan.findings:
        fix = f" Fix: {fix_options(finding.fix)}" if finding.fix is not None else ""
        yield from _wrapped(f"  {finding.level:<8}", plain(f"{finding.message} [{finding.code}]{fix}"))
    if plan.findings:
        yield ""
    yield from _wrapped("", plain(_probe(plan)))
    yield from _command_lines(plan)


def _command_lines(plan: Plan) -> Iterator[str]:
    if plan.nodes is None:
        yield plain(command_line(plan))
        return
    for node in plan.nodes.nodes:
        yield f"node {node.rank}{', which serves no HTTP' if node.headless else ''}:"
        yield plain(command_line(replace(plan, argv=node.argv)))


def _node_lines(plan: Plan, nodes: NodesPlan | None) -> Iterator[str]:
    """The layout across machines, and the load on the network between them."""
    if nodes is None:
        return
    layout, count, network = nodes.layout, len(nodes.nodes), nodes.network
    each = counted(nodes.gpus_each, "GPU") if plan.engine.build != "cpu" else "the CPU"
    yield from _wrapped("", f"{count} nodes, assumed equal to this machine, {each} of each: {format_layout(layout)}")
    if network is None:
        yield ""
        return
    what = "all-reduces" if nodes.across == "tensor" else "activations"
    text = f"network: {size(network.bytes_per_token)} of {what} per token between two nodes"
    if network.needed_gbits is not None and network.tokens_per_second is not None:
        text += (
            f"; at full load, {network.tokens_per_second:,.0f} tokens/s with prompts, "
            f"{three_digits(network.needed_gbits)} Gbit/s keep transfers below 10% of the time"
        )
    given = f"; given: {network.given_gbits:g} Gbit/s" if network.given_gbits is not None else ""
    yield from _wrapped("", f"{text}{given} (estimate: {network.formula})")
    yield ""


def _probe(plan: Plan) -> str:
    """Whether the probe is added, and the variables that it adds, which are not in the command line below."""
    if not plan.probe.variables:
        return f"Probe off: {plan.probe.why_not}."
    variables = " ".join(assignments(plan.probe.variables))
    return f"Probe: each request and engine step is recorded, without any text ({variables})."


def _verdict(plan: Plan) -> str:
    """Whether it would start and fit, and how many more problems are listed below."""
    found = errors(plan.findings)
    if found:
        more = f" (and {counted(len(found) - 1, 'more error')}, see below)" if len(found) > 1 else ""
        return f"Error: {found[0].message}{more}"
    warnings = sum(finding.level is Level.WARNING for finding in plan.findings)
    hint = f"; {counted(warnings, 'warning')} below" if warnings else ""
    if plan.memory is None:
        return f"No errors, but it is unknown whether it fits{hint}."
    if not plan.memory.fits:
        nevertheless = "; a simulated server starts anyway" if plan.engine.kind == "simulated" else ""
        return f"Does not fit{nevertheless}{hint}."
    return f"Fits{hint}."


def _alternative_lines(plan: Plan) -> Iterator[str]:
    """Layouts side by side, with the plan's own marked; only the plan's pace if there is no alternative."""
    if not plan.alternatives:
        if plan.paces is not None and (pace := format_pace(plan.paces)):
            yield f"expected: {pace}"
        return
    yield ""
    yield from alternatives_table(plan.alternatives)
    yield f"   {format_legend(plan.alternatives)}"
    if full := format_full(plan.alternatives):
        yield f"   ({full})"
    for number, one in enumerate(plan.alternatives, 1):
        if pace := alternative_text(one):
            yield from _wrapped(f"  {number}{'*' if one.chosen else ' '} ", pace)


def _written(flag: str, value: object) -> str:
    if value is None:
        return f"({flag})"
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{plain(flag)} {line_word(str(value))}"


def _wrapped(head: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(text, max(30, WIDTH - len(head)), break_long_words=False, break_on_hyphens=False) or [""]
    yield head + lines[0]
    for line in lines[1:]:
        yield " " * len(head) + line


LEAST_GIB = 0.05
"""Anything smaller is printed as 0.0."""


def _memory_lines(plan: Plan, ascii_only: bool) -> Iterator[str]:
    memory, nodes = plan.memory, plan.nodes
    if memory is None:
        more = "" if plan.unestimated else " (--host plans for another machine, --hub reads models from the hub)"
        yield from _wrapped("", f"{no_estimate(plan)}{more}")
        return
    marks = ASCII_MARKS if ascii_only else MARKS
    rows = [("", gpu) for gpu in memory.per_gpu]
    if nodes is not None:
        rows = [(f"node {node.rank} ", gpu) for node in nodes.nodes for gpu in node.memory]
    for where, gpu in rows:
        index = UNKNOWN if gpu.index is None else str(gpu.index)
        yield f"{where}GPU {index:>2}  {_bar(gpu, marks)}  {gpu.total_gib:.1f} GiB usable"
        overhead = gpu.overhead_gib + gpu.graphs_gib
        parts = (("weights", gpu.weights_gib), ("overhead", overhead), ("KV cache", gpu.kv_gib),
                 ("others", gpu.others_gib), ("left", gpu.free_gib))  # fmt: skip
        cells = [f"{mark} {name} {gib:.1f}" for mark, (name, gib) in zip(marks, parts, strict=True)]
        if gpu.free_gib < -LEAST_GIB:
            cells[-1] = f"{-gpu.free_gib:.1f} more than the GPU has"
        yield f"        {'  '.join(cells)}"
    if not memory.per_gpu:
        yield f"weights {memory.weights_gib:.1f} GiB, KV cache {memory.kv_gib:.1f} GiB"
    if memory.kv_tokens is not None:
        each = f" ({size(memory.kv_bytes_per_token)} per token)" if memory.kv_bytes_per_token else ""
        yield f"KV cache: {memory.kv_tokens:,} tokens{each}"
    if memory.max_concurrency is not None and memory.max_model_len:
        p95 = f", {memory.served_p95:.1f} at p95 length" if memory.served_p95 is not None else ""
        yield f"concurrency: {memory.max_concurrency:.1f} requests of {memory.max_model_len:,} tokens{p95}"
    source = "as reported by the engine" if memory.source == "engine" else memory.source
    assumed = f"; assumed: {'; '.join(memory.assumed)}" if memory.assumed else ""
    yield from _wrapped("", plain(f"({source}{assumed})"))


def _bar(gpu: GpuBudget, marks: str) -> str:
    """The parts to scale. Each nonzero part gets at least one cell; the overflow is cut off."""
    overhead = gpu.overhead_gib + gpu.graphs_gib
    cells = ""
    for mark, gib in zip(marks, (gpu.weights_gib, overhead, gpu.kv_gib, gpu.others_gib), strict=False):
        cells += mark * (max(1, round(BAR * gib / gpu.total_gib)) if gib > 0 and gpu.total_gib > 0 else 0)
    return f"[{cells[:BAR]:{marks[-1]}<{BAR}}]"
