"""A demo removes leftovers of killed demos, except demos on another machine with the same home folder."""

from __future__ import annotations

from pathlib import Path

from vllm_console.cli.demo import _sweep
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.location import here
from vllm_launchers.keeper.records import Generation, LaunchSpec, Location, ProcessIdentity, ServerRecord, State
from vllm_launchers.values import replace

NOBODY = 99_999_999
"""An unused pid."""


def demo(root: Path, number: int, location: Location) -> Path:
    """What a demo has on disk while its server runs there."""
    state = root / str(number)
    generation = Generation(1, LaunchSpec(("vllm",), "127.0.0.1", 1), 1_000.0, ready_at=1_001.0)
    process = ProcessIdentity(NOBODY, 1, location.boot_id)
    record = ServerRecord(
        "docs", State.READY, 1_001.0, 1_000.0, (generation,), server=process, keeper=process, location=location
    )
    folders.write_record(folders.prepare(state, "docs"), record)
    return state


def test_demo_on_another_machine_is_not_removed(tmp_path: Path) -> None:
    other = replace(here(), hostname="elsewhere", machine_id="another", boot_id="another")
    there, left = demo(tmp_path, NOBODY, other), tmp_path / str(NOBODY + 1)
    left.mkdir()
    _sweep(tmp_path)
    assert (there / "servers" / "docs" / "record.json").exists()
    assert not left.exists()
