"""What each export contains besides the command: restarts, limits, probes, folders; and never a secret."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import yaml

from vllm_launchers.keeper import health
from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.plan.export import Form, export
from vllm_launchers.plan.export.container import compose
from vllm_launchers.plan.export.kubernetes import kubernetes
from vllm_launchers.plan.export.quoting import ExportError
from vllm_launchers.plan.export.shell import config_yaml, shell
from vllm_launchers.plan.export.systemd import systemd_unit
from vllm_launchers.plan.model import Plan

Make = Callable[..., Plan]
KEY = "hunter2-hunter2"


def service_of(text: str) -> dict[str, Any]:
    (service,) = yaml.safe_load(text)["services"].values()
    return dict(service)


def objects_of(text: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pod_of(text: str) -> dict[str, Any]:
    return dict(objects_of(text)["Deployment"]["spec"]["template"]["spec"])


def settings_of(unit: str) -> dict[str, str]:
    """The unit's settings; the last value of each name."""
    joined = unit.replace("\\\n", " ")
    return dict(line.split("=", 1) for line in joined.splitlines() if "=" in line and not line.startswith("#"))


# Secrets


@pytest.mark.parametrize("form", list(Form))
def test_exports_contain_no_secret(form: Form, make: Make) -> None:
    """Not even one that was set where none is allowed."""
    plan = make({"max-num-seqs": 8}, secrets=("HF_TOKEN", "VLLM_API_KEY"))
    plan = msgspec.structs.replace(
        plan, environment={"MY_TOKEN": KEY, "A": "1"}, flags=plan.flags | {"x": f"--api-key {KEY}"}
    )
    assert KEY not in export(plan, form)


@pytest.mark.parametrize("form", list(Form))
def test_every_export_names_the_required_secrets(form: Form, make: Make) -> None:
    text = export(make(secrets=("HF_TOKEN", "VLLM_API_KEY")), form)
    assert "HF_TOKEN" in text
    assert "VLLM_API_KEY" in text


def test_locations_of_secrets(make: Make) -> None:
    plan, plain = make(secrets=("HF_TOKEN",)), make()
    system = systemd_unit(plan, user=False)
    assert settings_of(system)["EnvironmentFile"] == "/etc/vllm-console/vllm-chatbot.env"
    assert "install -m 600 /dev/null /etc/vllm-console/vllm-chatbot.env" in system
    user = systemd_unit(plan, user=True)
    assert settings_of(user)["EnvironmentFile"] == "%h/.config/vllm-console/vllm-chatbot.env"
    assert "EnvironmentFile" not in settings_of(systemd_unit(plain, user=True))
    assert service_of(compose(plan))["env_file"] == ["vllm-chatbot.env"]
    assert "env_file" not in service_of(compose(plain))
    (variable,) = (v for v in pod_of(kubernetes(plan))["containers"][0]["env"] if v["name"] == "HF_TOKEN")
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "vllm-chatbot", "key": "HF_TOKEN"}}


# Shell


def test_shell_has_one_flag_a_line(make: Make) -> None:
    lines = shell(make({"served-model-name": "a b"}, secrets=("HF_TOKEN",), gpus=(1,))).splitlines()
    assert lines[:3] == ["CUDA_VISIBLE_DEVICES=1 \\", "CUDA_DEVICE_ORDER=PCI_BUS_ID \\", 'HF_TOKEN="$HF_TOKEN" \\']
    assert lines[3].startswith("/opt/venv/bin/vllm serve ")
    assert "  --port 8000 \\" in lines
    assert lines[-1] == "  --served-model-name 'a b'" or "  --served-model-name 'a b' \\" in lines


@pytest.mark.parametrize("form", [Form.SHELL, Form.SYSTEMD, Form.CONFIG])
def test_each_served_name_is_a_separate_word(form: Form, make: Make) -> None:
    text = export(make({"served-model-name": '["qwen", "default"]', "max-num-seqs": 8}), form)
    assert "--served-model-name qwen default" in text


