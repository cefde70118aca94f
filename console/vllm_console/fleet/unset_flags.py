"""vLLM's values for flags that a server does not set, derived from its model, GPU and release."""

from __future__ import annotations

from vllm_console.fleet.snapshot import UnsetFlags
from vllm_launchers.engine_model.gpu_models import find_model
from vllm_launchers.launch.details import Details
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.memory_flags import batch_sizes
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, ModelFactsError
from vllm_launchers.vllm.modelfacts.read import model_facts


def unset_flags(details: Details) -> UnsetFlags:
    """The values that a server with these details has for unset flags. Reads the model's files."""
    try:
        facts = model_facts(details.model)
    except (ModelFactsError, OSError):
        facts = None
    release = details.engine.release if details.engine is not None else None
    return UnsetFlags(_sequences(details, facts), facts.longest_context(release) if facts is not None else None)


def _sequences(details: Details, facts: ModelFacts | None) -> int | None:
    flags = {name: value for name, value in details.flags.items() if name != "max-num-seqs"}
    engine = details.engine
    if engine is not None and engine.build == "cpu":
        return batch_sizes(facts, flags, engine.release, None)[0]
    model = find_model(details.gpu_name)
    if model is None:
        return None
    shape = GpuShape(details.gpu_name, model.memory_gib)
    return batch_sizes(facts, flags, engine.release if engine is not None else None, shape)[0]
