"""Main memory, within the limits of control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_launchers.host import main_memory
from vllm_launchers.host.environment import read_environment
from vllm_launchers.host.gpu.reader import SystemReader
from vllm_launchers.host.main_memory import MainMemory

GIB = 1 << 30
MACHINE = "MemTotal:       1048576000 kB\nMemFree: 1 kB\nMemAvailable:    943718400 kB\nHugePages_Total:       0\n"
"""1000 GiB, 900 of them available."""
NAMES = {
    2: ("memory.max", "memory.current", ""),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The files of a machine. ``limits``: by folder of a group, its limit and use in GiB, 5 of them cached files."""

    def system(
        groups: str = "0::/\n", limits: dict[str, tuple[str | int, int]] | None = None, version: int = 2
    ) -> None:
        for name, path in (("MEMINFO", "meminfo"), ("GROUPS", "self"), ("GROUPS_FOLDER", "cgroup")):
            monkeypatch.setattr(main_memory, name, tmp_path / path)
        (tmp_path / "meminfo").write_text(MACHINE)
        (tmp_path / "self").write_text(groups)
        limit_file, used_file, prefix = NAMES[version]
        for folder, (limit, used) in (limits or {}).items():
            path = tmp_path / "cgroup" / folder
            path.mkdir(parents=True, exist_ok=True)
            (path / limit_file).write_text(f"{limit * GIB if isinstance(limit, int) else limit}\n")
            (path / used_file).write_text(f"{used * GIB}\n")
            (path / "memory.stat").write_text(
                f"anon 5\n{prefix}inactive_file {2 * GIB}\n{prefix}active_file {3 * GIB}\n"
            )

    return system


def test_machine_without_limits(system) -> None:
    system()
    assert main_memory.main_memory() == MainMemory(1000.0, 900.0)
    system("0::/user.slice\n", {"user.slice": ("max", 100)})
    assert main_memory.main_memory() == MainMemory(1000.0, 900.0)
    system("4:memory:/\n", {"memory": (8388607, 100)}, 1)
    assert main_memory.main_memory() == MainMemory(1000.0, 900.0), "a limit above the machine's memory"


@pytest.mark.parametrize(
    ("groups", "folder", "version"),
    [
        ("0::/\n", ".", 2),  # in a container
        ("0::/docker/abc\n", ".", 2),  # in a container that sees the path outside
        ("0::/slurm/job_7/step_0\n", "slurm/job_7", 2),
        ("5:devices:/\n4:cpu,memory:/docker/abc\n0::/\n", "memory", 1),
        ("4:memory:/slurm/job_7\n", "memory/slurm/job_7", 1),
    ],
)
def test_limit_of_a_group_counts(system, groups: str, folder: str, version: int) -> None:
    system(groups, {folder: (64, 17)}, version)
    assert main_memory.main_memory() == MainMemory(64.0, 52.0)
    host = SystemReader().host(0.0)
    assert (host.memory_gib, host.memory_free_gib) == (64.0, 52.0)
    assert read_environment(environment={}).memory_free_gib == 52.0


def test_smallest_limit_counts(system) -> None:
    system("0::/job/step\n", {"job": (100, 98), "job/step": (50, 12)})
    assert main_memory.main_memory() == MainMemory(50.0, 7.0)
    system("0::/job/step\n", {"job": (100, 106)})
    assert main_memory.main_memory().available_gib == 0.0


def test_unreported_memory_is_unknown(system, tmp_path: Path) -> None:
    system()
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    assert main_memory.main_memory().available_gib is None
    (tmp_path / "meminfo").unlink()
    (tmp_path / "self").unlink()
    assert main_memory.main_memory() == MainMemory()
