"""Setup for all tests: separate user folders, and fixtures with the fakes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx._transports.default as httpx_transport
import pytest
from hypothesis import HealthCheck, settings

from fakes import fake_fleet, made_runs, terminal
from fakes.shared_collection import prepare_own_part

if settings.get_current_profile_name() == "default":  # with CI=true there is another, also without a deadline
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the soak test in `faults`."""
    parser.addoption("--soak-minutes", type=float, default=1.0, help="how long the soak acts (default 1)")
    parser.addoption("--soak-seed", type=int, default=6, help="what its actions are drawn from (default 6)")


def pytest_configure(config: pytest.Config) -> None:
    """Reset what tests inherit from the shell.

    Replace inherited "ignore" dispositions (``nohup``, background jobs) with a no-op handler: unlike SIG_IGN, a handler
    is not inherited across ``exec``, so programs that tests start have default dispositions.

    Set one locale for all tests: commands run in a fork only if their locale is the same as that of the process that
    has imported them.
    """
    os.environ["LC_ALL"] = "C.UTF-8"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


GROUPS = {
    "real: findings": ("real/test_real_findings.py", "real/test_real_orphans.py"),
    "real: loop": tuple(f"real/test_real_{name}.py" for name in ("loop", "probe", "contract", "serving", "chat")),
    "real: failures": ("real/test_real_*.py",),
}
"""Groups of files run by one worker in sequence: three groups of real servers, which share servers."""

FIRST = (
    "faults/test_faults_soak.py",
    "processes/*/*.py",
    *(pattern for patterns in GROUPS.values() for pattern in patterns),
    "scenarios/*.py",
    "scenarios/*/*.py",
)
"""Files that start first because they take longest; otherwise one worker would still run them at the end. Real vLLM is
not first because `.ci/run` needs a minute to build its environment meanwhile."""

BY_TEST = (
    "scenarios/test_findings_under_traffic.py",
    "scenarios/launch/test_plan_everywhere.py",
    "scenarios/load/test_ramp_search.py",
)
"""Files with long, CPU-bound, independent tests, which are distributed one by one."""


@cache
def _place(path: Path, patterns: tuple[str, ...]) -> int:
    """Index of the first pattern that a test file matches; the number of patterns if none does."""
    return next((n for n, pattern in enumerate(patterns) if path.match(f"tests/{pattern}")), len(patterns))


def _group(item: pytest.Item) -> str:
    """The xdist group of a test: one worker runs all of its tests. By default the file, so that its tests share
    fixtures."""
    for name, patterns in GROUPS.items():
        if _place(item.path, patterns) < len(patterns):
            return name
    return item.nodeid if _place(item.path, BY_TEST) < len(BY_TEST) else str(item.path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Runs before the first test file is imported."""
    prepare_own_part(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless ``-m`` names them, sort tests, and assign them to xdist groups."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run it with -m slow"))
    items.sort(key=lambda item: _place(item.path, FIRST))
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("xdist_group") is None:  # two markers would make a third group
                item.add_marker(pytest.mark.xdist_group(_group(item)))


OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""With Python's default of 700, collections traverse all imported modules again and again: a tenth of the test time."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt the collected tests from garbage collection: they live until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Prevent slow garbage collections at shutdown.

    pytest collects five times there, and xdist interrupts a worker with SIGINT if it takes longer than five seconds to
    exit. Collect once and exempt the rest.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[Any]:
    """Escape surrogates: reports are sent between processes as UTF-8, so a failure with a non-UTF-8 path would end the
    run."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    """The value with surrogates in its strings escaped."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    if isinstance(value, tuple):  # the location and reason of a skip must stay a tuple
        return tuple(_encodable(each) for each in value)
    return value


@pytest.fixture(scope="session", autouse=True)
def shared_tls_context() -> Iterator[None]:
    """Share httpx's default TLS context between clients: loading certificates takes 24 ms per client, and 50 ms if a
    variable names the system's certificate file."""
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


USER_FOLDERS = ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")


class Homes:
    """Makes the user folders of tests. Those that a test left empty are used again: most tests write nothing, and
    making folders took longer than these tests themselves."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made, self._empty = folder, 0, list[dict[str, str]]()

    def take(self) -> dict[str, str]:
        """Empty folders by variable."""
        if self._empty:
            return self._empty.pop()
        home = self._folder / str(self._made)
        self._made += 1
        home.mkdir()
        folders = {name: str(home / name.lower().split("_")[1]) for name in USER_FOLDERS}
        for folder in folders.values():
            Path(folder).mkdir(mode=0o700)
        return folders

    def give_back(self, folders: dict[str, str]) -> None:
        """Keep the folders for the next test if they are still there and empty."""
        with contextlib.suppress(OSError):
            if not any(map(os.listdir, folders.values())):
                self._empty.append(folders)


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a folder with a name that begins like this."""
    place, numbers = tmp_path_factory.getbasetemp(), itertools.count()

    def make(name: str) -> Path:
        folder = place / f"{name}_{next(numbers)}"
        folder.mkdir(mode=0o700)
        return folder

    return make


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, numbered: Callable[[str], Path]) -> Path:
    """Like pytest's own, which lists the folders of all earlier tests and replaces a symbolic link each time."""
    return numbered(re.sub(r"\W", "_", request.node.name)[:30])


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Homes:
    return Homes(tmp_path_factory.mktemp("own"))


@pytest.fixture(autouse=True)
def own_folders(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give every test its own config, state and cache folders; set the time zone to UTC and enable colors."""
    folders = homes.take()
    for name, folder in folders.items():
        monkeypatch.setenv(name, folder)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("TERM", "xterm-256color")
    time.tzset()
    for name in ("NO_COLOR", "VLLMCONSOLE_STATE"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    time.tzset()
    homes.give_back(folders)


@pytest.fixture(autouse=True)
def default_keys() -> None:
    """Reset the key map, which an app created outside a loop may have changed."""
    if (keymap := sys.modules.get("vllm_console.ui.keymap")) is not None:
        keymap.use_keys(keymap.chosen_keys("default", {}))


@pytest.fixture
def fakes() -> ModuleType:
    """The module with the fake fleet and its servers."""
    return fake_fleet


@pytest.fixture
def made() -> ModuleType:
    """The module with synthetic runs and their minutes."""
    return made_runs


@pytest.fixture
def terminal_module() -> ModuleType:
    """The module with `Terminal`, a pseudo-terminal whose screen can be read."""
    return terminal
