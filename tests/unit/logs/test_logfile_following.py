"""Following a log through rotation, truncation and deletion."""

from __future__ import annotations

import threading
import time

from vllm_console.logs.file import LogFile


def texts(lines):
    return [line.text for line in lines]


def test_rotation_loses_and_repeats_nothing(writer):
    writer.write(b"1\n2\n")
    log = LogFile(writer.path)
    assert texts(log.tail(1)) == ["2"]
    writer.write(b"3\n")
    writer.rotate()
    writer.write(b"4\n")
    assert texts(log.poll()) == ["3", "4"]
    assert texts(log.before(log.end, 10)) == ["1", "2", "3", "4"]


def test_files_rotated_before_opening_are_read(writer):
    for number in range(3):
        writer.write(b"%d\n" % number)
        writer.rotate()
    writer.write(b"3\n")
    log = LogFile(writer.path)
    assert texts(log.tail(10)) == ["0", "1", "2", "3"]
    assert texts(log.after(log.start, 2)) == ["0", "1"]


def test_several_rotations_between_two_samples(writer):
    log = LogFile(writer.path)
    for number in range(12):
        writer.write(b"%d\n" % number)
        writer.rotate()
    assert texts(log.poll()) == [str(number) for number in range(12)]


def test_unread_file_is_read_after_rotation_and_deletion(make_writer):
    writer = make_writer(1)
    writer.write(b"1\n")
    log = LogFile(writer.path)
    writer.write(b"2\n")
    writer.rotate()
    writer.write(b"3\n")
    writer.rotate()  # the file that was opened first is deleted now
    writer.write(b"4\n")
    assert texts(log.poll()) == ["2", "3", "4"]


def test_line_written_across_a_rotation_stays_one_line(writer):
    writer.write(b"whole\nfirst half ")
    log = LogFile(writer.path)
    assert log.poll() == []
    writer.rotate()
    writer.write(b"second half\n")
    assert texts(log.poll()) == ["first half second half"]


def test_offsets_stay_valid_after_rotation(writer):
    writer.write(b"1\n2\n3\n")
    log = LogFile(writer.path)
    second = log.tail(2)[0]
    writer.rotate()
    writer.write(b"4\n")
    log.refresh()
    assert texts(log.after(second.offset, 10)) == ["2", "3", "4"]


def test_truncation_starts_over_with_a_new_epoch(writer):
    writer.write(b"old line\n" * 3)
    log = LogFile(writer.path)
    log.tail(3)
    epoch = log.epoch
    writer.path.write_bytes(b"new\n")
    assert texts(log.poll()) == ["new"]
    assert log.epoch != epoch
    assert texts(log.before(log.end, 10)) == ["new"]


def test_poll_notices_a_truncation_seen_by_another_call(writer):
    writer.write(b"old line\n" * 3)
    log = LogFile(writer.path)
    writer.path.write_bytes(b"new\n")
    log.refresh()
    assert texts(log.poll()) == ["new"]


def test_deleted_file_is_read_to_its_end_and_the_new_one_followed(writer):
    writer.write(b"1\n")
    log = LogFile(writer.path)
    writer.write(b"2\n")
    writer.path.unlink()
    assert texts(log.poll()) == ["2"]
    writer.write(b"3\n")
    assert texts(log.poll()) == ["3"]
    assert log.problem == ""


def test_poll_in_small_steps_gives_every_line_once(writer):
    log = LogFile(writer.path)
    writer.write(b"".join(b"line %d\n" % n for n in range(1000)))
    seen = []
    while lines := log.poll(max_bytes=100):
        seen += texts(lines)
    assert seen == [f"line {n}" for n in range(1000)]


def test_following_while_another_thread_writes_and_rotates(make_writer):
    writer = make_writer(3)
    log = LogFile(writer.path)
    total, seen = 30_000, []
    rotated = threading.Semaphore(1)  # a keeper rotates after megabytes, so a reader polls in between

    def write() -> None:
        with_pieces = 0
        for number in range(total):
            if number % 1000 == 999:
                rotated.acquire(timeout=30)
                writer.rotate()
            line = b"line %d\n" % number
            cut = with_pieces = (with_pieces + 5) % len(line)
            writer.write(line[:cut])
            writer.write(line[cut:])

    thread = threading.Thread(target=write)
    thread.start()
    deadline = time.monotonic() + 60
    while len(seen) < total and time.monotonic() < deadline:
        lines = log.poll()
        seen += texts(lines)
        rotated.release()
    thread.join(60)
    seen += texts(log.poll())
    assert seen == [f"line {n}" for n in range(total)]
