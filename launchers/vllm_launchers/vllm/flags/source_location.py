"""Locates the source of an installed vLLM from its command: environments, editable installs, wrappers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.flag_table import FlagsUnknownError
from vllm_launchers.vllm.installed_packages import script_interpreter, site_packages

MARK = Path("engine/arg_utils.py")
"""A file that every vLLM package has; it defines the flags."""

_HEAD_BYTES = 8192
_PTH_BYTES = 100_000
_HANDS_ON = lazy_pattern(r"^\s*(?:exec\s+)?[\"']?(?P<path>/[^\s\"'$`;|&]+/vllm)[\"']?\s+\"?\$[@*]\"?\s*$", re.MULTILINE)
"""A line of a shell script that passes its arguments to another ``vllm`` on this machine."""

_VERSION = lazy_pattern(r"^(?:__version__|version)\s*=.*?['\"]([0-9][^'\"]*)['\"]", re.MULTILINE)
_WRAPPERS = 3


def package_folder(engine: Engine) -> Path:
    """The ``vllm`` package folder that an engine's command imports.

    Raises:
        FlagsUnknownError: it cannot be determined.
    """
    if engine.kind is not EngineKind.VLLM or not engine.command:
        raise FlagsUnknownError("a simulated engine, or one without a command, has no source of vLLM")
    try:
        interpreter = interpreter_of(engine)
        folder = next(_packages(interpreter), None)
    except OSError as error:
        place = error.filename or engine.command[0]
        raise FlagsUnknownError(f"{place}: can't be read: {os.strerror(error.errno or 0)}") from error
    if folder is None:
        raise FlagsUnknownError(f"{interpreter}: vLLM's source was not found among the packages of this Python")
    return folder


def package_version(folder: Path) -> str | None:
    """The version in a package's own file, or None."""
    for name in ("_version.py", "version.py"):
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")[:_HEAD_BYTES]
        except OSError:
            continue
        if match := _VERSION.search(text):
            return match[1]
    return None


def interpreter_of(engine: Engine) -> Path:
    """The Python that runs an engine's command; follows plain wrapper scripts.

    Raises:
        FlagsUnknownError: it cannot be determined.
        OSError: its command can't be read.
    """
    first = command = Path(engine.command[0])
    for _ in range(_WRAPPERS):
        if re.fullmatch(r"(?:python|pypy)[0-9.]*t?", command.name):
            return command
        with command.open("rb") as file:
            text = file.read(_HEAD_BYTES).decode("utf-8", "replace")
        if (interpreter := script_interpreter(command, text, os.environ)) is not None:
            return interpreter
        found = list(_HANDS_ON.finditer(text))
        if len(found) != 1 or not Path(found[0]["path"]).is_file():
            break
        command = Path(found[0]["path"])
    raise FlagsUnknownError(f"{first}: is a script around vLLM, so its flags are known only once it runs")


def _packages(interpreter: Path) -> Iterator[Path]:
    """vLLM folders that an interpreter would import, in order."""
    for folder in site_packages(interpreter):
        for place in chain((folder,), _editable(folder)):
            if (place / "vllm" / MARK).is_file():
                yield place / "vllm"


def _editable(folder: Path) -> Iterator[Path]:
    """Source folders of editable installs, from ``direct_url.json`` and lines of ``.pth`` files."""
    for path in sorted(folder.glob("vllm*-info/direct_url.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        url = document.get("url", "") if isinstance(document, dict) else ""
        if isinstance(url, str) and url.startswith("file://"):
            yield Path(unquote(urlsplit(url).path))
    for path in sorted(folder.glob("*.pth")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")[:_PTH_BYTES]
        except OSError:
            continue
        for line in text.splitlines():
            if line.strip() and not line.startswith(("#", "import ", "import\t")) and "\0" not in line:
                yield folder / line.strip()
