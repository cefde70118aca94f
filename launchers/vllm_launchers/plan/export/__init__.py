"""A plan as shell command, config file, systemd unit, Compose, Kubernetes or stack values; never with secrets. Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from vllm_launchers.plan.export.container import compose
from vllm_launchers.plan.export.kubernetes import kubernetes
from vllm_launchers.plan.export.shell import config_yaml, shell
from vllm_launchers.plan.export.stacks import kserve, llm_d, production_stack
from vllm_launchers.plan.export.systemd import systemd_unit
from vllm_launchers.plan.model import Plan


class Form(StrEnum):
    """Forms that a plan can be exported to."""

    SHELL = "shell"
    CONFIG = "config"
    SYSTEMD = "systemd"
    SYSTEMD_USER = "systemd-user"
    COMPOSE = "compose"
    KUBERNETES = "kubernetes"
    KSERVE = "kserve"
    LLM_D = "llm-d"
    PRODUCTION_STACK = "production-stack"


def export(plan: Plan, form: Form, *, name: str = "") -> str:
    """The plan in that form, as the text of a file. ``name`` is the server's name; default: the preset's.

    Raises:
        ExportError: it cannot be expressed in that form.
    """
    forms: dict[Form, Callable[[], str]] = {
        Form.SHELL: lambda: shell(plan),
        Form.CONFIG: lambda: config_yaml(plan),
        Form.SYSTEMD: lambda: systemd_unit(plan, user=False, name=name),
        Form.SYSTEMD_USER: lambda: systemd_unit(plan, user=True, name=name),
        Form.COMPOSE: lambda: compose(plan, name=name),
        Form.KUBERNETES: lambda: kubernetes(plan, name=name),
        Form.KSERVE: lambda: kserve(plan, name=name),
        Form.LLM_D: lambda: llm_d(plan, name=name),
        Form.PRODUCTION_STACK: lambda: production_stack(plan, name=name),
    }
    return forms[form]()
