"""From a fresh machine to the first token, with an engine on PATH and a model in the Hugging Face cache."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fakes.keeper_bench import end_servers

pytestmark = [pytest.mark.real, pytest.mark.terminal]

REVISION = "0123456789abcdef0123456789abcdef01234567"
MOST_KEYSTROKES = 6
READY_SECONDS = 600.0


@pytest.fixture
def fresh(
    tmp_path: Path, tiny_model: Path, real_vllm: Path, real_env: Mapping[str, str], terminal_module: ModuleType
) -> Iterator[Any]:
    """The console in an 80×24 terminal, with a home without settings and servers."""
    cache = tmp_path / "hf" / "hub" / "models--local--tiny"
    shutil.copytree(tiny_model, cache / "snapshots" / REVISION)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(REVISION)
    env = {
        **real_env, "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "SHELL": "/bin/sh",
        "PATH": f"{real_vllm.parent}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TORCH_COMPILE_DISABLE": "1",  # compilation would dominate the run time
    }  # fmt: skip
    terminal = terminal_module.Terminal([sys.executable, "-m", "vllm_console"], 80, 24, env)
    try:
        yield terminal
    finally:
        terminal.close()
        end_servers(tmp_path / "state" / "vllm-console")


def test_first_token_takes_at_most_six_keystrokes(fresh):
    """The prompt is sent while the server starts, and answered as soon as it is ready."""
    strokes = []

    def press(key: str) -> None:
        strokes.append(key)
        fresh.press(key)

    fresh.wait_for("n new")
    press("n")
    fresh.wait_for("local/tiny is on this machine")
    fresh.wait_for("ready to launch")
    press("\x13")  # ctrl+s
    fresh.wait_for("Start-up of chatbot")
    press("A")
    fresh.wait_for("type a prompt")
    press("h")
    press("\r")
    fresh.wait_for("Sent as soon as chatbot is ready.")
    fresh.wait_for("TTFT", READY_SECONDS)
    assert len(strokes) <= MOST_KEYSTROKES
