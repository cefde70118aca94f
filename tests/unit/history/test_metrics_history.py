"""History on disk: tiers, bounds, crashes, and invalid files."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sqlite3
import stat
import tracemalloc
from itertools import pairwise

import pytest
from msgspec.structs import replace

from fakes.endless_history import write_for_ever
from vllm_console.history.encoding import Base, decode_row, decode_scalars, encode_row, numbers_of, shape_of
from vllm_console.history.store import (
    TIERS,
    HistoryError,
    HistoryMissingError,
    HistoryReader,
    HistoryUnusableError,
    HistoryWriter,
    Stretch,
)
from vllm_console.metrics.parse import parse_metrics
from vllm_console.metrics.sample import Histogram, Responses, Sample

START = 1_790_000_000.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.sqlite"


@pytest.fixture
def filled(path, engine, sample):
    """Write ``seconds`` of samples, with KV cache usage peaking at every 37th second."""

    def fill(seconds, generation=1, start=START):
        writer = HistoryWriter(path)
        for second in range(seconds):
            usage = 0.95 if second % 37 == 0 else 0.1
            writer.append(sample(start + second, engine(usage=usage, generation=second * 10.0)), generation)
        writer.close()
        assert writer.trouble == ""
        return path

    return fill


def test_rows_with_equal_values_differ_in_time(path, engine, sample):
    """For example of an idle server: such rows are not decoded again, but a different row is."""
    writer, reader = HistoryWriter(path), HistoryReader(path)
    busy = engine(usage=0.5, generation=10.0)
    for second, one in enumerate([engine(usage=0.1), engine(usage=0.1), busy, busy, engine(usage=0.1)]):
        writer.append(sample(START + second, one), 1)
    found = reader.after(0)
    assert [entry.at - START for entry in found] == [0, 1, 2, 3, 4]
    assert [entry.sample.at for entry in found] == [entry.at for entry in found]
    assert [next(iter(entry.sample.engines.values())).kv_cache_usage for entry in found] == [0.1, 0.1, 0.5, 0.5, 0.1]
    writer.close()
    reader.close()


def test_written_rows_are_read_back(path, body):
    written = [
        parse_metrics(
            body(engines=[{"running": n, "usage": n / 8, "ttft": [0.01, 0.3] * n}, {"itl": [0.5] * n}]), START + n
        )
        for n in range(1, 6)
    ]
    writer, reader = HistoryWriter(path), HistoryReader(path)
    for number, item in enumerate(written):
        writer.append(item, generation=number)
        latest = reader.latest()
        assert (latest.at, latest.generation) == (item.at, number)
        assert latest.sample.kv_cache_tokens == item.kv_cache_tokens
        assert latest.sample.model_name == "tiny"
        for label, expected in item.engines.items():
            found = latest.sample.engines[label]
            assert replace(found, histograms={}) == replace(expected, histograms={})
            for key, histogram in expected.histograms.items():
                assert found.histograms[key].bounds == histogram.bounds
                assert found.histograms[key].counts == histogram.counts
                assert found.histograms[key].sum == pytest.approx(histogram.sum, abs=1e-6)
    assert [entry.at for entry in reader.since(START + 3)] == [START + 4, START + 5]
    assert [entry.at for entry in reader.after(reader.since(0)[2].sequence)] == [START + 4, START + 5]


def test_unreported_stays_unreported(path, engine, sample):
    writer = HistoryWriter(path)
    writer.append(sample(START, engine(running=None, usage=None), tokens=None))
    writer.append(Sample(START + 1, {}))
    first, second = HistoryReader(path).since(0)
    assert (first.sample.engines["0"].requests_running, first.sample.engines["0"].kv_cache_usage) == (None, None)
    assert first.sample.kv_cache_tokens is None
    assert second.sample == Sample(START + 1, {})


def test_coarser_rows_keep_peaks_and_last_totals(filled):
    rows = HistoryReader(filled(3600)).range(START, START + 3600, 60.0)
    assert len(rows) <= 62
    assert all(entry.at % 60 == 59 or entry is rows[0] or entry is rows[-1] for entry in rows)
    assert rows[-1].at == START + 3599
    assert rows[-1].sample.engines["0"].generation_tokens_total == 35990.0
    assert all(entry.sample.engines["0"].kv_cache_usage == 0.95 for entry in rows if 60 <= entry.at - START < 3540)


def test_short_range_has_one_second_rows(filled):
    rows = HistoryReader(filled(600)).range(START + 299, START + 359)
    assert [entry.at - START for entry in rows] == list(range(300, 360))


def test_range_has_at_most_a_row_for_each_step(filled):
    reader = HistoryReader(filled(1000))
    for step in (1000.0, 500.0, 143.0, 11.0):
        rows = reader.range(START, START + 1000, step)
        assert 0 < len(rows) <= 1000 // step + 2
        assert rows[-1].at == START + 999
        assert [entry.at for entry in rows] == sorted(entry.at for entry in rows)


def test_restart_is_a_boundary(filled):
    filled(100, generation=1)
    rows = HistoryReader(filled(100, generation=2, start=START + 130)).range(START, START + 400, 8.0)
    assert [entry.generation for entry in rows] == sorted(entry.generation for entry in rows)
    last_of_first = max(entry.at for entry in rows if entry.generation == 1)
    assert last_of_first == START + 99


def test_reset_counters_and_a_leaving_engine_lose_nothing_in_coarse_rows(path, engine, sample):
    """As after a change of the number of engines, or an automatic restart, which keeps its generation."""
    writer = HistoryWriter(path)
    leaving = [engine(waiting=50.0, generation=70.0)]
    for second, total in enumerate((1000.0, 5000.0, 6000.0, 10.0, 100.0)):
        engines = [engine(waiting=0.0, generation=total)] + (leaving if second < 2 else [])
        writer.append(sample(START + second, *engines), 1)
    writer.close()
    reader = HistoryReader(path)
    for tier in TIERS[1:]:
        rows = [
            {label: (one.requests_waiting, one.generation_tokens_total) for label, one in entry.sample.engines.items()}
            for entry in reader.read(Stretch(tier, START - 1, START + 60), 10)
        ]
        assert rows == [{"0": (0.0, 5000.0), "1": (50.0, 70.0)}, {"0": (0.0, 6000.0)}, {"0": (0.0, 100.0)}]
    reader.close()


def test_tables_keep_a_fixed_number_of_rows(path, engine, sample, monkeypatch):
    from vllm_console.history import store
    from vllm_console.history.store import Tier

    tiers = (Tier("seconds", 1.0, 50, 10**6), Tier("tens", 10.0, 20, 10**6), Tier("minutes", 60.0, 5, 10**6))
    monkeypatch.setattr(store, "TIERS", tiers)
    monkeypatch.setattr(store, "_PRUNE_EVERY", 10)
    monkeypatch.setattr(store, "_TIDY_EVERY", 60)
    writer = HistoryWriter(path)
    for second in range(1200):
        writer.append(sample(START + second, engine(generation=float(second))))
    writer.close()
    with sqlite3.connect(path) as connection:
        counts = {tier.table: connection.execute(f"SELECT count(*) FROM {tier.table}").fetchone()[0] for tier in tiers}
        bases = connection.execute("SELECT count(*) FROM bases").fetchone()[0]
    connection.close()
    assert 50 <= counts["seconds"] <= 60
    assert 20 <= counts["tens"] <= 22
    assert 5 <= counts["minutes"] <= 7
    assert bases <= 10
    assert HistoryReader(path).latest().at == START + 1199


def test_many_engines_keep_fewer_rows_within_the_byte_limit(path, engine, sample, monkeypatch):
    from vllm_console.history import store
    from vllm_console.history.store import Tier

    monkeypatch.setattr(store, "TIERS", tuple(Tier(name, 1.0, 1000, 20_000) for name in ("seconds", "tens", "minutes")))
    monkeypatch.setattr(store, "_PRUNE_EVERY", 10)
    rng = random.Random(3)
    writer = HistoryWriter(path)
    for second in range(400):
        writer.append(sample(START + second, *(engine(generation=rng.random() * 1e9) for _ in range(16))))
    with sqlite3.connect(path) as connection:
        size, count = connection.execute("SELECT sum(length(data)), count(*) FROM seconds").fetchone()
    connection.close()
    assert 30 < count < 400
    assert size < 30_000


def test_oversized_sample_is_stored_as_one_engine(path, engine, sample):
    writer = HistoryWriter(path)
    writer.append(sample(START, *(engine(running=1.0, generation=2.0, ttft=(1, 2, 3, 4)) for _ in range(800))))
    found = HistoryReader(path).latest().sample
    assert list(found.engines) == ["all"]
    assert found.engines["all"].requests_running == 800.0
    assert found.engines["all"].histograms["ttft"].count == 3200.0


def test_missing_folder_is_reported_without_a_crash(tmp_path, engine, sample):
    folder = tmp_path / "later"
    writer = HistoryWriter(folder / "history.sqlite")
    writer.append(sample(START, engine()))
    assert "No such file" in writer.trouble
    folder.mkdir()
    writer.append(sample(START + 10, engine()))
    assert [entry.at - START for entry in HistoryReader(folder / "history.sqlite").since(0)] == [0, 10]


def test_clock_set_back_loses_nothing(path, engine, sample):
    writer, reader = HistoryWriter(path), HistoryReader(path)
    for second in range(30):
        writer.append(sample(START + second, engine(running=1.0)))
    seen = reader.latest().sequence
    for second in range(5):
        writer.append(sample(START - 3600 + second, engine(running=2.0)))
    assert reader.latest().at == START - 3600 + 4
    assert [entry.sample.engines["0"].requests_running for entry in reader.after(seen)] == [2.0] * 5
    times = [entry.at for entry in reader.range(START - 7200, START + 100)]
    assert times == sorted(times)
    assert times[-1] == START - 3600 + 4


def test_only_the_owner_may_read(path, engine, sample):
    HistoryWriter(path).append(sample(START, engine()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_readers_report_errors(path):
    with pytest.raises(HistoryMissingError):
        HistoryReader(path).latest()
    path.write_bytes(b"")
    with pytest.raises(HistoryMissingError):
        HistoryReader(path).latest()
    path.write_bytes(b"this is not a database, however long it may be" * 100)
    with pytest.raises(HistoryUnusableError, match="damaged") as caught:
        HistoryReader(path).since(0)
    assert "\n" not in str(caught.value)
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE addresses (name TEXT)")
    connection.close()
    with pytest.raises(HistoryUnusableError, match="not a history"):
        HistoryReader(path).range(0, 1)


def test_newer_version_is_reported_and_moved_aside(path, engine, sample):
    HistoryWriter(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(HistoryUnusableError, match="newer"):
        HistoryReader(path).latest()
    writer = HistoryWriter(path)
    writer.append(sample(START, engine()))
    assert "newer" in writer.notice
    assert HistoryReader(path).latest().at == START
    assert path.with_name(path.name + ".broken").exists()


@pytest.mark.parametrize("damage", ["garbage", "middle"])
def test_damaged_file_is_moved_aside_and_recreated(filled, engine, sample, damage):
    path = filled(200)
    data = bytearray(path.read_bytes())
    data[0 if damage == "garbage" else 4096 :] = random.Random(1).randbytes(len(data))
    path.write_bytes(data)
    reader = HistoryReader(path)
    with pytest.raises(HistoryUnusableError, match="damaged"):
        reader.since(0)
    writer = HistoryWriter(path)
    for second in range(70):  # damage inside is found at the latest when old rows are removed
        writer.append(sample(START + 1000 + second, engine()))
    assert writer.trouble == ""
    assert "moved" in writer.notice
    assert reader.latest().at == START + 1069


def test_damaged_rows_without_a_time_are_skipped(path, filled):
    filled(100)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'at REAL NOT NULL', 'at REAL')")
    connection.close()
    with sqlite3.connect(path) as connection:
        for tier in TIERS:
            query = f"SELECT min(sequence), max(sequence), avg(sequence) FROM {tier.table}"
            for sequence in connection.execute(query).fetchone():
                connection.execute(f"UPDATE {tier.table} SET at = NULL WHERE sequence = ?", (round(sequence),))
    connection.close()
    reader = HistoryReader(path)
    for step in (0.0, 20.0):
        rows = reader.range(START - 1, START + 100, step)
        assert rows[0].at < START + 30
        assert rows[-1].at == START + 98
    reader.close()


def test_locked_file_is_reported_and_retried(filled, engine, sample):
    path = filled(5)
    writer = HistoryWriter(path)
    writer._connection.execute("PRAGMA busy_timeout = 1")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    writer.append(sample(START + 100, engine()))
    assert "history" not in writer.notice
    assert writer.trouble
    writer.append(sample(START + 101, engine()))
    holder.execute("ROLLBACK")
    holder.close()
    writer.append(sample(START + 106, engine()))
    assert writer.trouble == ""
    assert [entry.at - START for entry in HistoryReader(path).since(START + 50)] == [100, 101, 106]


def test_exclusive_lock_is_not_an_error_for_a_reader(filled):
    path = filled(5)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("DELETE FROM seconds")
    reader = HistoryReader(path)
    with pytest.raises(HistoryError, match="right now"):
        reader.latest()
    holder.execute("ROLLBACK")
    holder.close()
    assert reader.latest().at == START + 4


def test_samples_are_buffered_while_the_disk_is_full(path, body):
    writer = HistoryWriter(path)
    text = body()
    writer.append(parse_metrics(text, START))
    pages = writer._connection.execute("PRAGMA page_count").fetchone()[0]
    writer._connection.execute(f"PRAGMA max_page_count = {pages}")
    rng = random.Random(2)
    second = 0
    while not writer.trouble:
        second += 1
        bounds = (*sorted(rng.random() for _ in range(200)), float("inf"))
        engine = parse_metrics(text, 0.0).engines["0"]
        engine = replace(engine, histograms={"ttft": Histogram(bounds, tuple(map(float, range(201))), 1.0)})
        writer.append(Sample(START + second, {"0": engine}))
        assert second < 500
    assert "full" in writer.trouble
    # The next connection has no such limit, as if space had been freed.
    writer.append(parse_metrics(text, START + second + 10))
    assert writer.trouble == ""
    assert [entry.at - START for entry in HistoryReader(path).since(START)] == [*range(1, second + 1), second + 10]


def test_removed_file_is_recreated(path, engine, sample):
    writer, reader = HistoryWriter(path), HistoryReader(path)
    writer.append(sample(START, engine()))
    assert reader.latest().at == START
    for file in path.parent.glob(path.name + "*"):
        file.unlink()
    with pytest.raises(HistoryError):
        reader.latest()
    writer.append(sample(START + 1, engine()))
    assert [entry.at for entry in reader.since(0)] == [START + 1]


def test_kill_at_any_moment_leaves_a_valid_file(path, engine, sample):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=write_for_ever, args=(path, START, started), daemon=True)
    process.start()
    assert started.wait(120)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    reader = HistoryReader(path)
    rows = reader.since(0)
    assert len(rows) >= 30
    assert [entry.at for entry in rows] == [rows[0].at + n for n in range(len(rows))]
    writer = HistoryWriter(path)
    writer.append(sample(rows[-1].at + 1, engine()))
    assert (writer.trouble, writer.notice) == ("", "")
    assert reader.latest().sequence > rows[-1].sequence


def test_coarser_steps_continue_after_a_kill(path, engine, sample):
    first = HistoryWriter(path)
    for second in range(35):
        first.append(sample(START + second, engine(usage=0.9 if second == 32 else 0.1, generation=float(second))))
    first._connection.close()  # killed: what close() would have written is lost
    second_writer = HistoryWriter(path)
    for second in range(35, 65):
        second_writer.append(sample(START + second, engine(usage=0.1, generation=float(second))))
    second_writer.close()
    with sqlite3.connect(path) as connection:
        times = [row[0] - START for row in connection.execute("SELECT at FROM tens ORDER BY sequence")]
    connection.close()
    assert times[:4] == [9, 19, 29, 39]


def test_reader_keeps_nothing_of_old_runs(path, body):
    """Every restart begins a new base row of about 8 KiB: 120 of them are read, and memory does not grow."""
    sampled = parse_metrics(body(engines=[{"running": 1, "ttft": [0.01, 0.3], "itl": [0.5]}]), START)
    writer, reader = HistoryWriter(path), HistoryReader(path)
    sequence, read, sizes = 0, 0, {}
    tracemalloc.start()
    try:
        for generation in range(1, 161):
            named = replace(sampled, at=START + 2 * generation, model_name=f"model-{generation}")
            writer.append(named, generation)
            for entry in reader.after(sequence):
                assert entry.generation == generation
                sequence, read = entry.sequence, read + 1
            if generation in (20, 40, 160):
                gc.collect()
                only = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/history/encoding.py")])
                sizes[generation] = sum(one.size for one in only.statistics("filename"))
    finally:
        tracemalloc.stop()
    assert sizes[160] < 1.5 * sizes[20], sizes
    assert read == 160
    reader.close()
    writer.close()


def test_span_is_read_from_the_coarsest_suitable_tables(filled):
    path = filled(4000)
    reader = HistoryReader(path)
    end = START + 4000
    parts = reader.stretches(START - 100, end, 20.0)
    assert [part.tier.table for part in parts] == ["minutes", "tens", "seconds"]
    assert parts[-1].end == end
    assert all(one.end == other.start for one, other in pairwise(parts))
    assert [part.tier.table for part in reader.stretches(START - 100, end, 1.0)] == ["minutes", "tens", "seconds"]
    assert [part.tier.table for part in reader.stretches(end - 60, end, 5.0)] == ["seconds"]
    reader.close()


@pytest.mark.parametrize("start", [-50.0, 0.0, 7.5, 1234.0, 1498.5, 5000.0])
def test_stretch_begins_right_after_its_start(filled, start):
    reader = HistoryReader(filled(1500))
    entries = reader.read(Stretch(TIERS[0], START + start, START + 2000), 3)
    assert [entry.at - START for entry in entries] == [second for second in range(1500) if second > start][:3]
    reader.close()


def test_joined_rows_keep_totals_peaks_and_restarts(path, engine, sample):
    writer = HistoryWriter(path)
    for second in range(600):
        tokens = 10.0 * (second if second < 307 else second - 307)  # the process restarted within the generation
        usage = 0.9 if second == 123 else 0.1
        writer.append(sample(START + second, engine(usage=usage, generation=tokens, ttft=(0, 1, second, second))), 1)
    writer.close()
    reader = HistoryReader(path)
    part = Stretch(TIERS[0], START - 1, START + 600)
    every, joined = reader.read(part, 1000), reader.read(part, 1000, 60.0)
    assert len(joined) < 15
    assert joined[-1] == every[-1]
    assert {entry.at for entry in joined} < {entry.at for entry in every}
    assert START + 306 in {entry.at for entry in joined}, "the last row before the counters fell"
    assert max(entry.sample.engines["0"].kv_cache_usage for entry in joined) == 0.9
    by_time = {entry.at: entry.sample.engines["0"] for entry in every}
    for entry in joined:
        found, whole = entry.sample.engines["0"], by_time[entry.at]
        assert found.generation_tokens_total == whole.generation_tokens_total
        assert found.histograms == whole.histograms
    reader.close()


def test_prefix_caching_is_stored(path, engine, sample):
    known = replace(sample(START, engine()), prefix_caching=False, prefix_step=1152)
    writer = HistoryWriter(path)
    writer.append(known, 1)
    writer.close()
    (entry,) = HistoryReader(path).since(0.0)
    assert (entry.sample.prefix_caching, entry.sample.prefix_step) == (False, 1152)


def test_responses_are_stored_if_known(path, engine, sample):
    answered = Responses(10.0, 3.0, 1.0, unauthorized=7.0)
    known = replace(sample(START, engine()), responses=answered)
    without_log = replace(known, at=START + 1, responses=Responses(11.0, 3.0, 1.0))
    writer = HistoryWriter(path)
    for one in (known, without_log, replace(known, at=START + 2, responses=None)):
        writer.append(one, 1)
    writer.close()
    found = HistoryReader(path).since(0.0)
    assert [one.sample.responses for one in found] == [answered, without_log.responses, None]

    numbers = numbers_of(known)
    base = Base(shape_of(known), numbers)
    for decode in (decode_row, decode_scalars):
        assert decode(base, START, encode_row(base, numbers)).responses == answered
