"""Startup reports stored on disk."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_launchers.vllm import startup_reports
from vllm_launchers.vllm.startup_reports import StartupReportStore, flags_digest, remembered

REPORTED = {"weights_gib": 15.4, "kv_gib": 20.1}
PREDICTED = {"weights_gib": 15.0, "kv_gib": 21.0}
FLAGS: dict[str, object] = {"max-model-len": 8192, "tensor-parallel-size": 2}
ENTRY = (
    b'{"version": 1, "entries": [{"model": "org/m", "gpu": "L40S", "engine": "0.33.0", "flags": "f", "shares": "s", '
    b'"at": %s, "reported": {"kv_tokens": %s}, "predicted": {}}]}'
)
NO_NUMBERS = (b"9" * 400, b"8" * 5000, b"1e999", b"-1e999", b"NaN")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "reports.json"


def keep(
    store: StartupReportStore, model: str = "org/m", gpu: str = "L40S", engine: str = "0.33.0", **more: object
) -> bool:
    return store.remember(remembered(model, gpu, engine, {**FLAGS, **more}, reported=REPORTED, predicted=PREDICTED))


def test_start_is_found_by_another_program(path: Path) -> None:
    assert keep(StartupReportStore(path))
    found = StartupReportStore(path).find("org/m", "L40S", "0.33.0", FLAGS)
    assert found is not None
    assert (found.reported, found.predicted, found.engine) == (REPORTED, PREDICTED, "0.33.0")


def test_nothing_is_found_for_another_model_gpu_or_split(path: Path) -> None:
    store = StartupReportStore(path)
    keep(store)
    assert store.find("org/other", "L40S", "0.33.0", FLAGS) is None
    assert store.find("org/m", "L4", "0.33.0", FLAGS) is None
    assert store.find("org/m", "L40S", "0.33.0", {**FLAGS, "tensor-parallel-size": 4}) is None
    assert store.find("org/m", "L40S", "0.33.0", {**FLAGS, "quantization": "fp8"}) is None
    assert store.find("org/m", "L40S", "0.33.0", {**FLAGS, "spec-method": "ngram"}) is None
    assert store.find("org/m", "L40S", "0.33.0", {**FLAGS, "speculative-config.method": "ngram"}) is None


def test_same_flags_precede_same_engine_and_newest(path: Path) -> None:
    store = StartupReportStore(path)
    keep(store, engine="0.32.0")
    keep(store, engine="0.33.0", **{"max-model-len": 4096})
    keep(store, engine="0.33.0", **{"max-model-len": 2048})
    same_flags = store.find("org/m", "L40S", "0.33.0", FLAGS)
    assert same_flags is not None
    assert same_flags.engine == "0.32.0"
    other_flags = store.find("org/m", "L40S", "0.33.0", {**FLAGS, "max-model-len": 1024})
    assert other_flags is not None
    assert other_flags.flags == flags_digest({**FLAGS, "max-model-len": 2048})


def test_irrelevant_flags_make_no_difference(path: Path) -> None:
    assert flags_digest({**FLAGS, "port": 8000, "served-model-name": "x"}) == flags_digest(FLAGS)
    assert flags_digest({**FLAGS, "max-num-seqs": 8}) != flags_digest(FLAGS)
    assert flags_digest(dict(reversed(FLAGS.items()))) == flags_digest(FLAGS)


def test_later_start_replaces_an_equal_one(path: Path) -> None:
    store = StartupReportStore(path)
    keep(store)
    store.remember(remembered("org/m", "L40S", "0.33.0", FLAGS, reported={"kv_gib": 1.0}, predicted={}))
    assert [entry.reported for entry in store.entries()] == [{"kv_gib": 1.0}]


def test_empty_report_is_not_stored(path: Path) -> None:
    store = StartupReportStore(path)
    empty = remembered("org/m", "L40S", "0.33.0", FLAGS, reported={"kv_gib": float("nan")}, predicted={})
    assert not store.remember(empty)
    assert not path.exists()


def test_oldest_entries_are_dropped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_reports, "MOST_ENTRIES", 5)
    store = StartupReportStore(path)
    for number in range(8):
        keep(store, model=f"org/m{number}")
    assert [entry.model for entry in store.entries()] == [f"org/m{number}" for number in range(3, 8)]


def test_file_is_private_and_holds_no_flags(path: Path) -> None:
    keep(StartupReportStore(path), **{"hf-overrides": "hidden"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["version"] == 1
    assert "hidden" not in path.read_text()
    assert sorted(file.name for file in path.parent.iterdir()) == ["reports.json", "reports.json.lock"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"version": 1}',
        b'{"version": 1, "entries": [1]}',
        b'{"version": 1, "entries": [{"model": 3}]}',
        b"[" * 100_000,
        b" " * (startup_reports.MOST_BYTES + 1),
        *(pytest.param(ENTRY % (number, b"1"), id=f"at {number[:3]!r}") for number in NO_NUMBERS),
        *(pytest.param(ENTRY % (b"1", number), id=f"figure {number[:3]!r}") for number in NO_NUMBERS),
    ],
)
def test_damaged_file_is_moved_aside(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    store = StartupReportStore(path)
    assert store.find("org/m", "L40S", "0.33.0", FLAGS) is None
    assert path.with_name("reports.json.damaged").read_bytes() == content
    assert keep(store)
    assert len(StartupReportStore(path).entries()) == 1


def test_entry_is_ignored_only_for_its_invalid_numbers(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(ENTRY % (b"1", b"9000"))
    assert [entry.reported for entry in StartupReportStore(path).entries()] == [{"kv_tokens": 9000.0}]


def test_file_of_a_newer_program_is_unchanged(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"version": 99, "entries": "of another kind"}')
    store = StartupReportStore(path)
    assert not keep(store)
    assert "of another kind" in path.read_text()


def test_nothing_is_kept_in_an_unwritable_folder(path: Path) -> None:
    path.parent.write_text("a file, no folder")
    store = StartupReportStore(path)
    assert not keep(store)
    assert store.entries() == []


def test_concurrent_programs_lose_nothing(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: keep(StartupReportStore(path), model=f"org/m{number}"), range(24)))
    assert len(StartupReportStore(path).entries()) == 24
