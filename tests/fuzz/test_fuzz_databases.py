"""RunStore and history with changed, truncated and invented bytes: a result, or one of the package's errors."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_console.history import store
from vllm_console.history.gpu_history import GpuHistoryReader, GpuHistoryWriter, card_of, last_cards
from vllm_console.history.store import HistoryError
from vllm_console.metrics.parse import parse_metrics
from vllm_console.runs.store import Run, RunHead, RunStore, RunStoreError
from vllm_launchers.host.gpu.host import Gpu, Host

MOST = int(os.environ.get("VLLMCONSOLE_FUZZ_LONG") or 0)
DAMAGES = st.lists(
    st.tuples(st.integers(0, 60_000), st.binary(min_size=1, max_size=40)), min_size=1, max_size=6
) | st.integers(0, 60_000)
GPU = Gpu(0, uuid="GPU-a", utilization=90.0, power_w=250.5, power_limit_w=300.0)
PAGE = """vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
"""


def examples(count: int) -> settings:
    return settings(
        max_examples=MOST or count,
        deadline=None,
        derandomize=not MOST,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A run database and a history, as stored on disk."""
    folder = tmp_path_factory.mktemp("good")
    flags = {"max-num-seqs": 256}
    RunStore(folder / "runs").enter([RunHead(f"k{n}", "chat", n, 1000.0 * n, flags=flags) for n in range(1, 30)])
    writer = store.HistoryWriter(folder / "history")
    for second in range(100):
        writer.append(parse_metrics(PAGE, 1e9 + second))
    writer.close()
    gpus = GpuHistoryWriter(folder / "gpus")
    for second in range(0, 3000, 5):
        gpus.append(Host(gpus=(GPU,)), 1e9 + second)
    gpus.close()
    files = {}
    for name in ("runs", "history", "gpus"):
        with sqlite3.connect(folder / name) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        files[name] = (folder / name).read_bytes()
        assert len(files[name]) > 8000
    return files


def damaged(data: bytes, damage: object) -> bytes:
    """Bytes with changes at some places, or truncated."""
    if isinstance(damage, int):
        return data[: damage % len(data)]
    changed = bytearray(data)
    for at, put in damage:  # type: ignore[attr-defined]
        at %= len(data)
        changed[at : at + len(put)] = put
    return bytes(changed)


def test_damaged_run_store_is_read_or_reported(good: dict[str, bytes]) -> None:
    @examples(60)
    @given(DAMAGES)
    def run(damage: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "runs.sqlite")
            path.write_bytes(damaged(good["runs"], damage))
            for read_only in (True, False):
                try:
                    stored = RunStore(path, read_only=read_only)
                    for found in stored.runs():
                        assert isinstance(found.flags, dict)
                        stored.windows(found.id)
                except RunStoreError:
                    continue

    run()


def test_damaged_history_is_read_or_reported(good: dict[str, bytes]) -> None:
    @examples(60)
    @given(DAMAGES)
    def run(damage: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "history.sqlite")
            path.write_bytes(damaged(good["history"], damage))
            reader = store.HistoryReader(path)
            try:
                reader.latest()
                reader.range(0.0, 2e9)
            except HistoryError:
                pass
            finally:
                reader.close()
            store.HistoryWriter(path).close()

    run()


VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=3)
KEYS = st.sampled_from([name for name in Run.__struct_fields__ if name != "key"])


@examples(60)
@given(
    st.dictionaries(KEYS, VALUES | st.lists(VALUES, max_size=3), max_size=6),
    st.sampled_from(["", "[", "[]", "[" * 90_000]),
)
def test_run_with_any_document_matches_its_columns(document: dict[str, object], instead: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runs.sqlite")
        RunStore(path).enter([RunHead("k", "chat", 3, 1000.0, flags={"a": 1})])
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE runs SET document = ?", (instead or json.dumps(document),))
        (found,) = RunStore(path).runs()
    assert (found.key, found.server, found.generation, found.started_at) == ("k", "chat", 3, 1000.0)
    assert isinstance(found.flags, dict)
    assert all(isinstance(gpu, int) for gpu in found.gpus)


def test_damaged_gpu_history_is_read_or_reported(good: dict[str, bytes]) -> None:
    @examples(60)
    @given(DAMAGES)
    def run(damage: object) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "gpus.sqlite")
            path.write_bytes(damaged(good["gpus"], damage))
            reader = GpuHistoryReader(path, card_of(GPU))
            try:
                last_cards(path)
                for step in (5.0, 480.0):
                    for part in reader.stretches(1e9, 1e9 + 3000, step):
                        assert all(entry.card.index >= 0 for entry in reader.read(part, 400))
            except HistoryError:
                pass
            reader.close()
            writer = GpuHistoryWriter(path)
            writer.append(Host(gpus=(GPU,)), 1e9 + 6000)
            writer.close()

    run()