def test_each_served_name_is_a_container_argument(make: Make) -> None:
    plan = make({"served-model-name": '["qwen", "default"]', "max-num-seqs": 8})
    for words in (service_of(compose(plan))["command"], pod_of(kubernetes(plan))["containers"][0]["args"]):
        at = words.index("--served-model-name")
        assert words[at + 1 : at + 3] == ["qwen", "default"]
        assert words[at + 3].startswith("--")


def test_shell_keeps_unknown_words(make: Make) -> None:
    plan = msgspec.structs.replace(make(), argv=("/x", "--other", "words"))
    assert shell(plan).endswith("/x --other words\n")


# Config file


def test_config_file(make: Make) -> None:
    text = config_yaml(make({"enable-prefix-caching": False, "enforce-eager": True, "disable-log-stats": False}))
    config = yaml.safe_load(text)
    assert config["no-enable-prefix-caching"] is True
    assert config["enforce-eager"] is True
    assert "disable-log-stats" not in config
    assert False not in config.values()
    assert config["model"]
    assert (config["host"], config["port"]) == ("127.0.0.1", 8000)
    assert config["gpu-memory-utilization"] == 0.92


def test_flags_unsupported_by_a_config_file_are_in_its_command(make: Make) -> None:
    plan = make({"chat-template": "-x y"}, environment={"NCCL_DEBUG": "INFO"}, secrets=("HF_TOKEN",))
    first, command, *rest = config_yaml(plan).splitlines()
    assert first == "# Run with:"
    assert command == (
        "#   NCCL_DEBUG=INFO HF_TOKEN=\"$HF_TOKEN\" /opt/venv/bin/vllm serve --config vllm.yaml '--chat-template=-x y'"
    )
    assert not any("chat-template" in line for line in rest)


def test_two_config_files_are_refused(make: Make) -> None:
    with pytest.raises(ExportError, match="takes only one"):
        config_yaml(make({"config": "/c.yaml"}))


# systemd


def test_system_unit(make: Make) -> None:
    unit = settings_of(systemd_unit(make(gpus=(0,)), user=False))
    assert unit["User"] == "vllm"
    assert unit["WantedBy"] == "multi-user.target"
    assert unit["Restart"] == "always"
    assert unit["RestartPreventExitStatus"] == "2"
    assert unit["LimitNOFILE"] == "65536"
    assert unit["KillMode"] == "mixed"
    assert unit["KillSignal"] == "SIGINT"
    assert unit["TimeoutStopSec"] == "60"
    assert unit["StartLimitBurst"] == "5"
    assert "nvidia-persistenced.service" in unit["After"]


def test_user_unit(make: Make) -> None:
    text = systemd_unit(make(), user=True, name="My Chat")
    unit = settings_of(text)
    assert unit["WantedBy"] == "default.target"
    assert not {"User", "After", "Wants"} & set(unit)
    assert "systemctl --user enable --now" not in unit
    assert "systemctl --user daemon-reload && systemctl --user enable --now vllm-my-chat" in text


def test_requests_get_time_to_finish(make: Make) -> None:
    plan = make({"shutdown-timeout": 120})
    assert settings_of(systemd_unit(plan, user=True))["TimeoutStopSec"] == "180"
    assert service_of(compose(plan))["stop_grace_period"] == "180s"
    assert service_of(compose(make({"shutdown-timeout": True})))["stop_grace_period"] == "60s"
    assert pod_of(kubernetes(plan))["terminationGracePeriodSeconds"] == 180


def test_tools_next_to_the_program_are_on_the_path(make: Make) -> None:
    assert "Environment=PATH=/opt/venv/bin:/usr/local/cuda/bin:" in systemd_unit(make(), user=True)
    assert "Environment=PATH=/mine\n" in systemd_unit(make(environment={"PATH": "/mine"}), user=True)


def test_files_that_another_account_must_read_are_named(make: Make) -> None:
    plan = make(command=("/home/anna/venv/bin/vllm",), model="/home/anna/m 1")
    comment = "# vllm must be able to read /home/anna/venv/bin/vllm and '/home/anna/m 1'\n"
    assert comment in systemd_unit(plan, user=False)
    assert comment not in systemd_unit(plan, user=True)
    assert "must be able to read" not in systemd_unit(make(), user=False)


