"""The values of the secrets that a spec names: given by a console, else from the environment; never written down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vllm_launchers.keeper.errors import SecretMissingError
from vllm_launchers.keeper.records import LaunchSpec, ServerRecord


def known(spec: LaunchSpec, given: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Those of them that have a value."""
    found = {name: given.get(name) or environment.get(name, "") for name in spec.secret_names}
    return {name: value for name, value in found.items() if value}


def complete(spec: LaunchSpec, given: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """All of them. Raises `SecretMissingError`, which names those without a value."""
    found = known(spec, given, environment)
    missing = [name for name in spec.secret_names if name not in found]
    if missing:
        raise SecretMissingError(f"the secret {', '.join(missing)} is missing: set it in the environment and try again")
    return found


def of_server(record: ServerRecord, proc: Path = Path("/proc")) -> dict[str, str]:
    """Those that a running server was started with, as far as its process still shows them.

    A keeper that adopts may know no others. vLLM's process titles can take the place of its environment.
    """
    names = set(record.current.spec.secret_names)
    if record.server is None or not names:
        return {}
    try:
        environment = (proc / str(record.server.pid) / "environ").read_bytes()
    except OSError:
        return {}
    entries = (entry.partition("=") for entry in os.fsdecode(environment).split("\0"))
    return {name: value for name, _, value in entries if name in names and value}
