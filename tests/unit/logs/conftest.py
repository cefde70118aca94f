from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


class Writer:
    """Writes a log like a keeper: appends, and rotates by renaming."""

    def __init__(self, path: Path, keep: int = 20) -> None:
        self.path = path
        self.keep = keep

    def write(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    def rotate(self) -> None:
        for number in range(self.keep, 0, -1):
            old = Path(f"{self.path}.{number}")
            if old.exists():
                if number == self.keep:
                    old.unlink()
                else:
                    old.rename(f"{self.path}.{number + 1}")
        self.path.rename(f"{self.path}.1")
        self.path.touch()


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "server.log")


@pytest.fixture
def make_writer(tmp_path: Path) -> Callable[[int], Writer]:
    return lambda keep: Writer(tmp_path / "server.log", keep)
