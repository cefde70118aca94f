"""``restart --rolling``: a second server next to the first, on simulated servers."""

from __future__ import annotations

import json
import re
import shutil


def test_new_generation_serves_alongside_old_one_until_stopped(program):
    host = ("--host", "4xa6000")
    first = program.json(*host, "start", "chatbot", "--name", "chat", "--engine", "simulated", "--wait")
    done = program(*host, "restart", "chat", "--rolling", "--set", "max-num-seqs=7")
    assert done.returncode == 0, done.stderr
    (gpu,) = re.findall(r"on GPU (\d); chat keeps serving\n", done.stdout)
    assert f"GPUs        {gpu}\n" in program("status", "chat-2").stdout
    assert f"GPUs        {gpu}\n" not in program("status", "chat").stdout
    assert "same answers to all 4 golden prompts" in done.stdout
    assert "chat keeps serving; 'vllm-console stop chat' stops it" in done.stdout
    servers = {server["name"]: server for server in program.json("list", "--ours")}
    assert {name: server["state"] for name, server in servers.items()} == {"chat": "ready", "chat-2": "ready"}
    assert servers["chat"]["pid"] == first["pid"], "it is unchanged"
    assert servers["chat-2"]["port"] != first["port"]
    argv = servers["chat-2"]["argv"]
    assert argv[argv.index("--max-num-seqs") + 1] == "7"

    for name, other in (("chat", "chat-2"), ("chat-2", "chat")):
        third = program(*host, "restart", name, "--rolling")
        assert third.returncode == 1
        assert f"not finished: {other} is ready next to {name}; stop one of them" in third.stderr

    # Reverse: the stopped server regains its name, history and generation numbers.
    program.json("stop", "chat")
    document = program.json(*host, "restart", "chat-2", "--rolling", "--stop-old")
    assert (document["old"]["name"], document["old"]["state"], document["old_stopped"]) == ("chat-2", "stopped", True)
    assert (document["new"]["name"], document["new"]["generation"]) == ("chat", 2)
    assert document["answers"] == {"compared": 4, "different": []}
    assert document["url"] == f"http://127.0.0.1:{document['new']['port']}"


def test_insufficient_memory_prints_one_line_and_starts_nothing(program):
    host = ("--host", "1xrtx4090")
    program.json(*host, "start", "chatbot", "--name", "chat", "--engine", "simulated", "--wait")
    done = program(*host, "restart", "chat", "--rolling")
    assert done.returncode == 1
    assert "no room for a second server beside chat: the server needs a GPU with 22.2 GiB free" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [server["name"] for server in program.json("list", "--ours")] == ["chat"]


def test_failed_new_generation_does_not_affect_old_one(program):
    program.json("start", "chatbot", "--name", "chat", "--engine", "simulated", "--wait")
    done = program(
        "restart", "chat", "--rolling", "--set", "num-gpu-blocks-override=2", "--stop-old", "--force", "--json"
    )
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["new"]["state"] == "failed"
    assert (document["old"]["state"], document["old_stopped"], document["answers"]) == ("ready", False, None)
    assert "chat keeps serving" in done.stderr


def test_rolling_update_requires_ready_server_and_valid_options(program):
    program.json("start", "chatbot", "--name", "chat", "--engine", "simulated", "--wait")
    assert program("restart", "chat", "--rolling", "--preset", "batch").returncode == 2
    assert program("restart", "chat", "--stop-old").returncode == 2
    program.json("stop", "chat")
    done = program("restart", "chat", "--rolling")
    assert (done.returncode, done.stderr) == (
        1, "vllm-console: chat is stopped: a rolling update needs a server that is ready\n",
    )  # fmt: skip


def test_pair_is_exported_for_proxies(program):
    new = program.json("start", "chatbot", "--name", "chat-2", "--engine", "simulated", "--wait")
    program.json("start", "chatbot", "--name", "chat", "--engine", "simulated", "--wait")
    text = program("export", "nginx", "chat-2", "chat").stdout
    assert f"server 127.0.0.1:{new['port']};  # chat-2" in text
    document = program.json("export", "litellm", "chat-2", "chat")
    assert (document["form"], document["servers"]) == ("litellm", ["chat-2", "chat"])
    assert f"api_base: http://127.0.0.1:{new['port']}/v1" in document["text"]
    assert document["warning"] is None
    variables = {"VLLM_USE_V1": "1", "VLLM_API_KEY": "secret"}
    noted = program("export", "llama-swap", "chat-2", "chat", env=variables).stderr
    assert "not in the export: VLLM_USE_V1" in noted
    assert "VLLM_API_KEY" not in noted
    assert "not in the export" not in program("export", "litellm", "chat-2", "chat", env=variables).stderr
    assert program("export", "llama-swap").returncode == 2
    assert program("export", "nginx", "nobody").returncode == 3
    assert program("export", "grafana", "chat", "chat-2").returncode == 2


def test_only_second_half_of_rolling_update_regains_its_name(program):
    program.json("start", "batch", "--name", "llama", "--engine", "simulated")
    program.json("stop", "llama")
    program.json("start", "chatbot", "--name", "llama-2", "--engine", "simulated", "--wait")
    document = program.json("restart", "llama-2", "--rolling", "--stop-old")
    assert document["new"]["name"] == "llama-2-2"
    program.json("remove", "llama-2")
    document = program.json("restart", "llama-2-2", "--rolling", "--keep-old")
    assert document["new"]["name"] == "llama-2"


def test_name_of_a_second_server_that_runs_without_its_folder_is_refused(program):
    program.json("start", "chatbot", "--name", "chat", "--engine", "simulated", "--wait")
    assert program("restart", "chat", "--rolling").returncode == 0
    folder = program.home / "state" / "vllm-console" / "servers" / "chat-2"
    shutil.rmtree(folder)
    again = program("restart", "chat", "--rolling")
    assert again.returncode == 1
    assert "server chat-2 still runs, but its folder was deleted" in again.stderr
    assert not folder.exists(), "its keeper would write its record into a new folder"
    assert "Removed" in program("leftovers", "--remove").stdout
