"""Which parts of an environment are recorded and restored, and how a dead keeper's record is handled."""

from __future__ import annotations

import pytest

from vllm_launchers.keeper import location, processes
from vllm_launchers.keeper.context import inherited_from, restored_environment
from vllm_launchers.keeper.records import Generation, LaunchSpec, NodeSpec, ProcessIdentity, ServerRecord, State
from vllm_launchers.keeper.supervisor import STOPPING, STOPPING_FOR_RESTART, SURVIVES, lost_node, missed_exit
from vllm_launchers.values import replace

SPEC = LaunchSpec(("vllm", "serve"), "127.0.0.1", 8000)
NODE = Generation(2, replace(SPEC, node=NodeSpec(0, 2, "10.0.0.1", 29501, 600.0, {})), 1.0)
HERE, ELSEWHERE = ProcessIdentity(5, 5, processes.boot_id()), ProcessIdentity(5, 5, "earlier")
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
def test_only_relevant_non_secret_values_are_recorded(name, value, written):
    kept = inherited_from({name: value}, 0o022)
    assert dict(kept.values) == ({name: value} if written else {})
    assert kept.others == (() if written else (name,))


def test_restored_environment_is_limited_to_the_launch():
    kept = inherited_from({"CUDA_VISIBLE_DEVICES": "0", "PLUGIN": "a", "GONE": "a"}, 0o027)
    now = {"CUDA_VISIBLE_DEVICES": "7", "NCCL_DEBUG": "INFO", "PLUGIN": "b", "HF_TOKEN": "t", "OTHER_TOKEN": "u"}
    assert restored_environment(kept, ["HF_TOKEN"], now) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "PLUGIN": "b",
        "HF_TOKEN": "t",
    }


def test_non_text_name_is_left_out():
    assert inherited_from({"X\udcff": "1"}, 0).others == ()


@pytest.mark.parametrize(
    ("change", "start_pending", "next_spec", "retry", "reason"),
    [
        ({}, False, None, False, "its keeper died before starting it"),
        ({"start_pending": True}, True, None, False, "its keeper died before starting it"),
        (
            {"start_pending": True, "server": HERE},
            True,
            None,
            False,
            "ended, exit code unknown: no keeper was watching",
        ),
        ({"start_pending": True, "keeper": ELSEWHERE}, False, None, False, "its pending restart was dropped"),
        ({"state": State.STOPPING, "server": HERE, "next_spec": SPEC}, False, SPEC, False, "stopped as requested"),
        (
            {"state": State.STOPPING, "server": ELSEWHERE, "next_spec": SPEC},
            False,
            None,
            False,
            "restart with other flags was dropped",
        ),
    ],
)
def test_missed_exit_follows_the_record(change, start_pending, next_spec, retry, reason):
    found = missed_exit(replace(RECORD, **change), location.ended_with(replace(RECORD, **change)), 9.0)
    assert (found.start_pending, found.next_spec, found.retry) == (start_pending, next_spec, retry)
    assert reason in found.exit.reason
    assert "exited with" not in found.exit.reason, "the reason is unknown"
    assert (found.exit.at, found.exit.code) == (9.0, None)


@pytest.mark.parametrize(
    ("reason", "requested"),
    [("node 1 is gone: its connection was lost", False), (STOPPING, True), (STOPPING_FOR_RESTART, True)],
)
@pytest.mark.parametrize("survives", ["", f"{SURVIVES} (pid 7): …"])
def test_node_that_ends_for_another_one_was_not_asked_to_stop(reason, requested, survives):
    stopping = replace(RECORD, state=State.STOPPING, reason=f"{reason}{survives}", server=HERE, generations=(NODE,))
    assert lost_node(stopping) == ("" if requested else reason)
    ended = missed_exit(stopping, "", 9.0).exit
    assert ended.requested is requested
    assert (reason in ended.reason) is not requested
