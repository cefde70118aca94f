"""Fixes other than vLLM's flags: ports, files, accounts, drivers, links."""

from __future__ import annotations

import re

from vllm_console.diagnosis.failure.case import Case
from vllm_console.diagnosis.failure.fixes.advice import ADVICE, advice
from vllm_console.diagnosis.finding import Cause, Fix
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.flags.releases import RELEASES, release_table, variable_releases
from vllm_launchers.vllm.release_defaults import parse_release

_PORT = lazy_pattern(r"\('[^']*', (?P<port>\d+)\)")
_ADDRESS = lazy_pattern(r"connect to \(?\[?(?P<host>[\w.:-]+?)\]?(?:, |:)(?P<port>\d+)(?!, \d|[\d:.]*\d)")
_LOCAL = lazy_pattern(r"Unable to find address for: (?P<name>[\w.@-]+)|tcp://(?P<ip>\[[^\]]+\]|[\d.]+):\d+")
_LISTENS = lazy_pattern(r"\bport: (?P<port>\d{1,5})\b")
_MODULE = lazy_pattern(r"(?P<path>[\w./-]*?)(?P<module>[\w-]+)(?:\.[\w-]+)*\.so[.\d]*: undefined symbol")
_FILE = lazy_pattern(r"config file at '(?P<path>[^']{1,500})'")
_CONFIG_FIELD = lazy_pattern(r"error for field '(?P<name>\w{1,100})'")
_WAITED = lazy_pattern(r"Waited (?P<seconds>\d{1,6})s")


def port_in_use(case: Case) -> tuple[Fix, ...]:
    """Use another port."""
    found = _PORT.search(case.text)
    which = f"Port {found['port']}" if found else "The port"
    why = f"{which} is in use: choose another --port. 'vllm-console start' without --port takes the first free one."
    return (advice(why),)


def model_not_found(case: Case) -> tuple[Fix, ...]:
    """Correct the name, or provide the files."""
    offline = re.search(r"offline|LocalEntryNotFound|couldn't connect", case.text, re.IGNORECASE)
    if offline:
        why = "Not in the local cache, and the Hub is unreachable: download it first (hf download MODEL)."
        return (advice(why), advice("If HF_HUB_OFFLINE is set, unset it for this start."))
    return (advice("Check the spelling (org/name), or give the full path of a folder with its config.json."),)


def nccl(case: Case) -> tuple[Fix, ...]:
    """Use another path between the GPUs."""
    found = [advice("Start once with --env NCCL_DEBUG=INFO: NCCL then logs which call failed, and why.")]
    if case.flags.get("disable-custom-all-reduce") is not True:
        why = "Skips vLLM's custom all-reduce, which needs peer access between the GPUs."
        tradeoff = "Small steps are slightly slower over NVLink."
        found.append(Fix(Changes({"disable-custom-all-reduce": True}), why, tradeoff))
    why = "Without peer access (--env NCCL_P2P_DISABLE=1) data goes through main memory, as some boards require."
    found.append(advice(why, "Slower in every layer."))
    found.append(advice("In a container /dev/shm must be large: use --ipc=host or --shm-size=16g."))
    return tuple(found)


def engine_died(case: Case) -> tuple[Fix, ...]:
    """The engine was ended externally, or hung."""
    if "timed out" in case.text:
        hung = "A worker hung: check with nvidia-smi whether a GPU is stuck at 100% or lost, then start again."
        longer = "waits longer, in case a step really takes that long."
        return (advice(hung), *_variable(case, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 900, longer))
    return ADVICE[Cause.KILLED]


def _variable(case: Case, name: str, value: int, what_for: str) -> tuple[Fix, ...]:
    """Advice to set a variable, if the log's vLLM reads it; for an unknown version, with the first one that does."""
    span = variable_releases(name)
    if span is None:
        return ()
    first, last = span
    release = parse_release(case.version or "")
    if release is None:
        return (advice(f"--env {name}={value} (vLLM {first} and later) {what_for}"),)
    oldest, newest = parse_release(first), parse_release(last or "")
    read = (oldest is None or release[:2] >= oldest[:2]) and (newest is None or release[:2] <= newest[:2])
    return (advice(f"--env {name}={value} {what_for}"),) if read else ()


def not_ready_in_time(case: Case) -> tuple[Fix, ...]:
    """Allow more time, or make the start faster."""
    found = _WAITED.search(case.text)
    longer = max(1800, 3 * int(found["seconds"])) if found else 1800
    waits = "lets the API server wait longer for the engine."
    slow = "Check the log for what took so long: weights from a slow disk or network, compilation, kernel warm-up."
    return (*_variable(case, "VLLM_ENGINE_READY_TIMEOUT_S", longer, waits), advice(slow))


def node_address(case: Case) -> tuple[Fix, ...]:
    """Use an interface or address that this machine has."""
    found = _LOCAL.search(case.text)
    given = f", not to {found['name'] or found['ip'].strip('[]')}" if found else ""
    wanted = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface"
    if found and found["ip"]:
        wanted = "VLLM_HOST_IP to an address"
    return (
        advice(f"Set {wanted} of this node{given}: 'ip -brief address' lists them."),
        advice("Each node has its own: give them with --env on each, not in a preset that all nodes use."),
    )


