"""A plan as a systemd service, for the system or for one user. Pure."""

from __future__ import annotations

from vllm_launchers.plan.command_line import line_word
from vllm_launchers.plan.export.quoting import ExportError, checked, comment, label, systemd_assignment, systemd_word
from vllm_launchers.plan.export.shell import node_comment, split_argv
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import redact_argv, redact_environment
from vllm_launchers.vllm.flags.changes import whole_number

STOP_SECONDS = 60
"""Time for a server to stop, in addition to the time for finishing its requests (``--shutdown-timeout``)."""

ACCOUNT = "vllm"
"""The account that a system unit runs as."""

PROGRAMS = "/usr/local/bin"
"""Assumed folder of a program whose path the plan does not know, because vLLM is not installed here."""

_PATH = "/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def systemd_unit(plan: Plan, user: bool, *, name: str = "") -> str:
    """The unit's text. ``user``: for ``systemctl --user``; otherwise for the system, as the account ``vllm``.

    It contains no secrets: they are in an ``EnvironmentFile``, which its owner fills. It restarts after a crash, but
    not after a usage error (exit code 2), and gives up after five starts in an hour. vLLM also exits with code 0 when
    its engine dies, so every unrequested exit counts as a crash (``Restart=always``).

    Raises:
        ExportError: the program or the model has a relative path, or an argument is not text.
    """
    if "/" in plan.engine.command[0] and not plan.engine.command[0].startswith("/"):
        raise ExportError(f"systemd needs the full path of {plan.engine.command[0]}")
    if plan.model.startswith(("./", "../", "~")):
        raise ExportError(f"in a service, relative paths don't work: give the full path of the model {plan.model}")
    unit = label(name or plan.preset)
    sections = (
        node_comment(plan) + _comments(plan, unit, user=user),
        "[Unit]\n" + "\n".join(_unit_lines(plan, user=user)),
        "[Service]\n" + "\n".join(_service_lines(plan, unit, user=user)),
        f"[Install]\nWantedBy={'default.target' if user else 'multi-user.target'}",
    )
    return "\n".join(f"{section}\n" for section in sections)


def stop_seconds(plan: Plan) -> int:
    """Seconds to wait for the server's exit before killing it."""
    return STOP_SECONDS + whole_number(plan.flags, "shutdown-timeout", 0)


def _secrets_file(unit: str, *, user: bool) -> str:
    return f"%h/.config/vllm-console/{unit}.env" if user else f"/etc/vllm-console/{unit}.env"


def _comments(plan: Plan, unit: str, *, user: bool) -> str:
    control = "systemctl --user" if user else "sudo systemctl"
    place = f"~/.config/systemd/user/{unit}.service" if user else f"/etc/systemd/system/{unit}.service"
    lines = [f"Put this into {place}, then: {control} daemon-reload && {control} enable --now {unit}"]
    if _program(plan) != plan.engine.command[0]:
        lines.append(f"Replace {_program(plan)} with the program's path and add its folder to PATH.")
    if user:
        lines.append('To have it run while you are logged out: loginctl enable-linger "$USER"')
    else:
        lines.append(f"It runs as {ACCOUNT}: sudo useradd --system --create-home {ACCOUNT}")
        if homes := [path for path in (plan.engine.command[0], plan.model) if path.startswith("/home/")]:
            lines.append(f"{ACCOUNT} must be able to read {' and '.join(map(line_word, homes))}")
    if plan.secrets:
        file = _secrets_file(unit, user=user).replace("%h", "~")
        sudo = "" if user else "sudo "
        lines.append(
            f"Secrets, one NAME=value a line ({', '.join(plan.secrets)}), in a file that only its owner reads:"
        )
        lines.append(f"  {sudo}mkdir -p {file.rpartition('/')[0]}; {sudo}install -m 600 /dev/null {file}; "
                     f"{sudo}${{EDITOR:-vi}} {file}")  # fmt: skip
    return comment(*lines).rstrip("\n")


def _unit_lines(plan: Plan, *, user: bool) -> list[str]:
    title = "".join(c if c.isprintable() else " " for c in f"vLLM, {plan.preset}: {plan.model}")
    lines = [f"Description={checked(title, 'the model').replace('%', '%%').rstrip(chr(92))}"]
    if not user:
        lines += ["Wants=network-online.target", "After=network-online.target nvidia-persistenced.service"]
    return [*lines, "StartLimitIntervalSec=1h", "StartLimitBurst=5"]


def _service_lines(plan: Plan, unit: str, *, user: bool) -> list[str]:
    lines = ["Type=exec", *(() if user else (f"User={ACCOUNT}",))]
    # Kernels compiled at startup need tools from the program's folder, such as ninja, and from CUDA's.
    tools = {"PATH": f"{_program(plan).rpartition('/')[0]}:{_PATH}"}
    environment = tools | redact_environment(plan.environment)
    lines += [f"Environment={systemd_assignment(key, checked(value, key))}" for key, value in environment.items()]
    if plan.secrets:
        lines.append(f"EnvironmentFile={_secrets_file(unit, user=user)}")
    lines += [
        f"ExecStart={_command(plan)}",
        "Restart=always",
        "RestartSec=5",
        "RestartPreventExitStatus=2",
        "# SIGINT to the server's first process ends it cleanly at any time; SIGTERM can hang while it still starts.",
        "KillMode=mixed",
        "KillSignal=SIGINT",
        f"TimeoutStopSec={stop_seconds(plan)}",
        "LimitNOFILE=65536",
        "LimitMEMLOCK=infinity",
    ]
    return lines


def _program(plan: Plan) -> str:
    program = plan.engine.command[0]
    return program if "/" in program else f"{PROGRAMS}/{program}"


def _command(plan: Plan) -> str:
    (_, *words), flags = split_argv(plan)
    lines = [[systemd_word(_program(plan), program=True), *map(systemd_word, redact_argv(words))]]
    lines += [[*map(systemd_word, redact_argv(flag))] for flag in flags]
    return " \\\n    ".join(checked(" ".join(line), "the command") for line in lines)
