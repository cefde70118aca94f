"""Reading a log of any size and content, at any position."""

from __future__ import annotations

import itertools
import re
import resource
from pathlib import Path

import pytest

from vllm_console.logs import file as module
from vllm_console.logs.file import LogFile


def texts(lines: list[module.Line]) -> list[str]:
    return [line.text for line in lines]


def test_missing_log_is_empty_and_then_followed_from_its_first_line(writer):
    log = LogFile(writer.path)
    assert log.tail(10) == []
    assert log.problem == ""
    writer.write(b"first\nsecond\n")
    assert texts(log.poll()) == ["first", "second"]
    assert log.poll() == []


def test_tail_before_and_after_agree(writer):
    writer.write(b"".join(b"line %d\n" % n for n in range(50_000)))
    log = LogFile(writer.path)
    tail = log.tail(30)
    assert texts(tail) == [f"line {n}" for n in range(49_970, 50_000)]
    above = log.before(tail[0].offset, 10)
    assert texts(above) == [f"line {n}" for n in range(49_960, 49_970)]
    assert log.after(above[0].offset, 10) == above
    assert texts(log.after(log.start, 2)) == ["line 0", "line 1"]
    assert log.before(log.start, 5) == []
    assert log.after(log.end, 5) == []


def test_whole_log_backwards_is_whole_log_forwards(writer):
    # Lines longer and shorter than a block, empty lines, and lines that end at a block boundary.
    sizes = [0, 1, module.BLOCK - 1, module.BLOCK, 3, 0, 0, 3 * module.BLOCK + 7, 5, module.BLOCK - 6, 12]
    writer.write(b"".join(b"x" * size + b"\n" for size in sizes) + b"unfinished")
    log = LogFile(writer.path)
    forwards = log.after(log.start, 1000)
    assert log.before(log.end, 1000) == forwards
    assert [line.end - line.offset - 1 for line in forwards[:-1]] == sizes
    assert forwards[-1].text == "unfinished"
    assert not forwards[-1].complete


def test_unfinished_line_is_in_the_tail_and_polled_once_finished(writer):
    writer.write(b"done\nhalf")
    log = LogFile(writer.path)
    assert texts(log.tail(5)) == ["done", "half"]
    assert log.poll() == []
    writer.write(b" a line\nnext")
    assert texts(log.poll()) == ["half a line"]
    writer.write(b"\n")
    assert texts(log.poll()) == ["next"]


def test_huge_sparse_file_is_read_with_little_memory(writer):
    with writer.path.open("wb") as file:
        file.write(b"begin\n")
        file.seek(64 * 1024**3)
        file.write(b"\nend\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log = LogFile(writer.path)
    assert log.tail(1)[0].text == "end"
    assert log.after(log.start, 1)[0].text == "begin"
    assert len(log.tail(1000)) < 1000, "what one call reads is bounded"
    assert log.search("nowhere", log.end, backwards=True).done is False
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 200 * 1024


def test_bytes_without_newlines_break_alike_in_both_directions(writer, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 1024)
    monkeypatch.setattr(module, "WINDOW", 4096)
    writer.write(b"first\n" + b"a" * 21_000 + b"\n" + b"b" * 4090 + b"\n" + b"c" * 9000)
    log = LogFile(writer.path)
    forwards = log.after(log.start, 1000)
    backwards = log.before(log.end, 1000)
    assert [(line.offset, line.end) for line in forwards] == [(line.offset, line.end) for line in backwards]
    assert forwards[0].text == "first"
    assert all(left.end == right.offset for left, right in itertools.pairwise(forwards))


def test_ten_megabyte_line_is_cut_with_a_mark(writer):
    writer.write(b"a\n" + b"x" * 10 * 1024 * 1024 + b"\nb\n")
    log = LogFile(writer.path)
    lines = log.tail(3)
    assert [lines[0].text, lines[2].text] == ["a", "b"]
    assert lines[1].text.endswith("… [cut: a line of 10 MiB]")
    assert len(lines[1].text) < 2100


def test_only_a_line_above_the_limit_is_cut_with_a_mark(writer):
    writer.write(b"y" * 2001 + b"\n" + b"y" * 2000 + b"\n")
    long, fits = LogFile(writer.path).tail(2)
    assert "cut: a line of" in long.text
    assert fits.text == "y" * 2000


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"caf\xe9 \xff\xfe", "caf� ��"),
        ("naïve 日本".encode(), "naïve 日本"),
        (b"\x1b[36m(EngineCore pid=1)\x1b[0;0m hi\x1b]0;title\x07", "(EngineCore pid=1) hi"),
        (b"nul\x00 in\x00side", "nul inside"),
        (b"\x9b31mcsi \xc2\x9b31mred", "�31mcsi red"),
        (b"dos line\r", "dos line"),
        (b"\rLoading:  0%\rLoading: 50%\rLoading: 100%", "Loading: 100%"),
        (b"\r" + b"Loading: 10%\r" * 20_000 + b"Loading: 99%", "Loading: 99%"),
        ("right \u202eto left".encode(), "right to left"),
        (b"tab\there", "tab    here"),
    ],
)
def test_control_characters_are_sanitized(writer, raw, shown):
    writer.write(raw + b"\n")
    assert texts(LogFile(writer.path).tail(1)) == [shown]


