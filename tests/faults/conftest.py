"""The bench of the keeper's tests, and folders whose disk is full on demand."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_launchers.keeper.records import ProcessIdentity


def _bench_module() -> ModuleType:
    path = Path(__file__).parents[1] / "unit" / "keeper" / "conftest.py"
    spec = importlib.util.spec_from_file_location("vllm_console_keeper_bench", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_bench = _bench_module()
bench, wait_until, session_of, port = _bench.bench, _bench.wait_until, _bench.session_of, _bench.port


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here breaks something."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.faults)


class FullDisk:
    """A file system of its own that can be filled to the last byte, and emptied again."""

    error = "No space left on device"

    def __init__(self, root: Path) -> None:
        self.root = root
        self._filler = root / "filler"

    def fill(self, keeper: ProcessIdentity | None = None) -> None:
        with self._filler.open("ab", buffering=0) as file:
            try:
                for size in (1 << 16, 1 << 12, 1):
                    while True:
                        try:
                            file.write(b"x" * size)
                        except OSError:
                            if size == 1:
                                raise
                            break
            except OSError:
                return

    def free(self, keeper: ProcessIdentity | None = None) -> None:
        self._filler.unlink()


class ShutDisk:
    """No file system: a keeper that may not write to files any more, by its resource limits."""

    error = "File too large"

    def __init__(self, root: Path) -> None:
        self.root = root

    def fill(self, keeper: ProcessIdentity | None = None) -> None:
        self._limit(keeper, 0)

    def free(self, keeper: ProcessIdentity | None = None) -> None:
        self._limit(keeper, resource.RLIM_INFINITY)

    @staticmethod
    def _limit(keeper: ProcessIdentity | None, size: int) -> None:
        pid = keeper.pid if keeper is not None else os.getpid()
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, most))


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, bench: Any) -> Iterator[FullDisk | ShutDisk]:
    """The bench's root as a disk that can be full: a small tmpfs where one may be mounted, and a limit anywhere."""
    if request.param == "limit":
        yield ShutDisk(bench.root)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "keeper-test", str(bench.root)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield FullDisk(bench.root)
    finally:
        bench.end()
        subprocess.run(["umount", "--lazy", str(bench.root)], check=True)
