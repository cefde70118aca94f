"""remove, runs and replay: the data kept of a removed server, and its replay."""

from __future__ import annotations

import json
import time

from fakes.commands import ASK_SECONDS, PATIENCE


def served(program, name="chat", seconds="3"):
    """A stopped server that had traffic."""
    program.json("start", "chatbot", "--engine", "simulated", "--name", name, "--wait")
    assert program("load", name, "--rate", "5", "--duration", seconds, "--output-tokens", "20").returncode == 0
    deadline = time.monotonic() + PATIENCE
    while not (program.json("status", name)["metrics"] or {}).get("generation_tokens_total"):
        assert time.monotonic() < deadline, "the recorder does not see it"
        time.sleep(ASK_SECONDS)
    program.json("stop", name)


def files(program):
    state = program.home / "state/vllm-console"
    return {
        path.relative_to(state).as_posix().partition("/")[0] + "/" + path.name: oct(path.stat().st_mode & 0o777)
        for folder in ("servers", "removed")
        for path in (state / folder).rglob("*")
        if path.is_file()
    }


def picture(program, *words):
    """The text of a screenshot."""
    path = program.home / "picture.svg"
    done = program("--picture", str(path), "--size", "120x40", *words)
    assert done.returncode == 0, done.stderr
    return path.read_text().replace("&#160;", " ")


def test_removed_server_can_be_replayed(program):
    served(program)
    (run,) = program.json("runs", "chat")
    assert (run["server_removed"], run["replayable"]) == (False, True)
    assert "chat@1" in picture(program, "replay", "chat"), "also for an existing server"
    assert program.json("remove", "chat") == {"name": "chat", "removed": True, "history_kept": True}
    assert program.json("list", "--ours") == []
    assert files(program) == {"removed/history.sqlite": "0o600", "removed/loads.jsonl": "0o600"}
    (run,) = program.json("runs", "chat")
    assert (run["server_removed"], run["replayable"]) == (True, True)
    assert "stopped, chatbot (server removed)" in program("runs").stdout

    shown = picture(program, "replay", "chat@1")
    for text in ("chat@1", "removed", "whole run", "it was deleted with its server", "KV cache", "being replayed"):
        assert text in shown, text
    middle = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((run["ready_at"] + run["ended_at"]) / 2))
    shown = picture(program, "--server", "chat", "--at", middle)
    assert f"at {middle.partition(' ')[2]}" in shown
    assert "removed" in shown
    assert "last exit" in picture(program, "--screen", "describe", "replay", str(run["id"]))

    assert program("replay", "chat").returncode == 2, "no terminal"
    for words, code, why in (
        (["--server", "chat"], 3, "'vllm-console replay chat' shows its newest run"),
        (["replay", "chat@9"], 3, "no run 'chat@9'"),
        (["--at", "2020-01-01 00:00", "replay", "chat@1"], 2, "chat@1 ran from"),
        (["--screen", "log", "replay", "chat"], 1, "The log of chat@1 was deleted with its server."),
    ):
        answer = program("--picture", str(program.home / "no.svg"), *words)
        assert (answer.returncode, why in answer.stderr) == (code, True), answer.stderr
    assert not (program.home / "no.svg").exists()


def test_name_is_reusable_and_purge_deletes_everything(program):
    served(program)
    assert "replay chat" in program("remove", "chat").stdout
    served(program, seconds="2")
    numbers = [run["id"] for run in program.json("runs", "chat")]
    assert "removed" not in picture(program, "replay", "chat"), "the newest run belongs to the existing server"
    assert "removed" in picture(program, "replay", str(numbers[-1]))
    assert program("remove", "chat", "--purge").stdout == "chat: removed, with its history\n"
    assert files(program) == {}
    assert [run["replayable"] for run in program.json("runs", "chat")] == [False, False], "the runs are kept"
    answer = program("--picture", str(program.home / "no.svg"), "replay", "chat")
    assert (answer.returncode, "its history was deleted with its server" in answer.stderr) == (1, True)
    assert program("remove", "chat", "--purge").returncode == 3


def test_purge_of_removed_server_deletes_its_history(program):
    served(program)
    program.json("remove", "chat")
    assert program("--read-only", "remove", "chat", "--purge").returncode == 4
    assert json.loads(program("runs", "--json").stdout)[0]["replayable"]
    assert program.json("remove", "chat", "--purge") == {"name": "chat", "removed": True, "history_kept": False}
    assert files(program) == {}


def test_running_server_is_not_removed_or_purged(program):
    program.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait")
    for words in (["remove", "chat"], ["remove", "chat", "--purge"]):
        answer = program(*words)
        assert (answer.returncode, "stop it first" in answer.stderr) == (4, True)
    assert "servers/history.sqlite" in files(program)
    answer = program("--picture", str(program.home / "no.svg"), "replay", "chat")
    assert (answer.returncode, "chat@1 has not ended" in answer.stderr) == (1, True)
