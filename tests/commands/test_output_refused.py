"""Failed output and invalid file names cause a one-line error and no crash report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LONG = "m" * 300
COMMANDS = [
    ["list"], ["list", "--json"], ["presets"], ["presets", "chatbot", "--json"], ["export", "prometheus"], ["doctor"],
    ["--help"], ["list", "--help"], ["--version"],
]  # fmt: skip


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    around = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    return {**around, "HOME": str(tmp_path / "home")}


def run(environment: dict[str, str], words: list[str], redirection: str = "") -> subprocess.CompletedProcess[str]:
    script = f'"$@" {redirection}'
    return subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "vllm_console", *words],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def reports(environment: dict[str, str]) -> list[Path]:
    return list(Path(environment["HOME"]).rglob("crash-*"))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("redirection", "sentence"),
    [
        (">/dev/full", "vllm-console: standard output can't be written: No space left on device\n"),
        (">&-", "vllm-console: standard output is closed\n"),
    ],
    ids=["full", "closed"],
)
def test_failed_write_to_stdout_prints_one_line(
    environment: dict[str, str], words: list[str], redirection: str, sentence: str
) -> None:
    done = run(environment, words, redirection)
    assert (done.returncode, done.stderr) == (1, sentence)
    assert reports(environment) == []


@pytest.mark.parametrize("words", [["list"], ["presets", "--json"]], ids=" ".join)
def test_no_output_stream_sets_exit_code(environment: dict[str, str], words: list[str]) -> None:
    for redirection in (">/dev/full 2>/dev/full", ">&- 2>&- <&-"):
        done = run(environment, words, redirection)
        assert done.returncode == 1
        assert reports(environment) == []


def test_nothing_is_started_with_closed_stdout(environment: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "state"
    done = run(environment, ["--state", str(state), "start", "chatbot", "--engine", "simulated"], ">&-")
    sentence = "standard output is closed, so nothing was done: use >/dev/null to discard the output"
    assert (done.returncode, done.stderr) == (1, f"vllm-console: {sentence}\n")
    assert not state.exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["plan", "chatbot", "--model", LONG, "--engine", "simulated"], 0),
        (["plan", "chatbot", "--model", f"/{LONG}/x", "--engine", "simulated"], 0),
        (["--host", LONG, "host"], 2),
        (["--state", f"/tmp/{LONG}", "start", "chatbot", "--engine", "simulated"], 1),
        (["--config", f"/tmp/{LONG}", "list"], 2),
        (["status", LONG], 3),
        (["logs", LONG], 3),
        (["metrics", LONG], 1),
        (["diagnose", LONG], 1),
        (["plan", "chatbot", "--vllm", f"/{LONG}"], 1),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else str(value),
)
def test_too_long_names_print_one_line(environment: dict[str, str], words: list[str], code: int) -> None:
    done = run(environment, words)
    assert "internal error" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == code, done.stderr
    assert reports(environment) == []


@pytest.mark.parametrize("home", ["/proc", "/dev/null", "/sys/kernel", f"/tmp/{LONG}"], ids=lambda home: home[:12])
def test_unwritable_home_prints_one_line(environment: dict[str, str], home: str) -> None:
    for words in (["list"], ["doctor"], ["presets"], ["runs"]):
        done = run({**environment, "HOME": home}, words)
        assert "internal error" not in done.stderr + done.stdout
        assert "Traceback" not in done.stderr
    refused = run({**environment, "HOME": home}, ["start", "chatbot", "--engine", "simulated"])
    assert refused.returncode in (1, 2)
    assert refused.stderr.splitlines()[-1].startswith("vllm-console: ")
    assert "internal error" not in refused.stderr
