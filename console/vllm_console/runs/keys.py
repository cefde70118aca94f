"""The key of a run in the run database, which its recorder and the fleet agree on."""

from __future__ import annotations

from vllm_launchers.keeper.records import Generation, ServerRecord


def run_key(record: ServerRecord, generation: Generation) -> str:
    """A run's unique key, which its recorder was given."""
    words = generation.spec.sidecar
    if "--run" in words[:-1]:
        return words[words.index("--run") + 1].replace("{generation}", str(generation.number))
    return f"{record.name}@{generation.number}/{record.created_at:.0f}"
