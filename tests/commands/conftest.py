"""Fixtures that run commands and read their JSON, with simulated servers in a separate state folder."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.commands import run_command, with_own_port
from fakes.keeper_bench import end_servers


class Program:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {
            **os.environ,
            "HOME": str(home),
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "SIMULATED_STARTUP_SECONDS": "0",
        }
        self.env.pop("VLLM_API_KEY", None)
        self.env.pop("HF_TOKEN", None)

    def __call__(
        self,
        *words: str,
        env: dict[str, str] | None = None,
        typed: str = "",
        own_port: bool = True,
        timeout: float = 180.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run it. Servers that it starts get a free port chosen by the test."""
        words = with_own_port(words) if own_port else words
        return run_command(words, {**self.env, **(env or {})}, typed, timeout=timeout)

    def json(self, *words: str, env: dict[str, str] | None = None) -> Any:
        """The output as JSON; the command must succeed."""
        answer = self(*words, "--json", env=env)
        assert answer.returncode == 0, f"{words}: exit {answer.returncode}\n{answer.stderr}\n{answer.stdout}"
        return json.loads(answer.stdout)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """``vllm-console`` with a ready server ``chat``, for all tests of a module that don't change it."""
    runner = Program(tmp_path_factory.mktemp("served"))
    runner.env["XDG_DATA_HOME"] = str(runner.home / "data")
    try:
        runner.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait")
        yield runner
    finally:
        end_servers(runner.home / "state" / "vllm-console")


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``vllm-console`` with a separate home; its servers end with the test."""
    runner = Program(tmp_path)
    yield runner
    end_servers(tmp_path / "state" / "vllm-console")
