"""Queries the hub and downloads with ``huggingface_hub``, in a Python that has it: ``python hub_worker.py < request``.

`vllm_launchers.vllm.hub` runs it as a file, because an engine's environment has no vllm_launchers. It reads one JSON
object and prints JSON objects, one per line. Nothing that it downloads is run or imported.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from typing import Any


def emit(**event: Any) -> None:
    """Print one event."""
    print(json.dumps(event), flush=True)


SETTINGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files that may name custom Python code of a model, which transformers then loads."""
LARGEST_SETTINGS = 16 * 2**20
"""No real settings file is larger; vLLM would read it whole."""


class SettingsError(Exception):
    """A model's settings are implausible."""


def about(api: Any, request: dict[str, Any]) -> None:
    """Emit a model's commit and files, and whether its settings name custom code.

    Raises:
        SettingsError: a settings file is too large to be real.
    """
    import huggingface_hub

    found = api.model_info(request["model"], revision=request["revision"], files_metadata=True)
    files = [
        {
            "name": one.rfilename,
            "bytes": one.size,
            "sha256": one.lfs["sha256"] if one.lfs else None,
            "blob": one.blob_id,
        }
        for one in found.siblings or ()
    ]
    code = False
    for one in files:
        if code or one["name"] not in SETTINGS:
            continue
        if (one["bytes"] or 0) > LARGEST_SETTINGS:
            raise SettingsError(f"its {one['name']} of {one['bytes']:,} bytes is too large to be a model's settings")
        with tempfile.TemporaryDirectory() as folder:  # nothing enters the cache before the user agrees
            path = huggingface_hub.hf_hub_download(request["model"], one["name"], revision=found.sha, local_dir=folder)
            with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                code = '"auto_map"' in file.read(LARGEST_SETTINGS)
    emit(about={"commit": found.sha, "files": files, "code": code})


def get(_api: Any, request: dict[str, Any]) -> None:
    """Download files one after the other, except those already in the cache."""
    import huggingface_hub

    for name in request["files"]:
        path = huggingface_hub.hf_hub_download(request["model"], name, revision=request["revision"])
        emit(file={"name": name, "path": path})


def search(api: Any, request: dict[str, Any]) -> None:
    """Search models by words; most downloads first."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined,unused-ignore]

    get_session().head(api.endpoint, timeout=10)  # fail early: list_models retries an unreachable hub for 20 s
    found = api.list_models(search=request["words"], sort="downloads", limit=request["limit"])
    emit(found=[{"model": one.id, "downloads": one.downloads, "tags": list(one.tags or ())} for one in found])


def kind_of(error: Exception) -> str:
    """Whether an error without a response from the hub is the network's or the disk's."""
    import socket

    words = ("Connect", "Timeout", "Network", "Protocol")
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return "unreachable"
    if any(word in type(error).__name__ for word in words):
        return "unreachable"
    if isinstance(error, OSError):  # a file error names a file, or has a number that only files cause
        on_disk = error.filename is not None or error.errno in (13, 28, 30, 122)
        return "disk" if on_disk else "unreachable"
    return "other"


def main() -> int:
    """Handle one request; an error becomes an event with its kind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that an unfinished file is cleaned up
    request = json.load(sys.stdin)
    try:
        import huggingface_hub
        from huggingface_hub import errors

        # More specific ones first.
        kinds = {
            "offline": ("OfflineModeIsEnabled",),
            "gated": ("GatedRepoError",),
            "no_revision": ("RevisionNotFoundError",),
            "not_found": ("RepositoryNotFoundError", "EntryNotFoundError", "DisabledRepoError"),
            "name": ("HFValidationError",),
        }
        try:
            {"about": about, "get": get, "search": search}[request["do"]](huggingface_hub.HfApi(), request)
        except Exception as error:  # noqa: BLE001 - the process's boundary: reported with its kind
            kind = "other"
            for one, names in kinds.items():
                if any(isinstance(error, getattr(errors, name, ())) for name in names):
                    kind = one
                    break
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in (401, 403) and kind == "other":
                kind = "gated"
            if kind == "other" and status is None:
                kind = "settings" if isinstance(error, SettingsError) else kind_of(error)
            emit(error={"kind": kind, "text": str(error), "status": status})
            return 1
    except ImportError as error:
        emit(error={"kind": "missing", "text": str(error), "status": None})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
