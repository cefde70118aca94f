"""A plan for KServe, llm-d and production-stack: only fields in their schemas, and everything in the plan.

The field names come from the schemas and templates of KServe 0.20 (``InferenceService`` v1beta1), llm-d-modelservice
0.4.12 and vllm-stack 0.1.12; complete exports were validated against these when this was written.
"""

from __future__ import annotations

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

STACKS = (Form.KSERVE, Form.LLM_D, Form.PRODUCTION_STACK)
PREDICTOR = {
    *("minReplicas", "maxReplicas", "deploymentStrategy", "enableServiceLinks", "terminationGracePeriodSeconds"),
    *("containers", "volumes"),
}
CONTAINER = {
    *("name", "image", "command", "args", "env", "resources", "volumeMounts", "ports"),
    *("startupProbe", "readinessProbe", "livenessProbe"),
}
MODEL_SPEC = {
    *("name", "repository", "tag", "modelURL", "replicaCount", "resources", "shmSize", "vllmConfig", "env", "hf_token"),
    *("pvcStorage", "pvcAccessMode", "extraVolumes", "extraVolumeMounts"),
}


def documents(plan: Plan, form: Form) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(export(plan, form, name="demo")))


def words_of(plan: Plan, form: Form) -> list[str]:
    """The command line in the pod."""
    found = documents(plan, form)[-1]
    if form is Form.KSERVE:
        (one,) = found["spec"]["predictor"]["containers"]
        return [*one["command"], *one["args"]]
    if form is Form.LLM_D:
        (one,) = found["decode"]["containers"]
        return [*one["command"], *one["args"]]
    engine = found["servingEngineSpec"]
    (model,) = engine["modelSpec"]
    config = model["vllmConfig"]
    caching = "--enable-prefix-caching" if config["enablePrefixCaching"] else "--no-enable-prefix-caching"
    tensor = ["--tensor-parallel-size", str(config["tensorParallelSize"])]
    address = ["--host", "0.0.0.0", "--port", str(engine["containerPort"])]
    return ["vllm", "serve", model["modelURL"], *address, caching, *tensor, *config["extraArgs"]]


@pytest.mark.parametrize("form", STACKS)
def test_pod_runs_the_planned_command(form: Form, make: Any) -> None:
    plan = make({"tensor-parallel-size": 2, "max-num-seqs": 64, "enable-prefix-caching": False})
    words = words_of(plan, form)
    assert words[:3] == ["vllm", "serve", plan.model]
    assert words[words.index("--port") + 1] == str(plan.port)
    assert words[words.index("--max-num-seqs") + 1] == "64"
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert "--no-enable-prefix-caching" in words
    assert "--enable-prefix-caching" not in words


def test_production_stack_keeps_prefix_caching_on_by_default(make: Any) -> None:
    plan = make({})
    plan = replace(plan, flags={flag: value for flag, value in plan.flags.items() if flag != "enable-prefix-caching"})
    assert "--enable-prefix-caching" in words_of(plan, Form.PRODUCTION_STACK)  # without it, the chart turns it off


@pytest.mark.parametrize("form", STACKS)
def test_secrets_are_references_and_variables_stay_text(form: Form, make: Any) -> None:
    plan = replace(make({}), secrets=("HF_TOKEN", "VLLM_API_KEY", "OTHER_TOKEN"), environment={"FOO": "a$(B)"})
    text = export(plan, form, name="demo")
    assert "kubectl create secret generic vllm-demo" in text
    assert "a$$(B)" in text
    assert text.count("OTHER_TOKEN") >= 2
    if form is Form.LLM_D:
        assert documents(plan, form)[0]["modelArtifacts"]["authSecretName"] == "vllm-demo"
    if form is Form.PRODUCTION_STACK:
        engine = documents(plan, form)[0]["servingEngineSpec"]
        assert engine["vllmApiKey"] == {"secretName": "vllm-demo", "secretKey": "VLLM_API_KEY"}
        assert engine["modelSpec"][0]["hf_token"] == {"secretName": "vllm-demo", "secretKey": "HF_TOKEN"}


def test_fields_match_the_schemas(make: Any) -> None:
    plan = make({"tensor-parallel-size": 2})
    claim, service = documents(plan, Form.KSERVE)
    assert claim["kind"] == "PersistentVolumeClaim"
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    predictor = service["spec"]["predictor"]
    assert set(predictor) <= PREDICTOR
    (one,) = predictor["containers"]
    assert set(one) <= CONTAINER
    assert one["name"] == "kserve-container"  # KServe identifies its own pods by this name
    (values,) = documents(plan, Form.LLM_D)
    assert set(values["decode"]["containers"][0]) <= CONTAINER | {"modelCommand", "mountModelVolume"}
    assert values["decode"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert values["prefill"] == {"create": False}
    (stack,) = documents(plan, Form.PRODUCTION_STACK)
    assert set(stack["servingEngineSpec"]["modelSpec"][0]) <= MODEL_SPEC
    assert stack["servingEngineSpec"]["startupProbe"]["httpGet"]["port"] == plan.port


def test_model_folder_is_mounted_or_refused(make: Any) -> None:
    plan = replace(make({}), model="/data/model")
    (service,) = documents(plan, Form.KSERVE)
    assert {"hostPath": {"path": "/data/model"}, "name": "host-0"} in service["spec"]["predictor"]["volumes"]
    (stack,) = documents(plan, Form.PRODUCTION_STACK)
    (model,) = stack["servingEngineSpec"]["modelSpec"]
    assert [one["mountPath"] for one in model["extraVolumeMounts"]] == ["/data/model"]
    assert "pvcStorage" not in model
    with pytest.raises(ExportError, match="use kubernetes"):
        export(plan, Form.LLM_D)


@pytest.mark.parametrize("form", STACKS)
def test_unsupported_plans_are_refused(form: Form, make: Any) -> None:
    plan = make({"tensor-parallel-size": 2, "pipeline-parallel-size": 2})
    workload = read_presets(None)[0]["chatbot"].workload
    nodes = nodes_plan(plan, NodesRequest(2, 0, "10.0.0.1"), None, workload, fits_one=False)
    why = "only the first of several nodes serves" if form is Form.LLM_D else "as a Ray cluster"
    with pytest.raises(ExportError, match=f"{why}.*: use kubernetes"):
        export(replace(plan, nodes=nodes), form)
    with pytest.raises(ExportError, match="talks HTTP"):
        export(replace(make({"ssl-certfile": "/c.pem", "ssl-keyfile": "/k.pem"})), form)


def test_template_in_a_variable_is_refused_if_the_chart_reads_it(make: Any) -> None:
    plan = replace(make({}), environment={"FOO": "{{ .Values }}"})
    with pytest.raises(ExportError, match="FOO"):
        export(plan, Form.LLM_D)
    assert "{{ .Values }}" in export(plan, Form.PRODUCTION_STACK)
