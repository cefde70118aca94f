"""Formatting, lint, complexity, types, and forbidden text, checked on the whole tree."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ("console", "launchers", "presets", "tests", "docs", ".ci")

FOREIGN = tuple(
    re.compile(pattern) for pattern in (r"(?<![\w.-])/(?:work|root)/", r"/opt/pypi", r"pypi\.org|pythonhosted")
)
"""Paths of one machine and hosts of package registries, which the project must not mention."""


def run(*words: str) -> None:
    """Run a tool on the whole tree; fail with its output if it finds something."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def texts() -> Iterator[tuple[Path, str]]:
    """All text files of the project."""
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # .git is a file in a worktree
    for folder in PROJECT:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and not made_by_a_tool(path)]
    for path in sorted(files):
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:
            continue


def made_by_a_tool(path: Path) -> bool:
    """Whether a file lies in a cache inside the tree."""
    return any(part == "__pycache__" or part.startswith(".") for part in path.relative_to(ROOT).parts[1:])


def test_lint() -> None:
    run("ruff", "check", "--quiet", ".")


def test_formatting() -> None:
    run("ruff", "format", "--check", "--quiet", ".")


def test_types() -> None:
    run("mypy")


def test_project_does_not_mention_its_authors_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in texts()
        if path != Path(__file__).resolve()
        for number, line in enumerate(text.splitlines(), 1)
        if any(pattern.search(line) for pattern in FOREIGN)
    ]
    assert not found


def test_ci_runs_the_readme_command() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & stat.S_IXUSR
    done = subprocess.run(
        ["bash", str(script), "--print"], capture_output=True, text=True, timeout=30, check=True, cwd=os.sep
    )
    command = done.stdout.strip()
    assert "pip install" in command
    assert " -m pytest" in command
    readme = (ROOT / "README.md").read_text()
    assert f"<!-- tests -->\n```sh\n{command}\n```" in readme


def test_ci_exits_like_the_tests_and_leaves_no_cache(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    command = 'touch "$VLLMCONSOLE_TEST_CACHE/big"; echo "$CI $VLLMCONSOLE_TEST_CACHE"; exit 5'
    (tmp_path / "README.md").write_text(f"# x\n\n<!-- tests -->\n```sh\n{command}\n```\n\n```sh\nexit 0\n```\n")
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=30, check=False, cwd=os.sep)
    ci, cache = done.stdout.split()
    assert done.returncode == 5
    assert ci == "true"
    assert not Path(cache).exists()


def test_ci_builds_real_vllm_in_parallel_and_ends_with_the_tests(tmp_path: Path) -> None:
    for folder in (".ci", "tests/real/environment"):
        (tmp_path / folder).mkdir(parents=True)
    script = shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    build = "import os, pathlib, time\nplace = pathlib.Path(os.environ['VLLMCONSOLE_TEST_CACHE'])\n"
    build += "(place / 'pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    (tmp_path / "tests/real/environment/build.py").write_text(build)
    command = 'until [[ -s "$VLLMCONSOLE_TEST_CACHE/pid" ]]; do sleep 0.05; done; cat "$VLLMCONSOLE_TEST_CACHE/pid"'
    (tmp_path / "README.md").write_text(f"# x\n\n<!-- tests -->\n```sh\n{command}\n```\n")
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=60, check=True, cwd=os.sep)
    assert not Path("/proc", done.stdout.strip()).exists()


def test_ci_reports_a_readme_without_the_command(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "README.md").write_text("# x\n")
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "no command" in done.stderr
