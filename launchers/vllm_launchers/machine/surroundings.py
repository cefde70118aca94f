"""The machine beside its GPUs, at one moment: port, limits, shared memory, disk, the hub's token. Costs little."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_launchers.machine.model import Surroundings
from vllm_launchers.machine.modelfacts.cache import cache_folder
from vllm_launchers.machine.ports import check_port
from vllm_launchers.secrets import is_secret_name

GIB = 2**30
SHM = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
HOMES = ("HF_HOME", "XDG_CACHE_HOME", "HOME")
"""What says where the hub's tools keep their files; its model cache alone may lie elsewhere."""

MOST_FILES = 65535
"""vLLM raises its own soft limit to this, as far as the hard one lets it (``vllm.utils.set_ulimit``)."""


def look_around(
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    starting: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    download_dir: str | None = None,
) -> Surroundings:
    """Look once. ``port`` is looked at only where it is given: it is not one that the server itself holds now.

    ``environment`` is what the server inherits (this process's own by default); ``download_dir`` a place for models
    other than the hub's cache.
    """
    environment = os.environ if environment is None else environment
    folder = Path(download_dir).expanduser() if download_dir else cache_folder(environment)
    use = check_port(host, port) if port is not None else None
    return Surroundings(
        port_holder=str(use) if use is not None else "",
        starting=tuple(starting),
        open_files=open_files_limit(),
        shm_free_gib=_free_gib(SHM),
        memory_free_gib=memory_available_gib(),
        model_disk=str(folder),
        model_disk_free_gib=_free_gib(folder),
        has_hub_token=has_hub_token(environment),
        environment=without_secrets(environment),
    )


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment may be looked at and shown."""
    return {name: value for name, value in environment.items() if not is_secret_name(name)}


def has_hub_token(environment: Mapping[str, str]) -> bool:
    """Whether the hub would be asked with a token: of the environment, or left by ``hf auth login``."""
    if any(environment.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")):
        return True
    home = cache_folder({name: environment[name] for name in HOMES if name in environment}).parent
    chosen = environment.get("HF_TOKEN_PATH")
    path = Path(chosen).expanduser() if chosen else home / "token"
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def open_files_limit() -> int | None:
    """How many files a server may open: the hard limit, as far as vLLM raises its soft one; None without a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return None
    return max(soft, min(hard, MOST_FILES))


def memory_available_gib() -> float | None:
    """RAM that can be had without swapping, as the kernel reckons it."""
    try:
        text = MEMINFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and (words := rest.split()) and words[0].isdecimal():
            return int(words[0]) / 2**20
    return None


def _free_gib(folder: Path) -> float | None:
    """What is free for this user where ``folder`` is, or would be made."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free / GIB
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
