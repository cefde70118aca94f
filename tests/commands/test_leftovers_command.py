"""``leftovers`` lists what servers left and ends it on request; commands name it when a server has lost its folder."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path


def test_leftovers_are_listed_but_not_ended_in_read_only_mode(program):
    server = program.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait")
    state = program.home / "state" / "vllm-console"
    assert program.json("leftovers")["processes"] == []
    keeper = int(Path(f"/proc/{server['pid']}/stat").read_text().rpartition(")")[2].split()[1])
    shutil.rmtree(state / "servers" / "chat")
    found = program.json("leftovers")["processes"]
    assert server["pid"] in {one["pid"] for one in found}
    assert all("was deleted" in one["why"] for one in found)
    assert keeper not in {one["pid"] for one in found}

    refused = program("--read-only", "leftovers", "--remove")
    assert refused.returncode == 4
    assert "read-only" in refused.stderr
    os.kill(server["pid"], 0)
    for one in found:
        os.kill(one["pid"], signal.SIGKILL)


def test_commands_name_a_server_whose_folder_was_deleted(program):
    server = program.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait")
    shutil.rmtree(program.home / "state")
    way_out = "'vllm-console leftovers --remove'"
    listed = program("list")
    row = f"vllm@{server['port']}"
    assert f"chat, whose folder was deleted while it ran: only {way_out} can end it" in listed.stdout.split(row)[1]
    assert "The folder of chat was deleted while it ran" in listed.stderr
    assert way_out in listed.stderr
    assert way_out in program("list", "--ours").stdout
    for words in (("status", "chat"), ("stop", "chat"), ("logs", "chat"), ("stop", row)):
        refused = program(*words)
        assert refused.returncode != 0
        assert "folder" in refused.stderr
        assert way_out in refused.stderr
    again = program("start", "chatbot", "--engine", "simulated", "--name", "chat")
    assert again.returncode == 1
    assert f"server chat still runs, but its folder was deleted: end it with {way_out}" in again.stderr
    assert not list(program.home.glob("state/**/chat")), "its keeper would write its record into a new folder"
    removed = program("leftovers", "--remove")
    assert "Removed" in removed.stdout
    assert row not in program("list").stdout
