"""The machine apart from its GPUs: files, shared memory, disk, and other starting servers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.addresses import format_exposure
from vllm_launchers.plan.checks.request import local_ranks, simulated, uses_gpus
from vllm_launchers.plan.files import ignored_file, named_files
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import API_KEY
from vllm_launchers.units import GIB
from vllm_launchers.vllm.engines import EngineKind
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.release_defaults import NEWEST

FEW_FILES = 4096
"""Each connection and each weight file needs an open file; a lower limit is exceeded under load."""

SHM_GIB_PER_RANK = 0.25
"""NCCL and vLLM's queues between ranks need tens of MiB each; a container's default is 64 MiB in total."""

DISK_SLACK = 1.02


def machine_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """Limits of the machine that end a start or cause failures under load."""
    around = inputs.environment
    for name, path in named_files(plan.flags, plan.model):
        if path in around.absent and not ignored_file(name, plan.flags, plan.engine.release):
            text = f"vLLM will not start: {path} does not exist, which --{name} needs"
            yield PlanFinding("file_missing", Level.ERROR, text)
    if around.open_files is not None and around.open_files < FEW_FILES:
        text = (
            f"open-file limit is {around.open_files:,}, and each connection uses one; "
            f"run 'ulimit -n 65536' before starting"
        )
        yield PlanFinding("open_files_low", Level.WARNING, text)
    count = local_ranks(plan.flags)
    needed = SHM_GIB_PER_RANK * count
    if uses_gpus(plan) and count > 1 and around.shm_free_gib is not None and around.shm_free_gib < needed:
        text = (
            f"/dev/shm has {_size(around.shm_free_gib)} free; {count} NCCL ranks may need "
            f"{_size(needed)}; in a container, use --ipc=host or --shm-size=8g"
        )
        yield PlanFinding("shm_small", Level.WARNING, text)
    yield from _disk(inputs)
    if around.starting:
        many = len(around.starting) > 1
        text = (
            f"{' and '.join(around.starting)} {'are' if many else 'is'} starting right now: servers that start at "
            f"the same time can take each other's memory and ports; wait until {'they are' if many else 'it is'} "
            "ready"
        )
        yield PlanFinding("another_starting", Level.WARNING, text)


def _disk(inputs: PlanInputs) -> Iterator[PlanFinding]:
    facts, free = inputs.facts, inputs.environment.model_disk_free_gib
    if facts is None or not facts.bytes_to_download or free is None:
        return
    needed = facts.bytes_to_download * DISK_SLACK / GIB
    if needed > free:
        where = inputs.environment.model_disk or "the model cache"
        text = (
            f"{facts.model} needs a {needed:.1f} GiB download, but {where} has {free:.1f} GiB free; free up space or "
            "point HF_HOME to a larger disk"
        )
        yield PlanFinding("disk_for_download", Level.ERROR, text, surely=False)


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"


# -- the executable and its version. Pure -----------------------------------------------------------------------------


OLDEST = (0, 10, 0)
"""First release with well-known flags, defaults and logs."""


def engine_missing(problem: str, *, elsewhere: bool = False) -> PlanFinding:
    """No vLLM can be run; ``problem`` is a sentence that says why. Only advice if the plan is for another machine."""
    return PlanFinding("engine_missing", Level.ADVICE if elsewhere else Level.ERROR, problem)


def engine_findings(plan: Plan) -> Iterator[PlanFinding]:
    """Unknown, too old or too new versions, and the installation's own notes."""
    engine = plan.engine
    if simulated(plan):
        return
    release = engine.release
    if engine.kind is EngineKind.VLLM and release is None:
        note = engine.note or ("the version of this vLLM is unknown" if engine.path else "no vLLM was found")
        text = f"{note}: the flags and defaults of the newest release are assumed"
        yield PlanFinding("engine_version_unknown", Level.WARNING, text)
    elif engine.note:
        yield PlanFinding("engine_note", Level.ADVICE, engine.note)
    if release is not None and release < OLDEST:
        text = f"vLLM {engine.public_version} is older than 0.10, the oldest release supported here; upgrade it"
        yield PlanFinding("engine_old", Level.WARNING, text)
    if release is not None and release[:2] > NEWEST[:2]:
        text = f"vLLM {engine.public_version} is newer than {NEWEST[0]}.{NEWEST[1]}: changed defaults are unknown here"
        yield PlanFinding("engine_new", Level.ADVICE, text)


# -- the address a server listens on, and whether it can be watched there. Pure ---------------------------------------


OTHER_PORT = "choose another --port, or start without it to get a free one"
"""Advice for a port that is not available."""

_SERVERS = "api-server-count"
"""vLLM runs without an API server if this is below one."""

CERTIFICATE_REQUIRED = 2
"""`ssl.CERT_REQUIRED`."""


def network_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """Port, key, and flags that prevent monitoring of a server."""
    if taken := inputs.environment.port_problem:
        text = f"port {plan.port} {taken}; {OTHER_PORT}"
        yield PlanFinding("port_taken", Level.ERROR, text)
    if message := format_exposure(plan.host, API_KEY in plan.secrets):
        text = f"{message}. Export {API_KEY} first, or omit --host to stay on this machine"
        yield PlanFinding("open_to_all_without_key", Level.WARNING, text)
    if plan.flags.get("ssl-keyfile") and not plan.flags.get("ssl-certfile") and not simulated(plan):
        text = "vLLM will exit once it has loaded the model: --ssl-keyfile needs --ssl-certfile"  # uvicorn's `Config`
        yield PlanFinding("certificate_missing", Level.ERROR, text, Changes(unset=("ssl-keyfile",)))
    yield from _watching(plan)


def _watching(plan: Plan) -> Iterator[PlanFinding]:
    flags = plan.flags
    if flags.get("disable-log-stats") is True:
        text = "--disable-log-stats disables all metrics: this server can't be monitored"
        yield PlanFinding("unwatchable", Level.WARNING, text, Changes(unset=("disable-log-stats",)))
    if flags.get("ssl-cert-reqs") == CERTIFICATE_REQUIRED:
        text = (
            "--ssl-cert-reqs 2 requires client certificates; this console has none and will never see the server ready"
        )
        yield PlanFinding("unwatchable", Level.WARNING, text, Changes(unset=("ssl-cert-reqs",)))
    for name in ("headless", "grpc"):
        if flags.get(name) is True and plan.nodes is None:
            yield _no_api(f"--{name}", name)
    servers = flags.get(_SERVERS)
    if isinstance(servers, int) and servers < 1 and plan.nodes is None and flags.get("headless") is not True:
        yield _no_api(f"--{_SERVERS} {servers}", _SERVERS)


def _no_api(written: str, name: str) -> PlanFinding:
    text = f"{written} disables the HTTP API: the server will never appear ready"
    return PlanFinding("unwatchable", Level.WARNING, text, Changes(unset=(name,)))
