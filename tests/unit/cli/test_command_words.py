"""Parsing of command lines, and output that a terminal can't encode."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_console.cli.main import main, parse
from vllm_console.cli.options import pairs_from
from vllm_console.history.time_view import moment_from
from vllm_launchers.errors import UsageError


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("list --json", "list"),
        ("--state demo list --json", "list"),
        ("--state=demo list", "list"),
        ("--sta start --refresh 2 --ascii status x", "status"),
        ("--host demo", None),
        ("--read-only", None),
        ("", None),
    ],
)
def test_folder_may_be_named_like_a_command(words: str, command: str | None) -> None:
    assert parse(words.split()).command == command


def test_unknown_word_is_not_a_command() -> None:
    with pytest.raises(SystemExit):
        parse(["lsit", "list"])


@pytest.mark.parametrize(("word", "meant"), [("stat", "status"), ("sto", "stop"), ("lsit", "list"), ("sta", "start")])
def test_command_that_begins_with_the_word_is_meant(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([word])
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_unencodable_output_does_not_fail_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a POSIX locale without UTF-8, a dash must not crash the program."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["presets"]) == 0
    print("p99 –")
    sys.stdout.flush()
    assert b"chatbot" in written.getvalue()
    assert b"p99 ?" in written.getvalue()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-22 03:10", "2026-11-22 03:10:00"),
        ("2026-11-22T03:10:30", "2026-11-22 03:10:30"),
        ("11-22 03:10", "2026-11-22 03:10:00"),
        ("11-23 03:10", "2025-11-23 03:10:00"),
        ("03:10", "2026-11-22 03:10:00"),
        ("14:00", "2026-11-21 14:00:00"),
    ],
)
def test_earlier_moment_is_parsed(text, expected):
    now = time.mktime((2026, 11, 22, 13, 40, 0, 0, 0, -1))
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment_from(text, now))) == expected


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-13-01 03:10", "2026-11-22 25:00", "2026-11-23 03:10", "0001-01-01 00:00"]
)
def test_later_or_invalid_moment_is_refused(text):
    with pytest.raises(ValueError, match="expected an earlier time"):
        moment_from(text, time.mktime((2026, 11, 22, 13, 40, 0, 0, 0, -1)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--at nonsense list", "'nonsense': expected an earlier time"),
        ("--at 0001-01-01T00:00 list", "expected an earlier time"),
        ("--refresh nan list", "must be a duration from 0.1s to 1m, such as 25, 25s, 20m or 1h30m, not 'nan'"),
        ("--refresh -1 list", "must be a duration from 0.1s to 1m"),
        (
            "metrics x --timeout inf",
            "must be a duration above 0, at most 366d, such as 25, 25s, 20m or 1h30m, not 'inf'",
        ),
        ("metrics x --timeout 0", "above 0, at most 366d"),
        ("stop x --timeout 1e308", "at most 366d"),
        ("load x --duration 25h", "must be a duration above 0, at most 24h"),
        ("ramp x --budget 9s", "must be a duration from 10s to 24h"),
        ("check x --window 31d", "must be a duration from 1s to 30d"),
        ("load x --requests 99999999999999999999", "must be a whole number from 1 to 999,999,999"),
        ("logs x -n 0", "must be a whole number from 1"),
        ("logs x -n=-1", "must be a whole number from 1"),
        ("topology --width=-1", "must be a whole number from 1"),
    ],
)
def test_out_of_range_numbers_are_refused_with_the_limit(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words.split())
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


DURATIONS = [
    "--refresh * list", "check x --window *", "compare x --seconds *", "load x --duration *", "metrics x --timeout *",
    "ramp x --budget *", "restart x --timeout *", "sleep x --drain *", "start x --timeout *", "stop x --timeout *",
    "tune x --budget *", "wake x --drain *", "demo --after *",
]  # fmt: skip
"""All options that take a duration."""


@pytest.mark.parametrize("words", DURATIONS)
@pytest.mark.parametrize(("text", "seconds"), [("25", 25), ("25s", 25), ("0.5m", 30), ("1m", 60), ("0m45s", 45)])
def test_every_duration_option_accepts_the_same_forms(words: str, text: str, seconds: float) -> None:
    option = next(word for word in words.split() if word.startswith("--"))
    assert getattr(parse(words.replace("*", text).split()), option.removeprefix("--")) == seconds


@pytest.mark.parametrize("text", ["", "s", "1 h", "-1s", "25x", "1m1h", "1e3", "5.", "h1"])
def test_invalid_duration_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["load", "x", f"--duration={text}"])
    assert "must be a duration" in " ".join(capsys.readouterr().err.split())


def test_every_duration_option_has_units() -> None:
    """A new duration option must be listed above and accept these forms."""
    listed = {f"{word}" for words in DURATIONS for word in words.split() if word.startswith("--")}
    page = (Path(__file__).parents[3] / "docs" / "options.md").read_text()
    assert set(re.findall(r"`(--[a-z-]+) DURATION`", page)) | {"--refresh"} == listed
    assert not re.findall(r"`(--[a-z-]+) S(?:ECONDS)?`", page)


@pytest.mark.parametrize("option", [("--at", "03:10"), ("--picture", "x.svg"), ("--server", "chat"), ("--keys", "n")])
def test_console_options_are_refused_for_other_commands(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """``list`` used to ignore the requested time and to save no screenshot."""
    with pytest.raises(SystemExit) as ended:
        parse([*option, "list"])
    assert ended.value.code == 2
    assert f"{option[0]} applies only to the console; 'list' does not accept it" in capsys.readouterr().err
    assert parse([*option, "replay", "chat"]).command == "replay"
    assert parse(option).command is None


def test_picture_is_refused_for_the_web_console(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (("--picture", "x.svg"), ("--server", "chat"), ("--keys", "n"), ("--size", "80x24")):
        with pytest.raises(SystemExit):
            parse([*option, "web"])
        assert f"{option[0]} applies only to the console; 'web' does not accept it" in capsys.readouterr().err
    assert parse(["--at", "03:10", "web"]).command == "web"


@pytest.mark.parametrize(
    "words",
    [("start", "chatbot", "--name", ""), ("start", "chatbot", "--host", ""), ("plan", "chatbot", "--gpus", " "),
     ("plan", "chatbot", "--host", ""), ("plan", "chatbot", "--name", ""), ("presets", ""), ("plan", ""),
     ("--state", "", "list"), ("--config", "", "list"), ("--host", "", "plan", "chatbot")],
)  # fmt: skip
def test_empty_argument_is_not_treated_as_missing(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert "must not be empty" in capsys.readouterr().err


def test_server_variables_need_valid_names_and_hide_secrets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for word in ("A B=1", "1A=1", "=1", "A"):
        with pytest.raises(UsageError, match="--env"):
            pairs_from([word])
    assert pairs_from(["NAME_1=a b", "HF_TOKEN=abc"]) == {"NAME_1": "a b", "HF_TOKEN": "abc"}
    output = capsys.readouterr().err
    assert "--env HF_TOKEN=…: every user of this machine can read command lines" in output
    assert "abc" not in output
    assert "NAME_1" not in output


@pytest.mark.parametrize("value", ["postgres://user:pw@host/db", "Bearer abcdef0123456789", "hf_" + "a" * 20])
def test_secret_in_the_value_of_a_variable_is_reported(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pairs_from([f"DATABASE={value}", "PLACE=http://host/db"]) == {"DATABASE": value, "PLACE": "http://host/db"}
    assert capsys.readouterr().err == (
        "vllm-console: --env DATABASE=…: every user of this machine can read command lines; "
        "set DATABASE in the environment of vllm-console instead\n"
    )


def test_closed_pipe_ends_a_command_like_sigpipe(tmp_path: Path) -> None:
    script = '"$@" | true; exit "${PIPESTATUS[0]}"'
    program = [sys.executable, "-m", "vllm_console", "presets", "chatbot"]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *program], env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
