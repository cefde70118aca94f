"""Which part of a server's environment is secret, and command lines that are safe to show. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.shell_quoting import assignments, line_of
from vllm_launchers.secrets import SERVER_SECRETS, holds_secret, is_secret_name, redact_argv, redact_environment


def split_secrets(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What may be stored and shown, and what may not: secrets by name, and a URL with a password."""
    plain = {name: value for name, value in environment.items() if not is_secret_name(name) and not holds_secret(value)}
    return plain, {name: value for name, value in environment.items() if name not in plain}


def inherited_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The secrets of the current environment that a server may need; empty ones count as unset."""
    return {name: environ[name] for name in sorted(SERVER_SECRETS) if environ.get(name)}


def command_line(plan: Plan, *, environment: bool = True) -> str:
    """The plan as a shell command to show and copy: it runs as it stands, and contains no secret.

    A secret variable is written ``NAME="$NAME"``, to be expanded where it is exported.
    """
    argv = redact_argv(plan.argv)
    if not environment:
        return line_of(argv)
    secrets = [f'{name}="${name}"' for name in plan.secrets if name not in plan.environment]
    return " ".join([*assignments(redact_environment(plan.environment)), *secrets, line_of(argv)])
