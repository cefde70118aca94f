"""What a keeper was started with, and what it makes of it for the processes that it starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_launchers.keeper import credentials, spawn
from vllm_launchers.keeper.companion import Wanted, fill
from vllm_launchers.keeper.lifecycle import Tuning
from vllm_launchers.keeper.logpipe import open_pipe
from vllm_launchers.keeper.records import LaunchSpec, ProcessIdentity, ServerRecord


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a keeper was started with, and hands on to its server."""

    folder: Path
    environment: Mapping[str, str]
    umask: int
    tuning: Tuning

    def spawn(
        self, spec: LaunchSpec, secrets: Mapping[str, str], before: Callable[[ProcessIdentity], None]
    ) -> ProcessIdentity:
        """Start a server, its output into the log's pipe; ``before`` is called while it is still held back.

        Raises `SecretMissingError`, `SpawnError`, OSError, and what ``before`` raises.
        """
        values = credentials.complete(spec, secrets, self.environment)
        environment = {**self.environment, **spec.environment, **values}
        output = open_pipe(self.folder, blocking=True)
        try:
            return spawn.start(spawn.Command(spec.argv, environment, spec.cwd, output, self.umask), before)
        finally:
            os.close(output)

    def companion(self, record: ServerRecord) -> Wanted | None:
        """What is to run beside the server as it is now."""
        if record.server is None:
            return None
        argv = fill(record.current.spec.companion, record.server, record.current.number)
        return Wanted(argv, self.environment, str(self.folder), self.umask) if argv else None
