"""A note about variables of this shell that an export does not contain."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_console.cli.output import complain
from vllm_launchers.secrets import is_secret_name

if TYPE_CHECKING:
    from vllm_launchers.plan.model import Plan

_READS = ("VLLM_", "HF_", "TRANSFORMERS_", "NCCL_", "CUDA_", "TORCH_")
_READS_ON_CPU = ("OMP_",)


def tell_left_out(plans: Iterable[Plan], how: str) -> None:
    """Name variables that vLLM reads and a server started here would inherit, but that an export of one lacks.

    ``how`` completes the sentence: how to add those that it needs.
    """
    if left_out := sorted({name for plan in plans for name in _left_out(plan)}):
        complain(f"note: set in this shell but not in the export: {', '.join(left_out)}; {how}")


def _left_out(plan: Plan) -> list[str]:
    reads = _READS + _READS_ON_CPU if plan.engine.build == "cpu" else _READS
    held = {*plan.environment, *plan.secrets}
    return [name for name in os.environ if name.startswith(reads) and name not in held and not is_secret_name(name)]
