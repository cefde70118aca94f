"""What is said of a set of GPUs: why it stands where it does, who is on it, what is wrong with it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_launchers.machine.gpu.host import Gpu, Link
from vllm_launchers.machine.gpu.links import Level, nvlinks_in
from vllm_launchers.machine.gpu.matrix import spans
from vllm_launchers.machine.gpu.sharing import holdings, is_held

MOST_NAMED = 3
IDLE_PERCENT = 10
"""A GPU used less than this draws a desktop at most."""


def reason_for(
    gpus: Sequence[Gpu],
    level: Level | None,
    links: Sequence[Link],
    bandwidth: float | None,
    free: float | None,
    tier: int,
) -> str:
    """One line: ``0,1: NVLink ×4, 112 GB/s, both idle``."""
    parts = [] if level is None else [link_words(level, links)]
    if bandwidth is not None:
        # Rounded down: a link never carries more than is said.
        parts.append(f"{int(bandwidth)} GB/s")
    return f"{spans([gpu.index for gpu in gpus])}: " + ", ".join([*parts, _state(gpus, free, tier)])


def link_words(level: Level, links: Sequence[Link]) -> str:
    """``NVLink ×4``, ``NVSwitch ×18``, ``one PCIe switch (PIX)``."""
    if level is Level.NVLINK:
        counts = [nvlinks_in(link.kind) for link in links]
        name = "NVSwitch" if links and all(link.switch for link in links) else "NVLink"
        fewest = min(counts, default=0)
        return f"{name} ×{fewest}" if fewest else name
    kind = f" ({level.name})" if Level.PIX <= level <= Level.SYS else ""
    return f"{level.words}{kind}"


def _state(gpus: Sequence[Gpu], free: float | None, tier: int) -> str:
    held = any(is_held(gpu) for gpu in gpus)
    working = any((gpu.utilization or 0) > IDLE_PERCENT for gpu in gpus)
    if free is None:
        return "free memory unknown"
    if not held and tier == 0 and not working:
        many = {1: "idle", 2: "both idle"}.get(len(gpus), "all idle")
        return f"{many}, {free:.1f} GiB free" if len(gpus) == 1 else many
    each = "" if len(gpus) == 1 else "at least "
    return f"{each}{free:.1f} GiB free" + ("" if tier < 2 else ", not enough")


def need_words(needs: Sequence[float]) -> str:
    """What is taken of each GPU: ``43.2 GiB``, or ``21.6 to 43.2 GiB`` of unlike ones."""
    return " to ".join(f"{need:g}" for need in sorted({min(needs), max(needs)})) + " GiB"


def held_by(gpus: Sequence[Gpu]) -> list[str]:
    """A sentence per GPU that is not empty: ``GPU 1: anna holds 38.2 GiB``."""
    return [text for gpu in gpus if is_held(gpu) and (text := held_words(gpu))]


def held_words(gpu: Gpu) -> str:
    """Who holds a GPU now, the most first; empty when nobody does."""
    held = holdings(gpu)
    named = [(f"{user} holds {gib:.1f} GiB", gib) for user, gib in held.others.items()]
    named += [(f"{server} (yours) holds {gib:.1f} GiB", gib) for server, gib in held.ours.items()]
    if held.unseen:
        named.append((f"processes that cannot be seen hold {held.unseen:.1f} GiB", held.unseen))
    named.sort(key=lambda pair: -pair[1])
    if not named:
        return ""
    more = f", and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"GPU {gpu.index}: " + ", ".join(text for text, _ in named[:MOST_NAMED]) + more


def crossing(indices: Sequence[int], groups: Sequence[Sequence[int]], level: Level) -> str:
    """Why tensor parallelism over this set is slow, and the way out."""
    where = spans(sorted(indices))
    if level is Level.UNKNOWN:
        return f"how {where} are linked is not known; tensor parallelism is fast over NVLink or one PCIe switch only"
    problem = f"tensor parallelism over {where} crosses the CPU interconnect at every layer"
    sizes = {len(group) for group in groups}
    inner, stages = len(groups[0]), len(groups)
    if len(sizes) == 1 and stages > 1:
        flags = f"--tensor-parallel-size {inner} --pipeline-parallel-size {stages}"
        apart = " and ".join(spans(group) for group in groups) if stages <= 4 else f"{inner} GPU each"
        return f"{problem}; use {flags}, or {stages} servers on {apart} if the model fits"
    flags = f"--tensor-parallel-size 1 --pipeline-parallel-size {len(indices)}"
    return f"{problem}; use {flags}, or several smaller servers if the model fits"
