"""A choice of a flag: what, why, at what price, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_launchers.presets.model import FlagValue


class Source(StrEnum):
    """Who chose a flag's value."""

    YOU = "you"
    PRESET = "preset"
    WORKLOAD = "workload"
    MODEL = "model"
    MACHINE = "machine"
    CONSOLE = "console"
    """This program, so that the server can be watched."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One flag that the plan sets. ``reason`` is one sentence; ``price`` what it costs, or empty.

    ``value`` None says that a flag was thought about and left to vLLM.
    """

    flag: str
    value: FlagValue | None
    reason: str
    source: Source
    price: str = ""