def test_secrets_are_redacted_in_every_read(writer):
    writer.write(b"token hf_abcdef\n" * 3)

    def clean(text: str) -> str:
        return text.replace("hf_abcdef", "***")

    log = LogFile(writer.path, clean=clean)
    found = [*log.tail(1), *log.before(log.end, 1), *log.after(log.start, 1)]
    writer.write(b"token hf_abcdef\n")
    found += log.poll()
    assert texts(found) == ["token ***"] * 4
    assert log.search("hf_abcdef", log.start, max_bytes=10**9).line is None


def test_search_forwards_and_backwards_finds_every_match(writer):
    writer.write(b"".join(b"%s %d\n" % (b"needle" if n % 1000 == 7 else b"hay", n) for n in range(20_000)))
    log = LogFile(writer.path)
    expected = [f"needle {n}" for n in range(7, 20_000, 1000)]
    assert walk(log, "needle", log.start, backwards=False) == expected
    assert walk(log, "needle", log.end, backwards=True) == expected[::-1]


def walk(log: LogFile, pattern: module.Pattern, at: int, backwards: bool) -> list[str]:
    matches = []
    while True:
        found = log.search(pattern, at, backwards, max_bytes=10_000)
        if found.line:
            matches.append(found.line.text)
        if found.done:
            return matches
        assert found.next_offset != at, "every step makes progress"
        at = found.next_offset


def test_search_is_bounded_per_call(writer):
    writer.write(b"hay\n" * 100_000 + b"needle\n")
    log = LogFile(writer.path)
    step = log.search("needle", log.start, max_bytes=1000)
    assert step.line is None
    assert not step.done
    assert step.next_offset < 100_000


def test_search_text_is_literal_with_smart_case_or_a_pattern(writer):
    writer.write(b"Error (a+b)\nerror\nERROR [x]\n")
    log = LogFile(writer.path)
    assert walk(log, "error", log.start, False) == ["Error (a+b)", "error", "ERROR [x]"]
    assert walk(log, "Error", log.start, False) == ["Error (a+b)"]
    assert walk(log, "(a+b)", log.start, False) == ["Error (a+b)"]
    assert walk(log, re.compile(r"\[x\]$"), log.start, False) == ["ERROR [x]"]


def test_search_uses_the_displayed_text(writer):
    writer.write(b"\x1b[31mfailed\x1b[0m to start\nbar 10%\rbar 20%\n")
    log = LogFile(writer.path)
    assert walk(log, "failed to start", log.start, False) == ["failed to start"]
    assert walk(log, "bar 10%", log.start, False) == []


def test_count_of_lines_between_offsets(writer):
    writer.write(b"one\ntwo\n")
    log = LogFile(writer.path)
    low = log.end
    writer.write(b"three\nfour\nfi")
    assert log.count(low, log.refresh()) == (2, log.end)


def test_unreadable_path_is_a_message_not_an_exception(tmp_path):
    folder = LogFile(tmp_path)
    assert folder.tail(3) == []
    assert "not a regular file" in folder.problem
    nowhere = LogFile(Path("/nonexistent/folder/server.log"))
    assert nowhere.tail(3) == []
    assert nowhere.poll() == []
