"""Pure drawing: what is in each cell."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from vllm_console.ui.terminal.lines import cells_of, changed_spans, line, text_between
from vllm_console.ui.theme import to_ascii, wants_ascii
from vllm_console.ui.widgets.chart import nice_ceiling, resample
from vllm_console.ui.widgets.draw import TextFrame, bar, fit, fit_words, paragraph, rule, wrap

RED = Style(color="red")
WORDS = st.text(alphabet="abc 日本é─😀", max_size=20)


def test_fit_pads_and_cuts_to_cells():
    assert fit("abc", 5) == "abc  "
    assert fit("abc", 5, ">") == "  abc"
    assert fit("abcdef", 4) == "abc…"
    assert fit("日本語", 4) == "日 …"
    assert fit("abc", 0) == ""


@given(WORDS, st.integers(1, 30), st.sampled_from("<>"))
def test_fit_always_takes_exactly_its_width(text, width, align):
    assert cell_len(fit(text, width, align)) == width


def test_fit_words_cuts_between_words():
    assert fit_words("one two three four", 18) == "one two three four"
    assert fit_words("one two three four", 17) == "one two three …"
    assert fit_words("one two three four", 14) == "one two …"
    assert fit_words("one two three four", 6) == "one t…", "too narrow for words"


@given(WORDS, st.integers(0, 30))
def test_fit_words_never_takes_more_than_its_width(text, width):
    assert cell_len(fit_words(text, width)) <= width


SENTENCE = "显存不足，请减少并发请求数或降低上下文长度。"


def test_wrap_counts_cells_and_loses_nothing():
    rows = wrap(SENTENCE * 5, 80)
    assert [cell_len(row) for row in rows] == [80, 80, 60]
    assert "".join(rows) == SENTENCE * 5
    assert wrap(f"GPU 0 {SENTENCE}", 21) == ("GPU 0 显存不足，请减", "少并发请求数或降低上", "下文长度。")
    assert [strip.cell_length for strip in paragraph(SENTENCE * 5, 80)] == [79, 79, 65]


def test_wrap_keeps_indentation_and_words():
    assert wrap("  one two  three", 9) == ("  one two", "three")
    assert wrap("", 9) == wrap("  ", 9) == ()
    assert wrap("a /models/a-long-path", 12) == ("a /models/a-", "long-path")
    assert wrap("123456789012 /models/a-long-path", 12) == ("123456789012", "/models/a-lo", "ng-path")


def test_wrap_reads_long_white_space_once():
    """An answer that degenerates into blanks once took seconds to wrap, at each redraw; 100,000 would take minutes."""
    assert wrap("a" + " " * 100_000, 80) == wrap("a" + "\t" * 10_000, 80) == ("a",)
    assert wrap(" " * 100_000, 80) == ()
    assert wrap(f"a{' ' * 100_000}b", 80) == ("a", "b")


def test_wrap_ends_the_last_row_with_an_ellipsis():
    assert wrap("one two three four", 9, 1) == ("one two …",)
    assert wrap("one two three four", 9, 2) == ("one two", "three …")
    assert wrap("显存不足" * 3, 9, 1) == ("显存不足…",)
    assert wrap("显存不足" * 3, 9, 2) == ("显存不足", "显存不足…")
    assert wrap("GPU 显存不足显存", 9, 1) == ("GPU 显存…",)
    assert wrap("/models/a-long-path", 9, 1) == ("/models/…",)
    assert wrap("at /models/a-long-path", 9, 1) == ("at …",)
    assert wrap("12345678 9", 9, 1) == ("12345678…",), "the word alone leaves no room for a space"


@given(WORDS, st.integers(2, 30), st.integers(1, 3))
def test_wrap_never_takes_more_than_its_width(text, width, most):
    rows = wrap(text, width)
    assert all(cell_len(row) <= width for row in (*rows, *wrap(text, width, most)))
    assert "".join(rows).replace(" ", "") == text.replace(" ", "")
    assert len(wrap(text, width, most)) == min(most, len(rows))


@given(st.text(max_size=20), st.integers(12, 80), st.text(max_size=30))
def test_rule_has_the_given_width(title, width, right):
    title, right = "".join(filter(str.isprintable, title)), "".join(filter(str.isprintable, right))
    assert rule(title, width, (right,)).cell_length == width


def test_bar_has_eighths():
    assert bar(0.5, 4) == "██  "
    assert bar(1.0, 4) == "████"
    assert bar(1.7, 4) == "████"
    assert bar(1 / 32, 4) == "▏   "
    assert bar(None, 4) == "    "


def test_resampling_keeps_peaks_and_sums_counts():
    assert resample((1.0, 5.0, 2.0, 3.0), 2, 0) == (5.0, 3.0)
    assert resample((1.0, 5.0, 2.0, 3.0), 2, 0, sum) == (6.0, 5.0)
    assert resample((1.0, None, 3.0), 6, 0) == (1.0, 1.0, None, None, 3.0, 3.0)
    assert resample((), 3, 0) == (None, None, None)
    assert resample((None, None, 1.0, None), 2, 0) == (None, 1.0)


@given(st.integers(0, 1000), st.integers(6, 300))
def test_chart_moves_by_whole_columns(first, columns):
    points = tuple(float(index * 7919 % 101) for index in range(2000))
    before = resample(points[first : first + 180], columns, first)
    after = resample(points[first + 1 : first + 181], columns, first + 1)
    moves = [before[by + 1 : -1] == after[1 : columns - 1 - by] for by in range(columns - 4)]
    assert any(moves), (before, after)


@pytest.mark.parametrize(("value", "top"), [(0, 1), (0.03, 0.03), (1, 1), (1.2, 1.5), (2100, 2500), (9.1, 10)])
def test_scales_end_at_round_numbers(value, top):
    assert nice_ceiling(value) == pytest.approx(top)


def spans(before: Strip, after: Strip) -> list[tuple[int, int]]:
    return list(changed_spans(before, after))


def test_only_changed_cells_are_repainted():
    assert spans(line("abc"), line("abc")) == []
    assert spans(line("ab", ("c", None)), line("a", "bc")) == []
    assert spans(line("abc"), line("abd")) == [(2, 3)]
    assert spans(line("a" * 40), line("b" + "a" * 38 + "b")) == [(0, 1), (39, 40)]
    assert spans(line("abcdef"), line("xbcdex")) == [(0, 6)]
    assert spans(line("abc"), line(("abc", RED))) == [(0, 3)]
    assert spans(line("abc"), line("ab")) == [(2, 3)]


def test_span_cuts_no_wide_character():
    assert spans(line("日本"), line("日x ")) == [(2, 4)]
    assert spans(line("ab本"), line("a日x")) == [(1, 4)]


@given(WORDS, WORDS)
def test_repainting_the_spans_gives_the_new_line(old, new):
    before, after = line(old), line(new)
    width = max(before.cell_length, after.cell_length)
    cells = cells_of(before.adjust_cell_length(width))
    target = cells_of(after.adjust_cell_length(width))
    for start, end in spans(before, after):
        cells[start:end] = target[start:end]
    assert cells == target


def by_cell(text: str) -> list[str]:
    """Each cell's character with its accents; the second cell of a wide character is empty."""
    found: list[str] = []
    for char in text:
        if cell_len(char):
            found += [char, *[""] * (cell_len(char) - 1)]
        else:
            found[max(at for at, one in enumerate(found) if one)] += char
    return found


