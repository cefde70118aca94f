"""The machine beside its GPUs: files, shared memory, disk, and who else is starting. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.plan.checks.asked import ranks, uses_gpus
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Plan

FEW_FILES = 4096
"""Every connection takes an open file, and so does every weight file; fewer than these run out under load."""

SHM_GIB_PER_RANK = 0.25
"""NCCL and vLLM's own queues between ranks need tens of MiB each; a container's default is 64 MiB in all."""

DISK_SLACK = 1.02
GIB = 2**30


def machine_findings(plan: Plan, knowledge: Knowledge) -> Iterator[Finding]:
    """Limits of the machine that end a start or a busy hour."""
    around = knowledge.surroundings
    if around.open_files is not None and around.open_files < FEW_FILES:
        text = (
            f"a server may open {around.open_files:,} files here, and every connection is one; "
            f"raise the limit with 'ulimit -n 65536' before the start"
        )
        yield Finding("open_files_low", Level.WARNING, text)
    count = ranks(plan.flags)
    needed = SHM_GIB_PER_RANK * count
    if uses_gpus(plan) and count > 1 and around.shm_free_gib is not None and around.shm_free_gib < needed:
        text = (
            f"/dev/shm has {_size(around.shm_free_gib)} free, and {count} ranks that talk by NCCL may need "
            f"{_size(needed)}; in a container give it --ipc=host or --shm-size=8g"
        )
        yield Finding("shm_small", Level.WARNING, text)
    yield from _disk(knowledge)
    if around.starting:
        many = len(around.starting) > 1
        text = (
            f"{' and '.join(around.starting)} {'are' if many else 'is'} starting this very second: servers that "
            "start together can take each other's memory and ports; wait until that is ready"
        )
        yield Finding("another_starting", Level.WARNING, text)


def _disk(knowledge: Knowledge) -> Iterator[Finding]:
    facts, free = knowledge.facts, knowledge.surroundings.model_disk_free_gib
    if facts is None or not facts.bytes_to_download or free is None:
        return
    needed = facts.bytes_to_download * DISK_SLACK / GIB
    if needed > free:
        where = knowledge.surroundings.model_disk or "the model cache"
        text = (
            f"{facts.model} is {needed:.1f} GiB to download and {where} has {free:.1f} GiB free; make room, or point "
            "HF_HOME at a larger disk"
        )
        yield Finding("disk_for_download", Level.ERROR, text, surely=False)


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"
