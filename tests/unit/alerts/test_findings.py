"""Beginnings and ends are each reported once: the log, the terminal's bytes, and the notifier that combines them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.alerts.findings import ENDS_AFTER_SECONDS, Alert, Event, FindingTracker, OpenFinding, replayed
from vllm_console.alerts.notifier import MOST_BYTES, FindingsLog, Notifier, TerminalBell, TerminalSignal, ring
from vllm_console.diagnosis.finding import Finding, Severity
from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.settings import Alerts
from vllm_launchers.keeper.records import State

NOW = 1_000_000.0
PRESSURE = Finding("kv_cache_pressure", Severity.WARNING, NOW - 30, "91% is used.", "Full.")
PREEMPTING = Finding("preempting", Severity.CRITICAL, NOW - 20, "18 a minute.", "Full.")
UNUSED = Finding("context_unused", Severity.NOTE, NOW - 20, "Short.", "Long.")
HEALTHY = Finding("healthy", Severity.GOOD, NOW - 100, "Healthy.", "")
CHAT = ServerView("chat", State.READY, NOW - 3600, preset="chatbot", findings=(HEALTHY,))


def chat_with(*findings: Finding, **more: object) -> ServerView:
    return replace(CHAT, findings=findings, **more)  # type: ignore[arg-type]


def events_of(tracker: FindingTracker, server: ServerView | None, at: float) -> list[tuple[str, str]]:
    servers = [server] if server is not None else []
    return [(str(one.event), one.finding.finding.code) for one in tracker.update(servers, at)]


def test_finding_is_reported_at_its_beginning_and_end() -> None:
    tracker = FindingTracker()
    assert events_of(tracker, CHAT, NOW) == []
    assert events_of(tracker, chat_with(PRESSURE), NOW + 5) == [("began", "kv_cache_pressure")]
    assert events_of(tracker, chat_with(PRESSURE), NOW + 10) == []
    assert events_of(tracker, CHAT, NOW + 15) == []
    assert events_of(tracker, CHAT, NOW + 80) == [("ended", "kv_cache_pressure")]
    assert events_of(tracker, CHAT, NOW + 200) == []
    assert events_of(tracker, chat_with(PRESSURE), NOW + 300) == [("began", "kv_cache_pressure")]


def test_finding_of_traffic_says_what_of_ours_loads_the_server() -> None:
    sentences = [one.sentence for one in FindingTracker().update([chat_with(PRESSURE, UNUSED, load_test=12)], NOW)]
    assert sentences[0] == "chat: KV cache pressure: 91% is used. A load test is running (pid 12)."
    assert sentences[1].endswith(": Short."), "load is not why"


def test_flapping_finding_is_reported_once() -> None:
    tracker = FindingTracker()
    events = [
        one
        for step in range(60)
        for one in events_of(tracker, chat_with(PRESSURE) if step % 4 else CHAT, NOW + step * 10)
    ]
    assert events == [("began", "kv_cache_pressure")]


def test_finding_ends_when_it_was_last_seen() -> None:
    tracker = FindingTracker()
    tracker.update([chat_with(PRESSURE)], NOW)
    tracker.update([chat_with(PRESSURE)], NOW + 50)
    tracker.update([CHAT], NOW + 60)
    (event,) = tracker.update([CHAT], NOW + 130)
    assert (event.event, event.at) == (Event.ENDED, NOW + 50)


def test_restart_does_not_end_a_finding_that_returns() -> None:
    tracker = FindingTracker()
    events_of(tracker, chat_with(PRESSURE), NOW)
    assert events_of(tracker, chat_with(state=State.STOPPING), NOW + 10) == []
    assert events_of(tracker, chat_with(state=State.STARTING), NOW + 100) == []
    assert events_of(tracker, chat_with(state_since=NOW + 200), NOW + 250) == []
    assert events_of(tracker, chat_with(PRESSURE, state_since=NOW + 200), NOW + 300) == []


def test_restart_that_fixes_a_finding_ends_it() -> None:
    tracker = FindingTracker()
    events_of(tracker, chat_with(PRESSURE), NOW)
    assert events_of(tracker, chat_with(state_since=NOW + 100), NOW + 150) == []
    assert events_of(tracker, chat_with(state_since=NOW + 100), NOW + 165) == []
    assert events_of(tracker, chat_with(state_since=NOW + 100), NOW + 230) == [("ended", "kv_cache_pressure")]


def test_stopped_server_has_no_findings() -> None:
    tracker = FindingTracker()
    events_of(tracker, chat_with(PRESSURE), NOW)
    assert events_of(tracker, chat_with(state=State.STOPPED), NOW + 5) == [("ended", "kv_cache_pressure")]
    assert events_of(tracker, chat_with(state=State.STOPPED), NOW + 6) == []


def test_findings_of_a_removed_server_end_after_a_delay() -> None:
    tracker = FindingTracker()
    events_of(tracker, chat_with(PRESSURE), NOW)
    assert events_of(tracker, None, NOW + 5) == []
    assert events_of(tracker, chat_with(PRESSURE), NOW + 6) == []
    assert events_of(tracker, None, NOW + 7) == []
    assert events_of(tracker, None, NOW + 8 + ENDS_AFTER_SECONDS) == [("ended", "kv_cache_pressure")]
    assert events_of(tracker, None, NOW + 9 + ENDS_AFTER_SECONDS) == []


def test_failure_is_reported_once_over_retries_until_ready() -> None:
    tracker = FindingTracker()
    failed = chat_with(state=State.FAILED, reason="CUDA out of memory", next_attempt_at=NOW + 20)
    (event,) = tracker.update([failed], NOW)
    assert event.finding.finding.severity is Severity.CRITICAL
    assert "CUDA out of memory" in event.sentence
    assert events_of(tracker, chat_with(state=State.STARTING), NOW + 20) == []
    assert events_of(tracker, failed, NOW + 30) == []
    assert events_of(tracker, CHAT, NOW + 60) == [("ended", "failed")]


def test_final_failure_ends_earlier_findings() -> None:
    tracker = FindingTracker()
    events_of(tracker, chat_with(PRESSURE), NOW)
    assert events_of(tracker, chat_with(state=State.FAILED), NOW + 5) == [
        ("ended", "kv_cache_pressure"),
        ("began", "failed"),
    ]


def test_only_a_long_silence_is_a_finding() -> None:
    silent = chat_with(state=State.UNRESPONSIVE, state_since=NOW)
    tracker = FindingTracker()
    assert events_of(tracker, silent, NOW + 5) == []
    assert events_of(tracker, silent, NOW + 20) == [("began", "unresponsive")]
    dead = Finding("engine_dead", Severity.CRITICAL, NOW, "/health answers 503.", "")
    assert events_of(FindingTracker(), replace(silent, findings=(dead,)), NOW + 20) == [("began", "engine_dead")]


def test_servers_of_others_are_ignored() -> None:
    assert events_of(FindingTracker(), chat_with(PRESSURE, ours=False), NOW) == []


# -- the terminal ------------------------------------------------------------------------------------------------------


def test_terminal_signal_bytes() -> None:
    every = (TerminalSignal.BELL, TerminalSignal.OSC9, TerminalSignal.OSC777)
    assert ring("chat: x", (TerminalSignal.BELL,), {}) == b"\x07"
    assert ring("chat: x", (TerminalSignal.OSC9,), {}) == b"\x1b]9;vllm-console: chat: x\x07"
    assert ring("chat; x", (TerminalSignal.OSC777,), {}) == b"\x1b]777;notify;vllm-console;chat, x\x07"
    assert ring("x", every, {"TMUX": "/tmp/tmux-1000/default,1,0"}) == (
        b"\x1bPtmux;\x1b\x1b]9;vllm-console: x\x07\x1b\\\x1bPtmux;\x1b\x1b]777;notify;vllm-console;x\x07\x1b\\\x07"
    )


@pytest.mark.parametrize(
    "text", ["a\x07b", "a\x1b\\b", "a\x1b]52;c;ZXZpbA==\x07b", "a\x9cb", "a\r\nb", "ä€\u202eb", "4;3;"]
)
def test_outside_text_cannot_leave_its_escape_sequence(text: str) -> None:
    data = ring(text, (TerminalSignal.OSC9,), {})
    assert data.startswith(b"\x1b]9;vllm-console: ")
    assert data.endswith(b"\x07")
    assert all(0x20 <= byte <= 0x7E for byte in data[2:-1])


def test_long_text_is_cut() -> None:
    assert len(ring("x" * 5000, (TerminalSignal.OSC9,), {})) < 200


def began(finding: Finding, server: str = "chat") -> Alert:
    return Alert(Event.BEGAN, OpenFinding(server, "chatbot", finding, NOW), finding.since)


def test_bell_rings_at_most_every_ten_seconds_and_loses_nothing() -> None:
    ringer = TerminalBell([TerminalSignal.OSC9], {})
    assert b"KV cache pressure (warning)" in ringer.take([began(PRESSURE)], 100.0)
    assert ringer.take([began(UNUSED)], 101.0) == b""
    assert ringer.take([began(PREEMPTING, "coder")], 105.0) == b""
    assert b"coder: preempting (critical), and 1 more" in ringer.take([], 110.5)
    assert ringer.take([], 200.0) == b""


def test_nothing_is_written_without_a_terminal_signal() -> None:
    assert TerminalBell([], {}).take([began(PREEMPTING)], 0.0) == b""


# -- the log -----------------------------------------------------------------------------------------------------------


def test_findings_log_is_private_and_bounded(tmp_path: Path) -> None:
    log = FindingsLog(tmp_path / "state")
    assert log.mine()
    line = {"text": "x" * 1000}
    for _ in range(3 * MOST_BYTES // 1000):
        log.append(line)
    files = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert files == ["findings.lock", "findings.log", "findings.log.1"]
    for path in (tmp_path / "state").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_size <= MOST_BYTES
    assert log.trouble == ""


def test_one_console_writes_the_log_until_the_other_takes_over(tmp_path: Path) -> None:
    one, other = FindingsLog(tmp_path), FindingsLog(tmp_path)
    assert one.mine()
    assert not other.mine()
    one.close()
    assert other.mine()
    assert not one.mine()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    log = FindingsLog(tmp_path)
    assert not log.mine()
    assert log.trouble == (
        f"{tmp_path / 'findings.lock'}: can't be locked ({os.strerror(number)}): no finding is logged or sent"
    )


def test_unwritable_log_is_reported(tmp_path: Path) -> None:
    log = FindingsLog(tmp_path)
    log.path.mkdir()
    log.append({"event": "began"})
    assert "findings.log: can't be written" in log.trouble
    nowhere = FindingsLog(tmp_path / "findings.log" / "x" / "y")
    (tmp_path / "findings.log" / "x").write_text("")
    assert not nowhere.mine()
    assert nowhere.trouble


def test_log_is_not_written_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    (tmp_path / "findings.log").symlink_to(tmp_path / "precious")
    log = FindingsLog(tmp_path)
    log.append({"event": "began"})
    assert (tmp_path / "precious").read_text() == ""
    assert log.trouble


def test_foreign_log_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "findings.log").write_bytes(
        b'{"event": "began"}\nhalf a li\n[1]\n\xff\n{"event": "began", "server": 3}\n'
    )
    assert replayed(FindingsLog(tmp_path).read()) == {}


# -- all together ------------------------------------------------------------------------------------------------------


def snapshot(*servers: ServerView, at: float = NOW) -> FleetSnapshot:
    return FleetSnapshot(at, "gpubox", servers)


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "findings.log").read_text().splitlines()]


def test_finding_goes_to_the_log_and_the_terminal(tmp_path: Path) -> None:
    written: list[bytes] = []
    notifier = Notifier(tmp_path, Alerts(terminal=("bell",)), environ={}, write=written.append)
    notifier.update(snapshot(chat_with(PRESSURE)))
    notifier.update(snapshot(chat_with(PRESSURE), at=NOW + 1))
    notifier.close()
    (line,) = lines(tmp_path)
    assert (line["event"], line["server"], line["preset"]) == ("began", "chat", "chatbot")
    assert (line["code"], line["severity"], line["since"]) == ("kv_cache_pressure", "warning", NOW - 30)
    assert written == [b"\x07"]
    assert notifier.trouble == ""


def test_findings_below_the_severity_go_only_to_the_log(tmp_path: Path) -> None:
    written: list[bytes] = []
    notifier = Notifier(tmp_path, Alerts(severity="critical", terminal=("bell",)), environ={}, write=written.append)
    notifier.update(snapshot(chat_with(PRESSURE, UNUSED)))
    assert [line["code"] for line in lines(tmp_path)] == ["kv_cache_pressure", "context_unused"]
    assert written == []
    notifier.update(snapshot(chat_with(PRESSURE, PREEMPTING)))
    assert written == [b"\x07"]
    notifier.close()


def test_next_console_repeats_no_beginning_and_reports_the_end(tmp_path: Path) -> None:
    first = Notifier(tmp_path, Alerts(), environ={})
    first.update(snapshot(chat_with(PRESSURE)))
    first.close()
    second = Notifier(tmp_path, Alerts(), environ={})
    assert second.update(snapshot(chat_with(PRESSURE), at=NOW + 500)) == ()
    second.update(snapshot(CHAT, at=NOW + 505))
    assert [event.event for event in second.update(snapshot(CHAT, at=NOW + 600))] == [Event.ENDED]
    second.close()
    assert [line["event"] for line in lines(tmp_path)] == ["began", "ended"]


def test_two_consoles_write_each_finding_once(tmp_path: Path) -> None:
    written: list[bytes] = []
    wanted = Alerts(terminal=("bell",))
    consoles = [Notifier(tmp_path, wanted, environ={}, write=written.append) for _ in range(2)]
    for server in (CHAT, chat_with(PREEMPTING)):
        for console in consoles:
            console.update(snapshot(server))
    assert len(lines(tmp_path)) == 1
    assert written == [b"\x07", b"\x07"]
    for console in consoles:
        console.close()


def test_webhook_is_not_used_when_its_secret_is_missing(tmp_path: Path) -> None:
    wanted = Alerts(webhook="https://example.org/hook", webhook_header_env="NOT_THERE")
    notifier = Notifier(tmp_path, wanted, environ={})
    assert notifier.trouble == "alerts: NOT_THERE is not set, so the webhook is not used"
    notifier.update(snapshot(chat_with(PREEMPTING)))
    notifier.close()
