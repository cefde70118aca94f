"""The machine except its GPUs, at one moment: port, limits, shared memory, disk, hub token. Cheap to read."""

from __future__ import annotations

import os
import pwd
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from vllm_launchers.host.gpu.vendors import vendors_here
from vllm_launchers.host.hub_folders import cache_folder, has_hub_token
from vllm_launchers.host.main_memory import main_memory
from vllm_launchers.host.ports import check_port
from vllm_launchers.secrets import is_secret_name
from vllm_launchers.units import GIB

SHM = Path("/dev/shm")
_FIRST_UID, _NOBODY = 1000, 60000
"""Range of uids assigned to people."""
MOST_FILES = 65535
"""vLLM raises its own soft limit to this, if the hard limit allows (``vllm.utils.set_ulimit``)."""


class HostEnvironment(msgspec.Struct, frozen=True):
    """The machine except its GPUs, at one moment. None means unknown; unknown values are not reported.

    ``port_problem``: why the port can't be bound (``is in use by vllm (pid 4711)``), empty if it can. ``starting``: our
    servers that are starting now. ``open_files``: the result of `open_files_limit`. Sizes in GiB.
    """

    port_problem: str = ""
    starting: tuple[str, ...] = ()
    open_files: int | None = None
    shm_free_gib: float | None = None
    memory_free_gib: float | None = None
    model_disk: str = ""
    """The download folder."""
    model_disk_free_gib: float | None = None
    has_hub_token: bool | None = None
    accelerators: tuple[str, ...] = ()
    """A sentence for each kind of non-NVIDIA accelerator, if there are no NVIDIA GPUs."""
    variables: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The environment that the server inherits, without secrets."""
    shared: bool = False
    """Whether other people have accounts on this machine."""
    absent: tuple[str, ...] = ()
    """Those of the requested paths that do not exist."""


def read_environment(
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    starting: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    download_dir: str | None = None,
    files: Iterable[str] = (),
) -> HostEnvironment:
    """Read it once. ``port`` is checked if given; don't pass a port that the server itself holds now.

    ``environment``: what the server inherits (default: this process's own). ``download_dir``: a model folder other than
    the hub cache. ``files``: paths that should exist.
    """
    environment = os.environ if environment is None else environment
    folder = Path(download_dir).expanduser() if download_dir else cache_folder(environment)
    use = check_port(host, port) if port is not None else None
    return HostEnvironment(
        port_problem=str(use) if use is not None else "",
        starting=tuple(starting),
        open_files=open_files_limit(),
        shm_free_gib=_free_gib(SHM),
        memory_free_gib=main_memory().available_gib,
        model_disk=str(folder),
        model_disk_free_gib=_free_gib(folder),
        has_hub_token=has_hub_token(environment),
        variables=without_secrets(environment),
        accelerators=tuple(vendor.sentence for vendor in vendors_here()),
        shared=other_people(),
        absent=tuple(path for path in files if not _exists(path)),
    )


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def other_people() -> bool:
    """Whether other people have accounts on this machine, according to its local user list."""
    people = [user for user in pwd.getpwall() if _FIRST_UID <= user.pw_uid < _NOBODY]
    return any(user.pw_uid != os.geteuid() and not user.pw_shell.endswith(("nologin", "false")) for user in people)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables whose names suggest secrets."""
    return {name: value for name, value in environment.items() if not is_secret_name(name)}


def open_files_limit() -> int | None:
    """How many files a server can open: vLLM raises its soft limit, up to the hard one. None if unlimited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return None
    return max(soft, min(hard, MOST_FILES))


def _free_gib(folder: Path) -> float | None:
    """Space available to this user where ``folder`` is or would be created."""
    for place in (folder, *folder.parents):
        try:
            disk = os.statvfs(place)
            return disk.f_bavail * disk.f_frsize / GIB
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
