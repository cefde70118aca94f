"""Our SQLite files: how a damaged one is moved aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_console.sqlite_files import move_aside


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
