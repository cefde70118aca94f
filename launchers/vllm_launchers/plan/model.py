"""What a plan is made of and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_launchers.presets.model import FlagValue

Flags = Mapping[str, FlagValue]
"""Flags without leading dashes, words joined by ``-``: ``{"max-num-seqs": 256}``."""


class EngineKind(StrEnum):
    """Which engine runs a server."""

    VLLM = "vllm"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that can be launched: a real vLLM installation or the simulated one.

    ``command`` is what stands before ``serve`` in argv. ``version`` is None when it could not be learned
    without running it. ``build`` is ``cuda``, ``cpu``, ``rocm``, … or ``simulated``.
    """

    kind: EngineKind
    command: tuple[str, ...]
    version: str | None
    build: str | None
    path: str

    @property
    def label(self) -> str:
        """Short text for a screen, e.g. ``vLLM 0.32.0 cpu`` or ``simulated 0.33.0``."""
        name = "vLLM" if self.kind is EngineKind.VLLM else "simulated"
        return " ".join(part for part in (name, self.version or "version unknown", self._build_label) if part)

    @property
    def _build_label(self) -> str:
        return "" if self.build in (None, "simulated") else str(self.build)


@dataclass(frozen=True, slots=True)
class Changes:
    """A difference of flags: what a person staged, or gave as ``--set``/``--unset``."""

    set: Flags = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is changed."""
        return not self.set and not self.unset


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch, resolved: everything the keeper needs and everything a person is shown before it runs.

    ``flags`` are the effective ones (without model, host and port, which stand in their own fields);
    ``reasons`` gives, per flag, why it is set. ``secrets`` are *names* of environment variables only.
    """

    preset: str
    model: str
    engine: Engine
    host: str
    port: int
    argv: tuple[str, ...]
    flags: Flags
    reasons: Mapping[str, str]
    environment: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
