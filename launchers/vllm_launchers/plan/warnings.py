"""What a person should know of a plan before it runs, one plain sentence each. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vllm_launchers.addresses import is_loopback
from vllm_launchers.plan.flags import token_count
from vllm_launchers.plan.model import Engine, Flags
from vllm_launchers.presets.rules import FLAG_RULES

HIGH_UTILIZATION = 0.95


def warnings_for(
    flags: Flags, engine: Engine, *, host: str, gpus: Sequence[int], secrets: Sequence[str]
) -> tuple[str, ...]:
    """Everything that is probably not meant, or that vLLM is going to refuse."""
    return (
        *_exposure(host, secrets),
        *_values(flags),
        *_batching(flags),
        *_parallelism(flags, gpus),
        *_watching(flags),
        *((engine.note,) if engine.note else ()),
    )


def _exposure(host: str, secrets: Sequence[str]) -> Iterator[str]:
    if not is_loopback(host) and "VLLM_API_KEY" not in secrets:
        yield (
            f"whoever can reach {host} can use this server: it listens there without an API key. "
            "Export VLLM_API_KEY first, or leave --host out to stay on this machine"
        )


def _values(flags: Flags) -> Iterator[str]:
    for name, value in flags.items():
        rule = FLAG_RULES.get(name)
        if rule is not None and not rule.allows(value):
            yield f"vLLM will refuse --{name} {str(value)[:40]}: expected {rule.expected}"
    utilization = flags.get("gpu-memory-utilization")
    if isinstance(utilization, float) and HIGH_UTILIZATION < utilization <= 1:
        yield (
            f"--gpu-memory-utilization {utilization:g} leaves {1 - utilization:.0%} of the GPU: a long prompt "
            f"can run out of memory. {HIGH_UTILIZATION} is the most, and only with short contexts"
        )


def _batching(flags: Flags) -> Iterator[str]:
    """vLLM's own two conditions on ``max-num-batched-tokens`` (``SchedulerConfig.verify_max_model_len``)."""
    batched = token_count(flags.get("max-num-batched-tokens"))
    if batched is None:
        return
    sequences = token_count(flags.get("max-num-seqs"))
    if sequences is not None and batched < sequences:
        yield (
            f"vLLM will refuse --max-num-batched-tokens {batched}: each of {sequences} sequences (--max-num-seqs) "
            "needs room for a token in every step"
        )
    length = token_count(flags.get("max-model-len"))
    if flags.get("enable-chunked-prefill") is False and length is not None and batched < length:
        yield (
            f"vLLM will refuse --max-num-batched-tokens {batched} without chunked prefill: a whole prompt of up to "
            f"{length} tokens (--max-model-len) must fit into one step"
        )


def _parallelism(flags: Flags, gpus: Sequence[int]) -> Iterator[str]:
    names = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
    sizes = [size if isinstance(size := flags.get(name, 1), int) else 1 for name in names]
    wanted = math.prod(sizes)
    if gpus and wanted > len(gpus):
        yield f"it wants {wanted} GPUs (tensor × pipeline × data parallel) and was given {len(gpus)}"
    elif len(gpus) > wanted >= 1:
        yield (
            f"it was given {len(gpus)} GPUs and will use {wanted}: "
            f"set tensor-parallel-size={len(gpus)}, or give it fewer"
        )


def _watching(flags: Flags) -> Iterator[str]:
    if flags.get("disable-log-stats") is True:
        yield "--disable-log-stats takes away every metric: this server cannot be watched"
    if "ssl-keyfile" in flags or "ssl-certfile" in flags:
        yield "with TLS on this console, which asks over plain HTTP, will not see that the server is ready"
    for name in ("headless", "grpc"):
        if flags.get(name) is True:
            yield f"--{name} leaves out the HTTP API: the server will never be seen ready"
