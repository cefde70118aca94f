"""Asks and downloads with ``huggingface_hub``, in a Python that has it: ``python hub_worker.py < request``.

Run by `vllm_launchers.vllm.hub`, as a file: it may run in an engine's environment, which has no vllm_launchers. It gets
one JSON object and prints JSON objects, one a line. Nothing that it downloads is run or imported.
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
"""Files in which a model names Python code of its own: transformers then loads that code."""
LARGEST_SETTINGS = 16 * 2**20
"""No model has a larger one; vLLM would read it whole."""


class SettingsError(Exception):
    """A model's settings are nothing that a model has."""


def about(api: Any, request: dict[str, Any]) -> None:
    """A model's commit and files, and whether its settings name code of its own.

    Raises:
        SettingsError: a file of them is too large to be one.
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
        with tempfile.TemporaryDirectory() as folder:  # the cache gets nothing before the user agrees
            path = huggingface_hub.hf_hub_download(request["model"], one["name"], revision=found.sha, local_dir=folder)
            with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                code = '"auto_map"' in file.read(LARGEST_SETTINGS)
    emit(about={"commit": found.sha, "files": files, "code": code})


def get(_api: Any, request: dict[str, Any]) -> None:
    """Download files, one after the other; what is there already is kept."""
    import huggingface_hub

    for name in request["files"]:
        path = huggingface_hub.hf_hub_download(request["model"], name, revision=request["revision"])
        emit(file={"name": name, "path": path})


def search(api: Any, request: dict[str, Any]) -> None:
    """Models by words, those with most downloads first."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined,unused-ignore]

    get_session().head(api.endpoint, timeout=10)  # a hub that can't be reached would be asked again for 20 s
    found = api.list_models(search=request["words"], sort="downloads", limit=request["limit"])
    emit(found=[{"model": one.id, "downloads": one.downloads, "tags": list(one.tags or ())} for one in found])


def kind_of(error: Exception) -> str:
    """Whether an error without an answer of the hub is the network's or the disk's."""
    import socket

    words = ("Connect", "Timeout", "Network", "Protocol")
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return "unreachable"
    if any(word in type(error).__name__ for word in words):
        return "unreachable"
    if isinstance(error, OSError):  # of a file, it names one or has a number that only files have
        on_disk = error.filename is not None or error.errno in (13, 28, 30, 122)
        return "disk" if on_disk else "unreachable"
    return "other"


def main() -> int:
    """Answer one request; an error is an event with its kind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that an unfinished file is cleaned up
    request = json.load(sys.stdin)
    try:
        import huggingface_hub
        from huggingface_hub import errors

        # The first one is the more specific.
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
