"""Downloads models into the Hugging Face cache, verifies them and removes them.

``huggingface_hub`` does the downloading in a separate process, with this program's Python or with an engine's, which
has it too. Its cache, token and settings apply. An interrupted download keeps the complete files.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.host.hub_folders import cache_folder, model_folder
from vllm_launchers.procfs import command_lines
from vllm_launchers.units import in_units
from vllm_launchers.vllm import hub_worker
from vllm_launchers.vllm.engines import disk_bytes, find_engines, free_bytes
from vllm_launchers.vllm.installed_packages import site_packages
from vllm_launchers.vllm.model_folder import HUB_ID

Progress = Callable[[str, int], None]
"""Called with the current step and the bytes done in it."""

_COPIES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot", "original/*", "onnx/*")
"""Files that duplicate weights in safetensors; vLLM does not read them."""

_MOST_FOUND = 50
_CANCELED = "canceled; the next download keeps the files that are complete"


class HubError(OperationError):
    """The hub or the cache can't do what was asked. One sentence."""


class HubNameError(HubError, UsageError):
    """Not a valid name of a model on the hub."""


class HubFile(msgspec.Struct, frozen=True):
    """A file of a model: its size, and the SHA-256 of a large file or the Git hash of a small one."""

    name: str
    bytes: int | None
    sha256: str | None = None
    blob: str | None = None


class HubModel(msgspec.Struct, frozen=True):
    """A model's files at the commit of a revision. ``code``: its settings name custom Python code (``auto_map``)."""

    model: str
    commit: str
    files: tuple[HubFile, ...]
    code: bool = False
    revision: str = "main"

    @property
    def bytes(self) -> int:
        """Total size of its files."""
        return sum(one.bytes or 0 for one in self.files)


class FoundModel(msgspec.Struct, frozen=True):
    """A search result."""

    model: str
    downloads: int | None = None
    tags: tuple[str, ...] = ()


