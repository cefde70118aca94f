"""Fixtures of the keeper tests, and folders on a disk that can be filled."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.keeper_bench import bench, port, session_of, wait_until
from vllm_launchers.keeper.records import ProcessIdentity

__all__ = ["bench", "disk", "port", "session_of", "wait_until"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder as fault tests."""
    here = str(Path(__file__).parent) + os.sep
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.faults)


class FullDisk:
    """A separate file system that can be filled completely and freed again."""

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
    """A resource limit instead of a file system: it keeps the keeper from writing to files."""

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
    """The bench's root on a disk that can be full: a small tmpfs where one can be mounted, and a limit everywhere."""
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
