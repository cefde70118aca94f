"""What an unexpected exception leaves behind."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from vllm_console import crash_report
from vllm_console.cli import main, servers

SECRET = "hf_" + "Q7" * 17


@pytest.fixture
def failed(monkeypatch, tmp_path, capsys):
    """The program after a crash whose text, cause and command line contain a secret: exit code, output, report."""

    def run(args):
        raise KeyError(f"no such slot {SECRET} \x1b]0;title\x07") from ValueError(f"--api-key {SECRET}")

    monkeypatch.setattr(servers, "run_list", run)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    code = main.main(["--state", str(tmp_path / "state"), "list"])
    reports = crash_report.reports(tmp_path / "state")
    assert len(reports) == 1
    return code, capsys.readouterr(), reports[0]


def test_crash_ends_with_one_sentence_that_names_the_report(failed):
    code, output, report = failed
    assert code == 1
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert str(report) in output.err
    assert "Servers keep running" in output.err


def test_report_has_exception_command_and_versions(failed):
    text = failed[2].read_text()
    for words in ("vllm-console 0.", "Python 3.", "KeyError", "ValueError", "in run", "command vllm-console"):
        assert words in text


def test_no_secret_or_escape_code_is_in_the_report_or_on_the_screen(failed):
    for text in (failed[2].read_text(), failed[1].err):
        assert SECRET not in text
        assert "\x1b" not in text


def test_report_is_private(failed):
    report = failed[2]
    assert report.stat().st_mode & 0o777 == 0o600
    assert report.parent.stat().st_mode & 0o777 == 0o700


def test_unwritable_report_is_reported(tmp_path):
    (tmp_path / "state").write_text("a file where the folder should be")
    message = crash_report.write_report(RuntimeError("lost"), ["list"], tmp_path / "state")
    assert "The report could not be saved" in message
    assert "RuntimeError: lost" in message


def test_demo_crash_says_that_its_servers_were_stopped(tmp_path):
    message = crash_report.write_report(RuntimeError("lost"), ["demo"], tmp_path, demo=True)
    assert "The demo has stopped its servers" in message
    assert "keep running" not in message


def test_old_reports_are_deleted(tmp_path):
    folder = tmp_path / crash_report.FOLDER
    folder.mkdir()
    for number in range(crash_report.KEPT + 5):
        (folder / f"crash-20200101-0000{number:02}-1.txt").write_text("old")
    crash_report.write_report(RuntimeError("new"), [], tmp_path)
    left = crash_report.reports(tmp_path)
    assert len(left) == crash_report.KEPT
    assert "new" in left[-1].read_text()


def test_lost_terminal_is_not_a_crash(tmp_path, monkeypatch):
    """Textual writes from a thread, whose error after a lost terminal once led to a report at every hangup."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    messages: list[str] = []
    crash_report.in_threads([], tmp_path, messages)
    primary, secondary = os.openpty()
    failures: list[int] = []

    def write():
        try:
            os.write(secondary, b"frame")
        except OSError as error:
            failures.append(error.errno or 0)
            raise

    os.close(primary)
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    os.close(secondary)
    assert failures == [errno.EIO]
    assert messages == []
    assert crash_report.reports(tmp_path) == []


def test_failing_thread_is_reported_and_prints_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    messages: list[str] = []
    crash_report.in_threads(["list"], tmp_path, messages)

    def fail():
        raise LookupError("in a thread")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert len(messages) == 1
    assert "LookupError" in crash_report.reports(tmp_path)[0].read_text()
    assert capsys.readouterr().err == ""
