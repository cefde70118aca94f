"""Tables: columns as wide as needed, and a last one that wraps."""

from __future__ import annotations

import pytest

from vllm_console.ui.theme import WARN
from vllm_console.ui.widgets.table import table

COLUMNS = (">GPU", "NAME", "WHY")
ROWS = [["0", "RTX A6000", ("too hot, so that its clock is lowered", WARN)], ["11", "L40S", ""]]


def text(width: int) -> list[str]:
    return [strip.text.rstrip() for strip in table(COLUMNS, ROWS, width)]


def test_columns_are_aligned_under_their_headings() -> None:
    assert text(80) == [
        " GPU  NAME       WHY",
        "   0  RTX A6000  too hot, so that its clock is lowered",
        "  11  L40S",
    ]


def test_last_column_wraps_beside_or_below_its_row() -> None:
    assert text(40)[1:4] == ["   0  RTX A6000  too hot, so that its", "                 clock is lowered", "  11  L40S"]
    below = text(20)
    assert below[:2] == [" GPU NAME", "   0 RTX A6000"]
    assert below[2] == "     too hot, so"


@pytest.mark.parametrize("width", [10, 20, 30, 60])
def test_table_keeps_its_width(width: int) -> None:
    assert all(strip.cell_length <= width for strip in table(COLUMNS, ROWS, width))


def test_table_without_rows_is_empty() -> None:
    assert table(COLUMNS, [], 80) == []


def test_outside_names_bring_no_escape_codes() -> None:
    assert "\x1b" not in table(COLUMNS, [["0", "\x1b[31mred", "\x1b]0;x\x07"]], 80)[1].text
