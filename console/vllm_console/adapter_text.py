"""LoRA adapters in a few words, as the command and the console write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_console.text import UNKNOWN, count

if TYPE_CHECKING:
    from vllm_console.fleet.adapters import Adapter, Adapters


def request_states(adapter: Adapter) -> str:
    """Which requests an adapter has: ``running``, ``waiting``, both, ``none``, or unknown."""
    if adapter.running is None and adapter.waiting is None:
        return UNKNOWN
    states = [word for word, has in (("running", adapter.running), ("waiting", adapter.waiting)) if has]
    return ", ".join(states) or "none"


def limits_text(found: Adapters) -> str:
    """What a server's flags allow."""
    return f"{count(found.max_loras)} in a batch, {count(found.max_cpu_loras)} in memory, rank {found.max_lora_rank}"
