from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CONSOLE_SCRIPT = "#!{python}\nimport sys\nfrom vllm.entrypoints.cli.main import main\nsys.exit(main())\n"


@pytest.fixture
def executable() -> Callable[[Path, str], Path]:
    def executable(path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    return executable


@pytest.fixture
def environment(tmp_path: Path, executable: Callable[[Path, str], Path]) -> Callable[..., Path]:
    """Build the folders of a virtual environment with a vLLM in it: ``environment("venv", "vllm-0.33.0")``."""

    def environment(name: str, *distributions: str, script: str | None = CONSOLE_SCRIPT) -> Path:
        venv = tmp_path / name
        site = venv / "lib" / "python3.11" / "site-packages"
        site.mkdir(parents=True)
        for distribution in distributions:
            (site / f"{distribution}.dist-info").mkdir()
        (venv / "bin").mkdir()
        (venv / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n")
        (venv / "bin" / "python").symlink_to(sys.executable)
        if script is not None:
            executable(venv / "bin" / "vllm", script.format(python=venv / "bin" / "python", venv=venv))
        return venv

    return environment
