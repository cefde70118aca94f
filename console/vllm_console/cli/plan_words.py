"""A plan as a JSON document (a contract) and as text: a bar per GPU, what fits, why each flag, what is wrong."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_console.cli.common import Document
from vllm_console.fleet.refusing import fix_words
from vllm_console.format import UNKNOWN
from vllm_console.text import plain
from vllm_launchers.plan.secrets import command_line, redact_argv, redact_environment
from vllm_launchers.plan.shell_words import line_word

if TYPE_CHECKING:
    from vllm_launchers.plan.budget.model import GpuBudget, MemoryBudget
    from vllm_launchers.plan.findings import Finding
    from vllm_launchers.plan.model import Plan

BAR = 40
WIDTH = 100
MOST_WRITTEN = 32
"""Longer flags stand on a line of their own."""
MARKS = "█▓▒░·"
ASCII_MARKS = "#=+o."
"""Weights, overhead with graphs, KV cache, others, free."""


def plan_document(plan: Plan) -> Document:
    """A plan as ``plan --json`` prints it. Sizes in GiB (2**30 bytes); null is 'not known'."""
    return {
        "preset": plan.preset,
        "model": plan.model,
        "engine": str(plan.engine.kind),
        "engine_version": plan.engine.version,
        "host": plan.host,
        "argv": list(redact_argv(plan.argv)),
        "env": redact_environment(plan.environment),
        "secrets": list(plan.secrets),
        "gpus": list(plan.gpus),
        "placement": plan.placement or None,
        "port": plan.port,
        "flags": dict(plan.flags),
        "memory": _memory(plan.memory) if plan.memory is not None else None,
        "estimated": _memory(plan.estimated) if plan.estimated is not None else None,
        "choices": [
            {
                "flag": choice.flag,
                "value": choice.value,
                "reason": choice.reason,
                "source": str(choice.source),
                "price": choice.price or None,
            }
            for choice in plan.choices
        ],
        "findings": [_finding(finding) for finding in plan.findings],
    }


def _memory(memory: MemoryBudget) -> Document:
    return {
        "weights_gib": _gib(memory.weights_gib),
        "overhead_gib": _gib(memory.overhead_gib),
        "graphs_gib": _gib(memory.graphs_gib),
        "kv_gib": _gib(memory.kv_gib),
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "kv_tokens": memory.kv_tokens,
        "max_model_len": memory.max_model_len,
        "max_concurrency": _round(memory.max_concurrency),
        "concurrency_p95": _round(memory.concurrency_p95),
        "fits": memory.fits,
        "source": memory.source,
        "assumed": list(memory.assumed),
        "per_gpu": [
            {
                "index": gpu.index,
                "total_gib": _gib(gpu.total_gib),
                "weights_gib": _gib(gpu.weights_gib),
                "overhead_gib": _gib(gpu.overhead_gib),
                "graphs_gib": _gib(gpu.graphs_gib),
                "kv_gib": _gib(gpu.kv_gib),
                "others_gib": _gib(gpu.others_gib),
                "free_gib": _gib(gpu.free_gib),
            }
            for gpu in memory.per_gpu
        ],
    }


def _gib(value: float) -> float:
    return round(value, 3)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _finding(finding: Finding) -> Document:
    fix = finding.fix
    return {
        "code": finding.code,
        "level": str(finding.level),
        "message": finding.message,
        "fix": {"set": dict(fix.set), "unset": list(fix.unset)} if fix is not None else None,
        "forceable": not finding.surely if finding.level == "error" else True,
    }


def plan_lines(plan: Plan, *, ascii_only: bool = False) -> Iterator[str]:
    """A plan for people."""
    where = f"port {plan.port}" + (f", GPU {','.join(map(str, plan.gpus))}" if plan.gpus else "")
    yield plain(f"{plan.preset}: {plan.model} on {plan.engine.label}, {where}")
    if plan.placement:
        yield plain(f"GPU {plan.placement}")
    yield ""
    yield from _memory_lines(plan.memory, ascii_only)
    if plan.memory is not None and (before := plan.estimated) is not None:
        tokens = f", {before.kv_tokens:,} tokens" if before.kv_tokens is not None else ""
        yield f"estimated before: weights {before.weights_gib:.1f} GiB, KV cache {before.kv_gib:.1f} GiB{tokens}"
    yield ""
    width = max((len(_written(choice.flag, choice.value)) for choice in plan.choices), default=0)
    for choice in plan.choices:
        written = _written(choice.flag, choice.value)
        why = f"{choice.source}: {choice.reason}" + (f" Price: {choice.price}" if choice.price else "")
        if len(written) > MOST_WRITTEN:
            yield f"  {written}"
            written = ""
        yield from _wrapped(f"  {written:<{min(width, MOST_WRITTEN)}}  ", plain(why))
    yield ""
    for finding in plan.findings:
        fix = f" Mend it with {fix_words(finding.fix)}" if finding.fix is not None else ""
        yield from _wrapped(f"  {finding.level:<8}", plain(f"{finding.message} [{finding.code}]{fix}"))
    if plan.findings:
        yield ""
    yield plain(command_line(plan))


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


def _memory_lines(memory: MemoryBudget | None, ascii_only: bool) -> Iterator[str]:
    if memory is None:
        yield "memory is not known: no GPU is known of here, or too little of the model (see --host and --hub)"
        return
    marks = ASCII_MARKS if ascii_only else MARKS
    for gpu in memory.per_gpu:
        index = UNKNOWN if gpu.index is None else str(gpu.index)
        yield f"GPU {index:>2}  {_bar(gpu, marks)}  {gpu.total_gib:.1f} GiB"
        overhead = gpu.overhead_gib + gpu.graphs_gib
        parts = (("weights", gpu.weights_gib), ("overhead", overhead), ("KV cache", gpu.kv_gib),
                 ("others", gpu.others_gib), ("free", gpu.free_gib))  # fmt: skip
        told = [f"{mark} {name} {gib:.1f}" for mark, (name, gib) in zip(marks, parts, strict=True)]
        yield f"        {'  '.join(told)}"
    if not memory.per_gpu:
        yield f"weights {memory.weights_gib:.1f} GiB, KV cache {memory.kv_gib:.1f} GiB"
    if memory.kv_tokens is not None:
        each = f" of {memory.kv_bytes_per_token:,.0f} bytes" if memory.kv_bytes_per_token else ""
        yield f"KV cache: {memory.kv_tokens:,} tokens{each}"
    if memory.max_concurrency is not None and memory.max_model_len:
        p95 = f", {memory.concurrency_p95:.1f} of the workload's" if memory.concurrency_p95 is not None else ""
        yield f"requests at once: {memory.max_concurrency:.1f} of {memory.max_model_len:,} tokens{p95}"
    source = "as the engine reported it" if memory.source == "engine" else memory.source
    assumed = f"; assumed: {'; '.join(memory.assumed)}" if memory.assumed else ""
    yield from _wrapped("", plain(f"({source}{assumed})"))


def _bar(gpu: GpuBudget, marks: str) -> str:
    """Parts in proportion; each that is there gets a cell, what does not fit is cut off."""
    overhead = gpu.overhead_gib + gpu.graphs_gib
    cells = ""
    for mark, gib in zip(marks, (gpu.weights_gib, overhead, gpu.kv_gib, gpu.others_gib), strict=False):
        cells += mark * (max(1, round(BAR * gib / gpu.total_gib)) if gib > 0 and gpu.total_gib > 0 else 0)
    return f"[{cells[:BAR]:{marks[-1]}<{BAR}}]"
