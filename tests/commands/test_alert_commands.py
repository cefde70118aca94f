"""check, watch and export, on simulated servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from fakes.commands import ASK_SECONDS, PATIENCE

PRESET = """
extends = "chatbot"

[objectives]
ttft_p99_seconds = {seconds}
itl_p99_seconds = {seconds}
kv_cache_usage = 1.0
preemption_rate = 1.0
"""


def start(program, name="chat", preset="chatbot"):
    return program.json("start", preset, "--engine", "simulated", "--name", name, "--wait")


def write_presets(program):
    """Write one preset whose objectives always hold, and one whose objectives never do."""
    folder = program.home / "config/vllm-console/presets"
    folder.mkdir(parents=True)
    (folder / "patient.toml").write_text(PRESET.format(seconds=3600))
    (folder / "hasty.toml").write_text(PRESET.format(seconds=0.00001))


def checked(program, *words):
    """The output of ``check`` once samples are recorded."""
    deadline = time.monotonic() + PATIENCE
    while True:
        answer = program("check", "chat", "--json", *words)
        document = json.loads(answer.stdout)
        if document["window_seconds"] > 0 or time.monotonic() > deadline:
            return answer, document
        time.sleep(ASK_SECONDS)


def test_check_exit_code_reports_whether_objectives_are_met(program):
    write_presets(program)
    start(program, preset="patient")
    answer, document = checked(program, "--allow-idle")
    assert (answer.returncode, document["ok"], answer.stderr) == (0, True, "")
    assert set(document) >= {"name", "ok", "objectives", "findings"}
    assert {"name", "value", "limit", "ok", "source", "window_seconds"} == set(document["objectives"][0])
    assert [one["ok"] for one in document["objectives"]] == [True, None, None, None]

    answer, document = checked(program)
    assert (answer.returncode, document["ok"], answer.stderr) == (1, False, "")
    assert "served nothing" in document["problems"][0]
    answer = program("check", "chat")
    assert (answer.returncode, answer.stderr) == (1, "")
    assert "failed  chat served nothing" in answer.stdout
    assert "objectives of preset patient" in program("check", "chat", "--allow-idle").stdout

    program.json("load", "chat", "--rate", "10", "--duration", "1")
    deadline = time.monotonic() + PATIENCE
    while (answer := program("check", "chat", "--json")).returncode != 0:
        assert time.monotonic() < deadline, answer.stdout
        time.sleep(ASK_SECONDS)
    assert all(one["ok"] for one in json.loads(answer.stdout)["objectives"])

    program.json("stop", "chat")
    answer = program("check", "chat", "--allow-idle")
    assert (answer.returncode, answer.stderr) == (1, "")
    assert "failed  chat is not serving: stopped" in answer.stdout


def test_check_lists_each_violated_objective(program):
    write_presets(program)
    start(program, preset="hasty")
    program.json("load", "chat", "--rate", "10", "--duration", "1")
    deadline = time.monotonic() + PATIENCE
    while "ITL p99 is" not in (answer := program("check", "chat")).stdout:
        assert time.monotonic() < deadline, answer.stdout
        time.sleep(ASK_SECONDS)
    assert answer.returncode == 1
    lines = [line for line in answer.stdout.splitlines() if line.startswith("failed")]
    assert [line.split(" is ")[0] for line in lines] == ["failed  TTFT p99", "failed  ITL p99"], "no duplicate line"
    assert all("above its limit of 10µs (objectives of preset hasty)" in line for line in lines)
    assert answer.stderr == "", "the result is printed once"
    _, document = checked(program)
    broken = [one["name"] for one in document["objectives"] if one["ok"] is False]
    assert broken == ["ttft_p99_seconds", "itl_p99_seconds"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["nobody"], 3, "no server is called 'nobody'"),
        (["chat", "--window", "0"], 2, "--window"),
        (["chat", "--window", "nan"], 2, "--window"),
        ([], 2, "name"),
        (["chat", "--set", "max-num-seqs=64"], 2, "--set belongs to --before-launch"),
        (["chat", "--prometheus", "http://127.0.0.1:9090"], 2, "--prometheus belongs to --before-launch"),
        (["--before-launch", "chatbot", "--allow-idle"], 2, "--allow-idle belongs to the check of a server"),
        (["--before-launch", "chatbot", "--window", "5m"], 2, "--window belongs to the check of a server"),
    ],
)
def test_check_rejects_invalid_arguments(program, words, code, told):
    answer = program("check", *words)
    assert answer.returncode == code
    assert told in answer.stderr


def test_check_before_launch_uses_the_recorded_host(program):
    """Without a driver, it warned that this machine's GPUs can't be read, and looked for ramps on this machine."""
    words = ("check", "--before-launch", "chatbot", "--prometheus", "http://127.0.0.1:9", "--json")
    items = {one["name"]: one for one in json.loads(program("--host", "8xh100", *words).stdout)["items"]}
    assert "can't read GPUs" not in items["machine"]["message"]
    assert "H100" in items["ramp"]["message"]


def test_watch_reports_failure_once_and_ends_on_signal(program):
    server = start(program)
    watch = subprocess.Popen(
        [sys.executable, "-m", "vllm_console", "watch", "--json"],
        env=program.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        os.kill(server["pid"], signal.SIGKILL)
        assert watch.stdout is not None
        told = json.loads(watch.stdout.readline())
        assert (told["event"], told["server"], told["code"]) == ("began", "chat", "failed")
        assert told["severity"] == "critical"
        log = program.home / "state/vllm-console/findings.log"
        assert json.loads(log.read_text()) == told
        watch.send_signal(signal.SIGTERM)
        rest, errors = watch.communicate(timeout=PATIENCE)
        assert (watch.returncode, rest, errors) == (0, "", "")
        found = program.json("status", "chat")
        assert found["exit"]["signal"] == "SIGKILL"
        assert (found["diagnosis"]["cause"], found["diagnosis"]["line"]) == ("killed", None)
        assert found["diagnosis"]["explanation"].startswith("SIGKILL from outside ended its process")
    finally:
        watch.kill()
        watch.wait()


def test_export_writes_alert_rules_of_preset_or_server(program):
    rules = yaml.safe_load(program("export", "prometheus", "batch").stdout)["groups"][0]
    assert rules["name"] == "vllm-console batch"
    assert program.json("export", "prometheus", "batch")["groups"][0] == rules
    preset = program.json("presets", "batch")
    first = next(rule for rule in rules["rules"] if rule["alert"] == "VllmSlowFirstToken")
    assert first["expr"].endswith(f"> {preset['objectives']['ttft_p99_seconds']:g}")
    server = start(program)
    model = server["argv"][server["argv"].index("serve") + 1]
    rules = yaml.safe_load(program("export", "prometheus", "chat").stdout)["groups"][0]["rules"]
    assert f'{{model_name="{model}"}}' in rules[0]["expr"]
    everything = program("export", "prometheus", "--match", 'job="vllm"').stdout
    assert '{job="vllm"}' in everything
    assert "our default" in everything


def test_export_writes_dashboard(program):
    dashboard = json.loads(program("export", "grafana", "chatbot").stdout)
    assert dashboard["uid"] == "vllm-console-chatbot"
    assert json.loads(program("export", "grafana").stdout)["uid"] == "vllm-console"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["prometheus", "nothing"], 3, "'nothing'"),
        (["prometheus", "--match", "job=vllm"], 2, "--match"),
        (["nagios"], 2, "prometheus"),
    ],
)
def test_export_rejects_invalid_arguments(program, words, code, told):
    answer = program("export", *words)
    assert answer.returncode == code
    assert told in answer.stderr
