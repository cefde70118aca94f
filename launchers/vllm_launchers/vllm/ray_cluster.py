"""The Ray cluster that a vLLM would run its workers on, as Ray itself reports it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_launchers.vllm import ray_query

ADDRESS = "RAY_ADDRESS"
"""Environment variable with the cluster's address. If unset, Ray looks for a cluster started on this machine."""
SECONDS = 30.0
"""Timeout of a query; importing Ray alone takes two seconds."""
KEPT_SECONDS = 15.0
"""How long an answer is reused, because the launch screen plans at every key press."""


class RayNode(msgspec.Struct, frozen=True):
    """A living node. ``gpus`` is the total, ``free`` the part that no Ray job has reserved; None if unknown.

    ``kinds`` are Ray's accelerator types, such as ``A100``. ``here``: it is this machine.
    """

    address: str
    gpus: float
    free: float | None = None
    kinds: tuple[str, ...] = ()
    here: bool = False


class RayCluster(msgspec.Struct, frozen=True):
    """What is known about Ray and its cluster.

    ``missing`` says why Ray can't be imported, ``problem`` why the cluster can't be queried; otherwise they are empty.
    ``address`` is empty if no cluster was named and none runs on this machine; vLLM then starts Ray on this machine
    alone.
    ``local``: ``RAY_ADDRESS`` asks for that, even if a cluster runs here. ``versions`` has the cluster's
    ``ray_version`` and ``python_version``.
    """

    ray: str = ""
    python: str = ""
    address: str = ""
    nodes: tuple[RayNode, ...] = ()
    versions: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    missing: str = ""
    problem: str = ""
    local: bool = False

    @property
    def gpus(self) -> int:
        """Number of GPUs that Ray manages."""
        return int(sum(node.gpus for node in self.nodes))

    @property
    def free(self) -> int | None:
        """Number of GPUs that are not reserved; None if unknown."""
        found = [node.free for node in self.nodes]
        return int(sum(free for free in found if free is not None)) if None not in found else None


class RayClusters:
    """Queries clusters and keeps answers for some seconds. Thread-safe; queries of one cluster never overlap."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[float, RayCluster]] = {}
        """Answers and their arrival times."""
        self._locks: dict[tuple[str, str], threading.Lock] = {}

    def read(self, python: str, environ: Mapping[str, str]) -> RayCluster:
        """Query the cluster that a vLLM in this Python would use; takes some seconds."""
        key = (python, environ.get(ADDRESS, ""))
        with self._locks.setdefault(key, threading.Lock()):
            known = self._known.get(key)
            if known is None or time.monotonic() - known[0] > KEPT_SECONDS:
                answer = _asked(python, environ)
                known = self._known[key] = (time.monotonic(), answer)
            return known[1]


def _asked(python: str, environ: Mapping[str, str]) -> RayCluster:
    # Passed as text, so that Ray's imports are not searched for in the script's own folder.
    program = Path(ray_query.__file__).read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [python, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd="/", env=dict(environ), timeout=SECONDS, check=False,
        )  # fmt: skip
        return msgspec.json.decode(done.stdout.splitlines()[-1] if done.stdout else b"", type=RayCluster)
    except subprocess.TimeoutExpired:
        return RayCluster(problem=f"no answer within {SECONDS:g}s", address=environ.get(ADDRESS, ""))
    except OSError as error:
        return RayCluster(problem=f"{python}: {os.strerror(error.errno or 0)}")
    except msgspec.MsgspecError as error:
        return RayCluster(problem=f"its answer can't be read: {error}", address=environ.get(ADDRESS, ""))