def test_model_name_cannot_inject_unit_lines(make: Make) -> None:
    unit = systemd_unit(make(model="a%b\nExecStart=/bin/evil\\"), user=True)
    assert "Description=vLLM, chatbot: a%%b ExecStart=/bin/evil\n" in unit


# Containers


def test_compose_service(make: Make) -> None:
    service = service_of(compose(make(gpus=(2, 3))))
    assert service["image"] == "vllm/vllm-openai:v0.33.0"
    assert service["entrypoint"] == ["vllm", "serve"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["2", "3"], "capabilities": ["gpu"]}
    assert service["shm_size"] == "16gb"
    assert "/health" in service["healthcheck"]["test"][-1]
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & set(service["environment"])
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")


def test_compose_without_chosen_gpus_uses_the_planned_number(make: Make) -> None:
    service = service_of(compose(make({"tensor-parallel-size": 2, "data-parallel-size": 2})))
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == 4


@pytest.mark.parametrize(
    ("host", "published"),
    [
        ("127.0.0.1", "127.0.0.1:8000:8000"),
        ("localhost", "127.0.0.1:8000:8000"),
        ("0.0.0.0", "0.0.0.0:8000:8000"),
        ("::1", "[::1]:8000:8000"),
        ("::", "[::]:8000:8000"),
        ("gpubox", "127.0.0.1:8000:8000"),
    ],
)
def test_compose_publishes_no_more_than_the_plan(host: str, published: str, make: Make) -> None:
    service = service_of(compose(make(host=host)))
    assert service["ports"] == [published]
    assert service["command"][1:3] == ["--host", "0.0.0.0"]


def mounted(text: str) -> dict[str, bool]:
    """Folders of this machine inside a Compose service, and whether they are writable."""
    volumes = [volume for volume in service_of(text)["volumes"] if isinstance(volume, dict)]
    return {v["target"]: not v.get("read_only") for v in volumes if v["source"] == v["target"]}


def test_local_model_is_mounted(make: Make) -> None:
    plan = make(model="/data/my model")
    assert mounted(compose(plan)) == {"/data/my model": False}
    pod = pod_of(kubernetes(plan))
    assert {"name": "host-0", "hostPath": {"path": "/data/my model"}} in pod["volumes"]
    assert {"name": "host-0", "mountPath": "/data/my model", "readOnly": True} in pod["containers"][0]["volumeMounts"]
    assert "PersistentVolumeClaim" not in objects_of(kubernetes(plan))


def test_snapshot_is_mounted_with_its_link_targets(make: Make) -> None:
    whole = "/c/hub/models--org--m"
    assert mounted(compose(make(model=f"{whole}/snapshots/0123abc"))) == {whole: False}


def test_files_named_by_flags_are_mounted(make: Make) -> None:
    flags = {
        "config": "/etc/keys.yaml",
        "config-format": "hf",
        "logging-config.pylogging_config_file": "/etc/logging.json",
        "chat-template": "/t/chat.jinja",
        "lora-modules": "sql=/adapters/sql",
        "speculative-config": '{"model": "/models/draft", "num_speculative_tokens": 3}',
        "download-dir": "/models",
        "root-path": "/api",
        "disable-access-log-for-endpoints": "/health,/metrics",
    }
    assert mounted(compose(make(flags, model="/data/model"))) == {
        "/data/model": False,
        "/etc/keys.yaml": False,
        "/etc/logging.json": False,
        "/t/chat.jinja": False,
        "/adapters/sql": False,
        "/models/draft": False,
        "/models": True,
    }


def test_draft_named_by_a_flag_of_its_own_is_mounted(make: Make) -> None:
    assert mounted(compose(make({"spec-model": "/models/draft", "spec-tokens": 3}))) == {"/models/draft": False}


def test_local_model_cache_is_used(make: Make) -> None:
    service = service_of(compose(make()))
    assert service["volumes"] == [f"${{HF_HOME:-~/.cache/huggingface}}:{service['environment']['HF_HOME']}"]
    service = service_of(compose(make(environment={"HF_HOME": "/big/$hf"})))
    assert service["volumes"][0]["source"] == "/big/$$hf"
    assert service["environment"]["HF_HOME"] == service["volumes"][0]["target"]


