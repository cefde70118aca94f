"""Sleep mode: where it works, what it needs, and vLLM's known bugs (by issue or pull request number). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.addresses import is_loopback
from vllm_launchers.plan.checks.request import local_ranks, simulated, uses_gpus
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import KV_DTYPE, LORA, SLEEP_MODE, TRANSFER, flag_names
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.release_defaults import Release

DEVELOPERS = "VLLM_SERVER_DEV_MODE"
"""Environment variable that enables a server's development routes, including ``/sleep``."""

_ALLOCATOR = "enable-cumem-allocator"

SINCE: Release = (0, 8, 5)
RPC_SINCE: Release = (0, 10, 2)
"""First release with ``/collective_rpc``, which reloads weights."""
LITTLE_FREED: tuple[Release, Release] = ((0, 14, 0), (0, 16, 0))
"""From the first of these releases, and before the second, sleeping was reported to free little memory."""


def sleeps(flags: Flags) -> bool:
    """Whether a server with these flags can sleep."""
    return flags.get(SLEEP_MODE) is True


def sleep_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """What a server that can sleep must not do, and what may go wrong with it."""
    if plan.flags.get(_ALLOCATOR) is True and not uses_gpus(plan) and not simulated(plan):
        text = f"vLLM's allocator for sleeping needs a GPU: remove --{_ALLOCATOR}"
        yield PlanFinding("sleep_unsupported", Level.ERROR, text, Changes(unset=(_ALLOCATOR,)))
    if not sleeps(plan.flags):
        return
    if not uses_gpus(plan):
        yield PlanFinding("sleep_unsupported", Level.ERROR, f"vLLM can't sleep on a CPU: remove --{SLEEP_MODE}")
        return
    if not is_loopback(plan.host):
        text = (
            f"--{SLEEP_MODE} opens vLLM's development endpoints, which need no API key, to everyone who can reach "
            f"{plan.host}: omit --host to listen on 127.0.0.1"
        )
        yield PlanFinding("sleep_exposed", Level.ERROR, text)
    elif inputs.environment.shared:
        text = (
            f"this machine has other users; with --{SLEEP_MODE} each of them can put this server to sleep and call its "
            "workers on 127.0.0.1, without an API key"
        )
        yield PlanFinding("sleep_exposed", Level.WARNING, text)
    release = plan.engine.release
    if release is not None and release < SINCE and not simulated(plan):
        yield PlanFinding("sleep_unsupported", Level.ERROR, f"vLLM {plan.engine.version} can't sleep: it needs 0.8.5")
    yield from _known_bugs(plan, inputs.facts)
    yield from _host_memory(plan, inputs)


def _known_bugs(plan: Plan, facts: ModelFacts | None) -> Iterator[PlanFinding]:
    flags, release = plan.flags, plan.engine.release
    if release is not None and LITTLE_FREED[0] <= release < LITTLE_FREED[1]:
        text = (
            f"with vLLM {plan.engine.version} sleeping was reported to free only part of the memory (#32714); the "
            "other server of a pair is not woken up unless enough is free"
        )
        yield PlanFinding("sleep_bug", Level.WARNING, text)
    if flags.get(LORA) is True and facts is not None and _nvfp4(facts):
        text = (
            "LoRA adapters on NVFP4 weights were reported to give wrong answers after sleeping, without an error "
            f"(#53888, seen with 0.27.1): omit --{LORA} or --{SLEEP_MODE}"
        )
        yield PlanFinding("sleep_bug", Level.ERROR, text, surely=False)
    if flags.get("kv-offloading-backend") == "native":
        text = "with --kv-offloading-backend native the engine was reported to die after waking up (#45268, 0.22.1)"
        yield PlanFinding("sleep_bug", Level.WARNING, text)
    if TRANSFER in flag_names(flags):
        text = "with a KV connector (--kv-transfer-config) waking up was reported to end the server (#36753)"
        yield PlanFinding("sleep_bug", Level.WARNING, text)


def _nvfp4(facts: ModelFacts) -> bool:
    return facts.quantization is not None and facts.quantization.method == "modelopt_fp4"


def _host_memory(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    needed, free = (
        host_gib(plan.memory.weights_gib if plan.memory is not None else None, plan.flags),
        inputs.environment.memory_free_gib,
    )
    if needed is None or free is None or needed <= free:
        return
    text = (
        f"sleeping at level 1 keeps its weights in host memory, about {needed:.1f} GiB, and {free:.1f} GiB are "
        "available; level 2 needs none but reloads the weights on wake-up"
    )
    yield PlanFinding("sleep_host_memory", Level.WARNING, text)


def host_gib(weights_gib: float | None, flags: Flags) -> float | None:
    """GiB of host memory for the weights while asleep at level 1, from those per GPU; None if unknown."""
    return weights_gib * local_ranks(flags) if weights_gib is not None else None


def level_2_problem(flags: Flags, release: Release | None, facts: ModelFacts | None) -> str:
    """Why a server must not sleep at level 2, as a clause; empty if it may."""
    if release is not None and release < RPC_SINCE:
        return "this vLLM has no route to reload the weights (that needs 0.10.2)"
    if flags.get(LORA) is True:
        return f"reloading weights fails with --{LORA} (#39934)"
    if facts is not None and (facts.architecture or "").startswith("Gemma"):
        return "Gemma models were reported to answer wrongly after their weights were reloaded (#44371)"
    return ""


def level_2_doubt(flags: Flags, facts: ModelFacts | None) -> str:
    """What may go wrong at level 2 and is detected by the golden prompts, as a clause; empty if nothing is known."""
    if facts is not None and facts.quantization is not None:
        return "reloading quantized weights was reported to fail (#28606)"
    if str(flags.get(KV_DTYPE, "")).startswith("fp8"):
        return "with an FP8 KV cache answers were reported to be wrong after level 2 (#25800, fixed by #28783)"
    return ""
