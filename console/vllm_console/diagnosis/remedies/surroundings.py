"""Remedies outside of vLLM's flags: ports, files, accounts, drivers, links."""

from __future__ import annotations

import re

from vllm_console.diagnosis.case import Case
from vllm_console.diagnosis.model import Remedy
from vllm_launchers.plan.model import Changes

_PORT = re.compile(r"\('[^']*', (?P<port>\d+)\)")


def _advice(why: str, price: str = "") -> Remedy:
    return Remedy(Changes(), why, price)


def port_in_use(case: Case) -> tuple[Remedy, ...]:
    """Another port."""
    told = _PORT.search(case.text)
    which = f"Port {told['port']}" if told else "The port"
    return (_advice(f"{which} is taken: start it with another --port, or without one to get the first free port."),)


def model_not_found(case: Case) -> tuple[Remedy, ...]:
    """The right name, or the files."""
    offline = re.search(r"offline|LocalEntryNotFound|couldn't connect", case.text, re.IGNORECASE)
    if offline:
        why = "It is not in the local cache, and the hub could not be asked: fetch it first (hf download MODEL)."
        return (_advice(why), _advice("If HF_HUB_OFFLINE is set, unset it for this start."))
    return (_advice("Check the spelling (org/name), or give the whole path of a folder that holds its config.json."),)


def gated(_case: Case) -> tuple[Remedy, ...]:
    """A token of an account with access."""
    why = "Accept the model's terms at the hub, then export HF_TOKEN with a token of that account."
    return (_advice(why),)


def nccl(case: Case) -> tuple[Remedy, ...]:
    """Another way between the GPUs."""
    found = [_advice("Start once with --env NCCL_DEBUG=INFO: NCCL then says which call failed, and why.")]
    if case.flags.get("disable-custom-all-reduce") is not True:
        why = "vLLM's own all-reduce is left out, which asks for peer access between the GPUs."
        price = "Small steps are a little slower over NVLink."
        found.append(Remedy(Changes({"disable-custom-all-reduce": True}), why, price))
    why = "Without peer access (--env NCCL_P2P_DISABLE=1) data goes by way of main memory, as some boards need."
    found.append(_advice(why, "Slower at every layer."))
    found.append(_advice("In a container /dev/shm must be large: run it with --ipc=host or --shm-size=16g."))
    return tuple(found)


def engine_died(case: Case) -> tuple[Remedy, ...]:
    """It was ended from outside, or hung."""
    if "timed out" in case.text:
        return (
            _advice("A worker hung: see with nvidia-smi whether one GPU stands at 100 % or is lost, then start anew."),
            _advice("--env VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=900 waits longer, where a step really takes that long."),
        )
    return (
        _advice("See 'dmesg | grep -i kill': if the kernel ended it, the machine's memory ran out, not the GPU's."),
        _advice("Start it again; --restart on-failure does so by itself."),
    )


def driver(_case: Case) -> tuple[Remedy, ...]:
    """Driver, CUDA and build that go together."""
    return (
        _advice("Run nvidia-smi: if it fails, the driver is the trouble (after an upgrade: reboot)."),
        _advice("If it works, take a vLLM build for the CUDA version that nvidia-smi shows, or a newer driver."),
    )


def disk_full(case: Case) -> tuple[Remedy, ...]:
    """Room, elsewhere or here."""
    if "/torch_" in case.text or "shared" in case.text.lower():
        return (_advice("/dev/shm is full: run the container with --ipc=host or --shm-size=16g."),)
    cache = "compile" in case.text.lower() or "cache" in case.text.lower()
    where = "--env VLLM_CACHE_ROOT=FOLDER" if cache else "--env HF_HOME=FOLDER"
    return (_advice(f"Make room, or point to a folder with more of it: {where}."),)


def interrupted(_case: Case) -> tuple[Remedy, ...]:
    """Nothing is wrong."""
    return (_advice("Nothing is wrong with it: start it again."),)
