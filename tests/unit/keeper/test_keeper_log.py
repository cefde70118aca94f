"""The log: every line arrives, files stay within bounds, and a full disk costs lines but never the server."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.keeper import output
from vllm_launchers.keeper.lifecycle import LogLost, LogRecovered
from vllm_launchers.keeper.log_forwarder import LogForwarder, RotatingLog
from vllm_launchers.keeper.output import (
    CHUNK,
    OutputFile,
    OutputPosition,
    Position,
    open_for_server,
)


def everything(path):
    older = sorted(path.parent.glob(f"{path.name}.*"), key=lambda file: -int(file.suffix[1:]))
    return [file.read_bytes() for file in [*older, path]]


class Disk:
    """Accepts a number of bytes, then reports a full disk."""

    def __init__(self):
        self.room = 1 << 30

    def write(self, fd, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.write(fd, data[: self.room])
        self.room -= written
        return written


def test_oldest_file_is_deleted_above_the_limit(tmp_path):
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
def test_no_byte_is_lost_and_lines_stay_whole(tmp_path_factory, lines, cuts):
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


def test_endless_line_is_cut(tmp_path):
    path = tmp_path / "server.log"
    log = RotatingLog(path, 4096, 200)
    for _ in range(40):
        log.append(b"x" * 10_000)
    log.close()
    files = everything(path)
    assert sum(map(len, files)) == 400_000
    assert max(map(len, files)) <= 4096


def test_file_that_cannot_be_rotated_grows_and_loses_nothing(tmp_path):
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
def test_repeatedly_failing_rotation_deletes_no_older_file(tmp_path, monkeypatch, step):
    """No descriptor for the new file, or the last rename refused: retried at every write while that lasts."""
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


def test_lost_bytes_are_reported_even_without_a_new_file(tmp_path, monkeypatch):
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


def test_existing_log_is_continued(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(b"before\n")
    log = RotatingLog(path, 4096, 2)
    assert log.position() == (path.stat().st_ino, 7)
    log.append(b"after\n")
    assert path.read_bytes() == b"before\nafter\n"


def test_bytes_lost_on_a_full_disk_are_counted_and_reported(tmp_path):
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


def test_forwarder_keeps_draining_while_the_disk_is_full(tmp_path):
    disk, events, mended = Disk(), [], threading.Event()

    def post(event):
        events.append(event)
        if isinstance(event, LogRecovered):
            mended.set()

    writer = open_for_server(tmp_path)
    log = RotatingLog(tmp_path / "server.log", 1 << 30, 2, write=disk.write)
    forwarder = LogForwarder(tmp_path, log, post)
    forwarder.start()
    disk.room = 0
    chunk = b"y" * 99 + b"\n"
    for _ in range(40_000):
        os.write(writer, chunk)
    assert forwarder.drain(10.0)
    assert log.lost == 4_000_000
    disk.room = 1 << 30
    os.write(writer, b"again\n")
    assert forwarder.drain(10.0)
    assert mended.wait(10.0)
    assert isinstance(events[0], LogLost)
    assert events[-1] == LogRecovered(4_000_000)
    assert (tmp_path / "server.log").read_bytes().endswith(b"on device\nagain\n")


class HeldDisk:
    """Writes nothing until released."""

    def __init__(self):
        self.released = threading.Event()

    def write(self, fd, data):
        assert self.released.wait(60.0)
        return os.write(fd, data)


@pytest.fixture
def held(tmp_path):
    """A forwarder whose log can't be written yet, a server's output with a line, and the disk.

    Its thread starts late, so that it begins with the test's first request.
    """
    disk = HeldDisk()
    writer = open_for_server(tmp_path)
    os.write(writer, b"first\n")
    log = RotatingLog(tmp_path / "server.log", 1 << 20, 2, write=disk.write)
    forwarder = LogForwarder(tmp_path, log, print)
    start = threading.Timer(0.1, forwarder.start)
    start.start()
    yield forwarder, writer, disk
    start.join()
    disk.released.set()
    os.close(writer)


def test_output_is_not_emptied_for_a_start_that_no_longer_waits(tmp_path, held):
    """The next server writes meanwhile."""
    forwarder, writer, disk = held
    assert not forwarder.begin_anew(0.5)
    os.write(writer, b"second\n")
    disk.released.set()
    assert forwarder.drain(10.0)
    assert (tmp_path / "server.log").read_bytes() == b"first\nsecond\n"
    assert (tmp_path / "server.output").stat().st_size == len(b"first\nsecond\n")


def test_a_request_in_progress_does_not_end_the_next_one(tmp_path, held):
    forwarder, _, disk = held
    assert not forwarder.drain(0.5)
    later = threading.Timer(0.3, disk.released.set)
    later.start()
    assert forwarder.begin_anew(10.0)
    assert (tmp_path / "server.output").stat().st_size == 0
    later.join()


def test_repeated_lines_survive_a_change_of_keepers(tmp_path):
    server, path = open_for_server(tmp_path), tmp_path / "server.log"
    for times in range(1, 4):
        os.write(server, b"tick\n")
        LogForwarder(tmp_path, RotatingLog(path, 1 << 20, 2), print)._forward()
        assert path.read_bytes() == b"tick\n" * times


def test_line_with_a_possible_secret_waits_for_its_end(tmp_path):
    """It stays in the output, so a keeper killed meanwhile loses nothing."""
    server, path = open_for_server(tmp_path), tmp_path / "server.log"

    def forwarder():
        return LogForwarder(tmp_path, RotatingLog(path, 1 << 20, 2), print)

    os.write(server, b"first\nwith api_key=very-se")
    forwarder()._forward()
    assert path.read_bytes() == b"first\n"
    os.write(server, b"cret-indeed\nlast")
    forwarder()._forward()
    assert path.read_text() == "first\nwith api_key=•••\nlast"


def test_server_never_waits_for_a_reader_and_loses_nothing(tmp_path):
    """Forty times the capacity of a pipe, without a reader."""
    server, path = open_for_server(tmp_path), tmp_path / "server.log"
    line = b"z" * 1023 + b"\n"
    for _ in range(40_000):
        assert os.write(server, line) == len(line)
    LogForwarder(tmp_path, RotatingLog(path, 1 << 30, 2), print)._forward()
    assert path.read_bytes() == line * 40_000


def test_read_output_uses_no_disk_space(tmp_path):
    server = open_for_server(tmp_path)
    forwarder = LogForwarder(tmp_path, RotatingLog(tmp_path / "server.log", 1 << 20, 2), print)
    for _ in range(40):
        os.write(server, b"z" * (1 << 20))
        forwarder._forward()
        assert (tmp_path / "server.output").stat().st_blocks * 512 <= 3 << 20
    assert (tmp_path / "server.output").stat().st_size == 40 << 20


def test_secret_is_erased_from_the_output_once_redacted(tmp_path):
    server, output = open_for_server(tmp_path), tmp_path / "server.output"
    forwarder = LogForwarder(tmp_path, RotatingLog(tmp_path / "server.log", 1 << 20, 2), print)
    os.write(server, b"with api_key=very-secret-indeed\n")
    assert b"very-secret" in output.read_bytes()
    forwarder._forward()
    assert b"very-secret" not in output.read_bytes()


def test_file_without_hole_support_is_truncated_after_reading(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_launchers.keeper.output._punch", lambda *_: False)
    server, path = open_for_server(tmp_path), tmp_path / "server.log"
    forwarder, line = LogForwarder(tmp_path, RotatingLog(path, 1 << 30, 2), print), b"z" * 1023 + b"\n"
    for _ in range(4):
        for _ in range(1024):
            os.write(server, line)
        forwarder._forward()
        assert (tmp_path / "server.output").stat().st_size <= 1 << 20
    assert path.read_bytes() == line * 4096


def test_backlog_is_bounded_and_missing_bytes_are_reported(tmp_path, monkeypatch):
    server, path, lines = open_for_server(tmp_path), tmp_path / "server.log", 12_000
    LogForwarder(tmp_path, RotatingLog(path, 1 << 30, 2), print)._forward()
    os.write(server, b"".join(b"line %08d %s\n" % (number, b"z" * 1000) for number in range(lines)))
    monkeypatch.setattr(output, "MOST_UNREAD", 16 << 20)
    assert output.bound(tmp_path) == 0
    monkeypatch.setattr(output, "MOST_UNREAD", 8 << 20)
    assert output.bound(tmp_path) > 0
    assert (tmp_path / "server.output").stat().st_blocks * 512 < 8 << 20
    LogForwarder(tmp_path, RotatingLog(path, 1 << 30, 2), print)._forward()
    first = path.read_text().splitlines()[0]
    assert "bytes of log were lost here: the backlog for the keeper was too large" in first
    lost = int(first.split()[1])
    whole = b"".join(b"line %08d %s\n" % (number, b"z" * 1000) for number in range(lines))
    assert path.read_bytes() == first.encode() + b"\n" + whole[lost:]


LINES = [b"line %08d %s\n" % (number, b"z" * 85) for number in range(30_000)]


@pytest.mark.parametrize("unread", [0, 1000])
def test_unknown_read_position_claims_no_loss(tmp_path, unread):
    """Part of 3,000,000 bytes was read and released; later output is forwarded without a message before it."""
    server, whole = open_for_server(tmp_path), b"".join(LINES)
    os.write(server, whole)
    read = len(whole) - 100 * unread
    before = OutputFile(tmp_path)
    before.take(read)
    before.trim(now=True)
    before.close()
    after = OutputFile(tmp_path, None)
    assert (after.waiting(), after.peek(), after.missing) == (100 * unread, whole[read:], 0)
    os.write(server, b"more\n")
    after.take(100 * unread)
    assert after.peek() == b"more\n"
    after.close()


def test_log_with_a_lost_position_reports_no_loss(tmp_path):
    server, path = open_for_server(tmp_path), tmp_path / "server.log"
    os.write(server, b"".join(LINES))
    forwarder = LogForwarder(tmp_path, RotatingLog(path, 1 << 30, 2), print)
    forwarder._forward()
    forwarder._output.trim(now=True)
    (tmp_path / "log.position").unlink()
    os.write(server, b"more\n")
    LogForwarder(tmp_path, RotatingLog(path, 1 << 30, 2), print)._forward()
    assert b"lost" not in path.read_bytes()
    assert path.read_bytes() == b"".join(LINES) + b"more\n"


@pytest.mark.parametrize("replaced", [True, False])
def test_deleted_position_is_restored(tmp_path, replaced):
    file, there = tmp_path / "log.position", OutputPosition(1, 2, 3, 4)
    position = Position(tmp_path)
    position.write(there)
    assert not position.restore(), "it exists"
    file.unlink()
    if replaced:
        file.touch()
    assert position.restore()
    assert Position(tmp_path).read() == there
    position.write(OutputPosition(1, 2, 3, 5))
    assert Position(tmp_path).read() == OutputPosition(1, 2, 3, 5)


def test_non_file_in_place_of_the_position_is_left_alone(tmp_path):
    position, precious = Position(tmp_path), tmp_path / "precious"
    position.write(OutputPosition(1, 2, 3, 4))
    precious.write_bytes(b"mine")
    (tmp_path / "log.position").unlink()
    (tmp_path / "log.position").symlink_to(precious)
    assert not position.restore()
    assert precious.read_bytes() == b"mine"


def test_chunk_is_cut_at_the_beginning_of_a_line(tmp_path):
    """A read from a full pipe may end in the middle of a secret's name."""
    server, path = open_for_server(tmp_path), tmp_path / "server.log"
    line = b"x" * 90 + b" api_key=very-secret\n"
    count = 3 * CHUNK // len(line)
    for _ in range(count):
        os.write(server, line)
    LogForwarder(tmp_path, RotatingLog(path, 1 << 30, 2), print)._forward()
    assert path.read_text() == line.decode().replace("very-secret", "•••") * count
