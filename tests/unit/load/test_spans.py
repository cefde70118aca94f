"""The file of when load was sent: it stays small, and loses no load that still runs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from vllm_console.load import spans
from vllm_console.load.spans import FILE_NAME, MOST_BYTES, noted, read_spans


def fill(folder: Path) -> None:
    """Ended loads until the file is over its size."""
    while (folder / FILE_NAME).stat().st_size <= MOST_BYTES:
        with noted(folder, 2.0, 60.0):
            pass


def test_running_load_is_kept_when_the_file_grows_too_large(tmp_path: Path) -> None:
    with noted(tmp_path, 8.0, 600.0):
        fill(tmp_path)
        with noted(tmp_path, 4.0, 600.0):
            assert (tmp_path / FILE_NAME).stat().st_size < MOST_BYTES
            assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
            assert [one.rate for one in read_spans(tmp_path, time.time()) if one.ended_at is None] == [8.0, 4.0]
        ended = [one for one in read_spans(tmp_path, time.time()) if one.rate == 2.0]
        assert len(ended) > 100, "the newest ones are still known"
        assert all(one.ended_at is not None for one in ended)
    assert all(one.ended_at is not None for one in read_spans(tmp_path, time.time()))


WRITER = f"""
import sys
from pathlib import Path
from {spans.__name__} import noted
folder = Path(sys.argv[1])
with noted(folder, float(sys.argv[2]), 600.0):
    for _ in range(150):
        with noted(folder, 2.0, 60.0):
            pass
    print("said", flush=True)
    sys.stdin.readline()
"""


def test_concurrent_loads_do_not_lose_each_others_entries(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"\n" * MOST_BYTES)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(rate)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ},
        )
        for rate in (5, 6, 7)
    ]  # fmt: skip
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"said\n"
        found = read_spans(tmp_path, time.time())
        assert sorted(one.rate or 0.0 for one in found if one.ended_at is None) == [5.0, 6.0, 7.0]
    finally:
        for writer in writers:
            writer.communicate(b"\n")
    assert all(one.ended_at is not None for one in read_spans(tmp_path, time.time()))
