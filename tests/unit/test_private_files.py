"""Files that are replaced as a whole, and what killed writers leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from vllm_launchers import private
from vllm_launchers.private import LEFTOVER_SECONDS, replace_file


def test_replaced_file_has_new_content_and_nothing_is_left(tmp_path):
    path = tmp_path / "reports.json"
    for text in (b"old", b"new"):
        replace_file(path, text)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_old_temporary_file_of_a_killed_writer_is_deleted(tmp_path, monkeypatch):
    """A fresh one stays: its writer may be at work. Files of other names stay, however old."""
    path = tmp_path / "reports.json"
    left = tmp_path / ".reports.json.1.cafecafe"
    left.write_text("half")
    other = tmp_path / ".commands.json.1.cafecafe"
    other.write_text("of another file")
    replace_file(path, b"new")
    assert set(tmp_path.iterdir()) == {path, left, other}
    old = time.time() - LEFTOVER_SECONDS - 1.0
    for one in (left, other, path):
        os.utime(one, (old, old))
    replace_file(path, b"newer")
    assert set(tmp_path.iterdir()) == {path, other}
    assert path.read_bytes() == b"newer"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_interrupted_write_leaves_the_old_file_only(tmp_path, monkeypatch, error):
    path = tmp_path / "reports.json"
    replace_file(path, b"old")

    def fails(_opened: int) -> None:
        raise error

    monkeypatch.setattr(private.os, "fsync", fails)
    with pytest.raises(type(error)):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


EXITING = """
import os, sys, threading, time
from pathlib import Path
from vllm_launchers import private

syncing, sync = threading.Event(), os.fsync

def slowly(opened):
    syncing.set()
    time.sleep({seconds})
    sync(opened)

private.os.fsync = slowly
private.EXIT_SECONDS = {limit}
threading.Thread(target=private.replace_file, args=(Path(sys.argv[1]), b"complete"), daemon=True).start()
syncing.wait()
"""


def test_program_that_exits_completes_files_that_its_daemon_threads_write(tmp_path):
    path = tmp_path / "reports.json"
    subprocess.run([sys.executable, "-c", EXITING.format(seconds=0.5, limit=60), str(path)], check=True, timeout=60)
    assert path.read_bytes() == b"complete"
    assert list(tmp_path.iterdir()) == [path]


def test_write_that_never_ends_does_not_keep_a_program_from_exiting(tmp_path):
    path = tmp_path / "reports.json"
    subprocess.run([sys.executable, "-c", EXITING.format(seconds=3600, limit=0.1), str(path)], check=True, timeout=60)
    assert not path.exists()
