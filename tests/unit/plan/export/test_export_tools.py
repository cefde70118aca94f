"""Exports as read by the tools themselves, if installed: systemd, Compose, Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_launchers.plan.export.container import compose
from vllm_launchers.plan.export.kubernetes import kubernetes
from vllm_launchers.plan.export.systemd import systemd_unit
from vllm_launchers.plan.model import Plan

Make = Callable[..., Plan]
NASTY = "a \"b\" 'c' $HOME ${A} $(x) %h %% \\n\n\t; é😀 #"
FLAGS = {"served-model-name": NASTY, "revision": "", "root-path": ";", "enable-prefix-caching": False}


def run(*words: str, environment: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    """Run a tool; ``kubectl`` finds no cluster."""
    clean = {**os.environ, "KUBECONFIG": os.devnull, "SYSTEMD_COLORS": "0", **environment}
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=clean, check=False)


def needs(tool: str, *words: str) -> None:
    """Skip if a tool is missing or does not know a command."""
    if shutil.which(tool) is None or (words and run(tool, *words).returncode != 0):
        pytest.skip(f"{' '.join((tool, *words))} is not available here")


def program(folder: Path) -> str:
    """An existing program in a folder with a space and a percent sign in its name."""
    path = folder / "100% there" / "vllm"
    path.parent.mkdir()
    path.symlink_to(sys.executable)
    return str(path)


@pytest.mark.parametrize("user", [False, True])
def test_systemd_accepts_the_unit(user: bool, make: Make, tmp_path: Path) -> None:
    needs("systemd-analyze", "--version")
    plan = make(FLAGS, command=(program(tmp_path),), secrets=("HF_TOKEN",), environment={"A": NASTY})
    unit = tmp_path / "vllm-chatbot.service"
    unit.write_text(systemd_unit(plan, user=user))
    done = run("systemd-analyze", "verify", *(["--user"] if user else []), str(unit))
    assert done.returncode == 0, done.stderr
    assert "vllm-chatbot" not in done.stdout + done.stderr


def test_systemd_check_detects_errors(make: Make, tmp_path: Path) -> None:
    """The check above can fail."""
    needs("systemd-analyze", "--version")
    unit = tmp_path / "vllm-chatbot.service"
    unit.write_text(systemd_unit(make(command=("/no/such/vllm",)), user=False).replace("KillMode", "KillMood"))
    done = run("systemd-analyze", "verify", str(unit))
    assert done.returncode != 0
    assert "KillMood" in done.stderr


def test_systemd_reads_the_intended_words(make: Make, tmp_path: Path) -> None:
    needs("systemd-analyze", "--version")
    plan = make(FLAGS, command=(program(tmp_path),), environment={"A": NASTY})
    unit = tmp_path / "vllm-chatbot.service"
    unit.write_text(systemd_unit(plan, user=False))
    done = run("systemd-analyze", "verify", str(unit), environment={"SYSTEMD_LOG_LEVEL": "debug"})
    found = re.search(r"^\s*Command Line: (.*)$", done.stdout + done.stderr, re.MULTILINE)
    if found is None:
        pytest.skip("this systemd does not show what it read")
    words = [word.replace("$$", "$") for word in quoted_words(found[1])]
    assert words == list(plan.argv)
    assert "Environment: A=a \"b\" 'c' $HOME ${A} $(x) %h %% \\n" in done.stdout + done.stderr


def quoted_words(line: str) -> Iterable[str]:
    """Words as systemd prints them: in double quotes where needed, with C escapes."""
    named = {"n": "\n", "t": "\t"}
    for found in re.finditer(r'"((?:[^"\\]|\\.)*)"|(\S+)', line):
        text = found[1] if found[1] is not None else found[2]
        yield re.sub(r"\\(.)", lambda match: named.get(match[1], match[1]), text)


def test_compose_reads_the_intended_words(make: Make, tmp_path: Path) -> None:
    tool = ("docker-compose",) if shutil.which("docker-compose") else ("docker", "compose")
    needs(*tool, "version")
    plan = make(FLAGS, gpus=(0, 1), secrets=("HF_TOKEN",), model="/data/my model", environment={"A": NASTY})
    (tmp_path / "vllm-chatbot.env").write_text("HF_TOKEN=x\n")
    file = tmp_path / "compose.yaml"
    file.write_text(compose(plan))
    done = run(*tool, "-f", str(file), "config", environment={"HOME": str(tmp_path), "HF_HOME": ""})
    assert done.returncode == 0, done.stderr
    service = yaml.safe_load(done.stdout)["services"]["vllm-chatbot"]
    read = [word.replace("$$", "$") for word in service["command"]]
    assert read[0] == plan.model
    assert read[5:] == list(plan.argv[7:])
    assert service["environment"]["A"].replace("$$", "$") == NASTY
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["0", "1"]
    assert str(tmp_path / ".cache/huggingface") in str(service["volumes"][0])


def decoded(file: Path, document: Any, *words: str) -> Any:
    """An object as decoded by kubectl, without unknown fields."""
    file.write_text(yaml.safe_dump(document))
    done = run("kubectl", "set", *words[:1], "--local", "-f", str(file), *words[1:], "-o", "json")
    assert done.returncode == 0, done.stderr
    return without_empty(json.loads(done.stdout))


def without_empty(value: Any) -> Any:
    """An object without the empty fields that a reader adds."""
    if isinstance(value, dict):
        inner = {key: without_empty(one) for key, one in value.items()}
        return {key: one for key, one in inner.items() if one not in ({}, None)}
    return [without_empty(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("flags", [FLAGS, {"ssl-certfile": "/s/c.pem", "download-dir": "/models"}])
def test_kubernetes_accepts_every_field(flags: Any, make: Make, tmp_path: Path) -> None:
    """An unknown field would be dropped, and one of the wrong type refused."""
    needs("kubectl", "version", "--client")
    text = kubernetes(make(flags, gpus=(0, 1), secrets=("HF_TOKEN",), environment={"A": NASTY}))
    objects = {document["kind"]: document for document in yaml.safe_load_all(text)}
    deployment = objects["Deployment"]
    inside = deployment["spec"]["template"]["spec"]["containers"][0]
    inside["resources"]["limits"]["nvidia.com/gpu"] = "2"  # kubectl writes quantities as strings
    read = decoded(tmp_path / "deployment.yaml", deployment, "image", "vllm=another")
    inside["image"] = "another"
    assert read == without_empty(deployment)
    service = objects["Service"]
    read = decoded(tmp_path / "service.yaml", service, "selector", "app=another")
    service["spec"]["selector"] = {"app": "another"}
    assert read == service


def test_kubernetes_refuses_a_field_of_another_type(make: Make, tmp_path: Path) -> None:
    """The check above can fail."""
    needs("kubectl", "version", "--client")
    text = kubernetes(make()).replace("containerPort: 8000", "containerPort: http")
    deployment = next(document for document in yaml.safe_load_all(text) if document["kind"] == "Deployment")
    with pytest.raises(AssertionError, match="cannot unmarshal"):
        decoded(tmp_path / "deployment.yaml", deployment, "image", "vllm=x")


def test_test_words_need_quoting(make: Make) -> None:
    assert shlex.quote(NASTY) != NASTY
    assert make(FLAGS).flags["served-model-name"] == NASTY
