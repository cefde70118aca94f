from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from vllm_launchers.vllm.flags import cache as cache_module
from vllm_launchers.vllm.flags.cache import FlagCache, default_folder
from vllm_launchers.vllm.flags.flag_table import FlagsUnknownError


@pytest.fixture
def cache(tmp_path: Path) -> FlagCache:
    return FlagCache(tmp_path / "caches" / "flags")


@pytest.fixture
def engine(environment):
    environment.install()
    return environment.engine()


def file_of(cache: FlagCache) -> Path:
    (path,) = cache.folder.iterdir()
    return path


def test_learned_flags_are_read_back_from_the_cache(cache, engine, monkeypatch) -> None:
    assert cache.get(engine) is None
    table = cache.learn(engine)
    monkeypatch.setattr("vllm_launchers.vllm.flags.learn.learn_flags", lambda engine: pytest.fail("learned again"))
    assert cache.get(engine) == table
    assert FlagCache(cache.folder).get(engine) == table
    assert table.flags["speed"].default == "3"


def test_files_are_private_and_nothing_else_is_left(cache, engine) -> None:
    cache.learn(engine)
    cache.learn(engine)
    assert stat.S_IMODE(file_of(cache).stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["engine/arg_utils.py", "config/made.py", "entrypoints/openai/cli_args.py", "envs.py"])
def test_changed_source_is_learned_again(cache, engine, environment, name: str) -> None:
    cache.learn(engine)
    path = environment.site / "vllm" / name
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    assert cache.get(engine) is None
    cache.learn(engine)
    assert cache.get(engine) is not None


def test_another_version_or_build_at_the_path_is_learned_again(cache, engine, environment) -> None:
    cache.learn(engine)
    environment.version = "0.33.0"
    assert cache.get(environment.engine()) is None


def test_two_installations_do_not_affect_each_other(cache, engine, environment, tmp_path) -> None:
    other = type(environment)(tmp_path / "other")
    other.install()
    cache.learn(engine)
    cache.learn(other.engine())
    assert len(list(cache.folder.iterdir())) == 2
    assert cache.get(engine) is not None
    assert cache.get(other.engine()) is not None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"format": 1}',
        b'{"format": 999, "folder": "", "stamp": "", "table": null}',
        b'{"format": "1"}',
    ],
)
def test_damaged_file_is_learned_again(cache, engine, damage: bytes) -> None:
    cache.learn(engine)
    file_of(cache).write_bytes(damage)
    assert cache.get(engine) is None
    cache.learn(engine)
    assert cache.get(engine) is not None
    file_of(cache).write_bytes(damage)
    assert cache.get(engine) is not None, "it was read once"
    assert FlagCache(cache.folder).get(engine) is None


def test_truncated_file_is_never_accepted(cache, engine) -> None:
    cache.learn(engine)
    path = file_of(cache)
    data = path.read_bytes()
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        assert cache.get(engine) is None


def test_file_of_another_format_is_not_used(cache, engine, monkeypatch) -> None:
    cache.learn(engine)
    monkeypatch.setattr(cache_module, "FORMAT", cache_module.FORMAT + 1)
    assert cache.get(engine) is None


def test_unwritable_cache_does_not_prevent_learning(engine, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    cache = FlagCache(tmp_path / "file" / "flags")
    assert "speed" in cache.learn(engine).flags
    assert cache.get(engine) is None


def test_other_package_is_unknown(cache, environment) -> None:
    assert cache.get(environment.engine()) is None
    with pytest.raises(FlagsUnknownError):
        cache.learn(environment.engine())
    assert not cache.folder.exists()


def test_concurrent_reads_and_writes(cache, engine) -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        own = FlagCache(cache.folder)
        barrier.wait()
        try:
            for _ in range(3):
                own.learn(engine)
                assert own.get(engine) is not None
        except BaseException as error:  # noqa: BLE001 - a thread's failure is reported by the test
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [path.suffix for path in cache.folder.iterdir()] == [".json"]


def test_default_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine/vllm-console/flags"
    assert FlagCache().folder == default_folder()