class Hub:
    """The hub and cache that the environment sets; ``engines`` are paths of additional vLLM installations."""

    def __init__(self, engines: Sequence[str] = ()) -> None:
        self._environ = dict(os.environ)
        self._engines = tuple(engines)
        self.cache = cache_folder(self._environ)
        self._child: subprocess.Popen[bytes] | None = None
        self._canceled = False

    def about(self, model: str, revision: str | None = None, include: Sequence[str] = ()) -> HubModel:
        """Look up a model's files: those that a server needs, or those that match the patterns in ``include``.

        Raises:
            HubError: there is no such model, access is not granted, or the hub does not answer.
        """
        _checked(model)
        events = self._ask({"do": "about", "model": model, "revision": revision or "main"})
        found = next((event["about"] for event in events if "about" in event), None)
        try:
            answer = msgspec.convert({**(found or {}), "model": model, "revision": revision or "main"}, HubModel)
        except msgspec.ValidationError as error:
            raise HubError(f"{model}: the hub's answer can't be read: {error}") from error
        if not _is_hex(answer.commit, 40):
            raise HubError(f"{model}: the hub names no commit; try again later")
        if bad := next((one.name for one in answer.files if not _inside(one.name)), None):
            raise HubError(f"{model}: the file name {bad[:80]!r} leads out of the cache; nothing was downloaded")
        names = {one.name for one in answer.files}
        if both := next((one for one in names if names.intersection(map(str, PurePosixPath(one).parents))), None):
            raise HubError(f"{model}: a part of the file name {both[:80]!r} is a file too; nothing was downloaded")
        files = tuple(_chosen(answer.files, include))
        if not files:
            raise HubError(f"{model}: no file of it matches {', '.join(include) or 'what vLLM reads'}")
        return msgspec.structs.replace(answer, files=files)

    def missing_bytes(self, found: HubModel) -> int:
        """Bytes of a model that are still to be downloaded."""
        blobs = self._folder(found.model) / "blobs"
        total = 0
        for one in found.files:
            held = blobs / (one.sha256 or one.blob or "-")
            total += 0 if held.is_file() else one.bytes or 0
        return total

    def free_bytes(self) -> int:
        """Free space on the cache's disk."""
        return free_bytes(self.cache)

    def no_room(self, found: HubModel) -> str:
        """Why a model does not fit on the cache's disk, as a sentence; empty if it does."""
        missing, free = self.missing_bytes(found), self.free_bytes()
        if missing <= free:
            return ""
        return (
            f"{found.model} needs {in_units(missing)} more, and {self.cache} has {in_units(free)} free; "
            "free some, or set HF_HUB_CACHE to a folder on a larger disk"
        )

    def cancel(self) -> None:
        """Cancel the running operation from another thread; it raises HubError. Complete files stay."""
        self._canceled = True
        if self._child is not None:
            self._child.terminate()

    def get(self, found: HubModel, progress: Progress) -> Path:
        """Download and verify a model's files; returns the snapshot's folder.

        Raises:
            HubError: the download failed (complete files stay), or a file does not match what the hub reports.
        """
        blobs = self._folder(found.model) / "blobs"
        before = disk_size(blobs)
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.5):
                progress("downloading", max(0, disk_size(blobs) - before))

        watching = threading.Thread(target=watch, daemon=True)
        progress("downloading", 0)
        watching.start()
        paths: dict[str, Path] = {}
        request = {
            "do": "get", "model": found.model, "revision": found.revision, "files": [one.name for one in found.files],
        }  # fmt: skip
        try:
            for event in self._ask(request):
                if "file" in event:
                    paths[str(event["file"]["name"])] = Path(str(event["file"]["path"]))
        finally:
            done.set()
            watching.join()
        snapshot = self._folder(found.model) / "snapshots" / found.commit
        if any(not path.is_relative_to(snapshot) for path in paths.values()):
            raise HubError(f"{found.model}: changed on the hub during the download; run it again")
        checked = 0
        for one in found.files:
            if self._canceled:
                raise HubError(f"{found.model}: {_CANCELED}")
            progress("verifying", checked)
            self._verify(found.model, one, paths.get(one.name))
            checked += one.bytes or 0
        self._drop_unfinished(blobs, found)
        return snapshot

    @staticmethod
    def _drop_unfinished(blobs: Path, found: HubModel) -> None:
        """Delete partial files left by killed downloads of these files; ``huggingface_hub`` never resumes them.

        No process writes them now: a blob is downloaded under a lock, and only if it is missing.
        """
        for one in found.files:
            for part in blobs.glob(f"{glob.escape(one.sha256 or one.blob or '-')}.*.incomplete"):
                with contextlib.suppress(OSError):
                    part.unlink()

    def search(self, words: str) -> tuple[FoundModel, ...]:
        """Search models by words; most downloads first.

        Raises:
            HubError: the hub does not answer.
        """
        events = self._ask({"do": "search", "words": words, "limit": _MOST_FOUND})
        found: object = next((event["found"] for event in events if "found" in event), [])
        try:
            answer = msgspec.convert(found, tuple[FoundModel, ...])
        except msgspec.ValidationError as error:
            raise HubError(f"the hub's answer can't be read: {error}") from error
        return tuple(one for one in answer if HUB_ID.fullmatch(one.model))

    def held(self, model: str) -> Path | None:
        """A model's folder in the cache, complete or not."""
        _checked(model)
        folder = self._folder(model)
        return folder if folder.is_dir() and not folder.is_symlink() else None

    def remove(self, folder: Path) -> int:
        """Delete a model's folder from the cache; returns the number of bytes freed.

        Raises:
            OSError: a part of it can't be deleted.
        """
        freed = disk_bytes(folder)
        shutil.rmtree(folder)
        shutil.rmtree(self.cache / ".locks" / folder.name, ignore_errors=True)
        return freed

    def _folder(self, model: str) -> Path:
        return model_folder(self.cache, model)

    def _verify(self, model: str, file: HubFile, path: Path | None) -> None:
        """Compare a file with what the hub reports, and delete it if it differs.

        Raises:
            HubError: it differs.
        """
        if path is None:
            raise HubError(f"{model}: {file.name} was not downloaded")
        real = path.resolve()
        if not real.is_relative_to(self._folder(model).resolve()):
            raise HubError(f"{model}: {file.name} lies outside of the cache, at {real}")
        try:
            size = real.stat().st_size
            wrong = file.bytes is not None and size != file.bytes
            wrong = wrong or (file.sha256 is not None and _sha256(real) != file.sha256)
            wrong = wrong or (file.sha256 is None and file.blob is not None and _git_hash(real, size) != file.blob)
            if wrong:
                path.unlink(missing_ok=True)
                real.unlink(missing_ok=True)
        except OSError as error:
            raise HubError(f"{path}: {os.strerror(error.errno or 0)}") from error
        if wrong:
            raise HubError(
                f"{model}: {file.name} does not have the size and checksum that the hub gives; it was deleted, "
                "download it again"
            )

    def _python(self) -> str:
        """Find a Python that has huggingface_hub.

        Raises:
            HubError: there is none.
        """
        if importlib.util.find_spec("huggingface_hub") is not None:
            return sys.executable
        for engine in find_engines(self._engines, self._environ):
            python = Path(engine.command[0]).with_name("python")
            if python.is_file() and any((place / "huggingface_hub").is_dir() for place in site_packages(python)):
                return str(python)
        raise HubError(
            "downloads need huggingface_hub, which neither this program's Python nor an installed vLLM has: "
            "pip install 'vllm-console[hub]', or install a vLLM by 'vllm-console engines install'"
        )

    def _ask(self, request: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Send a request to a worker and yield its events.

        Raises:
            HubError: it reported an error, or ended without an answer.
        """
        quiet = {
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_CACHE": str(self.cache),
        }  # fmt: skip
        environ = {key: value for key, value in self._environ.items() if key != "PYTHONPATH"} | quiet
        try:
            child = subprocess.Popen(
                [self._python(), "-I", hub_worker.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, env=environ,
            )  # fmt: skip
        except OSError as error:
            raise HubError(f"{error.filename}: {os.strerror(error.errno or 0)}") from error
        self._child = child
        if self._canceled:
            child.terminate()
        assert child.stdin is not None
        assert child.stdout is not None
        answered = False
        try:
            child.stdin.write(json.dumps(request).encode())
            child.stdin.close()
            for line in child.stdout:
                event = json.loads(line)
                if "error" in event:
                    raise HubError(self._sentence(request, event["error"]))
                answered = True
                yield event
            if child.wait() and self._canceled:
                raise HubError(f"{request.get('model', 'search')}: {_CANCELED}")
            if child.returncode or not (answered or request["do"] == "get"):
                raise HubError(f"the download's process ended with exit code {child.returncode}; try again")
        except (ValueError, BrokenPipeError) as error:
            raise HubError("the download's process did not answer in full; try again") from error
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            child.stdout.close()

    def _sentence(self, request: Mapping[str, object], error: Mapping[str, object]) -> str:
        model = str(request.get("model", "search"))
        hub = self._environ.get("HF_ENDPOINT") or "https://huggingface.co"
        text = " ".join(str(error.get("text", "")).split())[:300]
        return {
            "offline": f"{model}: the hub is not asked, since HF_HUB_OFFLINE is set; unset it",
            "gated": f"{model}: access is not granted (status {error.get('status')}); accept its license at "
            f"{hub}/{model}, and give a token by 'hf auth login' or HF_TOKEN",
            "no_revision": f"{model}: has no revision '{request.get('revision')}'",
            "not_found": f"{model}: is not on the hub at {hub}, or is private; check its name, or give a token "
            "(HF_TOKEN)",
            "name": f"{model}: is not a hub id such as Qwen/Qwen3-8B-AWQ",
            "unreachable": f"{model}: the hub at {hub} does not answer; check the network and try again: {text}",
            "settings": f"{model}: {text}; nothing was downloaded",
            "disk": f"{model}: the cache at {self.cache} can't be written: {text}",
        }.get(str(error.get("kind")), f"{model}: the hub at {hub} failed: {text}")


def disk_size(folder: Path) -> int:
    """Total size of the files directly in a folder."""
    try:
        return sum(_size(path) for path in folder.iterdir())
    except OSError:
        return 0


def users_of_model(model: str, folder: Path) -> list[int]:
    """PIDs of vLLM processes whose command line names a model or its folder."""
    found = []
    for pid, words in command_lines():
        serves = any("vllm" in word for word in words)
        named = any(word == model or word.endswith(f"={model}") or str(folder) in word for word in words)
        if serves and named and pid != os.getpid():
            found.append(pid)
    return found


def _chosen(files: Sequence[HubFile], include: Sequence[str]) -> Iterator[HubFile]:
    safe = any(one.name.endswith(".safetensors") for one in files)
    for one in files:
        if include:
            if any(fnmatch.fnmatchcase(one.name, pattern) for pattern in include):
                yield one
        elif not (safe and any(fnmatch.fnmatchcase(one.name, pattern) for pattern in _COPIES)):
            yield one


def _checked(model: str) -> None:
    if not HUB_ID.fullmatch(model) or ".." in model or "--" in model:
        raise HubNameError(f"{model[:120]}: is not a hub id such as Qwen/Qwen3-8B-AWQ")


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and name.isprintable() and "\\" not in name and not path.is_absolute() and ".." not in path.parts


def _is_hex(text: str, length: int) -> bool:
    return len(text) == length and all(letter in "0123456789abcdef" for letter in text)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_hash(path: Path, size: int) -> str:
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
