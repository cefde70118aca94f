"""A plan as a shell command over several lines. Pure."""

from __future__ import annotations

from vllm_launchers.plan.flags import flag_words
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.secrets import redact_argv, redact_environment
from vllm_launchers.plan.shell_words import script_line, script_word


def shell(plan: Plan) -> str:
    """The plan as a command for any POSIX shell, one flag a line.

    It holds no secret: a secret variable is written ``NAME="$NAME"``, so that whoever has it exported gets it.
    """
    lines = [f"{name}={script_word(value)}" for name, value in redact_environment(plan.environment).items()]
    lines += [f'{name}="${name}"' for name in plan.secrets if name not in plan.environment]
    command, flags = split_argv(plan)
    lines.append(script_line(redact_argv(command)))
    lines += [f"  {script_line(redact_argv(words))}" for words in flags]
    return " \\\n".join(lines) + "\n"


def split_argv(plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The plan's words: program and model, then each flag with its value."""
    flags = [words for name, value in plan.flags.items() if (words := flag_words({name: value}))]
    if plan.argv[len(plan.argv) - sum(map(len, flags)) :] != tuple(word for words in flags for word in words):
        return plan.argv, []  # not made by `make_plan`: keep its words as they are
    rest = plan.argv[: len(plan.argv) - sum(map(len, flags))]
    address = ("--host", plan.host, "--port", str(plan.port))
    if rest[-4:] == address:
        return rest[:-4], [address[:2], address[2:], *flags]
    return rest, flags
