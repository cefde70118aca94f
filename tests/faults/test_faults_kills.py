"""SIGKILL at every step of a record's writing: what is read afterwards is the old record or the new, never between."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import pytest

from vllm_launchers.keeper import store
from vllm_launchers.keeper.ledger import Ledger, Notes
from vllm_launchers.keeper.lifecycle import Transition
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State

STEPS = 400
"""More than there are."""


def a_record(state):
    spec = LaunchSpec(("vllm", "serve"), "127.0.0.1", 8000, details={"flags": "old"})
    return ServerRecord("one", state, 1.0, 1.0, (Generation(1, spec, 1.0),), reason="x" * 9000)


def killed_at(step, act):
    """Do it in a child that is killed before the ``step``-th line that it runs in the records' code; whether it was."""
    child = os.fork()
    if child == 0:
        left = step

        def trace(frame, event, _argument):
            nonlocal left
            if not frame.f_code.co_filename.endswith(("store.py", "ledger.py")):
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


@pytest.mark.parametrize("lagging", [False, True])
def test_a_kill_at_any_step_leaves_the_old_record_or_the_new(tmp_path, lagging):
    folder = store.prepare(tmp_path, "one")
    old = a_record(State.READY)
    new = LaunchSpec(("vllm", "serve", "--new"), "127.0.0.1", 8000)

    def stop_to_restart():
        ledger = Ledger(folder, old, Notes(folder))
        if lagging:
            ledger.trouble, ledger._mark = "the disk was full", store.mark_lagging(folder)
        ledger.move(Transition.STOP_ASKED, "stopping, to start again", then=new)

    seen, steps = [], 0
    for step in range(STEPS):
        store.write_record(folder, old)
        killed = killed_at(step, stop_to_restart)
        read = store.read_record(folder)
        assert replace(read, state_since=0) in (
            replace(old, state_since=0),
            replace(old, state_since=0, state=State.STOPPING, reason="stopping, to start again", then=new),
        )
        seen.append(read.state)
        assert not store.lags(folder), "a mark ends with its keeper"
        lock = store.take_lock(folder)
        store.sweep(folder)
        os.close(lock)
        assert not [path for path in folder.iterdir() if path.name.startswith(".record")]
        if not killed:
            break
        steps += 1
    assert 10 < steps < STEPS
    assert seen == sorted(seen, key=[State.READY, State.STOPPING].index), "once it is new it stays new"
    assert seen[-1] is State.STOPPING
