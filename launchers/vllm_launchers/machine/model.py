"""What the machine room finds: engines that can be launched, and the machine beside its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class EngineKind(StrEnum):
    """Which engine runs a server."""

    VLLM = "vllm"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that can be launched: a real vLLM installation or the simulated one.

    ``command`` is what stands before ``serve`` in argv. ``version`` is None when it could not be learned
    without running it. ``build`` is ``cuda``, ``cpu``, ``rocm``, … or ``simulated``, None when unknown.
    ``note`` says in one sentence what a person should know of it.
    """

    kind: EngineKind
    command: tuple[str, ...]
    version: str | None
    build: str | None
    path: str
    note: str = ""

    @property
    def release(self) -> tuple[int, int, int] | None:
        """The version as numbers to compare, or None: ``0.32.0+cpu`` is ``(0, 32, 0)``."""
        if self.version is None:
            return None
        numbers: list[int] = []
        for part in self.version.partition("+")[0].split(".")[:3]:
            digits = part[: len(part) - len(part.lstrip("0123456789"))]
            if not digits:
                break
            numbers.append(int(digits))
        if not numbers:
            return None
        major, minor, patch = (*numbers, 0, 0)[:3]
        return major, minor, patch

    @property
    def label(self) -> str:
        """Short text for a screen, e.g. ``vLLM 0.32.0 cpu`` or ``simulated 0.33.0``."""
        name = "vLLM" if self.kind is EngineKind.VLLM else "simulated"
        version = self.version.partition("+")[0] if self.version else "version unknown"
        return " ".join(part for part in (name, version, self._build_label) if part)

    @property
    def _build_label(self) -> str:
        return "" if self.build in (None, "simulated") else str(self.build)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The machine beside its GPUs, at one moment. None is 'not known', and what is not known is not complained of.

    ``port_holder`` says who has the port (``pid 4711, anna``), empty for a free one. ``starting`` are names of servers
    of ours that are on their way up this second. ``open_files`` is the soft limit (``ulimit -n``). Sizes in GiB.
    """

    port_holder: str = ""
    starting: tuple[str, ...] = ()
    open_files: int | None = None
    shm_free_gib: float | None = None
    memory_free_gib: float | None = None
    model_disk: str = ""
    """The folder that a download would go to."""
    model_disk_free_gib: float | None = None
    has_hub_token: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the server inherits, without secrets."""
