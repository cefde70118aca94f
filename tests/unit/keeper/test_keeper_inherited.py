"""What of an environment is written down and brought back, and what is made of a dead keeper's record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_launchers.keeper import adoption
from vllm_launchers.keeper.inherited import brought_back, written_down
from vllm_launchers.keeper.records import Generation, LaunchSpec, ProcessIdentity, ServerRecord, State

SPEC = LaunchSpec(("vllm", "serve"), "127.0.0.1", 8000)
HERE, ELSEWHERE = ProcessIdentity(5, 5, "this"), ProcessIdentity(5, 5, "earlier")
RECORD = ServerRecord("one", State.STARTING, 1.0, 1.0, (Generation(2, SPEC, 1.0),), keeper=HERE)


@pytest.mark.parametrize(
    ("name", "value", "written"),
    [
        ("CUDA_VISIBLE_DEVICES", "0,1", True),
        ("LD_LIBRARY_PATH", "/opt/cuda/lib64", True),
        ("http_proxy", "http://proxy:3128", True),
        ("http_proxy", "http://anna:hunter2hunter2@proxy:3128", False),
        ("HF_HOME", "/data/hf", True),
        ("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwx", False),
        ("VLLM_API_KEY", "abc", False),
        ("VLLM_NOTE", "sk-abcdefghijklmnopqrstuvwx", False),
        ("COMPANY_LOGIN", "whatever", False),
        ("PATH", "x" * 100_000, False),
        ("PATH", "/opt/\udcff", False),
    ],
)
def test_a_value_is_written_down_only_where_it_matters_and_is_no_secret(name, value, written):
    kept = written_down({name: value}, 0o022)
    assert dict(kept.values) == ({name: value} if written else {})
    assert kept.others == (() if written else (name,))


def test_another_shell_brings_only_what_the_launch_had_too():
    kept = written_down({"CUDA_VISIBLE_DEVICES": "0", "PLUGIN": "a", "GONE": "a"}, 0o027)
    now = {"CUDA_VISIBLE_DEVICES": "7", "NCCL_DEBUG": "INFO", "PLUGIN": "b", "HF_TOKEN": "t", "OTHER_TOKEN": "u"}
    assert brought_back(kept, ["HF_TOKEN"], now) == {"CUDA_VISIBLE_DEVICES": "0", "PLUGIN": "b", "HF_TOKEN": "t"}


def test_a_name_that_is_no_text_is_left_out():
    assert written_down({"X\udcff": "1"}, 0).others == ()


@pytest.mark.parametrize(
    ("change", "owed", "then", "retry", "reason"),
    [
        ({}, False, None, False, "its keeper died before it was started"),
        ({"owed": True}, True, None, False, "its keeper died before it was started"),
        ({"owed": True, "server": HERE}, True, None, False, "it ended while no keeper watched"),
        ({"owed": True, "keeper": ELSEWHERE}, False, None, False, "it was to start again, which was not done"),
        ({"state": State.STOPPING, "server": HERE, "then": SPEC}, False, SPEC, False, "stopped as asked"),
        ({"state": State.STOPPING, "server": ELSEWHERE, "then": SPEC}, False, None, False, "again with other flags"),
    ],
)
def test_what_follows_from_a_server_that_does_not_run(change, owed, then, retry, reason):
    found = adoption.ended(replace(RECORD, **change), "this", 9.0)
    assert (found.owed, found.then, found.retry) == (owed, then, retry)
    assert reason in found.exit.reason
    assert (found.exit.at, found.exit.code) == (9.0, None)
