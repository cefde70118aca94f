"""``diagnose LOGFILE``: JSON, text output, and unreadable files."""

from __future__ import annotations

import argparse
import json

import pytest

from vllm_console.cli import diagnose
from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_launchers.errors import RefusedError
from vllm_launchers.keeper.records import State

LOG = """\
INFO 11-20 10:00:00 [api_server.py:1] vLLM API server version 0.32.0
Capturing CUDA graphs:  10%|#\rCapturing CUDA graphs: 100%|##########
ERROR 11-20 10:00:09 [core.py:1] EngineCore failed to start.
Traceback (most recent call last):
  File "gpu_worker.py", line 1, in init_device
ValueError: Free memory on device cuda:0 (12.00/24.00 GiB) on startup is less than desired GPU memory utilization (0.92, 22.08 GiB). Decrease GPU memory utilization.
RuntimeError: Engine core initialization failed. See root cause above.
"""  # noqa: E501


def test_json_has_cause_line_and_fix(program, tmp_path):
    path = tmp_path / "server.log"
    path.write_text(LOG)
    answer = program.json("diagnose", str(path))
    assert set(answer) == {"cause", "confidence", "line", "evidence", "explanation", "fixes", "also"}
    assert (answer["cause"], answer["line"]) == ("free_memory_below_utilization", 6)
    assert answer["evidence"].startswith("ValueError: Free memory on device")
    assert answer["fixes"][0]["set"] == {"gpu-memory-utilization": 0.49}
    assert set(answer["fixes"][0]) == {"set", "unset", "why", "tradeoff"}


def test_text_starts_with_cause_and_shows_the_fix_as_a_command(program, tmp_path):
    path = tmp_path / "server.log"
    path.write_text(LOG.replace("Decrease", "\x1b[31mDecrease [bold]") + "api key sk-aaaaaaaaaaaaaaaaaaaaaaaaaaaa\n")
    answer = program("diagnose", str(path))
    assert answer.returncode == 0
    assert answer.stdout.startswith("free_memory_below_utilization: ")
    assert "--gpu-memory-utilization 0.49" in answer.stdout
    assert "[bold]" in answer.stdout
    assert "\x1b" not in answer.stdout


def test_line_numbers_of_truncated_file_count_from_its_beginning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(diagnose, "MOST_BYTES", 2 * len(LOG))
    path = tmp_path / "long.log"
    path.write_text(("x" * 99 + "\n") * 500 + LOG)
    parser = argparse.ArgumentParser()
    diagnose.add_arguments(parser)
    assert diagnose.run(parser.parse_args([str(path), "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["line"] == 506


def test_windows_line_endings(program, tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(LOG.replace("\n", "\r\n").encode())
    answer = program.json("diagnose", str(path))
    assert (answer["cause"], answer["line"]) == ("free_memory_below_utilization", 6)


def test_unreadable_file_prints_one_line(program, tmp_path):
    for name in (tmp_path / "none.log", tmp_path):
        answer = program("diagnose", str(name))
        assert answer.returncode == 1
        assert answer.stderr.startswith(f"vllm-console: {name}: can't be read: ")
        assert answer.stderr.count("\n") == 1


def test_binary_and_empty_logs_have_no_failure(program, tmp_path):
    path = tmp_path / "x.log"
    for data in (b"", b"\xff\x00\xfe" * 1000):
        path.write_bytes(data)
        answer = program.json("diagnose", str(path))
        assert (answer["cause"], answer["confidence"], answer["fixes"]) == ("other", 0.0, [])


def test_unknown_name_prints_one_line(program):
    answer = program("diagnose", "chat")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr == "vllm-console: chat: no such file or server\n"


def test_folder_with_server_name_does_not_hide_server(program, tmp_path, monkeypatch):
    (tmp_path / "chat").mkdir()
    monkeypatch.chdir(tmp_path)
    assert program("diagnose", "chat").stderr.endswith("no such file or server\n")


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (State.READY, "chat is running and has not failed: 'vllm-console status chat' shows figures and findings"),
        (State.STARTING, "chat is starting and has not failed: 'vllm-console status chat' shows figures and findings"),
        (State.STOPPED, "chat has not failed: it is stopped"),
    ],
)
def test_server_without_failure_prints_one_line(tmp_path, monkeypatch, state, sentence):
    class Fleet:
        def snapshot(self):
            return FleetSnapshot(2000.0, "box", servers=(ServerView("chat", state, 1000.0),))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(diagnose, "open_fleet", lambda _args: Fleet())
    parser = argparse.ArgumentParser()
    diagnose.add_arguments(parser)
    with pytest.raises(RefusedError) as refused:
        diagnose.run(parser.parse_args(["chat"]))
    assert str(refused.value) == sentence
