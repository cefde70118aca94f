"""A look at a model's folder before a launch: vLLM's own answer to a wrong one takes 7 s and misleads."""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[\w.-]{1,96})?")
REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")
CONFIGS = ("config.json", "params.json")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")


def model_folder_problem(model: str) -> str | None:
    """What is wrong with a model that is given as a folder, in one sentence, or None.

    Hub ids (``org/name``) and remote addresses pass: whether they exist is not known here.
    """
    if REMOTE.match(model):
        return None
    if model.startswith("~"):
        return f"model {model}: write the whole path, the server does not know '~': {_expanded(model)}"
    path = Path(model)
    if not path.is_absolute():
        if not model.startswith(".") and not path.is_dir() and HUB_ID.fullmatch(model):
            return None
        if path.exists() and not HUB_ID.fullmatch(model):
            return f"model {model}: write the whole path, the server runs in another folder: {path.absolute()}"
        if not path.exists():
            return f"model {model}: is neither a folder here nor a hub id such as Qwen/Qwen3-8B-AWQ"
    try:
        return _folder_problem(path)
    except OSError as error:
        return f"model {model}: cannot be read: {os.strerror(error.errno or 0)}"


def _folder_problem(path: Path) -> str | None:
    if not path.exists():
        return f"model {path}: there is no such folder; give a folder with a config.json, or a hub id (org/name)"
    if path.is_file():
        if path.suffix == ".gguf":
            return None
        return f"model {path}: is a file; give the folder that holds its config.json"
    names = [entry.name for entry in path.iterdir()]
    if not any(name in CONFIGS for name in names):
        inside = next((name for name in sorted(names) if (path / name / "config.json").is_file()), None)
        hint = f"; did you mean {path / inside}?" if inside else ""
        return f"model {path}: is no model folder, it holds no config.json{hint}"
    if not any(name.endswith(WEIGHTS) for name in names):
        return f"model {path}: holds no weights ({', '.join(WEIGHTS[:2])}, …); was its download cut off?"
    return None


def _expanded(model: str) -> str:
    try:
        return str(Path(model).expanduser())
    except RuntimeError:
        return "/…"