ACCENTED = st.text(alphabet="ab日か─\u3099\u0301", max_size=12).map("x{}".format)


@given(ACCENTED, ACCENTED)
@example("xか\u3099", "xき\u3099")  # as many characters as cells, but not one in each
def test_accent_is_repainted_with_its_character(old, new):
    before, after = by_cell(old), by_cell(new)
    width = max(len(before), len(after))
    before, after = (one + [" "] * (width - len(one)) for one in (before, after))
    for start, end in spans(line(old), line(new)):
        before[start:end] = after[start:end]
        assert text_between("".join(after), start, end) == "".join(after[start:end])
    assert before == after


def test_cut_wide_character_is_a_space():
    assert [text_between("a日\u0301b", *cut) for cut in ((0, 2), (1, 3), (2, 4), (2, 3))] == [
        "a ",
        "日\u0301",
        " b",
        " ",
    ]


@given(st.text(max_size=30))
def test_ascii_text_takes_the_same_cells(text):
    text = "".join(filter(str.isprintable, text))
    assert to_ascii(text).isascii()
    assert cell_len(to_ascii(text)) == cell_len(text)


def test_locale_decides_about_ascii():
    assert wants_ascii({"LANG": "C"})
    assert wants_ascii({"LANG": "en_US.UTF-8", "LC_ALL": "POSIX"})
    assert not wants_ascii({"LANG": "C.UTF-8"})
    assert not wants_ascii({"LANG": "de_DE.utf8"})
    assert not wants_ascii({})


def test_cells_of_a_wide_character():
    assert [text for text, _ in cells_of(Strip([Segment("a日b")]))] == ["a", "日", "", "b"]


@pytest.mark.parametrize(("width", "height"), [(2, 2), (12, 3), (40, 8)])
def test_frame_has_its_size_with_any_content(width, height):
    lines = [rule("Title", width - 2, key="1"), *(line("x" * 60) for _ in range(12))]
    framed = TextFrame().around(lines, width, height)
    assert [strip.cell_length for strip in framed] == [width] * height
    assert framed[0].text[0] + framed[0].text[-1] + framed[-1].text[0] + framed[-1].text[-1] == "╭╮╰╯"


def test_colored_frame_does_not_change_the_title():
    framed = TextFrame().around([rule("Title", 30, ("99%",))], 32, 4, RED)
    styles = {text.strip(): style for text, style, _ in framed[0] if text.strip()}
    assert styles["Title"] != RED
    assert styles["╭"] == styles["╮"] == RED
    assert all(style == RED for text, style, _ in framed[0] if "─" in text)


def test_unchanged_line_keeps_its_row_in_the_frame():
    box, lines = TextFrame(), [rule("Title", 18), line("one"), line("two")]
    before = box.around(lines, 20, 6)
    after = box.around([*lines[:2], line("three")], 20, 6)
    assert [one is other for one, other in zip(before, after, strict=True)] == [True, True, False, True, True, True]
    assert "three" in after[2].text
    assert box.around(lines, 20, 6, RED)[1].text == before[1].text
    assert box.around(lines, 20, 6, RED)[1] is not before[1], "another color"
