"""Fixes other than vLLM's flags: ports, files, accounts, drivers, links."""

from __future__ import annotations

import re

from vllm_console.diagnosis.failure.case import Case
from vllm_console.diagnosis.finding import Fix
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.flags.changes import Changes

_PORT = lazy_pattern(r"\('[^']*', (?P<port>\d+)\)")
_ADDRESS = lazy_pattern(r"connect to \(?\[?(?P<host>[\w.:-]+?)\]?(?:, |:)(?P<port>\d+)(?!, \d|[\d:.]*\d)")
_LOCAL = lazy_pattern(r"Unable to find address for: (?P<name>[\w.@-]+)|tcp://(?P<ip>\[[^\]]+\]|[\d.]+):\d+")
_LISTENS = lazy_pattern(r"\bport: (?P<port>\d{1,5})\b")
_MODULE = lazy_pattern(r"(?P<path>[\w./-]*?)(?P<module>[\w-]+)(?:\.[\w-]+)*\.so[.\d]*: undefined symbol")
_WAITED = lazy_pattern(r"Waited (?P<seconds>\d{1,6})s")


def _advice(why: str, tradeoff: str = "") -> Fix:
    return Fix(Changes(), why, tradeoff)


def port_in_use(case: Case) -> tuple[Fix, ...]:
    """Use another port."""
    found = _PORT.search(case.text)
    which = f"Port {found['port']}" if found else "The port"
    why = f"{which} is in use: choose another --port. 'vllm-console start' without --port takes the first free one."
    return (_advice(why),)


def model_not_found(case: Case) -> tuple[Fix, ...]:
    """Correct the name, or provide the files."""
    offline = re.search(r"offline|LocalEntryNotFound|couldn't connect", case.text, re.IGNORECASE)
    if offline:
        why = "Not in the local cache, and the Hub is unreachable: download it first (hf download MODEL)."
        return (_advice(why), _advice("If HF_HUB_OFFLINE is set, unset it for this start."))
    return (_advice("Check the spelling (org/name), or give the full path of a folder with its config.json."),)


def gated(_case: Case) -> tuple[Fix, ...]:
    """Use a token of an account with access."""
    why = "Accept the model's terms on the Hub, then export HF_TOKEN with a token of that account."
    return (_advice(why),)


def nccl(case: Case) -> tuple[Fix, ...]:
    """Use another path between the GPUs."""
    found = [_advice("Start once with --env NCCL_DEBUG=INFO: NCCL then logs which call failed, and why.")]
    if case.flags.get("disable-custom-all-reduce") is not True:
        why = "Skips vLLM's custom all-reduce, which needs peer access between the GPUs."
        tradeoff = "Small steps are slightly slower over NVLink."
        found.append(Fix(Changes({"disable-custom-all-reduce": True}), why, tradeoff))
    why = "Without peer access (--env NCCL_P2P_DISABLE=1) data goes through main memory, as some boards require."
    found.append(_advice(why, "Slower in every layer."))
    found.append(_advice("In a container /dev/shm must be large: use --ipc=host or --shm-size=16g."))
    return tuple(found)


def engine_died(case: Case) -> tuple[Fix, ...]:
    """The engine was ended externally, or hung."""
    if "timed out" in case.text:
        hung = "A worker hung: check with nvidia-smi whether a GPU is stuck at 100% or lost, then start again."
        longer = "waits longer, where a step really takes that long."
        return (_advice(hung), *_variable(case, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 900, longer))
    return killed()


def killed() -> tuple[Fix, ...]:
    """Find out whether the kernel killed it."""
    return (
        _advice("Check 'dmesg | grep -i kill': if the kernel killed it, the machine's memory ran out, not the GPU's."),
        _advice("Start it again; --restart on-failure does so automatically."),
    )


def _variable(case: Case, name: str, value: int, what_for: str) -> tuple[Fix, ...]:
    """Advice to set a variable, if the log's vLLM reads it; for an unknown version, with the first one that does."""
    from vllm_launchers.vllm.flags.releases import parse_release, variable_releases

    span = variable_releases(name)
    if span is None:
        return ()
    first, last = span
    release = parse_release(case.version or "")
    if release is None:
        return (_advice(f"--env {name}={value} (vLLM {first} and later) {what_for}"),)
    oldest, newest = parse_release(first), parse_release(last or "")
    read = (oldest is None or release[:2] >= oldest[:2]) and (newest is None or release[:2] <= newest[:2])
    return (_advice(f"--env {name}={value} {what_for}"),) if read else ()


