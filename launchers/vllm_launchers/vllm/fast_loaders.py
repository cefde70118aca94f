"""Values of ``--load-format`` that read weights faster, and which of them an installation can use. Nothing is run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm_launchers.host.hub_folders import cache_folder
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.installed_packages import site_packages

if TYPE_CHECKING:
    from vllm_launchers.vllm.flags.flag_table import FlagSpec

FAST_LOADERS: Mapping[str, str] = {
    "runai_streamer": "runai_model_streamer",
    "fastsafetensors": "fastsafetensors",
    "tensorizer": "tensorizer",
}
"""The package that each needs, named like its metadata's folder; best first."""

_USUAL = (None, "auto", "safetensors", "hf")
_TENSORIZER_SINCE = (0, 11, 0)
"""First release that finds ``model.tensors`` in the model's folder without a flag."""


class FastLoader(msgspec.Struct, frozen=True):
    """A usable load format, and its trade-off in a sentence."""

    name: str
    tradeoff: str


_TRADEOFFS = {
    "runai_streamer": "It reads with many threads and buffers the weights in main memory; the disk's speed stays the"
    " limit, and weights that are in the page cache already gain little.",
    "fastsafetensors": "It copies whole files into GPU memory before it splits them, so loading needs more free GPU"
    " memory; without GPUDirect Storage it gains less.",
    "tensorizer": "It reads model.tensors, which must be written again whenever the model changes.",
}


def fast_loaders(
    engine: Engine, spec: FlagSpec | None, model: str, flags: Flags, environ: Mapping[str, str]
) -> tuple[FastLoader, ...]:
    """Fast load formats that this vLLM has, whose package is in its environment, and that can read this model.

    ``spec`` is its ``load-format`` flag, ``environ`` the server's environment. Raises OSError for unreadable folders.
    """
    if engine.kind is not EngineKind.VLLM or engine.build not in ("cuda", "rocm") or spec is None:
        return ()
    if flags.get("load-format") not in _USUAL or "model-loader-extra-config" in flags or "quantization" in flags:
        return ()
    offered = set(spec.choices or spec.words) & FAST_LOADERS.keys()
    names = _files(model, flags, environ)
    if not offered or not names:
        return ()
    installed = set(_distributions(engine))
    found = []
    for name, package in FAST_LOADERS.items():
        if name in offered and package in installed and _reads(name, names, model, flags, engine):
            found.append(FastLoader(name, _TRADEOFFS[name]))
    return tuple(found)


def _reads(name: str, files: set[str], model: str, flags: Flags, engine: Engine) -> bool:
    if name == "tensorizer":  # sharded files have other names, and vLLM needs a flag to find them
        alone = flags.get("tensor-parallel-size", 1) == 1 and os.path.isabs(model)  # noqa: PTH117 - it is text
        return alone and "model.tensors" in files and (engine.release or (0, 0, 0)) >= _TENSORIZER_SINCE
    if name == "fastsafetensors" and engine.build != "cuda":
        return False
    weights = {file for file in files if file.endswith(".safetensors")}
    twice = {file for file in weights if file.startswith("consolidated")}
    # This one reads all of these files, and not only those in the index: with both, it reads all weights twice.
    return bool(weights) and not (name == "runai_streamer" and twice and twice != weights)


def _files(model: str, flags: Flags, environ: Mapping[str, str]) -> set[str]:
    """Names of the model's files on this machine; empty if there are none."""
    folder: Path | None = Path(model)
    if not os.path.isabs(model):  # noqa: PTH117 - it is text
        from vllm_launchers.vllm.modelfacts.read import find_cached  # not needed for the constants alone

        cache = flags.get("download-dir")
        revision = flags.get("revision")
        found = find_cached(
            model,
            Path(cache) if isinstance(cache, str) else cache_folder(environ),
            revision if isinstance(revision, str) else None,
        )
        folder = found.snapshot if found is not None else None
    return {entry.name for entry in folder.iterdir()} if folder is not None and folder.is_dir() else set()


def _distributions(engine: Engine) -> Iterator[str]:
    """Packages in an engine's environment, named like their metadata's folders."""
    from vllm_launchers.vllm.flags.source_location import interpreter_of

    for folder in site_packages(interpreter_of(engine)):
        for path in folder.glob("*-info"):
            yield path.name.partition("-")[0].lower().replace(".", "_")
