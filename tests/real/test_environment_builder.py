"""The builder of the real environment builds once, rebuilds when its recipe changes, and reports errors."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent / "environment"


@pytest.fixture
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_console_real_builder", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installs(builder: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Records the install location without installing anything."""
    done: list[Path] = []
    monkeypatch.setattr(builder, "NEEDED_BYTES", 0)
    monkeypatch.setattr(builder, "_interpreter", lambda: sys.executable)
    monkeypatch.setattr(builder, "_install", lambda interpreter, root, log: done.append(root))
    monkeypatch.setattr(builder, "run", lambda command, log, what, **variables: None)
    return done


def test_builds_once(builder: ModuleType, installs: list[Path], tmp_path: Path) -> None:
    first = builder.build(tmp_path / "cache")
    assert builder.build(tmp_path / "cache") == first
    assert len(installs) == 1
    assert Path(first["vllm"]).is_relative_to(installs[0])


def test_concurrent_builders_build_once(builder: ModuleType, installs: list[Path], tmp_path: Path) -> None:
    threads = [threading.Thread(target=builder.build, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(installs) == 1


def test_interrupted_build_is_repeated(builder: ModuleType, installs: list[Path], tmp_path: Path) -> None:
    half = tmp_path / builder.recipe_key() / "venv"
    half.mkdir(parents=True)
    builder.build(tmp_path)
    assert len(installs) == 1
    assert not half.exists()


def test_changed_recipe_uses_new_folder(builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = builder.recipe_key()
    (tmp_path / "vllm-alias").mkdir()
    for name in ("requirements.txt", "make_tiny_model.py", "sitecustomize.py", "vllm-alias/pyproject.toml"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    monkeypatch.setattr(builder, "HERE", tmp_path)
    assert builder.recipe_key() == before
    with (tmp_path / "requirements.txt").open("a") as file:
        file.write("one-more==1.0\n")
    assert builder.recipe_key() != before


def test_all_packages_of_the_recipe_are_pinned() -> None:
    lines = (FOLDER / "requirements.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert len(packages) > 100
    assert all(package.count("==") == 1 and " " not in package for package in packages)


def test_unsupported_machine_is_reported(
    builder: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert builder.main([str(tmp_path)]) == builder.UNAVAILABLE
    assert "Linux x86-64" in capsys.readouterr().err


def test_full_disk_is_reported(
    builder: ModuleType, installs: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(builder, "NEEDED_BYTES", 10**18)
    with pytest.raises(builder.UnavailableError, match="GB free"):
        builder.build(tmp_path)
    assert installs == []


def test_failed_step_is_reported_with_its_error(builder: ModuleType, tmp_path: Path) -> None:
    code = "print('ERROR: No matching distribution found for torch'); print('a hint'); raise SystemExit(1)"
    with pytest.raises(builder.UnavailableError, match="the packages could not be made: ERROR: No matching"):
        builder.run([sys.executable, "-c", code], tmp_path / "log", "the packages")


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 error")])
def test_unavailable_environment_skips_locally_and_fails_in_ci(ci: str, outcome: str) -> None:
    test = f"{Path(__file__).with_name('test_real_serving.py')}::test_serves_tiny_model"
    environment = {**os.environ, "VLLMCONSOLE_TEST_CACHE": "/proc/nowhere", "CI": ci}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert outcome in done.stdout
    assert "real vLLM is not available here" in done.stdout
