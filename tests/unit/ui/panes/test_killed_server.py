"""A failed server whose log shows no cause: its reason is shown without a fix."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_console.diagnosis.finding import Cause, Diagnosis, Fix
from vllm_console.ui.panes.bars import message_lines
from vllm_console.ui.panes.state import state_lines
from vllm_console.ui.panes.throughput import throughput_lines
from vllm_launchers.vllm.flags.changes import Changes

REASON = "Ended by SIGKILL, which it did not ask for: most often the kernel, out of memory (dmesg says)."


def message_and_pane(server, now):
    message = "\n".join(strip.text for strip in message_lines(None, server, None, 200))
    return message, "\n".join(strip.text for strip in state_lines(server, now, 100, 30))


def test_kill_reason_is_shown_if_the_log_shows_nothing(fakes):
    advice = Fix(Changes(), "Look into dmesg.")
    killed = replace(
        fakes.broken(fakes.NOW),
        reason=REASON,
        diagnosis=Diagnosis(Cause.OTHER, 0.0, None, "", "its log does not say why", (advice,)),
    )
    message, pane = message_and_pane(killed, fakes.NOW)
    assert REASON in message
    assert "f fix" not in pane
    assert "i findings" in pane
    known = replace(fakes.diagnosed(fakes.NOW), reason=REASON)
    message, pane = message_and_pane(known, fakes.NOW)
    assert REASON not in message, "the findings line shows it"
    assert "f fix   i findings" in pane


def test_killed_server_shows_no_running_or_waiting_requests(fakes):
    crashed = replace(fakes.broken(fakes.NOW), last_window=fakes.window_at(fakes.NOW, 0.9), load_result="load ended")
    shown = replace(crashed, window=crashed.last_window)
    for width in (40, 120):
        lines = [strip.text for strip in throughput_lines(shown, fakes.NOW, width, 12)]
        assert " running · " not in "\n".join(lines)
        assert (lines[2].strip(), lines[3].strip()) == ("load ended", "tokens/s out")


def test_without_a_diagnosis_no_findings_key_is_shown(fakes):
    _, pane = message_and_pane(fakes.broken(fakes.NOW), fakes.NOW)
    assert "i findings" not in pane
    assert "l log" in pane
