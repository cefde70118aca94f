"""A plan over several machines, exported for other tools: a script for each machine, and a LeaderWorkerSet."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from vllm_launchers.plan.choices.nodes import NodesRequest
from vllm_launchers.plan.export import Form, export
from vllm_launchers.plan.export.quoting import ExportError
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.nodes import nodes_plan
from vllm_launchers.presets.load import read_presets

LAYOUT = {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}
NASTY = "$HOME $(x) 'q'"


def over_nodes(plan: Plan, rank: int = 0, address: str = "10.0.0.1") -> Plan:
    """The plan of one of two machines."""
    workload = read_presets(None)[0]["chatbot"].workload
    nodes = nodes_plan(plan, NodesRequest(2, rank, address), None, workload, fits_one=False)
    return replace(plan, nodes=nodes, flags=nodes.nodes[rank].flags, argv=nodes.nodes[rank].argv)


@pytest.mark.parametrize("rank", [0, 1])
def test_node_script_is_its_command(rank: int, make: Any) -> None:
    plan = over_nodes(make({**LAYOUT, "served-model-name": NASTY}), rank)
    text = export(plan, Form.SHELL)
    assert text.startswith(f"# Node {rank} of 2")
    done = subprocess.run(
        ["sh", "-c", text.replace(plan.engine.command[0], "printf '%s\\n'", 1)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == list(plan.argv[1:])


def test_headless_node_has_no_address_in_its_file(make: Any) -> None:
    served, headless = (yaml.safe_load(export(over_nodes(make(LAYOUT), rank), Form.CONFIG)) for rank in (0, 1))
    assert {"host", "port"} <= set(served)
    assert not {"host", "port"} & set(headless)
    assert (headless["node-rank"], headless["headless"], headless["master-addr"]) == (1, True, "10.0.0.1")


@pytest.mark.parametrize("form", [Form.SHELL, Form.CONFIG, Form.SYSTEMD, Form.SYSTEMD_USER])
def test_node_needs_the_address_of_the_first(form: Form, make: Any) -> None:
    with pytest.raises(ExportError, match="--master-addr"):
        export(over_nodes(make(LAYOUT), address=""), form)


def test_compose_does_not_support_several_machines(make: Any) -> None:
    with pytest.raises(ExportError, match="use shell"):
        export(over_nodes(make(LAYOUT)), Form.COMPOSE)


def pods_of(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The LeaderWorkerSet's two pod templates, after comparing its own fields with those of its API (v1)."""
    documents = {one["kind"]: one for one in yaml.safe_load_all(export(plan, Form.KUBERNETES))}
    found = documents["LeaderWorkerSet"]
    assert found["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(found["spec"]) == {"replicas", "leaderWorkerTemplate"}
    group = found["spec"]["leaderWorkerTemplate"]
    assert set(group) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    selector = documents["Service"]["spec"]["selector"].items()
    assert selector <= group["leaderTemplate"]["metadata"]["labels"].items()
    assert not selector <= group["workerTemplate"]["metadata"]["labels"].items()
    assert documents["Service"]["metadata"]["name"] != found["metadata"]["name"]  # that is the name of its own service
    return group["leaderTemplate"], group["workerTemplate"]


def test_pods_of_a_leader_worker_set(make: Any) -> None:
    plan = over_nodes(
        make({**LAYOUT, "served-model-name": NASTY}, environment={"VLLM_HOST_IP": "10.0.0.9"}), address=""
    )
    leader, worker = (pod["spec"]["containers"][0] for pod in pods_of(plan))
    assert "--headless" in worker["args"]
    assert "--port" not in worker["args"]
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & set(worker)
    assert {"ports", "startupProbe"} <= set(leader)
    for inside, rank in ((leader, "0"), (worker, "$(LWS_WORKER_INDEX)")):
        words = dict(zip(inside["args"], inside["args"][1:], strict=False))
        assert (words["--nnodes"], words["--node-rank"]) == ("2", rank)
        assert words["--master-addr"] == "$(LWS_LEADER_ADDRESS)"
        assert words["--served-model-name"].replace("$$", "$") == NASTY  # not expanded
        assert inside["resources"]["limits"] == {"nvidia.com/gpu": 2}
        own = [one for one in inside["env"] if one["name"] == "VLLM_HOST_IP"]
        assert own == [{"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]


def test_kubernetes_accepts_every_pod_field(make: Any, tmp_path: Path) -> None:
    """kubectl drops unknown fields, and refuses fields of the wrong type."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not available here")
    for pod in pods_of(over_nodes(make(LAYOUT, secrets=("HF_TOKEN",)))):
        pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "2"  # as written by kubectl
        labels = pod["metadata"]["labels"]
        spec = {"selector": {"matchLabels": labels}, "template": pod}
        document = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": spec}
        file = tmp_path / "pod.json"
        file.write_text(json.dumps(document))
        words = shlex.split(f"kubectl set image --local -f {shlex.quote(str(file))} vllm=another -o json")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        pod["spec"]["containers"][0]["image"] = "another"
        read = json.loads(done.stdout)["spec"]["template"]["spec"]
        container = read["containers"][0]
        container["resources"] = {key: value for key, value in container["resources"].items() if value}
        assert read == pod["spec"]
