"""Presets that extend others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm_launchers.presets.load import PresetError, read_presets
from vllm_launchers.presets.model import FlagSetting, Preset

Write = Callable[..., Path]
Read = Callable[[], tuple[dict[str, Preset], list[PresetError]]]


def test_flags_are_merged_and_dropped(write: Write, read: Read) -> None:
    write(
        "mine",
        'extends = "chatbot"\ntitle = "Mine"\ndrop = ["max-num-batched-tokens"]\n'
        '[flags]\nmax-num-seqs = { value = 64, why = "a small GPU" }\nenforce-eager = true\n'
        '[environment]\nOMP_NUM_THREADS = { value = "4", why = "four cores" }\n'
        "[workload]\nconcurrency = 8\n",
    )
    presets, problems = read()
    assert problems == []
    mine, base = presets["mine"], presets["chatbot"]
    assert mine.title == "Mine"
    assert mine.summary == base.summary
    assert mine.model == base.model
    assert mine.flags["max-num-seqs"] == FlagSetting(64, "a small GPU")
    assert mine.flags["enforce-eager"] == FlagSetting(True, "set in mine.toml")
    assert mine.flags["max-model-len"] == base.flags["max-model-len"]
    assert "max-num-batched-tokens" not in mine.flags
    assert mine.environment["OMP_NUM_THREADS"].value == "4"
    assert mine.workload.concurrency == 8
    assert mine.workload.input_tokens_p95 == base.workload.input_tokens_p95
    assert mine.objectives == base.objectives
    assert not mine.shipped
    assert base.flags["max-num-seqs"].value == 256


def test_own_preset_replaces_and_may_extend_the_shipped_one(write: Write, read: Read) -> None:
    path = write("chatbot", 'extends = "chatbot"\n[flags]\nmax-num-seqs = 8\n')
    presets, problems = read()
    assert problems == []
    assert len(presets) == 4
    assert presets["chatbot"].flags["max-num-seqs"].value == 8
    assert presets["chatbot"].flags["max-model-len"].value == 4096
    assert presets["chatbot"].source == str(path)


def test_presets_extend_the_users_version(write: Write, read: Read) -> None:
    write("chatbot", 'extends = "chatbot"\n[flags]\nmax-num-seqs = 8\n')
    write("mine", 'extends = "chatbot"\n')
    assert read()[0]["mine"].flags["max-num-seqs"].value == 8


def test_chain_and_its_limit(write: Write, read: Read) -> None:
    write("p0", 'extends = "batch"\n[flags]\nseed = 7\n')
    for number in range(1, 12):
        write(f"p{number}", f'extends = "p{number - 1}"\n')
    presets, problems = read()
    assert presets["p5"].flags["seed"].value == 7
    assert {str(problem.path)[-8:-5] for problem in problems} == {"/p8", "/p9", "p10", "p11"}
    assert all("a chain of more than" in str(problem) for problem in problems)


def test_cycle_breaks_only_itself(write: Write, read: Read) -> None:
    write("a", 'extends = "b"\n')
    write("b", 'extends = "c"\n')
    write("c", 'extends = "b"\n')
    write("good", 'extends = "batch"\n')
    presets, problems = read()
    assert "good" in presets
    assert len(problems) == 3
    assert all("circular" in str(problem) for problem in problems)


def test_preset_that_extends_a_broken_one_reports_it(write: Write, read: Read) -> None:
    write("base", 'extends = "chatbot"\n[flags]\nmax-num-seqs = -1\n')
    write("unread", "= no toml")
    write("one", 'extends = "base"\n')
    write("two", 'extends = "unread"\n')
    _, problems = read()
    texts = {problem.path.stem: str(problem) for problem in problems if problem.path}
    assert "'base' is itself invalid: flags.max-num-seqs" in texts["one"]
    assert "'unread' is itself invalid" in texts["two"]


def test_complete_own_preset(write: Write, read: Read, own: Path) -> None:
    text = (Path(read_presets(None)[0]["batch"].source)).read_text()
    write("mine", text.replace("512", "32"))
    presets, problems = read_presets(own)
    assert problems == []
    assert presets["mine"].flags["max-num-seqs"].value == 32
    assert presets["mine"].workload.output_tokens_p95 == 32
