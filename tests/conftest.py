"""For all tests: a person's own folders are never touched, and fakes are had as fixtures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from fakes import fake_fleet, made_runs, terminal


def pytest_addoption(parser: pytest.Parser) -> None:
    """For the soak in `faults`: how long it goes on, and what it is drawn from."""
    parser.addoption("--soak-minutes", type=float, default=2.0, help="how long the soak acts (default 2)")
    parser.addoption("--soak-seed", type=int, default=6, help="what its actions are drawn from (default 6)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where two processes share the tests: one takes those on real vLLM, which are long, the other the rest by file."""
    real = config.rootpath / "tests" / "real"
    items.sort(key=lambda item: not item.path.is_relative_to(real))
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group("real" if item.path.is_relative_to(real) else item.path.name))


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