def test_kubernetes_objects(make: Make) -> None:
    plan = make({"tensor-parallel-size": 2}, gpus=(0, 1), port=8100)
    objects = objects_of(kubernetes(plan, name="Chat"))
    assert set(objects) == {"PersistentVolumeClaim", "Deployment", "Service"}
    assert objects["Service"]["spec"]["ports"] == [{"name": "http", "port": 8100, "targetPort": "http"}]
    labels = objects["Deployment"]["spec"]["selector"]["matchLabels"]
    assert objects["Service"]["spec"]["selector"] == labels
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    inside = pod["containers"][0]
    assert inside["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert pod["enableServiceLinks"] is False
    start = inside["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 3600
    assert {inside[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")} == {"/health"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in inside["volumeMounts"]
    assert all(isinstance(variable["value"], str) for variable in inside["env"])


def test_open_service_is_reported_as_open(make: Make) -> None:
    assert "it has no API key" in kubernetes(make())
    assert "it has no API key" not in kubernetes(make(secrets=("VLLM_API_KEY",)))


def test_probes_use_the_keepers_timeout(make: Make) -> None:
    """A busy API server may take seconds to respond to /health."""
    (container,) = pod_of(kubernetes(make()))["containers"]
    waits = {container[name]["timeoutSeconds"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert waits == {health.DEADLINE_SECONDS}
    assert service_of(compose(make()))["healthcheck"]["timeout"] == f"{health.DEADLINE_SECONDS:g}s"


def test_probes_use_tls_like_the_server(make: Make) -> None:
    plan = make({"ssl-certfile": "/s/c.pem", "ssl-keyfile": "/s/k.pem"})
    assert pod_of(kubernetes(plan))["containers"][0]["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    ask = service_of(compose(plan))["healthcheck"]["test"][-1]
    assert "https://127.0.0.1:8000/health" in ask
    compile(ask, "healthcheck", "exec")


def test_volume_has_room_for_the_weights(make: Make) -> None:
    memory = MemoryBudget(140.0, 1, 1, 10, None, None, None, None)
    claim = objects_of(kubernetes(msgspec.structs.replace(make(gpus=(0,)), memory=memory)))["PersistentVolumeClaim"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "210Gi"


def test_unknown_version_is_reported(make: Make) -> None:
    text = compose(make(version=None))
    assert service_of(text)["image"].endswith(":latest")
    assert "replace 'latest' with it" in text
    assert service_of(compose(make(version="0.20.1+cu129")))["image"].endswith(":v0.20.1")


def test_development_build_has_no_image(make: Make) -> None:
    text = compose(make(version="0.33.1.dev5+g0123abc"))
    assert service_of(text)["image"].endswith(":latest")
    assert "# vLLM 0.33.1.dev5 is a development build without an image" in text


# What cannot be exported


@pytest.mark.parametrize("form", [compose, kubernetes, config_yaml])
def test_simulated_engine_is_not_exported(form: Callable[[Plan], str], make: Make) -> None:
    with pytest.raises(ExportError, match="simulated"):
        form(make(build="simulated"))


@pytest.mark.parametrize("form", [compose, kubernetes])
def test_image_is_for_nvidia(form: Callable[[Plan], str], make: Make) -> None:
    with pytest.raises(ExportError, match="for a cpu build"):
        form(make(build="cpu"))


@pytest.mark.parametrize("form", [Form.SYSTEMD, Form.COMPOSE, Form.KUBERNETES])
@pytest.mark.parametrize("model", ["./m", "../m", "~/m"])
def test_relative_models_are_refused_without_a_folder(form: Form, model: str, make: Make) -> None:
    with pytest.raises(ExportError, match="give the full path"):
        export(make(model=model), form)


def test_systemd_needs_an_absolute_path(make: Make) -> None:
    with pytest.raises(ExportError, match="full path of bin/vllm"):
        systemd_unit(make(command=("bin/vllm",)), user=True)


def test_vllm_not_found_here_gets_a_placeholder(make: Make) -> None:
    unit = systemd_unit(make(command=("vllm",)), user=True)
    assert "ExecStart=/usr/local/bin/vllm serve " in unit
    assert "# Replace /usr/local/bin/vllm with the program's path" in unit
    assert "with the program's path" not in systemd_unit(make(), user=True)
