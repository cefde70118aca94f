"""The memory bar: its parts are to scale and distinguishable without color, and its values are never rounded up."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.ui.theme import to_ascii
from vllm_console.ui.widgets.memory_bar import budget_line, budget_rows, memory_bar, room_words, times
from vllm_launchers.plan.budget.budget import GpuBudget, MemoryBudget

GPU = GpuBudget(0, 48.0, weights_gib=16.0, overhead_gib=2.0, graphs_gib=1.0, kv_gib=20.0, others_gib=4.0)
BUDGET = MemoryBudget(
    weights_gib=16.0,
    overhead_gib=2.0,
    graphs_gib=1.0,
    kv_gib=20.0,
    kv_bytes_per_token=131_072,
    kv_tokens=163_840,
    max_model_len=4096,
    max_concurrency=40.0,
    concurrency_p95=86.2,
    per_gpu=(GPU,),
)
MARKS = "█≡▒╳·"


def text_of(parts):
    return "".join(part if isinstance(part, str) else part[0] for part in parts)


def lines(strips):
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


def test_parts_are_drawn_to_scale_and_in_order():
    bar = text_of(memory_bar(GPU, 48))
    assert len(bar) == 48
    assert [bar.count(mark) for mark in MARKS] == [16, 3, 20, 4, 5]
    assert list(dict.fromkeys(bar)) == list(MARKS)


def test_marks_differ_without_color_and_in_ascii():
    assert len({to_ascii(mark) for mark in MARKS}) == len(MARKS)
    assert "?" not in to_ascii(MARKS)


@pytest.mark.parametrize(
    "gpu",
    [
        replace(GPU, kv_gib=-3.2),
        replace(GPU, others_gib=30.0),
        replace(GPU, weights_gib=400.0),
    ],
)
def test_overflow_ends_in_a_mark_within_the_bar(gpu):
    bar = text_of(memory_bar(gpu, 20))
    assert len(bar) == 20
    assert bar.endswith("!")


def test_every_nonzero_part_is_visible():
    small = GpuBudget(0, 141.0, weights_gib=16.0, overhead_gib=0.6, graphs_gib=0.3, kv_gib=110.0, others_gib=0.5)
    full = replace(small, kv_gib=123.6)
    for gpu in (small, full):
        bar = text_of(memory_bar(gpu, 20))
        assert len(bar) == 20
        assert set("█≡▒╳") <= set(bar)


def test_completely_full_gpu_is_not_over():
    assert "!" not in text_of(memory_bar(replace(GPU, others_gib=9.0), 20))


@pytest.mark.parametrize("width", [56, 64, 76, 80, 120, 200])
def test_legend_is_above_its_values_within_the_width(width):
    head, row = lines(budget_rows(BUDGET, width, 8))
    assert max(len(head), len(row)) <= width
    figures = ["16.0", "3.0", "20.0", "4.0", "5.0", "48.0"]
    assert row.split()[-6:] == figures
    titles = (
        ["weights", "overhead", "KV cache", "others", "left"] if width >= 76 else ["wgt", "over", "KV", "oth", "left"]
    )
    for title, figure in zip(titles, figures, strict=False):
        assert row.index(f" {figure}") + 1 + len(figure) == head.index(title) + len(title)
    for mark in MARKS:
        assert mark in head


def test_gpus_are_listed_separately_if_there_is_room():
    gpus = tuple(replace(GPU, index=index, others_gib=3.0 * (index == 2)) for index in range(8))
    budget = replace(BUDGET, per_gpu=gpus)
    assert [row.split()[0] for row in lines(budget_rows(budget, 90, 8))[1:]] == list("01234567")
    together = lines(budget_rows(budget, 90, 2))
    assert [row.split()[0] for row in together[1:]] == ["0,1,3-7", "2"]
    tightest, more = lines(budget_rows(budget, 90, 1))[1:]
    assert tightest.split()[0] == "2", "the one with the least room is the one that stays"
    assert "1 more" in more


def test_one_gpu_stands_for_those_not_chosen_yet():
    assert lines(budget_rows(replace(BUDGET, per_gpu=(replace(GPU, index=None),)), 80, 2))[1].split()[0] == "each"


def test_without_a_gpu_weights_are_still_reported():
    (only,) = lines(budget_rows(replace(BUDGET, per_gpu=()), 80, 2))
    assert "16.0 GiB" in only
    assert "no GPU data to compare with" in only


def test_tokens_and_both_concurrencies_fit_the_width():
    assert text_of(room_words(BUDGET, 200)) == (
        "KV 20.0 GiB · 163,840 tokens · 40× concurrent at 4,096 tokens · 86× at the workload's p95 length"
    )
    assert text_of(room_words(BUDGET, 78)) == "KV 20.0 GiB · 164k tokens · 40× at 4,096 · 86× at p95"


def test_missing_memory_is_reported():
    missing = replace(BUDGET, kv_gib=-3.21, kv_tokens=0, max_concurrency=0.0)
    assert "3.2 GiB short" in text_of(room_words(missing, 80))
    short = replace(BUDGET, kv_gib=0.4, kv_tokens=3276, max_concurrency=0.8, concurrency_p95=None)
    assert "0.79×" in text_of(room_words(replace(short, max_concurrency=0.799), 80))
    assert "not one request" in text_of(room_words(short, 80))


@pytest.mark.parametrize(
    ("value", "text"), [(0.999, "0.99×"), (1.0, "1.0×"), (19.99, "19.9×"), (20.9, "20×"), (1234.5, "1,234×")]
)
def test_concurrency_is_rounded_down(value, text):
    assert times(value) == text


@pytest.mark.parametrize("width", [60, 80, 110])
def test_one_line_budget_keeps_its_text(width):
    (line,) = lines([budget_line(BUDGET, width)])
    assert len(line) <= width
    assert "164k tokens" in line or "163,840 tokens" in line
    assert "p95" in line
    assert "▒" in line or width < 70


def test_requests_refused_for_their_length_are_not_counted():
    short = replace(BUDGET, max_concurrency=1024.0, concurrency_p95=33.5)
    assert short.served_p95 is None
    assert "p95" not in text_of(room_words(short, 200))
    assert "p95" in text_of(room_words(BUDGET, 200))
