"""A plan as the YAML file of ``vllm serve --config``. Pure.

vLLM turns each ``key: value`` back into the words of a command line. ``x: true`` is ``--x``; but ``x: false`` is
dropped without a word before 0.28, and by ``vllm serve`` (not by its API server's module) still in 0.32: so
``no-x: true`` is written, which all releases read alike.
"""

from __future__ import annotations

from vllm_launchers.plan.export.errors import ExportError
from vllm_launchers.plan.export.quoting import checked, comment, yaml_number_or_text, yaml_text
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.plan.model import EngineKind, Plan
from vllm_launchers.plan.secrets import redact_argv, redact_environment
from vllm_launchers.plan.shell_words import line_word


def config_yaml(plan: Plan, *, file: str = "vllm.yaml") -> str:
    """The file's text. The command that reads it stands in the comment on top, with what the file cannot say.

    That is the environment, and values that begin with a dash.

    Raises:
        ExportError: the plan itself reads a config file, is for the simulated engine, or holds what is no text.
    """
    if plan.engine.kind is EngineKind.SIMULATED:
        raise ExportError("the simulated engine reads no config file")
    if "config" in plan.flags:
        raise ExportError("this plan reads a config file already (--config), and vLLM takes only one")
    lines = [f"model: {yaml_text(checked(plan.model, 'the model'))}", f"host: {yaml_text(plan.host)}"]
    lines.append(f"port: {plan.port}")
    besides: list[str] = []
    for name, value in plan.flags.items():
        words = redact_argv(flag_words({name: value}))
        for word in words:
            checked(word, f"--{name}")
        if len(words) == 1 and "=" in words[0]:
            besides.append(words[0])
        elif len(words) == 1:
            lines.append(f"{yaml_text(words[0][2:])}: true")
        elif words:
            lines.append(f"{yaml_text(words[0][2:])}: {yaml_number_or_text(words[1])}")
    return _head(plan, besides, file) + "\n".join(lines) + "\n"


def _head(plan: Plan, besides: list[str], file: str) -> str:
    environment = redact_environment(plan.environment)
    words = [f"{name}={line_word(checked(value, name))}" for name, value in environment.items()]
    words += [f'{name}="${name}"' for name in plan.secrets if name not in plan.environment]
    command = [line_word(checked(word, "the command")) for word in (*plan.engine.command, "serve")]
    words += [*command, "--config", line_word(file), *map(line_word, besides)]
    return comment("Run with:", f"  {' '.join(words)}")
