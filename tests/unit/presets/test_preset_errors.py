"""The error of an invalid preset names file, key and what was expected, and affects no other preset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_launchers.presets.load import PresetError, find_preset, read_presets

Complaint = Callable[[str], str]
BASE = 'extends = "chatbot"\n'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('modle = "x"', ["unknown key 'modle'", "did you mean 'model'?"]),
        ('title = "x"', ["'summary' is missing", "extends"]),
        ("title = 1", ["title: expected text in quotes, not the number 1"]),
        ('title = "a\\u001b[31m"', ["title: holds a line break or a control character", "\\x1b[31m"]),
        ("title = ", ["is not TOML", "line 1"]),
        ("a = 1\na = 2", ["is not TOML", "line 2"]),
        ("flags = 3", ["flags: expected a table"]),
        (BASE + "[flags]\nmax-num-seqs = 0", ["flags.max-num-seqs: expected a whole number of 1 or more", "not 0"]),
        (
            BASE + '[flags.max-num-seqs]\nvalue = "many"\nwhy = "x"',
            ["flags.max-num-seqs.value: expected a whole number", "not 'many'"],
        ),
        (BASE + "[flags.max-num-seqs]\nvalue = 1", ["flags.max-num-seqs: 'why' is missing"]),
        (BASE + '[flags.max-num-seqs]\nvalue = 1\nwhi = "x"', ["unknown key 'whi'", "did you mean 'why'?"]),
        (BASE + "[flags]\ngpu-memory-utilization = 92", ["expected a number above 0, 1 at most, not 92"]),
        (BASE + "[flags]\ngpu-memory-utilization = nan", ["finite"]),
        (BASE + "[flags]\nenable-prefix-caching = 1", ["expected true or false, not 1"]),
        (BASE + '[flags]\nmax-model-len = "long"', ["16k"]),
        (BASE + '[flags]\nmax-num-batched-tokens = "auto"', ["or a length such as 16k or 16K, not 'auto'"]),
        (BASE + "[flags]\nseed = 1979-05-27", ["flags.seed: expected true, false, a number or text, not a date"]),
        (BASE + '[flags]\n"--max_num_seqs" = 1', ["without leading dashes", "'max-num-seqs'"]),
        (BASE + "[flags]\nmax_num_seqs = 1", ["'max-num-seqs'"]),
        (BASE + "[flags]\nno-enable-prefix-caching = true", ["'enable-prefix-caching' with value = false"]),
        (BASE + '[flags]\napi-key = "abc"', ["flags.api-key", "export VLLM_API_KEY"]),
        (BASE + '[flags]\nhf-token = "abc"', ["flags.hf-token", "export HF_TOKEN"]),
        (BASE + "[flags]\nport = 1", ["flags.port", "--port"]),
        (BASE + "[flags.compilation-config]\nmode = { value = 1 }", ["must be quoted"]),
        (BASE + '[environment]\nHF_TOKEN = "abc"', ["environment.HF_TOKEN: secrets don't belong in files"]),
        (BASE + '[environment]\nMY_PASSWORD = "abc"', ["environment.MY_PASSWORD", "secret"]),
        (BASE + "[environment]\nOMP_NUM_THREADS = 4", ["expected text in quotes, not the number 4"]),
        (BASE + '[environment]\n"A B" = "1"', ["not a valid name of an environment variable"]),
        (BASE + "[workload]\nprefix_reuse = 1.5", ["workload.prefix_reuse", "<= 1", "not 1.5"]),
        (BASE + "[workload]\nconcurrency = 0", ["workload.concurrency: expected a whole number >= 1, not 0"]),
        (BASE + "[workload]\nconcurency = 4", ["workload: unknown key 'concurency'", "did you mean 'concurrency'?"]),
        (BASE + '[objectives]\nttft_p99_seconds = "1s"', ["objectives.ttft_p99_seconds: expected a number", "'1s'"]),
        (BASE + "[objectives]\nkv_cache_usage = 85", ["objectives.kv_cache_usage", "not 85"]),
        ('extends = "chatbt"', ["extends: no preset is called 'chatbt'", "did you mean 'chatbot'?"]),
        ('extends = "mine"', ["circular"]),
        (BASE + 'drop = ["max-num-seq"]', ["drop: 'max-num-seq' is not set by 'chatbot'", "'max-num-seqs'?"]),
        (BASE + 'drop = ["max-num-seqs"]\n[flags]\nmax-num-seqs = 3', ["both dropped and set"]),
        (BASE + 'drop = "max-num-seqs"', ["drop: expected a list"]),
        ('drop = ["max-num-seqs"]', ["no 'extends'"]),
        ("x = " + "[" * 3000 + "]" * 3000, ["nested too deeply"]),
        ("x = " + "9" * 5000, ["is not TOML"]),
        (".".join("a" * 30_000) + " = 1", ["more than 200 dots"]),
        ("# " + "x" * 70_000, ["larger than 64 KiB"]),
    ],
)
def test_error_sentence(complaint: Complaint, text: str, parts: list[str]) -> None:
    sentence = complaint(text)
    for part in parts:
        assert part in sentence
    assert len(sentence) < 400


def test_all_errors_of_a_file_are_reported_at_once(own: Path, write: Callable[..., Path]) -> None:
    text = BASE + 'titel = "x"\n[flags]\nport = 9\nmax_num_seqs = 4\n[workload]\nconcurrency = 0'
    path = write("mine", text)
    presets, problems = read_presets(own)
    assert [problem.path for problem in problems] == [path] * 4
    messages = [str(problem).removeprefix(f"{path}: ") for problem in problems]
    assert [one.partition(": ")[0].partition(";")[0] for one in messages] == [
        "unknown key 'titel'",
        "flags.port",
        "flags.max_num_seqs",
        "workload.concurrency",
    ]
    with pytest.raises(PresetError) as error:
        find_preset("mine", presets, problems)
    assert str(error.value).startswith(f"{path}: 4 mistakes: (1) {messages[0]} (2) {messages[1]} (3)")


def test_secret_is_not_repeated(complaint: Complaint) -> None:
    assert "hunter2" not in complaint(BASE + '[environment]\nDB_PASSWORD = "hunter2"')
    assert "hunter2" not in complaint(BASE + '[flags]\napi-key = "hunter2"')


def test_non_text_files(own: Path, complaint: Complaint) -> None:
    (own / "binary.toml").write_bytes(b'title = "\xff\xfe"')
    (own / "folder.toml").mkdir()
    (own / "dangling.toml").symlink_to(own / "nowhere")
    (own / "bad name.toml").write_text("")
    (own / ".hidden.toml").write_text("= broken")
    (own / "notes.txt").write_text("= broken")
    presets, problems = read_presets(own)
    assert len(presets) == 4
    assert {problem.path.name for problem in problems if problem.path} == {
        "binary.toml",
        "folder.toml",
        "dangling.toml",
        "bad name.toml",
    }


def test_missing_folder_is_not_an_error(tmp_path: Path) -> None:
    assert read_presets(tmp_path / "nowhere")[1] == []


def test_unknown_name_lists_similar_ones() -> None:
    presets, problems = read_presets(None)
    with pytest.raises(PresetError, match="no preset is called 'chatbott'; did you mean 'chatbot'"):
        find_preset("chatbott", presets, problems)
    with pytest.raises(PresetError, match="available: batch, chatbot"):
        find_preset("zzz", presets, problems)


def test_invalid_override_is_reported_and_not_replaced(own: Path) -> None:
    (own / "chatbot.toml").write_text('extends = "chatbot"\n[flags]\nmax-num-seqs = "x"\n')
    presets, problems = read_presets(own)
    assert set(presets) == {"code-generation", "long-document", "batch"}
    with pytest.raises(PresetError, match=r"max-num-seqs"):
        find_preset("chatbot", presets, problems)
