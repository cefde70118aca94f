"""The values of the secrets that a spec names: given by a console, else from the environment; never written down."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_launchers.keeper.errors import SecretMissingError
from vllm_launchers.keeper.records import LaunchSpec


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
