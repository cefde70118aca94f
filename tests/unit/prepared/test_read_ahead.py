"""Reading the weights into the page cache while another generation serves."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_launchers.prepared import bootstrap
from vllm_launchers.prepared.bootstrap import ReadAhead, read_ahead_files

CHUNK = 1000


class PageCache:
    """The page cache: chunks by offset; chunks that were read stay unless ``keeps`` is false."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: set[int] = set()
        self.reads: list[int] = []
        self.keeps, self.tells = True, True
        monkeypatch.setattr(bootstrap, "CHUNK", CHUNK)
        monkeypatch.setattr(bootstrap, "is_cached", self._is_cached)
        monkeypatch.setattr(bootstrap.os, "preadv", self._read)

    def _is_cached(self, descriptor: int, offset: int, length: int) -> bool:
        if not self.tells:
            raise OSError(errno.EOPNOTSUPP, "no page cache")
        return offset in self.held

    def _read(self, descriptor: int, buffers: list[bytearray], offset: int) -> int:
        self.reads.append(offset)
        if self.keeps:
            self.held.add(offset)
        return len(buffers[0])


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> PageCache:
    return PageCache(monkeypatch)


def read(tmp_path: Path, limit: int = 10**9) -> ReadAhead:
    """Read ahead a file of four and a half chunks."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(4 * CHUNK + 500))
    reader = ReadAhead([file], limit)
    reader.run()
    return reader


def test_only_uncached_parts_are_read(cache: PageCache, tmp_path: Path) -> None:
    cache.held = {0, 2000}
    reader = read(tmp_path)
    assert cache.reads == [1000, 3000, 4000]
    assert (reader.read, reader.cached, reader.size) == (2500, 2000, 4500)
    cache.reads.clear()
    assert read(tmp_path).read == 0
    assert cache.reads == []


def test_reading_is_limited_to_available_memory(cache: PageCache, tmp_path: Path) -> None:
    assert read(tmp_path, limit=2500).read == 2000


def test_reading_stops_if_pages_are_not_kept_or_unknown(cache: PageCache, tmp_path: Path) -> None:
    cache.keeps = False
    assert read(tmp_path).read == CHUNK
    cache.tells = False
    assert read(tmp_path).read == 0


def test_progress_and_result_are_reported(cache: PageCache, tmp_path: Path) -> None:
    reader = read(tmp_path)
    reader.start()
    assert reader.finish(600, lambda _: None) == "weights read ahead: 0.00 of 0.00 GiB, 0.00 GiB were cached"


def configuration(folder: Path, load_format: str = "auto") -> SimpleNamespace:
    model = SimpleNamespace(model=str(folder), revision=None)
    return SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format=load_format, download_dir=None))


def test_files_read_by_vllm(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "consolidated.safetensors", "pytorch_model.bin"):
        (tmp_path / name).touch()
    assert [path.name for path in read_ahead_files(configuration(tmp_path))] == ["a.safetensors", "b.safetensors"]
    assert read_ahead_files(configuration(tmp_path, "dummy")) == []
    index = {"weight_map": {"x": "b.safetensors", "y": "b.safetensors", "z": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in read_ahead_files(configuration(tmp_path))] == ["b.safetensors"]


def test_available_memory_is_known() -> None:
    assert bootstrap.available_memory() > 0
