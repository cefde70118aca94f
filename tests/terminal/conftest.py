"""The real program in a pseudo-terminal, with a separate home."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fakes.commands import run_command, with_own_port
from fakes.keeper_bench import end_servers


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Environment isolated from the user's settings and servers."""
    return {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "SIMULATED_STARTUP_SECONDS": "1",
    }


@pytest.fixture
def state(home: dict[str, str]) -> Path:
    return Path(home["XDG_STATE_HOME"], "vllm-console")


@pytest.fixture
def terminal(home: dict[str, str], terminal_module: ModuleType) -> Iterator[Callable[..., Any]]:
    """Open ``vllm-console`` with arguments in a terminal of a given size."""
    opened: list[Any] = []

    def open_terminal(*words: str, columns: int = 120, rows: int = 40, env: dict[str, str] | None = None) -> Any:
        program = [sys.executable, "-m", "vllm_console", *words]
        opened.append(terminal_module.Terminal(program, columns, rows, home | (env or {})))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


@pytest.fixture
def command(home: dict[str, str], state: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run ``vllm-console`` with arguments; its servers end with the test."""

    def run(*words: str, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
        return run_command(with_own_port(words), {**os.environ, **home, **(env or {})})

    yield run
    end_servers(state)
