"""The machine apart from its GPUs, at one moment: port, limits, shared memory, disk, the hub token. Cheap."""

from __future__ import annotations

import os
import pwd
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from vllm_launchers.host.gpu.vendors import vendors_here
from vllm_launchers.host.hub_folders import cache_folder, has_hub_token
from vllm_launchers.host.ports import check_port
from vllm_launchers.secrets import is_secret_name
from vllm_launchers.units import GIB

SHM = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
_FIRST_UID, _NOBODY = 1000, 60000
"""The uids that people get."""
MOST_FILES = 65535
"""vLLM raises its own soft limit to this, if the hard limit allows (``vllm.utils.set_ulimit``)."""


class HostEnvironment(msgspec.Struct, frozen=True):
    """The machine apart from its GPUs, at one moment. None means unknown, and what is unknown is not reported.

    ``port_holder`` says who has the port (``pid 4711, anna``), empty for a free one. ``starting`` lists our servers
    that are starting right now. ``open_files`` is the soft limit (``ulimit -n``). Sizes in GiB.
    """

    port_holder: str = ""
    starting: tuple[str, ...] = ()
    open_files: int | None = None
    shm_free_gib: float | None = None
    memory_free_gib: float | None = None
    model_disk: str = ""
    """The download folder."""
    model_disk_free_gib: float | None = None
    has_hub_token: bool | None = None
    accelerators: tuple[str, ...] = ()
    """A sentence for each kind of accelerator that is not NVIDIA's, if there are no NVIDIA GPUs."""
    variables: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What the server inherits, without secrets."""
    shared: bool = False
    """Whether other people have accounts here."""
    absent: tuple[str, ...] = ()
    """Paths of the files asked about that do not exist."""


def read_environment(
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    starting: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    download_dir: str | None = None,
    files: Iterable[str] = (),
) -> HostEnvironment:
    """Read it once. ``port`` is checked only if given: it is not one that the server itself holds now.

    ``environment`` is what the server inherits (default: this process's own); ``download_dir`` a model folder other
    than the hub cache; ``files`` paths that should exist.
    """
    environment = os.environ if environment is None else environment
    folder = Path(download_dir).expanduser() if download_dir else cache_folder(environment)
    use = check_port(host, port) if port is not None else None
    return HostEnvironment(
        port_holder=str(use) if use is not None else "",
        starting=tuple(starting),
        open_files=open_files_limit(),
        shm_free_gib=_free_gib(SHM),
        memory_free_gib=memory_available_gib(),
        model_disk=str(folder),
        model_disk_free_gib=_free_gib(folder),
        has_hub_token=has_hub_token(environment),
        variables=without_secrets(environment),
        accelerators=tuple(vendor.sentence for vendor in vendors_here()),
        shared=other_people(),
        absent=tuple(path for path in files if not _exists(path)),
    )


def _exists(path: str) -> bool:
    """Whether this user can find it."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def other_people() -> bool:
    """Whether other people have accounts on this machine, as far as its own list of users says."""
    people = [user for user in pwd.getpwall() if _FIRST_UID <= user.pw_uid < _NOBODY]
    return any(user.pw_uid != os.geteuid() and not user.pw_shell.endswith(("nologin", "false")) for user in people)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that may be used and shown."""
    return {name: value for name, value in environment.items() if not is_secret_name(name)}


def open_files_limit() -> int | None:
    """How many files a server may open: up to the hard limit, as far as vLLM raises its soft one; None if unlimited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return None
    return max(soft, min(hard, MOST_FILES))


def memory_available_gib() -> float | None:
    """RAM available without swapping, by the kernel's estimate."""
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
    """Free space for this user where ``folder`` is, or would be created."""
    for place in (folder, *folder.parents):
        try:
            disk = os.statvfs(place)
            return disk.f_bavail * disk.f_frsize / GIB
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
