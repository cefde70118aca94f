"""``leftovers`` lists leftovers of a server, ends them on request, and changes nothing with ``--read-only``."""

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
