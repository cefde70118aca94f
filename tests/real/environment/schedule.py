"""Run by real vLLM's Python: what vLLM's own scheduler schedules in each iteration, without a model.

Each case on standard input is a JSON object on one line: the model's folder, the limits, the number of KV cache blocks,
and the requests with their arrival step, prompt and number of generated tokens. The result has a list per step: the
scheduled tokens of each request, and the preempted requests.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


def scheduler_of(case: dict[str, Any]) -> Scheduler:
    config = EngineArgs(
        model=case["model"],
        max_model_len=case["length"],
        max_num_seqs=case["seqs"],
        max_num_batched_tokens=case["budget"],
        block_size=case["block"],
        enable_prefix_caching=case["caching"],
        enable_chunked_prefill=case["chunked"],
        async_scheduling=False,
        enforce_eager=True,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = case["blocks"]
    spec = FullAttentionSpec(block_size=case["block"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(case["blocks"], [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=case["block"],
        log_stats=False,
    )


def steps_of(case: dict[str, Any]) -> list[Any]:
    scheduler = scheduler_of(case)
    hasher = get_request_block_hasher(case["block"], sha256) if case["caching"] else None
    waiting = [
        (
            one["step"],
            Request(
                one["id"],
                one["prompt"],
                SamplingParams(max_tokens=one["output"], ignore_eos=True),
                None,
                block_hasher=hasher,
            ),
        )
        for one in case["requests"]
    ]
    steps: list[Any] = []
    while waiting or scheduler.has_unfinished_requests():
        for step, request in list(waiting):
            if step <= len(steps):
                scheduler.add_request(request)
                waiting.remove((step, request))
        output = scheduler.schedule()
        counts = dict(output.num_scheduled_tokens)
        steps.append([counts, sorted(output.preempted_req_ids or ())])
        known = scheduler.requests
        sampled = [
            [300 + known[name].num_output_tokens % 70]
            if known[name].num_computed_tokens >= known[name].num_tokens
            else []
            for name in counts
        ]
        places = {name: place for place, name in enumerate(counts)}
        scheduler.update_from_output(output, ModelRunnerOutput(list(counts), places, sampled))
    return steps


def main() -> None:
    init_none_hash(sha256)
    for line in sys.stdin:
        print(json.dumps(steps_of(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
