"""Arguments of the commands that measure, and the command line of the tool that ``bench`` runs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from fakes.endpoint import FakeEndpoint, document
from vllm_console.cli import ramp, tune
from vllm_console.cli.bench import check_access, check_words, lengths, reason
from vllm_console.cli.main import CHANGING, parse
from vllm_console.cli.progress import ProgressLine
from vllm_console.load.ramp import RampProgress
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.presets.model import Workload

WORK = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=64)


def test_traffic_commands_are_refused_in_read_only_mode():
    assert {"load", "ramp", "bench"} <= CHANGING


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("20m", 1200), ("1.5h", 5400)])
def test_budget_units(text, seconds):
    assert parse(["ramp", "chat", "--budget", text]).budget == seconds


@pytest.mark.parametrize(
    "words",
    [
        ["--budget", "5"], ["--budget", "soon"], ["--budget", ""], ["--budget", "nan"], ["--budget", "25h"],
        ["--rates", "0"], ["--rates", "1,,2"], ["--rates", "10001"], ["--rates", "inf"], ["--start", "-1"],
        ["--rates", ",".join("1" * 101)],
    ],
)  # fmt: skip
def test_unmeasurable_arguments_are_usage_errors(words):
    with pytest.raises(SystemExit) as ended:
        parse(["ramp", "chat", *words])
    assert ended.value.code == 2


def test_benchmark_uses_the_presets_mean_lengths_within_the_context():
    asked = argparse.Namespace(input_tokens=None, output_tokens=None)
    prefix, prompt, output = lengths(asked, WORK, None)
    assert prefix == pytest.approx(prompt, abs=1)
    assert 1000 < prefix + prompt < 1500
    assert 250 < output < 400
    prefix, prompt, output = lengths(asked, WORK, 512)
    assert prefix + prompt + output <= 512
    assert lengths(argparse.Namespace(input_tokens=1, output_tokens=3), WORK, None) == (0, 1, 3)
    with pytest.raises(OperationError, match=r"608 tokens do not fit: prompt and answer together can have 480"):
        lengths(argparse.Namespace(input_tokens=600, output_tokens=8), WORK, 480)


@pytest.mark.parametrize("options", [[], ["--requests", "5", "--rate", "2"]])
def test_arguments_after_two_dashes_go_to_the_tool(options):
    found = parse(["bench", "chat", *options, "--", "--burstiness", "0.5", "--"])
    assert (found.server, found.more) == ("chat", ["--burstiness", "0.5", "--"])


@pytest.mark.parametrize("word", ["--result-dir", "--result-dir=x", "--result_filename=x", "--append-result"])
def test_result_path_of_the_tool_is_not_passed_on(word):
    name = word.partition("=")[0].replace("_", "-")
    with pytest.raises(UsageError, match=f"^{name} can't be passed on: the result is kept with the run"):
        check_words(["--burstiness", "0.5", word])
    check_words(["--burstiness", "0.5", "--save-detailed"])


ENDED_WITH = """
import argparse, sys
from vllm_console.cli import bench
from vllm_console.fleet.snapshot import Workload

class Server:
    name, simulated, engine, url, flags, model = "chat", False, argparse.Namespace(command=sys.argv[1:]), "", {}, "m"

bench.find_target = lambda *_, **__: bench.Target("", Workload(8, 8, 0.0, 1), None, Server())
bench.check_access = bench.confirm_load = lambda *_: None
from vllm_console.cli.main import main
sys.exit(main(["bench", "chat"]))
"""
"""Runs `bench` on a server whose vLLM is the command in its arguments."""

TOOL = "import os, time; print(os.getpid(), file=open(os.environ['PID_FILE'], 'w'), flush=True); time.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_ends_a_benchmark_ends_the_tool(tmp_path, number):
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    words = [sys.executable, "-c", ENDED_WITH, sys.executable, "-c", TOOL]
    bench = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PID_FILE": str(pid_file)}
    )
    try:
        tool = int(pid_file.read_text())  # blocks until the tool runs
        with closing_pidfd(tool) as watched:
            bench.send_signal(number)
            _, errors = bench.communicate(timeout=60)
            assert select.select([watched], [], [], 0)[0], "the tool has ended before bench"
    finally:
        bench.kill()
        bench.wait()
    assert bench.returncode != 0
    assert "Traceback" not in errors


@contextlib.contextmanager
def closing_pidfd(pid):
    """A descriptor that is readable once the process has ended."""
    opened = os.pidfd_open(pid)
    try:
        yield opened
    finally:
        os.close(opened)


def test_benchmark_is_refused_without_a_required_api_key():
    endpoint = FakeEndpoint()
    endpoint.answers["/v1/models"] = document({"error": "Unauthorized"}, 401)
    try:
        with pytest.raises(OperationError, match="requires an API key: set VLLM_API_KEY"):
            check_access(endpoint.url)
    finally:
        endpoint.close()


def test_tool_failure_reason_is_extracted():
    output = [
        "W1125 Triton not available",
        "usage: vllm [-h] [-v]",
        "vllm: error: unrecognized arguments: --no-such-flag",
    ]
    assert reason(output) == "vllm: error: unrecognized arguments: --no-such-flag"
    assert reason(["Traceback:", "ValueError: no tokenizer"]) == "ValueError: no tokenizer"
    assert reason(["one", "two"]) == "one / two"


def test_ramp_prints_progress_lines_when_stderr_is_not_a_terminal(capsys):
    reports = ramp._Reports(argparse.Namespace(events=False, json=False, budget=600.0), asyncio.Event())
    for half in range(2 * 130):
        reports.progress(RampProgress(4.2, half < 20, half / 2 + 0.1, 12))
    reports.end()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "warming up at 4.2 req/s, 12 in flight; at most 9m59s left"
    assert lines[1] == "measuring 4.2 req/s, 12 in flight; at most 9m49s left"
    assert len(lines) == 8
    assert "\x1b" not in err


@pytest.mark.parametrize("json", [False, True])
def test_tune_prints_progress_to_stderr_only(capsys, json):
    tuner = object.__new__(tune._Tuner)
    tuner._args = argparse.Namespace(json=json, budget=600.0)
    tuner._begin, tuner.line, tuner._trying = time.monotonic(), ProgressLine(), ""
    tuner._measured = tuner._so_far = None
    for _ in range(3):
        tuner._progress("measuring 4.2 req/s")
    tuner._progress("restarting with max-num-seqs 64", step=True)
    tuner.say("a row")
    out, err = capsys.readouterr()
    assert [line.partition("; at most ")[0] for line in err.splitlines()] == [
        "measuring 4.2 req/s",
        "restarting with max-num-seqs 64",
    ]
    assert out == ("" if json else "a row\n")
