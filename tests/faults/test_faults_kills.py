"""SIGKILL at every step of a record write: readers then see either the old record or the new one."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from vllm_launchers.keeper import folders
from vllm_launchers.keeper.lifecycle import Transition
from vllm_launchers.keeper.record_writer import Notes, RecordWriter
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.values import replace

STEPS = 400


def make_record(state):
    spec = LaunchSpec(("vllm", "serve"), "127.0.0.1", 8000, details={"flags": "old"})
    return ServerRecord("one", state, 1.0, 1.0, (Generation(1, spec, 1.0),), reason="x" * 9000)


def run_and_kill(step, act):
    """Run it in a child killed before the ``step``-th line of the records' code; returns whether it was killed."""
    child = os.fork()
    if child == 0:
        left = step

        def trace(frame, event, _argument):
            nonlocal left
            if not frame.f_code.co_filename.endswith(("/folders.py", "/record_writer.py")):
                return None
            if event == "line":
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
            return trace

        sys.settrace(trace)
        try:
            act()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("stale", [False, True])
def test_kill_at_any_step_leaves_old_or_new_record(tmp_path, stale):
    folder = folders.prepare(tmp_path, "one")
    old = make_record(State.READY)
    new = LaunchSpec(("vllm", "serve", "--new"), "127.0.0.1", 8000)

    def stop_to_restart():
        record_writer = RecordWriter(folder, old, Notes(folder))
        if stale:
            record_writer.trouble, record_writer._mark = "the disk was full", folders.mark_stale(folder)
        record_writer.move(Transition.STOP_REQUESTED, "stopping for a restart", next_spec=new)

    seen, steps = [], 0
    for step in range(STEPS):
        folders.write_record(folder, old)
        killed = run_and_kill(step, stop_to_restart)
        read = folders.read_record(folder)
        assert replace(read, state_since=0) in (
            replace(old, state_since=0),
            replace(old, state_since=0, state=State.STOPPING, reason="stopping for a restart", next_spec=new),
        )
        seen.append(read.state)
        assert not folders.is_stale(folder), "a mark is dropped with its keeper"
        lock = folders.take_lock(folder)
        folders.sweep(folder)
        os.close(lock)
        assert not [path for path in folder.iterdir() if path.name.startswith(".record")]
        if not killed:
            break
        steps += 1
    assert 10 < steps < STEPS
    assert seen == sorted(seen, key=[State.READY, State.STOPPING].index), "the old record never comes back"
    assert seen[-1] is State.STOPPING
