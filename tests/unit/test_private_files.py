"""Files that are replaced as a whole, and what killed writers leave."""

from __future__ import annotations

import os
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

    def killed(path: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(private.os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_file(path, b"half")
    (left,) = tmp_path.iterdir()
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