def not_ready_in_time(case: Case) -> tuple[Fix, ...]:
    """Allow more time, or make the start faster."""
    found = _WAITED.search(case.text)
    longer = max(1800, 3 * int(found["seconds"])) if found else 1800
    waits = "lets the API server wait longer for the engine."
    slow = "Check the log for what took so long: weights from a slow disk or network, compilation, kernel warm-up."
    return (*_variable(case, "VLLM_ENGINE_READY_TIMEOUT_S", longer, waits), _advice(slow))


def node_address(case: Case) -> tuple[Fix, ...]:
    """Use an interface or address that this machine has."""
    found = _LOCAL.search(case.text)
    given = f", not to {found['name'] or found['ip'].strip('[]')}" if found else ""
    wanted = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface"
    if found and found["ip"]:
        wanted = "VLLM_HOST_IP to an address"
    return (
        _advice(f"Set {wanted} of this node{given}: 'ip -brief address' lists them."),
        _advice("Each node has its own: give them with --env on each, not in a preset that all nodes use."),
    )


def master_port(case: Case) -> tuple[Fix, ...]:
    """Use another port, or end the process that has it."""
    found = _LISTENS.search(case.text)
    port = found["port"] if found else "29501"
    left = "A rank that an earlier start left may have it: 'vllm-console leftovers'."
    return (
        _advice(f"See what has the port: ss -ltnp 'sport = :{port}'. {left}"),
        _advice(f"Or give another port than {port} with --master-port, the same on every node."),
    )


def rendezvous(case: Case) -> tuple[Fix, ...]:
    """Bring up all ranks, at one address that all can reach."""
    address = _ADDRESS.search(case.text)
    where = f" ({address['host']}, port {address['port']})" if address else ""
    found = []
    if address and address["host"] != "localhost" and not re.fullmatch(r"[\d.]+|.*:.*", address["host"]):
        found.append(_advice(f"Check that this node can resolve the name: getent hosts {address['host']}."))
    found += [
        _advice(f"Check that every rank was started and that each node reaches the first one{where}."),
        _advice(
            "On machines with several networks name the right one on every node: --env VLLM_HOST_IP=ADDRESS, "
            "--env GLOO_SOCKET_IFNAME=INTERFACE, --env NCCL_SOCKET_IFNAME=INTERFACE."
        ),
    ]
    longer = "Where a rank only needs longer to start (a slow disk), all wait longer for it."
    if case.release is not None:
        found.append(Fix(Changes({"distributed-timeout-seconds": 1800}), longer))
    return tuple(found)


def node_missing(_case: Case) -> tuple[Fix, ...]:
    """Start all nodes, and open the way between them."""
    return (
        _advice("Start every node with the same command and its own --node-rank, within the time they wait."),
        _advice(
            "Check from the other nodes that node 0 can be reached at --master-addr, on the master port and the one "
            "after it: a firewall must allow both and, for vLLM's own connections, all other ports."
        ),
    )


def nodes_differ(_case: Case) -> tuple[Fix, ...]:
    """Make the nodes equal."""
    return (
        _advice("Use the same vLLM, the same model files and the same flags on every node; give flags with --set."),
        _advice("Node 0 keeps waiting after it refused a node: correct that one and start it again."),
    )


def peer_gone(_case: Case) -> tuple[Fix, ...]:
    """See the other rank's log."""
    return (
        _advice("Check the log of the rank that ended first, on its own node."),
        _advice("Then stop and start all ranks together: none rejoins on its own."),
    )


def peer_unreachable(_case: Case) -> tuple[Fix, ...]:
    """Check whether the other machine is running and reachable."""
    return (
        _advice("Check that the other machine runs, and the network between the two."),
        _advice("Then start all nodes again: none rejoins on its own."),
    )


def ray_missing(case: Case) -> tuple[Fix, ...]:
    """Run without Ray, or install it."""
    without = "On one machine vLLM runs its workers itself, without Ray."
    found = [Fix(Changes(unset=("distributed-executor-backend",)), without)]
    if "does not support" not in case.text:
        found.append(
            _advice("Install Ray into the environment of this vLLM, in the cluster's version: pip install ray.")
        )
    return tuple(found)


