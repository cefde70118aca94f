"""A stub of NVIDIA's driver library, recorded hosts, and cleanup of servers that a test leaves running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.keeper_bench import Bench
from fakes.nvml_stub import compiler, make_stub, recorded, stub_cache
from fakes.ports import free_port

__all__ = ["compiler", "end_leftover_servers", "make_stub", "recorded", "stub_cache"]


@pytest.fixture(autouse=True)
def own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own ports for servers that processes of the test start."""
    monkeypatch.setenv("OWN_PORT", str(free_port()))


@pytest.fixture(autouse=True)
def end_leftover_servers(tmp_path: Path) -> Iterator[None]:
    """End everything that a failed test left running below ``tmp_path / "state"``."""
    yield
    Bench(tmp_path / "state").end()
