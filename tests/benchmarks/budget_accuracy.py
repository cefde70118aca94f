"""Accuracy of the memory budget compared with the reports of real servers at startup.

    python tests/benchmarks/budget_accuracy.py FOLDER [--rows] [--json]

FOLDER contains ``startups.jsonl`` and the configs it names. A line of ``startups.jsonl`` is a JSON object about one
successful start; null means 'not stated':

- ``vllm_version``, ``model``, ``model_config`` (a config.json, relative to FOLDER; it may be shortened, with
  ``_full_layers`` and ``_sliding_layers`` instead of ``layer_types``)
- ``gpu`` (name, optionally preceded by a count: ``2x Tesla T4``), ``gpu_mem_gib``, ``n_gpus_tp``, ``pp``
- flags as given: ``gpu_memory_utilization``, ``max_model_len``, ``kv_cache_dtype``, ``dtype``, ``quantization``,
  ``block_size``, ``enforce_eager``, ``max_num_batched_tokens``, ``max_num_seqs``, ``speculative`` (as vLLM prints it)
- values reported by the engine, per GPU: ``model_load_gib``, ``available_kv_gib``, ``kv_tokens``, ``max_concurrency``,
  ``cuda_graph_gib``; ``bytes_per_token_expected`` follows from the config where a token's size is fixed

There are four results: how often bytes per token are exact; the error of the concurrency, given the engine's own KV
cache size; and the error of the KV cache size, once with the weights' size reported by the engine (in practice it is
known from the weight files, which a config lacks) and once with the size derived from the model's name.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.reported_cache import cache_tokens
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.vllm.modelfacts.config import facts_from_config
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, Quantization

GIB = 2**30
_FLAGS = {
    "gpu_memory_utilization": "gpu-memory-utilization",
    "max_model_len": "max-model-len",
    "kv_cache_dtype": "kv-cache-dtype",
    "dtype": "dtype",
    "enforce_eager": "enforce-eager",
    "max_num_batched_tokens": "max-num-batched-tokens",
    "max_num_seqs": "max-num-seqs",
    "n_gpus_tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
}


@dataclass
class Row:
    """One start: its kind of attention, reported and predicted values in GiB, errors as fractions."""

    model: str
    kind: str
    version: str
    bytes_expected: int | None = None
    bytes_predicted: float | None = None
    concurrency: float | None = None
    concurrency_given: float | None = None
    kv: float | None = None
    kv_predicted: float | None = None
    kv_from_name: float | None = None
    milliseconds: float = 0.0

    @property
    def concurrency_error(self) -> float | None:
        return error(self.concurrency_given, self.concurrency)

    @property
    def kv_error(self) -> float | None:
        return error(self.kv_predicted, self.kv)

    @property
    def name_error(self) -> float | None:
        return error(self.kv_from_name, self.kv)


def error(predicted: float | None, reported: float | None) -> float | None:
    return None if predicted is None or not reported else abs(predicted - reported) / reported


def release_of(version: str | None) -> tuple[int, int, int] | None:
    numbers = re.findall(r"\d+", version or "")[:3]
    return tuple(map(int, [*numbers, "0", "0"][:3])) if len(numbers) >= 2 else None  # type: ignore[return-value]


def flags_of(record: dict[str, Any]) -> dict[str, Any]:
    flags = {flag: record[key] for key, flag in _FLAGS.items() if record.get(key) is not None}
    if found := re.search(r"method='(\w+)'.*num_spec_tokens=(\d+)", record.get("speculative") or ""):
        config = {"method": found[1], "num_speculative_tokens": int(found[2])}
        flags["speculative-config"] = json.dumps(config)
    return flags


def gpu_of(record: dict[str, Any]) -> GpuShape:
    """The GPU. A fractional size is the one CUDA reports, an integer is the nominal one.

    If only the name is given, or the nominal size is close to what the driver reports, the driver's size is used.
    """
    name = re.sub(r"\(.*?\)|^\s*\d+\s*x\s+", "", record.get("gpu") or "").strip()
    size = record.get("gpu_mem_gib")
    if size is not None and float(size) != int(size):
        return GpuShape(name, usable_gib=float(size))
    shorter = re.sub(r"\b\d+ ?G(?:i)?B\b|\bSXM\d?\b|\bPCIe\b", "", name).strip(" -")
    shape = next(
        (GpuShape(words) for words in (name, shorter) if GpuShape(words).total_gib is not None), GpuShape(name)
    )
    total = shape.total_gib
    if size is not None and (total is None or not 0.85 < total / size < 1.15):
        return replace(shape, memory_gib=float(size))
    return shape


def attention_of(facts: ModelFacts) -> str:
    if LayerKind.LINEAR in facts.layers:
        return "hybrid"
    if LayerKind.SLIDING in facts.layers or LayerKind.CHUNKED in facts.layers:
        return "sliding"
    return "MLA" if facts.mla else "MoE" if facts.experts else "plain"


def lengthened(config: dict[str, Any]) -> dict[str, Any]:
    """The config with its list of layers; a shortened one may give the numbers of full and sliding layers instead."""
    full, sliding = config.get("_full_layers"), config.get("_sliding_layers")
    if "layer_types" in config or not full or not sliding:
        return config
    step = (full + sliding) // full
    kinds = ["full_attention" if at % step == 0 else "sliding_attention" for at in range(full + sliding)]
    return {**config, "layer_types": kinds}


def measure(record: dict[str, Any], folder: Path) -> Row:
    config = json.loads((folder / record["model_config"]).read_text())
    facts = facts_from_config(record["model"], lengthened(config))
    if record.get("quantization") and facts.quantization is None:
        facts = replace(facts, quantization=Quantization(record["quantization"]))
    flags, gpu, release = flags_of(record), gpu_of(record), release_of(record.get("vllm_version"))
    row = Row(record["model"], attention_of(facts), record.get("vllm_version") or "?")
    row.bytes_expected, row.concurrency = record.get("bytes_per_token_expected"), record.get("max_concurrency")
    row.kv = record.get("available_kv_gib")
    if row.kv is not None:
        given = cache_tokens(facts, flags, row.kv, gpu, release=release)
        row.concurrency_given = given[1] if given else None
    loaded = record.get("model_load_gib")
    split = (record.get("n_gpus_tp") or 1) * (record.get("pp") or 1)
    begun = time.perf_counter()
    # Bytes per token do not depend on the GPU: if none is stated, any will do.
    shape = gpu if gpu.total_gib is not None else GpuShape("any", usable_gib=80.0)
    named = estimate(facts, flags, [shape], release=release)
    row.milliseconds = (time.perf_counter() - begun) * 1000
    known = replace(facts, weight_bytes=int(loaded * split * GIB)) if loaded is not None else None
    sized = (
        estimate(replace(known, quantization=facts.quantization), flags, [shape], release=release) if known else None
    )
    if (any_of := sized or named) is not None:
        row.bytes_predicted = any_of.kv_bytes_per_token
    if gpu.total_gib is not None:
        row.kv_predicted = sized.kv_gib if sized else None
        row.kv_from_name = named.kv_gib if named else None
    return row


def spread(errors: list[float | None]) -> str:
    known = sorted(value for value in errors if value is not None)
    if not known:
        return "nothing to compare"
    ninety = known[min(len(known) - 1, int(0.9 * len(known)))]
    return f"median {statistics.median(known):.2%}  p90 {ninety:.2%}  worst {known[-1]:.2%}  n={len(known)}"


def summary(rows: list[Row]) -> dict[str, str]:
    fixed = [row for row in rows if row.bytes_expected is not None and row.kind in ("plain", "MLA", "MoE")]
    exact = sum(row.bytes_predicted == row.bytes_expected for row in fixed)
    lines = {"bytes per token, exact": f"{exact} of {len(fixed)}"}
    for kinds, words in ((("plain", "MLA", "MoE"), "plain"), (("sliding",), "sliding"), (("hybrid",), "hybrid")):
        chosen = [row.concurrency_error for row in rows if row.kind in kinds]
        lines[f"concurrency, KV GiB given, {words}"] = spread(chosen)
    lines["KV GiB, weights' size known"] = spread([row.kv_error for row in rows])
    lines["KV GiB, weights by the model's name"] = spread([row.name_error for row in rows])
    lines["milliseconds per estimate"] = f"median {statistics.median(row.milliseconds for row in rows):.2f}"
    return lines


def cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def main() -> int:
    parser = argparse.ArgumentParser(description="Error of the memory budget against real start-ups.")
    parser.add_argument("folder", type=Path, help="holds startups.jsonl and the configs it names")
    parser.add_argument("--rows", action="store_true", help="print each start too")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    chosen = parser.parse_args()
    lines = (chosen.folder / "startups.jsonl").read_text().splitlines()
    rows = [measure(json.loads(line), chosen.folder) for line in lines if line.strip()]
    if chosen.rows:
        titles = ("CONC", 8), ("GIVEN", 8), ("KV", 7), ("SIZED", 7), ("NAMED", 7), ("ERROR", 7)
        print(f"{'MODEL':44} {'VLLM':11} {'KIND':7}", *(f"{title:>{width}}" for title, width in titles))
        for row in rows:
            figures = (row.concurrency, row.concurrency_given, row.kv, row.kv_predicted, row.kv_from_name)
            cells = " ".join(f"{cell(value, '.2f'):>{8 if at < 2 else 7}}" for at, value in enumerate(figures))
            print(f"{row.model[:44]:44} {row.version:11} {row.kind:7} {cells} {cell(row.kv_error, '.1%'):>7}")
    found = summary(rows)
    print(
        json.dumps(found, indent=1) if chosen.json else "\n".join(f"{name:38} {text}" for name, text in found.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
