"""Run by real vLLM's Python: results of vLLM's own KV cache planning for each case on standard input.

A case is a JSON object on one line: ``kinds`` of the layers, head sizes, and relevant settings. The result has
``block_bytes``, ``concurrency`` and, with pipeline parallelism, the ``stages`` as pairs of first and last layer.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


def spec_of(kind: str, case: dict[str, Any]) -> KVCacheSpec:
    if kind == "linear":
        return MambaSpec(
            block_size=case["length"],
            shapes=((case["state"] // 4,),),
            dtypes=(torch.float32,),
            page_size_padded=case["page"],
            mamba_cache_mode=case["mode"],
        )
    heads, size = (case["full_heads"], case["full_size"]) if kind == "full" else (case["heads"], case["size"])
    common = {"block_size": case["block"], "dtype": torch.bfloat16, "num_kv_heads": heads, "head_size": size}
    if kind == "sliding":
        return SlidingWindowSpec(sliding_window=case["window"], **common)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(attention_chunk_size=case["window"], **common)
    return FullAttentionSpec(**common)


def config_of(case: dict[str, Any]) -> Any:
    """The part of a ``VllmConfig`` that cache planning reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=case["one_kind"]),
        cache_config=SimpleNamespace(
            mamba_cache_mode=case["mode"],
            num_gpu_blocks_override=None,
            block_size=case["block"],
            get_resolved_kv_cache_layout=lambda: KVCacheLayout["LBNHC"],
        ),
        model_config=SimpleNamespace(max_model_len=case["length"]),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        max_in_flight_tokens=case["in_flight"],
        speculative_config=None,
        kv_transfer_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
    )


def answer(case: dict[str, Any]) -> dict[str, Any]:
    config = config_of(case)
    groups = kv_cache_utils.get_kv_cache_groups(
        config, {f"layers.{at}": spec_of(kind, case) for at, kind in enumerate(case["kinds"])}
    )
    size = kv_cache_utils._pool_bytes_per_block(config, groups)
    cache = SimpleNamespace(kv_cache_groups=groups, num_blocks=case["available"] // size)
    count = case["pipeline"]
    return {
        "block_bytes": size,
        "concurrency": kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, cache),
        "stages": [get_pp_indices(len(case["kinds"]), rank, count) for rank in range(count)],
    }


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
