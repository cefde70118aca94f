"""This machine's part of a multi-node server: what its keeper needs, and fingerprints of what all nodes must share.

vLLM does not compare its nodes: if one of them has another model of the same shape, it serves wrong output. The keepers
compare the fingerprints before any of them launches (`keeper.node_link`).
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
from pathlib import Path

from msgspec.structs import replace

from vllm_launchers.errors import RefusedError, UsageError
from vllm_launchers.keeper.node_link import HASHED
from vllm_launchers.keeper.records import NodeSpec, RestartMode, ServerRecord
from vllm_launchers.launch.errors import node_alone
from vllm_launchers.launch.launch_plan import LaunchPlan
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.choices.nodes import NODE_FLAGS, RANK, NodesRequest
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import is_secret_flag, redact
from vllm_launchers.vllm.flags.changes import FlagValue
from vllm_launchers.vllm.modelfacts.weights import weight_files

TIMEOUT = "distributed-timeout-seconds"
JOIN_SECONDS = 600.0
"""How long nodes wait for each other without that flag: NCCL's default."""
_OWN_FLAGS = (*NODE_FLAGS, TIMEOUT, "download-dir", "ssl-certfile", "ssl-keyfile", "ssl-ca-certs")
"""Flags that may differ between nodes. Values that are paths may differ, too."""
_NEVER_EQUAL = ("_name_or_path", "transformers_version")
"""Keys of a model's configuration that only say where it came from."""
_MOST_CONFIG = 8 << 20
_MOST_FILES = 1000
_PART = 1 << 16
_SHARED = ipaddress.ip_network("100.64.0.0/10")
"""Shared address space (RFC 6598), used by VPNs; `ipaddress` does not count it as private."""


def startable(request: LaunchRequest, nodes: NodesRequest) -> LaunchRequest:
    """Check a node's request and return it as it can be started: a headless node has no port.

    Raises:
        UsageError: the address of node 0 is missing, or an option does not apply to a node.
        RefusedError: node 0's address is neither private nor loopback.
    """
    if not nodes.master_addr:
        raise UsageError("--nodes: give --master-addr, the address of node 0 in the network that joins the nodes")
    if nodes.master_port >= 65535:
        raise UsageError(f"--master-port {nodes.master_port}: the port after it is used too, so 65534 is the highest")
    if request.restart != RestartMode.NEVER:
        raise UsageError("--restart on-failure: nodes are not restarted automatically because all must start together")
    if request.warm_up is False:
        raise UsageError("--no-warm-up: node 0 is ready only after a completed request because /health proves nothing")
    _refuse_public(nodes.master_addr)
    return replace(request, port=None) if nodes.rank else request


def _refuse_public(master: str) -> None:
    try:
        found = socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)[0][4][0]
        address = ipaddress.ip_address(str(found).partition("%")[0])
    except (OSError, ValueError) as error:
        raise UsageError(f"--master-addr {master}: this machine can't resolve it ({error})") from error
    if address.is_unspecified:
        raise UsageError(f"--master-addr {master}: give one address of node 0, not all of them")
    if not (address.is_private or address in _SHARED):
        raise RefusedError(
            f"--master-addr {master}: {address} is public, and nodes communicate without encryption or a password; "
            "connect them by a private network"
        )


def refuse_node(record: ServerRecord) -> None:
    """Refuse what can't be done to a single node of a multi-node server.

    Raises:
        RefusedError: the server is one.
    """
    if (node := record.current.spec.node) is not None:
        raise RefusedError(node_alone(record.name, node.text))


def node_spec(launch: LaunchPlan) -> NodeSpec | None:
    """What the keeper of this node needs; None for a single-machine server."""
    plan, nodes = launch.plan, launch.plan.nodes
    if nodes is None:
        return None
    rank, seconds = plan.flags[RANK], plan.flags.get(TIMEOUT)
    waits = float(seconds) if isinstance(seconds, int | float) and seconds > 0 else JOIN_SECONDS
    return NodeSpec(
        int(rank), len(nodes.nodes), nodes.master_addr, nodes.master_port + 1, waits,
        fingerprint(plan, Path(launch.model_folder) if launch.model_folder else None),
    )  # fmt: skip


def fingerprint(plan: Plan, folder: Path | None) -> dict[str, str]:
    """What must be equal on all nodes, by label; values are empty if unknown here. Contains no secrets.

    ``folder`` is the model's folder, whose contents are hashed, since its path may differ between nodes. None: the
    model is not on this machine, so only its name is compared.
    """
    config = _config_hash(folder)
    found = {
        "vLLM": plan.engine.version or "",
        "build of vLLM:": plan.engine.build or "",
        "model": "" if config else redact(plan.model),
        "model configuration": config,
        "model weights": _weights_hash(folder),
    }
    for name, value in sorted(plan.flags.items()):
        if name not in _OWN_FLAGS and not is_secret_flag(name) and not str(value).startswith("/"):
            found[f"--{name}"] = _shown(value)
    return found


def _shown(value: FlagValue) -> str:
    text = redact(json.dumps(value) if isinstance(value, bool) else str(value))
    return text if len(text) <= 100 else HASHED + hashlib.sha256(text.encode()).hexdigest()


def _config_hash(folder: Path | None) -> str:
    """Hash of the model's configuration, independent of its formatting; empty if it cannot be read."""
    if folder is None:
        return ""
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(_MOST_CONFIG))
        kept = {name: value for name, value in config.items() if name not in _NEVER_EQUAL}
        text = json.dumps(kept, sort_keys=True)
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return HASHED + hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _weights_hash(folder: Path | None) -> str:
    """Hash of the weight files' names, sizes, and samples of their contents; empty if there are none.

    Names and sizes do not tell two fine-tunes of a model apart, and reading whole files would take minutes.
    """

    found = hashlib.sha256()
    try:
        names = weight_files(one.name for one in folder.iterdir())[:_MOST_FILES] if folder is not None else []
        for name in names:
            with (folder or Path()).joinpath(name).open("rb") as file:
                size = file.seek(0, 2)
                found.update(f"{name} {size}\n".encode(errors="replace"))
                for at in (0, size // 2, max(0, size - _PART)):
                    file.seek(at)
                    found.update(file.read(_PART))
    except OSError:
        return ""
    return HASHED + found.hexdigest() if names else ""
