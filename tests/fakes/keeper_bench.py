"""Real keepers with a fake server and short timeouts; processes left over by a test are ended by pid."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fakes.ports import free_port
from vllm_launchers.keeper import client, errors, folders, processes
from vllm_launchers.keeper.records import LaunchSpec, ProcessIdentity, ServerRecord, State

FAKE = Path(__file__).with_name("fake_server.py")
PATIENCE = 120.0
TUNING: dict[str, Any] = {
    "stop_timeouts": {"interrupt": 1.0, "terminate": 1.5, "rest": 0.7, "kill": 5.0},
    "health_check_starting": 0.05,
    "health_check_ready": 0.1,
}


def until(finding: Callable[[], Any], what: str = "it") -> Any:
    """Wait until a condition holds; returns its value."""
    deadline = time.monotonic() + PATIENCE
    while not (found := finding()):
        assert time.monotonic() < deadline, f"{what} did not come true within {PATIENCE} s"
        time.sleep(0.02)
    return found


def session(pid: int) -> list[ProcessIdentity]:
    """The live processes of a session."""
    table = processes.table()
    return [processes.identity_of(process) for process in table.values() if process.session == pid and process.running]


def end_servers(root: Path, also: Iterable[ProcessIdentity] = ()) -> None:
    """End all processes in the records of a root: keepers first, then servers and sidecars, with their sessions."""
    ends: dict[ProcessIdentity, None] = {}
    with contextlib.suppress(errors.KeeperError):
        records = client.list_records(root)[0]
        found = [record.keeper for record in records] + [one for r in records for one in (r.server, r.sidecar)]
        ends = dict.fromkeys(process for process in found if process is not None)
    for process in filter(processes.alive, {**ends, **dict.fromkeys(also)}):
        for member in (process, *session(process.pid)):
            processes.send(member, signal.SIGKILL)


@dataclass
class Bench:
    """A separate root folder, configurable fake servers, and the calls of a console."""

    root: Path
    seen: set[ProcessIdentity] = field(default_factory=set)

    def spec(self, *options: str, port: int | None = None, **fields: Any) -> LaunchSpec:
        port = port or free_port()
        argv = (sys.executable, "-S", str(FAKE), "--port", str(port), *options)
        return LaunchSpec(**{"argv": argv, "host": "127.0.0.1", "port": port, **fields})

    def launch(
        self, spec: LaunchSpec, name: str = "one", steady: float = 600.0, terminate: float = 1.5, **more: Any
    ) -> ServerRecord:
        stop_timeouts = {**TUNING["stop_timeouts"], "terminate": terminate}
        tuning = {**TUNING, "steady": steady, "stop_timeouts": stop_timeouts}
        return self.see(client.launch(self.root, name, spec, tuning=tuning, **more))

    def ready(self, spec: LaunchSpec, name: str = "one", **more: Any) -> ServerRecord:
        self.launch(spec, name, **more)
        return self.wait(State.READY, name)

    def restart(self, spec: LaunchSpec, name: str = "one", **more: Any) -> ServerRecord:
        return self.see(client.restart(self.root, name, spec, tuning=TUNING, **more))

    def stop(self, name: str = "one") -> ServerRecord:
        return self.see(client.stop(self.root, name, tuning=TUNING))

    def stopped(self, name: str = "one") -> ServerRecord:
        self.stop(name)
        return self.wait(State.STOPPED, name)

    def adopt(self) -> list[str]:
        adopted = client.adopt_orphans(self.root, tuning=TUNING)
        for name in adopted:
            self.read(name)
        return adopted

    def read(self, name: str = "one") -> ServerRecord:
        return self.see(client.read(self.root, name))

    def wait(self, state: State, name: str = "one", generation: int | None = None) -> ServerRecord:
        return self.until(
            lambda record: record.state is state and (generation is None or record.current.number == generation), name
        )

    def until(self, predicate: Callable[[ServerRecord], Any], name: str = "one") -> ServerRecord:
        try:
            return client.wait_for(self.root, name, lambda record: bool(predicate(self.see(record))), PATIENCE)
        except errors.WaitTimeoutError as error:
            notes = self.file("keeper.log", name).read_text()
            pytest.fail(f"{error}\n{self.read(name)}\n{notes}\n{self.log(name)[-2000:]}")

    def orphaned(self, record: ServerRecord) -> None:
        """Kill a keeper and wait until its locks are free."""
        assert record.keeper is not None
        processes.send(record.keeper, signal.SIGKILL)
        self.let_go(record.name)

    def let_go(self, name: str = "one") -> None:
        """Wait until a dying keeper's locks are free: it counts as dead before its threads have closed its files."""
        home = folders.server_folder(self.root, name)
        until(
            lambda: not client.keeper_alive(self.root, name) and not folders.is_stale(home),
            "the keeper's death",
        )

    def log(self, name: str = "one") -> str:
        """The server's full log, oldest file first."""
        folder = folders.server_folder(self.root, name)
        older = sorted(folder.glob("server.log.*"), key=lambda path: -int(path.suffix[1:]))
        return "".join(path.read_text() for path in [*older, folder / "server.log"])

    def file(self, file: str, name: str = "one") -> Path:
        return folders.server_folder(self.root, name) / file

    def see(self, record: ServerRecord) -> ServerRecord:
        for process in (record.keeper, record.server, record.sidecar):
            if process is not None:
                self.seen.add(process)
        return record

    def end(self) -> None:
        """End every process that was seen, with its session."""
        end_servers(self.root, self.seen)

    def close(self) -> None:
        self.end()
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture
def bench() -> Iterator[Bench]:
    it = Bench(Path(tempfile.mkdtemp(prefix="keeper-test-")))
    try:
        yield it
    finally:
        it.close()


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    return until


@pytest.fixture
def session_of() -> Callable[[int], list[ProcessIdentity]]:
    return session


@pytest.fixture
def port() -> int:
    return free_port()
