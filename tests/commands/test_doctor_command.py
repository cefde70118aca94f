"""``doctor``: problems on this machine and everything a maintainer needs, without secrets."""

from __future__ import annotations

import json
import os
import signal
import time

from fakes.commands import PATIENCE


def test_doctor_reports_versions_servers_and_problems(program):
    program.json("start", "batch", "--engine", "simulated", "--name", "nightly", "--wait")
    answer = program("doctor", "--json")
    document = json.loads(answer.stdout)
    assert answer.returncode == (1 if document["problems"] else 0)
    assert document["program"]["textual"]
    assert [(server["name"], server["state"], server["keeper"]) for server in document["servers"]] == [
        ("nightly", "ready", "alive")
    ]
    assert document["folders"]["state"]["mode"] == "0700"
    assert all(set(problem) == {"what", "do"} for problem in document["problems"])
    assert "nightly" in program("doctor").stdout


def test_files_deleted_under_keeper_are_reported(program):
    program.json("start", "batch", "--engine", "simulated", "--name", "nightly", "--wait")
    folder = program.home / "state" / "vllm-console" / "servers" / "nightly"
    (folder / "keeper.sock").unlink()
    (folder / "server.log").unlink()
    whats = [problem["what"] for problem in json.loads(program("doctor", "--json").stdout)["problems"]]
    deadline = time.monotonic() + PATIENCE
    while not all((folder / name).exists() for name in ("keeper.sock", "server.log")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for name in ("keeper.sock", "server.log"):
        assert any(name in what and ("is missing" in what or "was deleted" in what) for what in whats), whats
    whats = [problem["what"] for problem in json.loads(program("doctor", "--json").stdout)["problems"]]
    assert any("server.log was deleted; restored" in what for what in whats)


def test_stopped_keeper_is_reported_immediately(program):
    keeper = program.json("start", "batch", "--engine", "simulated", "--name", "nightly", "--wait")
    record = json.loads((program.home / "state/vllm-console/servers/nightly/record.json").read_text())
    keeper = record["keeper"]["pid"]
    os.kill(keeper, signal.SIGSTOP)
    try:
        said = f"the keeper of nightly was stopped by a signal: resume it with 'kill -CONT {keeper}'"
        assert said in program("list").stdout
        assert said in program("status", "nightly").stdout
        assert said in program.json("status", "nightly")["notice"]
        assert said in program("doctor").stdout
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert program.json("status", "nightly")["notice"] is None


def test_broken_record_and_open_folder_are_reported_with_remedy(program):
    state = program.home / "state" / "vllm-console"
    server = state / "servers" / "torn"
    server.mkdir(parents=True, mode=0o700)
    (server / "record.json").write_text("{")
    state.chmod(0o755)
    answer = program("doctor", "--json")
    state.chmod(0o700)
    wrong = {problem["what"]: problem["do"] for problem in json.loads(answer.stdout)["problems"]}
    assert answer.returncode == 1
    assert any("is open to other users" in what and do.startswith("chmod 700") for what, do in wrong.items())
    assert any("torn" in what for what in wrong)
    (server / "record.json").unlink()


def test_wrong_keys_are_reported(program, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('\N{BYTE ORDER MARK}[keys]\nnope = "R"\n', encoding="utf-8")
    answer = program("--config", str(config), "doctor", "--json")
    problems = [problem["what"] for problem in json.loads(answer.stdout)["problems"]]
    assert any(problem.startswith(f"{config}: keys: no action named 'nope'") for problem in problems), problems


def test_doctor_prints_no_secret(program):
    secret = "hf_" + "Zz9" * 11
    names = {"HF_TOKEN": secret, "VLLM_API_KEY": secret, "NCCL_DEBUG": f"--api-key {secret}"}
    for words in (("doctor",), ("doctor", "--json")):
        answer = program(*words, env=names)
        assert secret not in answer.stdout + answer.stderr
        assert "HF_TOKEN" in answer.stdout


def test_unusable_vllm_is_reported_with_reason(program, tmp_path):
    """The first vllm on PATH runs in a container, which could not be ended from here."""
    wrapper = tmp_path / "bin" / "vllm"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\nexec docker run vllm/vllm-openai "$@"\n')
    wrapper.chmod(0o755)
    env = {"PATH": f"{wrapper.parent}:/usr/bin:/bin"}
    listed = program("engines", env=env)
    assert (listed.returncode, "runs vLLM in Docker" in listed.stderr) == (0, True)
    problems = json.loads(program("doctor", "--json", env=env).stdout)["problems"]
    assert [problem["what"] for problem in problems if "Docker" in problem["what"]]
    assert not [problem for problem in problems if "no vLLM" in problem["what"]]
