"""The engines that this program installed: one virtual environment per version, in the user's data folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

MARKER = "vllm-console-complete"
"""The file that an environment gets as the last step of its installation; without it nothing uses the environment."""

NAME = re.compile(r"[0-9][0-9A-Za-z.+_]{0,40}(?:-cpu)?")
"""How an installed engine is called: its version, with ``-cpu`` for the CPU build."""


def engines_folder(environ: Mapping[str, str]) -> Path | None:
    """Where engines are installed; None without a home folder."""
    data, home = environ.get("XDG_DATA_HOME", ""), environ.get("HOME", "")
    if data.startswith("/"):
        return Path(data) / "vllm-console/engines"
    return Path(home) / ".local/share/vllm-console/engines" if home.startswith("/") else None


def managed_engines(environ: Mapping[str, str]) -> list[Path]:
    """The environments of complete installations, the newest version first."""
    folder = engines_folder(environ)
    try:
        names = sorted(os.listdir(folder), key=_order, reverse=True) if folder is not None else []  # noqa: PTH208
    except OSError:
        return []
    return [folder / name for name in names if NAME.fullmatch(name) and (folder / name / MARKER).is_file()]  # type: ignore[operator]


def managed_engine(name: str, environ: Mapping[str, str]) -> Path | None:
    """The environment of that name, complete or not; None if there is none."""
    folder = engines_folder(environ)
    if folder is None or not NAME.fullmatch(name) or (folder / name).is_symlink() or not (folder / name).is_dir():
        return None
    return folder / name


def remove_engine(path: Path) -> int:
    """Delete an environment; returns the bytes that this freed. The marker goes first, so that half of one is none.

    Raises:
        OSError: a part of it can't be deleted.
    """
    import shutil  # rarely needed, and it imports every archive format

    before = disk_bytes(path)
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)
    return before


def disk_bytes(path: Path) -> int:
    """What the files below a folder take on the disk. A file with two names counts once; links are not followed."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                found = os.lstat(Path(folder) / name)
            except OSError:  # gone in the meantime
                continue
            seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def _order(name: str) -> tuple[list[int], bool]:
    version, _, build = name.partition("-")
    return [int(part) for part in re.findall(r"\d+", version)], build != "cpu"
