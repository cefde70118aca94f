"""The log: every line arrives, files stay within bounds, a full disk costs lines but never the server."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.keeper.events import LogLost, LogMended
from vllm_launchers.keeper.logfile import LogPump, RotatingLog
from vllm_launchers.keeper.logpipe import CHUNK, open_pipe
from vllm_launchers.keeper.records import State


def everything(path):
    older = sorted(path.parent.glob(f"{path.name}.*"), key=lambda file: -int(file.suffix[1:]))
    return [file.read_bytes() for file in [*older, path]]


class Disk:
    """Takes a number of bytes, then says that it is full."""

    def __init__(self):
        self.room = 1 << 30

    def write(self, fd, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.write(fd, data[: self.room])
        self.room -= written
        return written


def test_a_flood_arrives_whole_over_many_files(bench):
    lines = 300_000
    bench.launch(bench.spec("--lines", str(lines), "--exit-after", "0", log_bytes=200_000, log_files=100))
    bench.wait(State.FAILED)
    expected = "".join(f"line {number}\n" for number in range(lines)) + "fatal: made to fail\n"
    assert bench.log() == expected
    files = list(bench.file("").glob("server.log*"))
    assert len(files) > 10
    assert all(file.stat().st_size <= 200_000 and file.read_bytes().endswith(b"\n") for file in files)


def test_the_oldest_file_goes_when_there_are_too_many(tmp_path):
    log = RotatingLog(tmp_path / "server.log", 4096, 3)
    for number in range(5000):
        log.append(b"%06d\n" % number)
    log.close()
    files = everything(tmp_path / "server.log")
    assert len(files) == 3
    kept = b"".join(files).split()
    assert kept == [b"%06d" % number for number in range(5000 - len(kept), 5000)]


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.integers(0, 1200), max_size=60),
    cuts=st.lists(st.integers(1, 9000), min_size=1, max_size=20),
)
def test_no_byte_is_lost_and_lines_stay_whole_however_they_come(tmp_path_factory, lines, cuts):
    path = tmp_path_factory.mktemp("log") / "server.log"
    data = b"".join(b"x" * length + b"\n" for length in lines)
    log, at = RotatingLog(path, 5000, 1000), 0
    for cut in itertools.cycle(cuts):
        log.append(data[at : at + cut])
        at += cut
        if at >= len(data):
            break
    log.close()
    files = everything(path)
    assert b"".join(files) == data
    assert all(file.endswith(b"\n") and len(file) <= 5000 for file in files if file)


def test_a_line_without_end_is_cut(tmp_path):
    path = tmp_path / "server.log"
    log = RotatingLog(path, 4096, 200)
    for _ in range(40):
        log.append(b"x" * 10_000)
    log.close()
    files = everything(path)
    assert sum(map(len, files)) == 400_000
    assert max(map(len, files)) <= 4096


def test_a_file_that_cannot_make_way_grows_and_nothing_is_lost(tmp_path):
    path = tmp_path / "server.log"
    (tmp_path / "server.log.1").mkdir()
    log = RotatingLog(path, 4096, 2)
    for number in range(2000):
        log.append(b"%06d\n" % number)
    assert path.read_bytes() == b"".join(b"%06d\n" % number for number in range(2000))
    (tmp_path / "server.log.1").rmdir()
    log.append(b"last\n")
    log.close()
    assert path.read_bytes() == b"last\n", "as soon as it can, it does"


@pytest.mark.parametrize("step", ["open", "rename"])
def test_a_rotation_that_fails_again_and_again_costs_no_older_file(tmp_path, monkeypatch, step):
    """No descriptor for the new file, or the last rename refused: tried at every write, for as long as that lasts."""
    path, failed = tmp_path / "server.log", []
    log = RotatingLog(path, 4096, 4)
    lines = [b"%06d\n" % number for number in range(20_000)]
    done = iter(lines)
    while not (tmp_path / "server.log.3").exists():
        log.append(next(done))
    rename, make = Path.replace, os.open

    def refused_rename(source, target):
        if source == path:
            failed.append(source)
            raise OSError(errno.EIO, "Input/output error")
        return rename(source, target)

    def refused_open(file, flags, *more):
        if flags & os.O_CREAT:
            failed.append(file)
            raise OSError(errno.EMFILE, "Too many open files")
        return make(file, flags, *more)

    before = everything(path)
    with monkeypatch.context() as patched:
        if step == "open":
            patched.setattr(os, "open", refused_open)
        else:
            patched.setattr(Path, "replace", refused_rename)
        for _ in range(2000):
            log.append(next(done))
    assert len(failed) > 100, "the fault did not happen"
    kept = everything(path)
    assert kept[:-1] == (before[:-1] if step == "open" else before[1:-1]), "it makes way once, and then waits"
    assert kept[-1].startswith(before[-1]), "the newest file grows"
    log.append(next(done))
    log.close()
    after = b"".join(everything(path)).splitlines(keepends=True)
    assert after == lines[lines.index(after[0]) : lines.index(next(done))], "no line between is missing"
    assert len(everything(path)) == 4
    assert everything(path)[-2] == kept[-1], "as soon as it can, it does"


def test_what_was_lost_is_confessed_where_no_new_file_can_be_made(tmp_path, monkeypatch):
    disk, path = Disk(), tmp_path / "server.log"
    log = RotatingLog(path, 4096, 3, write=disk.write)
    begun = b"x" * 4050
    log.append(begun)
    disk.room = 0
    log.append(b"gone\n")
    disk.room, failed = 1 << 20, []

    def refused(file, flags, *more):
        failed.append(file)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        log.append(b"back\n")
    assert failed, "the fault did not happen"
    expected = begun + b"\n[keeper] 5 bytes of log were lost here: No space left on device\nback\n"
    assert everything(path) == [expected], "it grows by a line, and nothing more is lost"
    assert log.lost == 0


def test_an_existing_log_is_continued(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(b"before\n")
    log = RotatingLog(path, 4096, 2)
    assert log.position() == (path.stat().st_ino, 7)
    log.append(b"after\n")
    assert path.read_bytes() == b"before\nafter\n"


def test_a_full_disk_is_counted_and_confessed(tmp_path):
    disk, path = Disk(), tmp_path / "server.log"
    log = RotatingLog(path, 1 << 20, 2, write=disk.write)
    disk.room = 5
    log.append(b"0123456789\n")
    log.append(b"gone\n")
    assert log.lost == 6 + 5
    assert "space" in log.trouble
    disk.room = 1000
    log.append(b"back\n")
    assert log.lost == 0
    expected = b"01234\n[keeper] 11 bytes of log were lost here: No space left on device\nback\n"
    assert path.read_bytes() == expected


def test_the_pump_goes_on_draining_while_the_disk_is_full(tmp_path):
    disk, events, mended = Disk(), [], threading.Event()

    def post(event):
        events.append(event)
        if isinstance(event, LogMended):
            mended.set()

    pipe, writer = open_pipe(tmp_path, blocking=False), open_pipe(tmp_path, blocking=True)
    log = RotatingLog(tmp_path / "server.log", 1 << 30, 2, write=disk.write)
    pump = LogPump(pipe, log, post)
    pump.start()
    disk.room = 0
    chunk = b"y" * 99 + b"\n"
    for _ in range(40_000):  # four times what the pipe holds: this would block if nobody drained
        os.write(writer, chunk)
    assert pump.drain(10.0)
    assert log.lost == 4_000_000
    disk.room = 1 << 30
    os.write(writer, b"again\n")
    assert pump.drain(10.0)
    assert mended.wait(10.0)
    assert isinstance(events[0], LogLost)
    assert events[-1] == LogMended(4_000_000)
    assert (tmp_path / "server.log").read_bytes().endswith(b"on device\nagain\n")


def test_what_waits_in_the_pipe_is_there_for_the_next_reader(tmp_path):
    first, server = open_pipe(tmp_path, blocking=False), open_pipe(tmp_path, blocking=True)
    os.write(server, b"written while a keeper was there\n")
    os.close(first)
    os.write(server, b"written while none was\n")
    second = open_pipe(tmp_path, blocking=False)
    assert os.read(second, 1000) == b"written while a keeper was there\nwritten while none was\n"
    with pytest.raises(BlockingIOError):
        os.read(second, 1)


def test_what_a_server_says_twice_is_written_twice_over_a_change_of_keepers(tmp_path):
    server, path = open_pipe(tmp_path, blocking=True), tmp_path / "server.log"
    for times in range(1, 4):
        os.write(server, b"tick\n")
        LogPump(open_pipe(tmp_path, blocking=False), RotatingLog(path, 1 << 20, 2), print)._pump()
        assert path.read_bytes() == b"tick\n" * times


def test_a_line_that_may_hold_a_secret_waits_for_its_end_where_nothing_of_it_is_lost(tmp_path):
    """In the pipe: a keeper that is killed meanwhile has not taken it out."""
    server, path = open_pipe(tmp_path, blocking=True), tmp_path / "server.log"

    def pump():
        return LogPump(open_pipe(tmp_path, blocking=False), RotatingLog(path, 1 << 20, 2), print)

    os.write(server, b"first\nwith api_key=very-se")
    pump()._pump()
    assert path.read_bytes() == b"first\n"
    os.write(server, b"cret-indeed\nlast")
    pump()._pump()
    assert path.read_text() == "first\nwith api_key=•••\nlast"


def test_a_line_that_may_hold_a_secret_does_not_stop_a_server_whose_pipe_is_full(tmp_path):
    server, path = open_pipe(tmp_path, blocking=True), tmp_path / "server.log"
    assert fcntl.fcntl(server, fcntl.F_SETPIPE_SZ, 4096) == 4096
    pipe = os.open(tmp_path / "server.pipe", os.O_RDWR | os.O_NONBLOCK)
    pump = LogPump(pipe, RotatingLog(path, 1 << 20, 2), print)
    os.write(server, (b"api_key=very-secret" + b" " * 4096)[:4096])
    pump._pump()
    assert path.read_text().rstrip() == "api_key=•••"


def test_a_chunk_that_ends_within_a_line_is_cut_where_the_line_begins(tmp_path):
    """So no secret is missed because a look at a full pipe ended in the middle of its name."""
    server, path = open_pipe(tmp_path, blocking=True), tmp_path / "server.log"
    line = b"x" * 90 + b" api_key=very-secret\n"
    count = 3 * CHUNK // len(line)
    for _ in range(count):
        os.write(server, line)
    LogPump(open_pipe(tmp_path, blocking=False), RotatingLog(path, 1 << 30, 2), print)._pump()
    assert path.read_text() == line.decode().replace("very-secret", "•••") * count
