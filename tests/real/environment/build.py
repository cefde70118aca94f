"""Build a CPU vLLM and a tiny model once, for the tests under ``tests/real``: ``build.py [CACHE]``.

Prints one JSON line ``{"vllm": …, "model": …, "python": …}`` when done. The first build takes about a minute and 2.5
GB; later calls find it. The folder's name is a hash of the recipe, so a changed recipe is built separately. If this
machine is unsupported, exits with code 3 and one sentence on stderr. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
PYTHON = (3, 11)
NEEDED_BYTES = 5 * 10**9
UNAVAILABLE = 3
UV = "uv==0.13.9"
UV_SETTINGS = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_CERT": "SSL_CERT_FILE",
}
"""pip's settings and their names for uv."""
FIRST_USE = """
import vllm.entrypoints.cli.serve, vllm.v1.worker.cpu_model_runner
from vllm.model_executor.models import registry
registry._run_in_subprocess = lambda function: function()
registry.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
"""
"""Compiles only the files that servers import (a quarter of all files; pip would compile all), and caches vLLM's
inspection of the model class. Otherwise the first servers, which start concurrently, would each do both."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


class UnavailableError(Exception):
    """This machine cannot have the environment; the message says why."""


def default_cache() -> Path:
    """``$VLLMCONSOLE_TEST_CACHE``, or a folder in the user's cache."""
    if folder := os.environ.get("VLLMCONSOLE_TEST_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-console-tests"


def recipe_key() -> str:
    """A short hash of everything that determines what is built."""
    digest = hashlib.sha256(repr(PYTHON).encode())
    for name in ("requirements.txt", "make_tiny_model.py", "sitecustomize.py", "vllm-alias/pyproject.toml"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def build(cache: Path) -> dict[str, str]:
    """The environment's paths; builds it first unless this recipe was already built completely.

    Raises:
        UnavailableError: with the reason.
    """
    root = cache / recipe_key()
    paths = {
        "vllm": str(root / "venv/bin/vllm"),
        "python": str(root / "venv/bin/python"),
        "model": str(root / "tiny"),
    }
    complete = root / "complete"
    if complete.exists():
        return paths
    interpreter = _interpreter()
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{root.name}.lock"):
        if complete.exists():
            return paths
        _check_disk(cache)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        log = cache / f"{root.name}.log"
        log.unlink(missing_ok=True)
        _install(interpreter, root, log)
        run([paths["python"], str(HERE / "make_tiny_model.py"), paths["model"]], log, "the tiny model")
        run([paths["python"], "-c", FIRST_USE], log, "the first use", VLLM_CACHE_ROOT=str(root / "vllm-cache"))
        complete.touch()
    return paths


def _interpreter() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UnavailableError(
            f"the CPU build of vLLM is for Linux x86-64, this is {sys.platform} {platform.machine()}"
        )
    if platform.python_implementation() == "CPython" and sys.version_info[:2] == PYTHON:
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        raise UnavailableError("the CPU build of vLLM needs CPython 3.11, and there is no python3.11 on PATH")
    return found


def _check_disk(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise UnavailableError(
            f"{cache} has {free / 1e9:.1f} GB free; the environment needs {NEEDED_BYTES / 1e9:.0f} GB"
        )


def _install(interpreter: str, root: Path, log: Path) -> None:
    python = str(root / "venv/bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    run([interpreter, "-m", "venv", str(root / "venv")], log, "a virtual environment")
    try:
        _install_with_uv(pip, root, log)
    except UnavailableError:  # uv does not read pip's config files: if the index is configured there, only pip finds it
        run([*pip, "-r", str(REQUIREMENTS)], log, "the packages")
    with tempfile.TemporaryDirectory() as scratch:  # a build leaves files next to its source
        alias = shutil.copytree(HERE / "vllm-alias", Path(scratch) / "vllm-alias")
        run([*pip, "--no-build-isolation", str(alias)], log, "the package that lends vLLM its name")
    packages = root / f"venv/lib/python{PYTHON[0]}.{PYTHON[1]}/site-packages"
    shutil.copy(HERE / "sitecustomize.py", packages)


def _install_with_uv(pip: Sequence[str], root: Path, log: Path) -> None:
    """uv takes 10 seconds of CPU where pip takes a minute. It gets pip's settings from the environment."""
    run([*pip, UV], log, "uv")
    settings = {uv: value for pip_name, uv in UV_SETTINGS.items() if (value := os.environ.get(pip_name))}
    cache = root / "uv-cache"  # on the same file system, so that files are linked, not copied
    command = [str(root / "venv/bin/uv"), "pip", "install", "--quiet", "--no-deps", "--cache-dir", str(cache)]
    run([*command, "-p", pip[0], "-r", str(REQUIREMENTS)], log, "the packages", **settings)
    shutil.rmtree(cache)


def run(command: Sequence[str], log: Path, what: str, **variables: str) -> None:
    """Run one step; its output goes to the log, from which the reason for a failure is taken."""
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | OFFLINE | variables
    with log.open("ab") as file:
        start = file.tell()
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, check=False)
    if done.returncode:
        said = log.read_bytes()[start:].decode(errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no word")
        raise UnavailableError(f"{what} could not be made: {reason}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one builder run at a time; the next one waits and then finds the work done."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str]) -> int:
    """Build, and print the paths."""
    try:
        print(json.dumps(build(Path(arguments[0]) if arguments else default_cache())))
    except (UnavailableError, OSError) as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
