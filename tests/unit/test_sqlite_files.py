"""Our SQLite files: how a damaged one is moved aside, and reading in a read-only folder."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from vllm_console.sqlite_files import apply_pragmas, connect_read_only, move_aside, open_database


def test_write_ahead_log_is_read_in_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container in which the folder of a running server is mounted read-only."""
    path = tmp_path / "history.sqlite"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with closing(open_database(path, 1.0)) as writer:
        apply_pragmas(writer, "NORMAL")
        writer.execute("CREATE TABLE samples (at REAL)")
        with closing(connect_read_only(path, 1.0)) as reader:
            for count in (1, 2):
                writer.execute("INSERT INTO samples VALUES (1.0)")
                assert reader.execute("SELECT count(*) FROM samples").fetchone() == (count,)
    assert list(tmp_path.iterdir()) == [path], "a closed one has no log"
    with closing(connect_read_only(path, 1.0)) as reader:
        assert reader.execute("SELECT count(*) FROM samples").fetchone() == (2,)
    assert list(tmp_path.iterdir()) == [path], "it was read as it is"


def test_side_files_of_a_new_database_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer creates a new database as soon as the damaged one is gone."""
    path, replace = tmp_path / "runs.sqlite", Path.replace
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).write_text("damaged")

    def replace_and_race(moved: Path, target: Path) -> Path:
        result = replace(moved, target)
        if moved == path:
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).write_text("new")
        return result

    monkeypatch.setattr(Path, "replace", replace_and_race)
    aside = move_aside(path, keep_earlier=False)
    for suffix in ("", "-wal", "-shm"):
        assert path.with_name(path.name + suffix).read_text() == "new"
        assert aside.with_name(aside.name + suffix).read_text() == "damaged"