def ray_cluster(_case: Case) -> tuple[Fix, ...]:
    """Reach a cluster of the same version."""
    return (
        _advice("Check the cluster with 'ray status' from this vLLM's environment; RAY_ADDRESS names another one."),
        _advice("All nodes and this vLLM need the same Ray and the same Python, down to the patch version."),
    )


def ray_gpus(_case: Case) -> tuple[Fix, ...]:
    """Free GPUs of the cluster, or use fewer."""
    return (
        _advice("Check with 'ray status' which GPUs are reserved: end the jobs that hold them, or add a node."),
        _advice("Or use fewer workers: tensor × pipeline parallel is the number of GPUs that Ray has to have free."),
    )


def raylet_gone(_case: Case) -> tuple[Fix, ...]:
    """Start Ray again, then the server."""
    return (
        _advice("Start Ray again on that node (ray start), check it with 'ray status', then restart this server."),
        _advice(
            "Check 'dmesg | grep -i kill' there, and raylet.out in /tmp/ray/session_latest/logs, for why it ended."
        ),
    )


def library_symbol(case: Case) -> tuple[Fix, ...]:
    """Install packages built for each other."""
    version = f"=={case.version.partition('+')[0]}" if case.version else ""
    fresh = (
        f"Install vLLM into a fresh environment and let it choose torch: pip install vllm{version}. "
        "Pinning or upgrading torch afterwards breaks it."
    )
    found = _MODULE.search(case.text)
    if found is None or "vllm" in found["path"] or found["module"].startswith("lib"):
        return (_advice(fresh), _advice("Unset LD_LIBRARY_PATH and PYTHONPATH if they point to another CUDA or torch."))
    own = f"{found['module']} is not part of vLLM: uninstall its package, or rebuild it for the installed torch."
    return (_advice(own), _advice(fresh))


def kernel_crash(case: Case) -> tuple[Fix, ...]:
    """Distinguish a software bug from a faulty GPU."""
    found = [_advice("Check 'dmesg | grep -i xid': Xid 48, 64, 79, 94 or 95 mean a faulty GPU.")]
    if case.flags.get("enforce-eager") is not True:
        why = "Disables CUDA graphs and compilation: if it then runs, one of their kernels is at fault."
        found.append(Fix(Changes({"enforce-eager": True}), why, "Each step is slower."))
    found.append(_advice("Update vLLM: most releases fix kernel crashes."))
    return tuple(found)


_IN_MAIN_MEMORY = ("swap-space", "cpu-offload-gb", "kv-offloading-size")


def _flags_of(case: Case, names: tuple[str, ...]) -> list[str]:
    """Those of the flags that the log's vLLM accepts; if its version is unknown, the newest release's."""
    from vllm_launchers.vllm.flags.releases import RELEASES, UnknownReleaseError, release_table

    try:
        table = release_table(case.version or RELEASES[-1])
    except UnknownReleaseError:
        return []
    return [f"--{name}" for name in names if name in table.flags]


def main_memory(case: Case) -> tuple[Fix, ...]:
    """Provide more main memory, or use less of it."""
    more = _advice("Give the machine or container more memory: loading weights needs memory besides the page cache.")
    names = _flags_of(case, _IN_MAIN_MEMORY)
    return (more, _advice(f"Lower what uses main memory: {', '.join(names)}.")) if names else (more,)


def driver(_case: Case) -> tuple[Fix, ...]:
    """Match driver, CUDA and build."""
    return (
        _advice("Run nvidia-smi: if it fails, the driver is the problem (reboot after an upgrade)."),
        _advice("If it works, use a vLLM build for the CUDA version that nvidia-smi shows, or a newer driver."),
    )


def disk_full(case: Case) -> tuple[Fix, ...]:
    """Make room, elsewhere or here."""
    if "/torch_" in case.text or "shared" in case.text.lower():
        return (_advice("/dev/shm is full: run the container with --ipc=host or --shm-size=16g."),)
    cache = "compile" in case.text.lower() or "cache" in case.text.lower()
    where = "--env VLLM_CACHE_ROOT=FOLDER" if cache else "--env HF_HOME=FOLDER"
    return (_advice(f"Free space, or use a folder with more of it: {where}."),)


def interrupted(_case: Case) -> tuple[Fix, ...]:
    """Start it again: nothing is wrong with it."""
    return (_advice("Start it again; --restart on-failure does so automatically."),)
