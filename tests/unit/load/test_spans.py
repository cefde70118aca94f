"""The file with the times of sent load: it stays small, and loses no load that is still running."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from msgspec.structs import replace

from vllm_console.load import spans
from vllm_console.load.spans import FILE_NAME, MOST_BYTES, LoadWatch, noted, read_spans
from vllm_console.load.tuner_progress import TunerProgress, TunerStep


def fill(folder: Path) -> None:
    """Add ended loads until the file exceeds its size limit."""
    with (folder / FILE_NAME).open("a") as file:
        for number in itertools.count():
            for line in ({"began_at": 1.0, "until": 9.0, "rate": 2.0}, {"ended_at": 2.0}):
                file.write(json.dumps({"id": f"1-{number}", **line}) + "\n")
            if file.tell() > MOST_BYTES:
                return


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
    print("ready", flush=True)
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
            assert writer.stdout.readline() == b"ready\n"
        found = read_spans(tmp_path, time.time())
        assert sorted(one.rate or 0.0 for one in found if one.ended_at is None) == [5.0, 6.0, 7.0]
    finally:
        for writer in writers:
            writer.communicate(b"\n")
    assert all(one.ended_at is not None for one in read_spans(tmp_path, time.time()))


BEGIN = TunerProgress("goodput", "requests/s", TunerStep.MEASURING, 1.0, 2.0, 4)
TRIAL = replace(BEGIN, step=TunerStep.RESTARTING, trial=2, set={"max-num-seqs": 16}, was={"max-num-seqs": None})


def test_tuner_is_read_from_its_first_step_to_its_end(tmp_path: Path) -> None:
    watch = LoadWatch(tmp_path)
    assert watch.progress(time.time()) is None
    with noted(tmp_path, None, 600.0) as note, noted(tmp_path, 4.0, 600.0):
        assert watch.progress(time.time()) is None, "a load is no tuner"
        for step in (BEGIN, TRIAL):
            note.tuner(step)
            assert watch.progress(time.time()) == replace(step, pid=os.getpid())
        assert watch.progress(time.time() + 601) is None, "no tuner takes longer than it may"
    assert watch.progress(time.time()) is None
    first, second = read_spans(tmp_path, time.time())
    assert (first.tuner, second.tuner) == (replace(TRIAL, pid=os.getpid()), None)


TUNER = f"""
import sys
from pathlib import Path
from {spans.__name__} import noted
from {TunerProgress.__module__} import TunerProgress
with noted(Path(sys.argv[1]), None, 600.0) as note:
    note.tuner(TunerProgress("goodput", "requests/s", "measuring", 1.0, 2.0, 4))
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_killed_tuner_is_not_read(tmp_path: Path) -> None:
    tuner = subprocess.Popen(
        [sys.executable, "-c", TUNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ}
    )
    watch = LoadWatch(tmp_path)
    try:
        assert tuner.stdout is not None
        assert tuner.stdout.readline() == b"ready\n"
        found = watch.progress(time.time())
        assert found is not None
        assert found.pid == tuner.pid
    finally:
        tuner.kill()
        tuner.communicate()
    assert watch.progress(time.time()) is None
    left = watch.killed_tuner(time.time())
    assert left is not None
    assert left.pid == tuner.pid
    (span,) = read_spans(tmp_path, time.time())
    assert span.ended_at == 1.0, "at its last step"
    with noted(tmp_path, None, 600.0) as note:
        note.tuner(TRIAL)
        assert watch.killed_tuner(time.time()) is None, "the newest one runs"
    assert watch.killed_tuner(time.time()) is None, "the newest one has ended"


def test_load_test_is_read_while_it_runs(tmp_path: Path) -> None:
    watch = LoadWatch(tmp_path)
    assert watch.load_test(time.time()) is None
    with noted(tmp_path, 4.0, 600.0) as note:
        assert watch.load_test(time.time()) == os.getpid()
        assert watch.load_test(time.time() + 601) is None
        note.tuner(BEGIN)
        assert watch.load_test(time.time()) is None, "it is a tuner"
    with noted(tmp_path, 4.0, 600.0):
        assert watch.load_test(time.time()) == os.getpid()
    assert watch.load_test(time.time()) is None


def test_other_process_with_the_same_pid_is_no_tuner(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with noted(tmp_path, None, 600.0) as note:
        note.tuner(BEGIN)
        lines = path.read_text()
        begin = json.loads(lines.splitlines()[0])
        pid, started, boot = begin["process"]
        assert LoadWatch(tmp_path).progress(time.time()) is not None
        for other in ([pid, started + 1, boot], [pid, started, "another"], None):
            path.write_text("\n".join([json.dumps({**begin, "process": other}), *lines.splitlines()[1:]]))
            assert LoadWatch(tmp_path).progress(time.time()) is None, other


def test_newest_step_of_a_running_tuner_is_kept_when_the_file_grows_too_large(tmp_path: Path) -> None:
    with noted(tmp_path, None, 600.0) as note:
        note.tuner(BEGIN)
        note.tuner(TRIAL)
        fill(tmp_path)
        with noted(tmp_path, 4.0, 600.0):
            steps = (tmp_path / FILE_NAME).read_text().count('"tuner"')
        assert steps == 1
        assert LoadWatch(tmp_path).progress(time.time()) == replace(TRIAL, pid=os.getpid())