def master_port(case: Case) -> tuple[Fix, ...]:
    """Use another port, or end the process that has it."""
    found = _LISTENS.search(case.text)
    port = found["port"] if found else "29501"
    left = "A leftover rank of an earlier start may be using it: 'vllm-console leftovers'."
    return (
        advice(f"See what is using the port: ss -ltnp 'sport = :{port}'. {left}"),
        advice(f"Or use a port other than {port} with --master-port, the same on every node."),
    )


def rendezvous(case: Case) -> tuple[Fix, ...]:
    """Bring up all ranks, at one address that all can reach."""
    address = _ADDRESS.search(case.text)
    where = f" ({address['host']}, port {address['port']})" if address else ""
    found = []
    if address and address["host"] != "localhost" and not re.fullmatch(r"[\d.]+|.*:.*", address["host"]):
        found.append(advice(f"Check that this node can resolve the name: getent hosts {address['host']}."))
    found += [
        advice(f"Check that every rank was started and that each node reaches the first one{where}."),
        advice(
            "On machines with several networks, specify the right one on every node: --env VLLM_HOST_IP=ADDRESS, "
            "--env GLOO_SOCKET_IFNAME=INTERFACE, --env NCCL_SOCKET_IFNAME=INTERFACE."
        ),
    ]
    longer = "If a rank only needs longer to start (slow disk), all wait longer for it."
    if case.release is not None:
        found.append(Fix(Changes({"distributed-timeout-seconds": 1800}), longer))
    return tuple(found)


def ray_missing(case: Case) -> tuple[Fix, ...]:
    """Run without Ray, or install it."""
    without = "On one machine vLLM runs its workers itself, without Ray."
    found = [Fix(Changes(unset=("distributed-executor-backend",)), without)]
    if "does not support" not in case.text:
        found.append(
            advice("Install Ray into the environment of this vLLM, in the cluster's version: pip install ray.")
        )
    return tuple(found)


def library_symbol(case: Case) -> tuple[Fix, ...]:
    """Install packages built for each other."""
    version = f"=={case.version.partition('+')[0]}" if case.version else ""
    fresh = (
        f"Install vLLM into a fresh environment and let it choose torch: pip install vllm{version}. "
        "Pinning or upgrading torch afterwards breaks it."
    )
    found = _MODULE.search(case.text)
    if found is None or "vllm" in found["path"] or found["module"].startswith("lib"):
        return (advice(fresh), advice("Unset LD_LIBRARY_PATH and PYTHONPATH if they point to another CUDA or torch."))
    own = f"{found['module']} is not part of vLLM: uninstall its package, or rebuild it for the installed torch."
    return (advice(own), advice(fresh))


def kernel_crash(case: Case) -> tuple[Fix, ...]:
    """Distinguish a software bug from a faulty GPU."""
    found = [advice("Check 'dmesg | grep -i xid': Xid 48, 64, 79, 94 or 95 mean a faulty GPU.")]
    if case.flags.get("enforce-eager") is not True:
        why = "Disables CUDA graphs and compilation: if it then runs, one of their kernels is at fault."
        found.append(Fix(Changes({"enforce-eager": True}), why, "Each step is slower."))
    found.append(advice("Update vLLM: most releases fix kernel crashes."))
    return tuple(found)


_IN_MAIN_MEMORY = ("swap-space", "cpu-offload-gb", "kv-offloading-size")


def _flags_of(case: Case, names: tuple[str, ...]) -> list[str]:
    """Those of the flags that the log's vLLM accepts; if its version is unknown, the newest release's."""
    table = release_table(case.version or RELEASES[-1])
    return [f"--{name}" for name in names if table is not None and name in table.flags]


def main_memory(case: Case) -> tuple[Fix, ...]:
    """Provide more main memory, or use less of it."""
    more = advice("Give the machine or container more memory: loading weights needs memory besides the page cache.")
    names = _flags_of(case, _IN_MAIN_MEMORY)
    return (more, advice(f"Lower what uses main memory: {', '.join(names)}.")) if names else (more,)


def model_file(case: Case) -> tuple[Fix, ...]:
    """Correct the file, or get it again."""
    found = _FILE.search(case.text)
    field = _CONFIG_FIELD.search(case.text)
    what = found["path"] if found else "config.json"
    value = f" ({field['name']})" if field else ""
    return (advice(f"Correct {what}{value}, or download it again (hf download MODEL)."),)


def disk_full(case: Case) -> tuple[Fix, ...]:
    """Make room, elsewhere or here."""
    if "/torch_" in case.text or "shared" in case.text.lower():
        return (advice("/dev/shm is full: run the container with --ipc=host or --shm-size=16g."),)
    cache = "compile" in case.text.lower() or "cache" in case.text.lower()
    where = "--env VLLM_CACHE_ROOT=FOLDER" if cache else "--env HF_HOME=FOLDER"
    return (advice(f"Free space, or use a folder with more of it: {where}."),)
