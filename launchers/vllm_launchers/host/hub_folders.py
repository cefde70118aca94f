"""Where Hugging Face tools keep models and the token on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

HOMES = ("HF_HOME", "XDG_CACHE_HOME", "HOME")
"""Variables that locate the hub's files; its model cache alone may be elsewhere."""


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The model cache of Hugging Face tools under these variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := environ.get(name):
            return _expanded(value, environ)
    if value := environ.get("HF_HOME"):
        return _expanded(value, environ) / "hub"
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(base, environ) / "huggingface" / "hub"


def model_folder(cache: Path, model: str) -> Path:
    """The folder of a model in a cache."""
    return cache / f"models--{model.replace('/', '--')}"


def _expanded(value: str, environ: Mapping[str, str]) -> Path:
    """Expand a folder from these variables; ``~`` is their user's home, not this process's."""
    home = environ.get("HOME")
    value = re.sub(r"\$\{?(\w+)\}?", lambda found: environ.get(found[1], found[0]), value)
    if home and (value == "~" or value.startswith("~/")):
        return Path(home + value[1:])
    try:
        return Path(value).expanduser()
    except RuntimeError:
        return Path(value)


def has_hub_token(environment: Mapping[str, str]) -> bool:
    """Whether the hub would get a token, from the environment or from ``hf auth login``."""
    if any(environment.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")):
        return True
    home = cache_folder({name: environment[name] for name in HOMES if name in environment}).parent
    chosen = environment.get("HF_TOKEN_PATH")
    path = Path(chosen).expanduser() if chosen else home / "token"
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
