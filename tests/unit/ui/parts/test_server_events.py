"""Events between two snapshots."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_console.attached import Endpoint
from vllm_console.ui.parts.server_events import events_between, seen_of
from vllm_launchers.keeper.records import State


def events(before, after):
    return [(event.text, event.aloud) for event in events_between(seen_of(before), after)]


def test_findings_begin_and_end(fakes):
    calm, pressed = fakes.chat(fakes.NOW), fakes.pressed(fakes.NOW)
    assert events([calm], [pressed]) == [
        ("chat: finding began: KV cache pressure.", False),
        ("chat: finding began: preempting.", False),
    ]
    assert events([pressed], [calm]) == [
        ("chat: finding ended: KV cache pressure.", False),
        ("chat: finding ended: preempting.", False),
    ]
    assert events([pressed], [pressed]) == []
    assert all("finding" not in text for text, _ in events([pressed], [replace(calm, state=State.STARTING)])), "restart"


def test_finished_start_is_announced(fakes):
    starting = fakes.docs(fakes.NOW)
    ready = replace(fakes.chat(fakes.NOW), name="docs")
    failed = replace(starting, state=State.FAILED, reason="no memory")
    assert events([starting], [ready]) == [("docs is ready (41s downtime).", True)]
    assert events([starting], [failed]) == [("docs did not start: no memory", True)]
    assert events([ready], [failed]) == [("docs failed: no memory", True)]


def test_events_of_others_are_kept_but_not_announced(fakes):
    theirs = fakes.observed(fakes.NOW)
    hung = replace(theirs, state=State.UNRESPONSIVE)
    assert events([theirs], [hung]) == [("anna-8100 is unresponsive.", False)]


def test_machine_is_lost_and_back(fakes):
    chat, lost = fakes.there(fakes.NOW), fakes.lost(fakes.NOW)
    assert events([chat], [lost]) == [("box is unreachable: ssh: connect to host box port 22: No route to host", False)]
    assert events([lost], [chat]) == [("box is reachable.", False)]
    assert events([lost], [lost]) == events([chat], [chat]) == []


def test_unreachable_endpoint_event_has_its_reason(fakes):
    lost = fakes.lost(fakes.NOW)
    far = replace(lost, name="far", attached=Endpoint("http://h:8000"))
    assert events([replace(far, state=State.READY)], [far]) == [(f"far is unreachable: {far.reason}", False)]


def test_new_server_reports_nothing(fakes):
    assert events([], [fakes.pressed(fakes.NOW)]) == []


def test_tuner_events(fakes):
    tuned = fakes.tuned(fakes.NOW)
    before, starting = replace(tuned, tuner=None), replace(tuned, state=State.STARTING)
    why = "trial 2 of 4 of a tuner, max-num-seqs 256 → 128, max-num-batched-tokens 2048 → 8192"
    assert events([before], [tuned]) == [("chat: a tuner is running: goodput, at most 4 trials.", False)]
    assert (f"chat is starting: {why}.", False) in events([tuned], [starting])
    assert events([starting], [replace(tuned, downtime_seconds=4.8)]) == [
        (f"chat is ready (4.8s downtime): {why}.", False)
    ]
    flags = {**tuned.flags, "max-num-batched-tokens": 2048}
    assert events([tuned], [replace(before, flags=flags)]) == [
        ("chat: the tuner has finished; chat has its original flags.", False)
    ]
    left = replace(before, flags={**flags, "max-num-seqs": 128})
    assert events([tuned], [left]) == [("chat: the tuner has finished; chat has max-num-seqs 128.", False)]
    again = replace(before, flags=flags, generation=4)
    assert events([tuned], [again]) == [("chat: the tuner has finished; chat was restarted.", False)]
    stopped = replace(before, flags=flags, state=State.STOPPED)
    assert ("chat: the tuner has finished; chat is stopped.", False) in events([tuned], [stopped])
