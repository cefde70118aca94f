"""Prints what a Ray cluster reports, as one JSON object. Run by `ray_cluster` in vLLM's own Python.

It queries the cluster's control store (GCS) without joining the cluster, because Ray would start workers for a driver.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

SECONDS = 5.0
"""Timeout for connecting to the control store."""
LOCAL = "local"
"""The address that means: use no cluster, start Ray on this machine."""


def main() -> None:
    """Print the answer, or why there is none."""
    try:
        import ray
        from ray._private import services  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    found: dict[str, Any] = {"ray": ray.__version__, "python": ".".join(map(str, sys.version_info[:3]))}
    if os.environ.get("RAY_ADDRESS") == LOCAL:
        print(json.dumps(found | {"local": True}))
        return
    try:
        address = services.canonicalize_bootstrap_address(None)  # RAY_ADDRESS, else the cluster of this machine
        if address is not None:
            found["address"] = address
            host, _, port = address.rpartition(":")
            if not port.isdecimal():
                raise ValueError(f"{address!r} is not an address of the form HOST:PORT")
            socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
            found |= _cluster(address)
    except Exception as error:  # noqa: BLE001 - the process's boundary: reported
        found["problem"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    print(json.dumps(found))


def _cluster(address: str) -> dict[str, Any]:
    from ray._private.state import GlobalState  # type: ignore[import-not-found,unused-ignore]
    from ray._raylet import GcsClient, GcsClientOptions  # type: ignore[import-not-found,unused-ignore]

    versions = GcsClient(address=address).internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster")
    state = GlobalState()
    state._initialize_global_state(
        GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
    )
    free = state.available_resources_per_node()
    nodes = []
    for node in state.node_table():
        resources = node.get("Resources", {})
        if node.get("Alive"):
            kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
            nodes.append(
                {
                    "address": node["NodeManagerAddress"],
                    "gpus": resources.get("GPU", 0.0),
                    "free": free[node["NodeID"]].get("GPU", 0.0) if node["NodeID"] in free else None,
                    "kinds": kinds,
                    "here": _here(node["NodeManagerAddress"]),
                }
            )
    known = json.loads(versions) if versions else {}
    return {"nodes": nodes, "versions": {name: known.get(name) for name in ("ray_version", "python_version")}}


def _here(address: str) -> bool:
    """Whether an address is this machine's, which is when a socket can be bound to it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
