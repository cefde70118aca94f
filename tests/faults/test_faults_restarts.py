"""Restart policy: failures that are not retried according to their log, and crash loops with dying keepers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_console.diagnosis.failure.diagnose import NOT_RETRYABLE
from vllm_launchers.keeper import client, errors
from vllm_launchers.keeper.records import RestartMode, RestartPolicy, State
from vllm_launchers.values import replace

CODE = "import sys; sys.stderr.write(sys.argv[1].replace('|', chr(10)) + chr(10)); sys.exit(int(sys.argv[2]))"
LOGS = {
    "flag": ("vllm: error: unrecognized arguments: --max-seqs", 2, "does not know the flag"),
    "value": ("vllm serve: error: argument --dtype: invalid choice: 'fp4' (choose from 'auto')", 2,
              "does not accept this flag value"),
    "usage": ("usage: engine [-h]", 2, "rejects its command line"),
    "kv-cache": ("(EngineCore pid=7) ValueError: To serve at least one request with the models's max seq len (40960), "
                 "4.38 GiB KV cache is needed", 1, "can't hold even one request"),
    "weights": ("ValueError: No available memory for the cache blocks.", 1, "no memory for the KV cache"),
    "model": ("OSError: a/b is not a local folder and is not a valid model identifier listed on the hub", 1,
              "Model not found"),
    "gated": ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", 1, "gated"),
    "split": ("AssertionError: 28 is not divisible by 3", 1, "can't be split over this many GPUs"),
}  # fmt: skip
MAY_PASS = {
    "memory": ("ValueError: Free memory on device cuda:0 (3/48 GiB) is less than desired GPU memory utilization (0.9, "
               "43).", 1),
    "port": ("OSError: [Errno 98] error while attempting to bind on address: address already in use", 1),
    "network": ("requests.exceptions.ConnectionError: Max retries exceeded|OSError: Can't load the configuration of "
                "'a/b'.", 1),
    "crash": ("RuntimeError: NCCL error: unhandled system error", 1),
}  # fmt: skip


def test_only_transient_failures_are_retried(bench):
    """Every known kind of failure, under real keepers, in parallel."""
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=2, backoff_seconds=0.05, not_retryable=NOT_RETRYABLE)
    for name, (log, code, *_) in (LOGS | MAY_PASS).items():
        argv = (sys.executable, "-S", "-c", CODE, log, str(code))
        bench.launch(replace(bench.spec(), argv=argv, restart=policy), name)
    for name, (_, _, why) in LOGS.items():
        failed = bench.until(lambda record: record.state is State.FAILED and record.next_attempt_at is None, name)
        assert failed.attempt == 0, name
        assert "not restarted, because it would fail the same way" in failed.reason, name
        assert why in failed.reason, name
    for name in MAY_PASS:
        failed = bench.until(lambda record: record.state is State.FAILED and record.next_attempt_at is None, name)
        assert failed.attempt == 2, name
        assert "gave up after 2 automatic restarts" in failed.reason, name
        assert bench.log(name).count(MAY_PASS[name][0].split("|")[0]) == 3


def test_backoff_and_limit_survive_keeper_deaths(bench):
    """The keeper is killed during each wait: waits double up to the cap, and the limit holds."""
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=4, backoff_seconds=0.15, backoff_cap_seconds=0.5)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "7", restart=policy))
    waits, keepers = [], set()
    for attempt in range(4):
        waiting = bench.until(
            lambda record, attempt=attempt: record.attempt == attempt and record.next_attempt_at is not None
        )
        waits.append(round(waiting.next_attempt_at - waiting.state_since, 1))
        keepers.add(waiting.keeper)
        bench.orphaned(waiting)
        bench.adopt()
    failed = bench.until(lambda record: record.state is State.FAILED and record.next_attempt_at is None)
    assert "gave up after 4 automatic restarts" in failed.reason
    assert waits == pytest.approx([0.15, 0.3, 0.5, 0.5], abs=0.1)
    assert len(keepers) == 4
    assert bench.log().count("made to fail") == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system can be mounted by root only")
def test_read_only_file_system(bench):
    """Every change fails with a message; existing data stays readable."""
    root = str(bench.root)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "test", root], check=False)
    if mounted.returncode:
        pytest.skip("nothing may be mounted here")
    try:
        bench.ready(bench.spec())
        stopped = bench.stopped()
        read_only = ["mount", "-o", "remount,ro", root]  # refused while the ending keeper still has files open
        bench.until(lambda _: subprocess.run(read_only, capture_output=True, check=False).returncode == 0)
        for act in (
            lambda: bench.restart(bench.spec()),
            lambda: bench.launch(bench.spec(), "two"),
            lambda: client.remove(bench.root, "one"),
        ):
            with pytest.raises(errors.KeeperError, match="Read-only file system"):
                act()
        assert bench.read() == stopped
        assert bench.stop() == stopped
        assert client.names(bench.root) == ["one"]
        subprocess.run(["mount", "-o", "remount,rw", root], check=True)
        bench.restart(bench.spec())
        assert bench.wait(State.READY).current.number == 2
    finally:
        bench.end()
        subprocess.run(["umount", "--lazy", root], check=True)
