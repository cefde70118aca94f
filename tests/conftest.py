"""For all tests: a person's own folders are never touched, and fakes are had as fixtures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from fakes import fake_fleet, made_runs, terminal


SLOWEST = ("real", "faults", "terminal", "commands")
"""The folders to begin with, so that nothing long is left for the end where several processes share the tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first."""

    def rank(item: pytest.Item) -> int:
        folders = item.path.relative_to(item.config.rootpath / "tests").parts
        return SLOWEST.index(folders[0]) if folders[0] in SLOWEST else len(SLOWEST)

    items.sort(key=rank)


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Config, state and cache of every test lie in folders of its own; the clock's zone is UTC; colours are on."""
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        folder = tmp_path_factory.mktemp(name.lower().split("_")[1])
        folder.chmod(0o700)
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("TERM", "xterm-256color")
    time.tzset()
    for name in ("NO_COLOR", "VLLMCONSOLE_STATE"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def fakes() -> ModuleType:
    """The module with the fake fleet and its servers."""
    return fake_fleet


@pytest.fixture
def made() -> ModuleType:
    """The module with made runs and their minutes."""
    return made_runs


@pytest.fixture
def terminal_module() -> ModuleType:
    """The module with `Terminal`, a pseudo-terminal whose screen can be read."""
    return terminal
