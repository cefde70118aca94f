"""For all tests: a person's own folders are never touched, and fakes are had as fixtures."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FAKES = Path(__file__).parent / "fakes"


def load_fake(name: str) -> ModuleType:
    """A module of ``tests/fakes``, loaded once under a name of its own."""
    full = f"vllm_console_fakes_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, FAKES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


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
    return load_fake("fake_fleet")


@pytest.fixture
def made() -> ModuleType:
    """The module with made runs and their minutes."""
    return load_fake("made_runs")


@pytest.fixture
def terminal_module() -> ModuleType:
    """The module with `Terminal`, a pseudo-terminal whose screen can be read."""
    return load_fake("terminal")
