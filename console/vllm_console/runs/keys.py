"""The key of a run in the run database, shared by its recorder and the fleet."""

from __future__ import annotations

from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord


def run_key(record: ServerRecord, generation: Generation) -> str:
    """A run's unique key, as passed to its recorder."""
    if "--run" in generation.spec.sidecar[:-1]:
        return recorded_key(generation.spec, generation.number)
    return f"{record.name}@{generation.number}/{record.created_at:.0f}"


def recorded_key(spec: LaunchSpec, number: int) -> str:
    """The key that this spec's recorder uses for the run of a generation."""
    return spec.sidecar[spec.sidecar.index("--run") + 1].replace("{generation}", str(number))
