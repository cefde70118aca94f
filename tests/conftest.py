"""For all tests: the user's own folders are never touched; fakes are fixtures."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import ssl
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx._transports.default as httpx_transport
import pytest
from hypothesis import HealthCheck, settings

from fakes import fake_fleet, made_runs, terminal
from fakes.shared_collection import prepare_own_part

if settings.get_current_profile_name() == "default":  # with CI=true it is another, which has no deadline either
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the soak in `faults`: its length and its seed."""
    parser.addoption("--soak-minutes", type=float, default=1.0, help="how long the soak acts (default 1)")
    parser.addoption("--soak-seed", type=int, default=6, help="what its actions are drawn from (default 6)")


def pytest_configure(config: pytest.Config) -> None:
    """Signals that were inherited as ignored (``nohup``, a shell's background) stay without effect here, and are as
    they should be in whatever a test starts: a handler ends with ``exec``, to be ignored does not.

    The locale is that of all tests, and of fixtures that several of them share: only where it is the same as in the
    process that has imported the commands are commands forks of it."""
    os.environ["LC_ALL"] = "C.UTF-8"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


GROUPS = {
    "real: findings": ("real/test_real_findings.py", "real/test_real_orphans.py"),
    "real: loop": tuple(f"real/test_real_{name}.py" for name in ("loop", "probe", "contract", "serving", "chat")),
    "real: failures": ("real/test_real_*.py",),
}
"""Files that one process runs one after the other: three groups of real servers, each of which shares some."""

FIRST = (
    "faults/test_faults_soak.py",
    "processes/*/*.py",
    *(pattern for patterns in GROUPS.values() for pattern in patterns),
    "scenarios/*.py",
    "scenarios/*/*.py",
)
"""What takes longest begins first, so that no process is left with it at the end. Real vLLM comes when the others have
taken the minute that `.ci/run` needs to build its environment beside them."""

BY_TEST = (
    "scenarios/test_findings_under_traffic.py",
    "unit/launch/test_plan_everywhere.py",
    "scenarios/load/test_ramp_search.py",
)
"""Files whose tests take long, compute only and share nothing: each test goes to whoever has time."""


@cache
def _place(path: Path, patterns: tuple[str, ...]) -> int:
    """The first pattern that a test's file matches; the number of patterns where none does."""
    return next((n for n, pattern in enumerate(patterns) if path.match(f"tests/{pattern}")), len(patterns))


def _group(item: pytest.Item) -> str:
    """Tests of one group run in one process: by file, which keeps what its tests share to one process."""
    for name, patterns in GROUPS.items():
        if _place(item.path, patterns) < len(patterns):
            return name
    return item.nodeid if _place(item.path, BY_TEST) < len(BY_TEST) else str(item.path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Before the first file is imported."""
    prepare_own_part(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests, unless ``-m`` names them. Where several processes share the tests: who takes which, and
    what begins first."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run it with -m slow"))
    items.sort(key=lambda item: _place(item.path, FIRST))
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("xdist_group") is None:  # two markers would be a third group
                item.add_marker(pytest.mark.xdist_group(_group(item)))


OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Python's default of 700 has collections traverse all imported modules again and again: a tenth of the tests' time."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected stays until the end: it is exempt from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """pytest collects garbage five times at its very end. A worker of xdist that takes longer than five seconds to end
    gets a SIGINT, in the middle of that. One collection finds what there is; what is left is exempt from the others."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[Any]:
    """Reports are sent between processes as UTF-8: a failure that shows another path would end the whole run."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    """The same with surrogates in its texts escaped."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    if isinstance(value, tuple):  # a skip's place and reason stay one
        return tuple(_encodable(each) for each in value)
    return value


@pytest.fixture(scope="session", autouse=True)
def shared_tls_context() -> Iterator[None]:
    """Clients share the context that httpx makes by default: reading its certificates takes 24 ms per client, and 50 ms
    where a variable names a file with those of the system."""
    make = httpx_transport.create_ssl_context

    @cache
    def default(trust_env: bool, *_places: str | None) -> ssl.SSLContext:
        return make(trust_env=trust_env)

    def create(verify: object = True, cert: object = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return make(verify, cert, trust_env)
        return default(trust_env, *map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx_transport, "create_ssl_context", create)
        yield


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for each test. ``mktemp`` reads the names of all that it has made before it makes the next: with five
    folders for each of 6,000 tests that took longer than the tests."""
    folder = tmp_path_factory.mktemp("own")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_folders(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Config, state and cache of every test lie in folders of its own; the clock's zone is UTC; colors are on."""
    home = next(homes)
    home.mkdir()
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        folder = home / name.lower().split("_")[1]
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("TERM", "xterm-256color")
    time.tzset()
    for name in ("NO_COLOR", "VLLMCONSOLE_STATE"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(autouse=True)
def default_keys() -> None:
    """No test sees the keys of an app that another one made outside a loop."""
    if (keymap := sys.modules.get("vllm_console.ui.keymap")) is not None:
        keymap.use_keys(keymap.chosen_keys("default", {}))


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
