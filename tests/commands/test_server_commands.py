"""start, list, status, restart, stop, logs: their JSON is a contract."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fakes.commands import ASK_SECONDS, PATIENCE
from vllm_launchers.keeper import client

SERVER_KEYS = {"name", "preset", "engine", "port", "state", "pid", "argv", "generation", "log"}


def start(program, *words, name="chat"):
    return program.json("start", "chatbot", "--engine", "simulated", "--name", name, "--wait", *words)


def test_start_prints_the_server(program):
    server = start(program)
    assert set(server) == SERVER_KEYS
    assert server["name"] == "chat"
    assert server["preset"] == "chatbot"
    assert server["engine"] == "simulated"
    assert server["state"] == "ready"
    assert server["generation"] == 1
    os.kill(server["pid"], 0)
    assert "--max-num-seqs" in server["argv"]
    assert str(server["port"]) in server["argv"]


def test_start_without_wait_returns_immediately(program):
    server = program.json(
        "start", "chatbot", "--engine", "simulated", "--name", "slow", env={"SIMULATED_STARTUP_SECONDS": "20"}
    )
    assert server["state"] == "starting"
    assert program.json("stop", "slow")["state"] == "stopped"


def test_set_and_unset_change_command_line(program):
    server = start(
        program, "--set", "max-num-seqs=7", "--set", "enforce-eager=true", "--set", "enable-prefix-caching=false",
        "--unset", "max-num-batched-tokens", "--unset", "no-such-thing-set",
    )  # fmt: skip
    argv = server["argv"]
    assert argv[argv.index("--max-num-seqs") + 1] == "7"
    assert "--enforce-eager" in argv
    assert "--no-enable-prefix-caching" in argv
    assert "--max-num-batched-tokens" not in argv


def test_restart_rejects_unset_of_missing_flag_before_stopping(program):
    before = start(program, "--set", "max-num-seqs=7", "--wait")
    sentence = "chat does not set --max-num-seq; did you mean --max-num-seqs?"
    for words in (("restart",), ("restart", "--rolling"), ("predict",)):
        refused = program(words[0], "chat", *words[1:], "--unset", "max-num-seq")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert sentence in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert program("restart", "chat", "--unset", "xyzzy").stderr == "vllm-console: chat does not set --xyzzy\n"
    both = program("restart", "chat", "--set", "max-num-seqs=4", "--unset", "max_num_seqs")
    assert (both.returncode, both.stderr) == (2, "vllm-console: --set and --unset both name max-num-seqs\n")
    followed = program("logs", "chat", "--follow", "--json")
    assert followed.returncode == 2
    assert "can't be combined with --json" in followed.stderr
    after = program.json("status", "chat")
    assert (after["pid"], after["generation"], after["state"]) == (before["pid"], 1, "ready")
    assert [one["name"] for one in program.json("list") if "chat" in one["name"]] == ["chat"]
    kept_away = program("restart", "chat", "--unset", "kv-cache-dtype", "--unset", "max-num-seqs", "--wait", "--json")
    assert kept_away.returncode in (0, 2), kept_away.stderr  # whether the plan chooses one depends on the machine
    assert program.json("restart", "chat", "--unset", "max_num_seqs")["generation"] > 1


def test_status_adds_exit_and_metrics(program):
    start(program)
    deadline = time.monotonic() + PATIENCE
    while (answer := program.json("status", "chat"))["metrics"] is None:
        assert time.monotonic() < deadline
        time.sleep(ASK_SECONDS)
    assert set(answer) >= SERVER_KEYS | {"exit", "metrics"}
    assert answer["exit"] is None
    assert answer["metrics"]["requests_running"] == 0
    assert answer["metrics"]["kv_cache_tokens"] > 1000
    program.json("stop", "chat")
    ended = program.json("status", "chat")
    assert ended["state"] == "stopped"
    assert ended["exit"]["requested"] is True
    assert ended["pid"] is None


def test_list_shows_every_server(program):
    start(program, name="one")
    start(program, name="two")
    servers = program.json("list", "--ours")
    assert [server["name"] for server in servers] == ["one", "two"]
    assert servers[0]["port"] != servers[1]["port"]
    assert all({"exit", "metrics"} <= set(server) for server in servers)


def test_restart_keeps_identity_and_increments_generation(program):
    before = start(program)
    after = program.json("restart", "chat", "--set", "max-num-seqs=32", "--wait")
    assert (after["name"], after["port"], after["generation"], after["state"]) == ("chat", before["port"], 2, "ready")
    assert after["pid"] != before["pid"]
    assert after["argv"][after["argv"].index("--max-num-seqs") + 1] == "32"
    back = program.json("restart", "chat", "--previous", "--wait")
    assert back["generation"] == 3
    assert back["argv"][back["argv"].index("--max-num-seqs") + 1] == "256"


def test_switch_replaces_server_with_another_preset(program):
    before = start(program)
    after = program.json("restart", "chat", "--preset", "batch", "--wait")
    assert (after["preset"], after["port"], after["generation"]) == ("batch", before["port"], 2)
    status = program.json("status", "chat")
    assert status["downtime_seconds"] > 0


def test_start_after_stop_increments_generation(program):
    start(program)
    stopped = program.json("stop", "chat")
    assert stopped["state"] == "stopped"
    again = start(program)
    assert (again["generation"], again["state"]) == (2, "ready")


def test_logs(served):
    answer = served.json("logs", "chat", "-n", "500")
    assert any("Application startup complete" in line for line in answer["lines"])
    assert any("simulated" in line for line in answer["lines"])


def counted(program):
    """Prompt and generated tokens counted by the server so far, including its warm-up request."""
    found = program.json("metrics", f"http://127.0.0.1:{program.json('status', 'chat')['port']}")
    return found["prompt_tokens_total"], found["generation_tokens_total"]


def test_load_reports_client_side_metrics(served):
    before = counted(served)
    report = served.json("load", "chat", "--rate", "5", "--duration", "3", "--output-tokens", "20")
    assert set(report) >= {
        "sent", "completed", "failed", "duration_s", "output_tokens", "ttft_seconds", "itl_seconds", "e2e_seconds",
    }  # fmt: skip
    assert report["sent"] == report["completed"] == 15
    assert report["failed"] == 0
    assert report["output_tokens"] == 15 * 20
    assert report["ttft_seconds"]["p99"] >= report["ttft_seconds"]["p50"] > 0
    assert counted(served)[1] - before[1] == report["output_tokens"]


def test_closed_loop_uses_exact_lengths(served):
    before = counted(served)
    words = ("--concurrency", "3", "--requests", "9", "--input-tokens", "40", "--output-tokens", "8")
    report = served.json("load", "chat", *words)
    assert (report["sent"], report["completed"], report["held_back"]) == (9, 9, 0)
    assert (report["prompt_tokens"], report["output_tokens"]) == (9 * 40, 9 * 8)
    assert [after - one for after, one in zip(counted(served), before, strict=True)] == [360, 72]


def test_invalid_lengths_are_rejected(served):
    words = ("load", "chat", "--requests", "4", "--concurrency", "2")
    refused = served(*words, "--input-tokens", "4000", "--output-tokens", "97")
    assert refused.returncode == 1
    assert "do not fit into the server's context of 4,096 tokens" in refused.stderr
    for wrong in (("--input-tokens", "0"), ("--max-failed", "2"), ("--input-tokens", "5", "--input-p95", "5")):
        assert served(*words[:2], *wrong).returncode == 2


def test_failure_is_explained_with_log_line(program):
    answer = program("start", "chatbot", "--engine", "simulated", "--name", "bad", "--env", "SIMULATED_GPU=x", "--wait")
    assert answer.returncode == 1
    assert "SIMULATED_GPU names no known GPU" in answer.stderr
    status = program.json("status", "bad")
    assert status["state"] == "failed"
    assert status["exit"]["code"] == 1
    assert "SIMULATED_GPU names no known GPU" in status["reason"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("start", "chatbt"), 3, "did you mean 'chatbot'"),
        (("status", "nobody"), 3, "no server is called 'nobody'"),
        (("restart", "nobody"), 3, "no server is called 'nobody'"),
        (("stop", "nobody"), 3, "no server is called 'nobody'"),
        (("logs", "nobody"), 3, "no server is called 'nobody'"),
        (("start", "chatbot", "--set", "oops"), 2, "oops"),
        (("start", "chatbot", "--set", "api-key=abc"), 2, "VLLM_API_KEY"),
        (("start", "chatbot", "--engine", "simulated", "--name", "../x"), 2, "name"),
        (("start", "chatbot", "--vllm", "/bin/true"), 1, "/bin/true"),
        (("start", "chatbot", "--vllm", "/nowhere/vllm"), 1, "/nowhere/vllm"),
        (("--read-only", "start", "chatbot", "--engine", "simulated"), 4, "read-only"),
        (("metrics", "/nowhere"), 1, "/nowhere"),
        (("load", "http://10.1.2.3:8000"), 1, "remote"),
        (("nonsense",), 2, "nonsense"),
    ],
)  # fmt: skip
def test_invalid_arguments_print_one_line_and_set_exit_code(program, words, code, text):
    answer = program(*words)
    assert answer.returncode == code, answer.stderr
    assert text in answer.stderr
    assert "Traceback" not in answer.stderr


def test_port_in_use_is_reported_with_its_holder(program):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        answer = program("start", "chatbot", "--engine", "simulated", "--port", str(port))
    assert answer.returncode == 1
    assert f"port {port} is in use by" in answer.stderr
    assert str(os.getpid()) in answer.stderr


def test_name_of_running_server_is_rejected(served):
    answer = served("start", "batch", "--engine", "simulated", "--name", "chat")
    assert answer.returncode == 1
    assert "chat" in answer.stderr


def test_running_server_is_not_removed(served):
    refused = served("remove", "chat")
    assert (refused.returncode, refused.stderr) == (4, "vllm-console: chat has not ended yet: stop it first\n")


@pytest.mark.parametrize("verb", ["remove", "status", "stop", "sleep", "restart"])
@pytest.mark.parametrize("below", ["file", "file/state"])
def test_file_in_place_of_the_state_folder_is_reported(program, tmp_path, verb, below):
    (tmp_path / "file").write_text("text")
    refused = program("--state", str(tmp_path / below), verb, "chat")
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert "Not a directory" in last
    assert "hosts.json" not in last
    assert "internal error" not in refused.stderr


def test_secrets_appear_nowhere(program):
    secret = "sk-very-secret-0123456789"
    server = program.json(
        "start", "chatbot", "--engine", "simulated", "--name", "keyed", "--wait", env={"VLLM_API_KEY": secret}
    )
    assert secret not in json.dumps(server)
    assert secret not in json.dumps(program.json("status", "keyed"))
    for path in program.home.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    assert secret.encode() not in Path(f"/proc/{server['pid']}/cmdline").read_bytes()
    refused = program("load", "keyed", "--rate", "2", "--duration", "1")
    assert refused.returncode == 1
    assert "requires an API key" in refused.stderr
    done = program.json("load", "keyed", "--rate", "2", "--duration", "1", env={"VLLM_API_KEY": secret})
    assert done["completed"] > 0


def test_keeper_death_does_not_affect_server(program):
    server = start(program)
    record = json.loads((program.home / "state/vllm-console/servers/chat/record.json").read_text())
    os.kill(record["keeper"]["pid"], signal.SIGKILL)
    os.kill(server["pid"], 0)
    answer = program.json("status", "chat")
    assert answer["pid"] == server["pid"]
    deadline = time.monotonic() + PATIENCE
    while "adopted" not in ((answer := program.json("status", "chat"))["notice"] or ""):
        assert time.monotonic() < deadline
        time.sleep(ASK_SECONDS)
    assert answer["state"] in ("ready", "unresponsive")
    ended = program.json("stop", "chat")
    assert ended["state"] == "stopped"
    assert program.json("status", "chat")["exit"]["code"] is None


def test_foreign_servers_are_shown_but_not_controlled(program, tmp_path):
    """A server without one of our keepers is listed but cannot be stopped."""
    import subprocess
    import sys

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vllm_launchers.simulated", "serve", "Qwen/Qwen3-8B-AWQ"]
    words += ["--port", str(port), "--host", "127.0.0.1"]
    foreign = subprocess.Popen(words, env=program.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while not (seen := [s for s in program.json("list") if s["pid"] == foreign.pid and s["state"] == "ready"]):
            assert time.monotonic() < deadline
            time.sleep(ASK_SECONDS)
        assert seen[0]["ours"] is False
        assert seen[0]["engine"] == "simulated"
        answer = program("stop", seen[0]["name"])
        assert answer.returncode == 4
        assert foreign.poll() is None
    finally:
        foreign.terminate()
        foreign.wait(PATIENCE)


def test_broken_record_is_reported_without_hiding_others(served):
    folder = served.home / "state/vllm-console/servers/bad"
    folder.mkdir(mode=0o700)
    (folder / "record.json").write_text("{ not json")
    try:
        listed = served("list", "--ours", "--json")
        status = served("status", "bad")
    finally:
        shutil.rmtree(folder)
    assert [server["name"] for server in json.loads(listed.stdout)] == ["chat"]
    assert "record.json is not JSON" in listed.stderr
    assert status.returncode == 1
    assert f"delete {folder}" in status.stderr


def test_restart_is_prepared_while_server_serves(program):
    before = start(program)
    after = program.json("restart", "chat", "--set", "max-num-seqs=7", "--wait")
    assert after["generation"] == before["generation"] + 1
    assert "vllm_launchers.simulated.prepared" in Path(f"/proc/{after['pid']}/cmdline").read_text()
    assert program.json("status", "chat")["restart"] is None


def test_restart_replaced_by_another_restart_fails(program):
    start(program)
    slow = ("--set", "max-num-seqs=32", "--env", "SIMULATED_STARTUP_SECONDS=600")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(program, "restart", "chat", *slow, "--no-prepare", "--wait")
        client.wait_for(program.home / "state/vllm-console", "chat", lambda one: one.current.number > 1, PATIENCE)
        program.json(
            "restart",
            "chat",
            "--set",
            "max-num-seqs=44",
            "--env",
            "SIMULATED_STARTUP_SECONDS=0",
            "--no-prepare",
            "--wait",
        )
        answer = first.result()
    assert answer.returncode == 1
    assert "another restart was requested meanwhile, and replaced this one" in answer.stderr


def test_restart_without_preparation(program):
    start(program)
    after = program.json("restart", "chat", "--set", "max-num-seqs=7", "--no-prepare", "--wait")
    assert "vllm_launchers.simulated.prepared" not in Path(f"/proc/{after['pid']}/cmdline").read_text()


def test_settings_disable_preparation(program):
    start(program)
    config = program.home / "config" / "vllm-console" / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("prepare_restarts = false\n")
    after = program.json("restart", "chat", "--wait")
    assert "vllm_launchers.simulated.prepared" not in Path(f"/proc/{after['pid']}/cmdline").read_text()


def test_invalid_settings_do_not_prevent_list_or_stop(program, tmp_path):
    start(program)
    config = program.home / "config" / "vllm-console" / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("refesh_seconds = 2\n")
    log = tmp_path / "vllm.log"
    log.write_text("")
    for words in (("list",), ("status", "chat"), ("logs", "chat"), ("diagnose", str(log)), ("stop", "chat")):
        answer = program(*words, "--json")
        assert answer.returncode == 0, (words, answer.stderr)
        assert answer.stderr.count("unknown key 'refesh_seconds'") == (words[0] != "diagnose"), (words, answer.stderr)
    problems = json.loads(program("doctor", "--json").stdout)["problems"]
    assert any("unknown key 'refesh_seconds'" in problem["what"] for problem in problems)
    assert program("restart", "chat").returncode == 2
    config.write_text("read_only = tru\n")
    assert program("stop", "chat").returncode == 4


def test_flags_rejected_by_engine_do_not_affect_server(program):
    before = start(program)
    answer = program("restart", "chat", "--set", "block-size=24", "--wait")
    assert answer.returncode == 1
    assert "was not touched" in answer.stderr
    assert "block_size (24) must be a multiple of 16" in answer.stderr
    after = program.json("status", "chat")
    assert (after["pid"], after["generation"], after["state"]) == (before["pid"], 1, "ready")
    assert after["restart"]["step"] == "refused"
    assert after["restart"]["changes"] == ["block-size unset → 24"]


def test_failed_generation_is_rolled_back_with_exit_code(program):
    start(program, "--gpus", "none")
    answer = program("restart", "chat", "--set", "kv-cache-memory-bytes=1000", "--force", "--wait")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    after = program.json("status", "chat")
    assert after["state"] == "ready"
    assert after["generation"] == 3
    assert after["rollback"].startswith("run 2 failed, back to run 1's flags: ")
    assert "kv-cache-memory-bytes" not in " ".join(after["argv"])


def test_rollback_is_recorded_as_a_separate_run(program):
    before = start(program, "--gpus", "none")
    words = ("--set", "kv-cache-memory-bytes=1000", "--port", "18431", "--force", "--wait")
    assert program("restart", "chat", *words).returncode == 1
    assert program.json("status", "chat")["port"] == before["port"]
    deadline = time.monotonic() + PATIENCE
    while program.json("status", "chat")["metrics"] is None:  # its recorder polls the right port
        assert time.monotonic() < deadline
        time.sleep(ASK_SECONDS)
    third, second, first = program.json("runs", "chat")
    assert [third["generation"], second["generation"], first["generation"]] == [3, 2, 1]
    assert third["ended_at"] is None
    assert (second["ready_at"], "kv-cache-memory-bytes" in second["flags"]) == (None, True)
    assert "kv-cache-memory-bytes" not in third["flags"]


def test_earlier_rejection_does_not_affect_next_restart(program):
    start(program)
    assert program("restart", "chat", "--set", "block-size=24", "--wait").returncode == 1
    after = program.json("restart", "chat", "--no-prepare", "--wait")
    assert (after["state"], after["generation"]) == ("ready", 2)


def test_server_waiting_for_automatic_restart_can_be_restarted(program):
    """Its keeper holds the port meanwhile; this must not count as a port in use by another process."""
    server = start(program, "--restart", "on-failure")
    os.kill(server["pid"], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while program.json("status", "chat")["state"] == "ready":
        assert time.monotonic() < deadline
        time.sleep(ASK_SECONDS)
    after = program.json("restart", "chat", "--set", "max-num-seqs=7", "--wait")
    assert (after["state"], after["generation"], after["port"]) == ("ready", 2, server["port"])


def test_failed_generation_without_rollback(program):
    start(program, "--gpus", "none")
    words = ("restart", "chat", "--set", "kv-cache-memory-bytes=1000", "--force", "--no-rollback", "--wait")
    assert program(*words).returncode == 1
    assert program.json("status", "chat")["state"] == "failed"
    assert program.json("diagnose", "chat")["evidence"]
    assert "neither" not in program("diagnose", "chat").stderr
