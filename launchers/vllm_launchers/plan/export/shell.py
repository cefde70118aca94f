"""A plan as a shell command on several lines. Pure."""

from __future__ import annotations

from vllm_launchers.plan.command_line import line_word, script_line, script_word
from vllm_launchers.plan.export.quoting import ExportError, checked, comment, yaml_number_or_text, yaml_text
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import redact_argv, redact_environment
from vllm_launchers.vllm.engines import EngineKind


def shell(plan: Plan) -> str:
    """The plan as a command for any POSIX shell, one flag per line.

    It contains no secrets: a secret variable is written ``NAME="$NAME"``, which expands where it is exported.
    """
    head = node_comment(plan)
    lines = [f"{name}={script_word(value)}" for name, value in redact_environment(plan.environment).items()]
    lines += [f'{name}="${name}"' for name in plan.secrets if name not in plan.environment]
    command, flags = split_argv(plan)
    lines.append(script_line(redact_argv(command)))
    lines += [f"  {script_line(redact_argv(words))}" for words in flags]
    return head + " \\\n".join(lines) + "\n"


def node_comment(plan: Plan) -> str:
    """Which of several machines a plan is for, and what differs between them; empty for a plan for one machine.

    Raises:
        ExportError: the address of node 0 was not given.
    """
    nodes = plan.nodes
    if nodes is None:
        return ""
    if not nodes.master_addr:
        raise ExportError("the nodes need the address of node 0: give --master-addr")
    rank, count = plan.flags["node-rank"], len(nodes.nodes)
    others = [str(node.rank) for node in nodes.nodes if node.rank != rank]
    return comment(
        f"Node {rank} of {count} (node {' and '.join(others)}: export again with --node-rank). Start all within some",
        "minutes, with the same vLLM and the same model files. If a node has several addresses, export its",
        "VLLM_HOST_IP, and the name of that interface as GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    )


def split_argv(plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The plan's arguments: program and model, then each flag with its value."""
    flags = [words for name, value in plan.flags.items() if (words := flag_words({name: value}))]
    if plan.argv[len(plan.argv) - sum(map(len, flags)) :] != tuple(word for words in flags for word in words):
        return plan.argv, []  # not made by `make_plan`: keep its arguments as they are
    rest = plan.argv[: len(plan.argv) - sum(map(len, flags))]
    address = ("--host", plan.host, "--port", str(plan.port))
    if rest[-4:] == address:
        return rest[:-4], [address[:2], address[2:], *flags]
    return rest, flags


# -- a plan as the YAML file of ``vllm serve --config``. Pure ---------------------------------------------------------


def config_yaml(plan: Plan) -> str:
    """The file's text, with a comment at the top that has the command to read it.

    That command has what the file cannot contain: the environment, values that begin with a dash, and several values of
    a flag, which not every vLLM reads.

    Raises:
        ExportError: the plan itself reads a config file, is for the simulated engine, or contains invalid text.
    """
    if plan.engine.kind is EngineKind.SIMULATED:
        raise ExportError("the simulated engine reads no config file")
    if "config" in plan.flags:
        raise ExportError("this plan reads a config file already (--config), and vLLM takes only one")
    node = node_comment(plan)
    lines = [f"model: {yaml_text(checked(plan.model, 'the model'))}"]
    if plan.flags.get("headless") is not True:
        lines += [f"host: {yaml_text(plan.host)}", f"port: {plan.port}"]
    besides: list[str] = []
    for name, value in plan.flags.items():
        words = redact_argv(flag_words({name: value}))
        for word in words:
            checked(word, f"--{name}")
        if len(words) > 2 or (len(words) == 1 and "=" in words[0]):
            besides += words
        elif len(words) == 1:
            lines.append(f"{yaml_text(words[0][2:])}: true")
        elif words:
            lines.append(f"{yaml_text(words[0][2:])}: {yaml_number_or_text(words[1])}")
    return node + _head(plan, besides) + "\n".join(lines) + "\n"


def _head(plan: Plan, besides: list[str]) -> str:
    environment = redact_environment(plan.environment)
    words = [f"{name}={line_word(checked(value, name))}" for name, value in environment.items()]
    words += [f'{name}="${name}"' for name in plan.secrets if name not in plan.environment]
    command = [line_word(checked(word, "the command")) for word in (*plan.engine.command, "serve")]
    words += [*command, "--config", "vllm.yaml", *map(line_word, besides)]
    return comment("Run with:", f"  {' '.join(words)}")
