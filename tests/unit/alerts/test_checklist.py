"""What operators check before a launch: each item from the plan, the runs, the disks and a Prometheus."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from vllm_console.alerts.checklist import ChecklistInputs, Disk, Monitoring, checklist
from vllm_console.alerts.monitoring import ask_prometheus
from vllm_console.runs.measurement import RAMP, Measurement
from vllm_console.runs.store import Run
from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes

WORK = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=64)
FITS = MemoryBudget(5.7, 1.8, 0.7, 36.7, 147_456, 267_136, 4096, 65.2, 69.6)
URL = "http://127.0.0.1:9090"


def plan(*findings: PlanFinding, **changes: object) -> Plan:
    engine = Engine(EngineKind.VLLM, ("vllm",), "0.33.0", "cuda", "/opt/vllm")
    fields = {"gpus": (0,), "secrets": (), "findings": findings, "memory": FITS} | changes
    return Plan("chatbot", "org/model", engine, "127.0.0.1", 8000, ("vllm",), {}, {}, {}, **fields)


def run(**changes: object) -> Run:
    ramp = Measurement(RAMP, 1.0, (), 9.4, 9.0, None, "found")
    fields = {"preset": "chatbot", "model": "org/model", "gpu_kind": "NVIDIA RTX A6000", "measurements": (ramp,)}
    return Run(key="k", server="chat", generation=3, started_at=0.0, **fields | changes)


def inputs(**changes: object) -> ChecklistInputs:
    fields = {
        "gpu_kind": "NVIDIA RTX A6000", "hosts": ("127.0.0.1", "gpubox"), "runs": [run()],
        "disks": [Disk("model cache", "/data", 80.0)], "wanted_alerts": ("A", "B"),
        "monitoring": Monitoring(URL, ("gpubox:8000",), ("A", "B", "C")),
    }  # fmt: skip
    return ChecklistInputs(**fields | changes)


def item(name: str, wanted_plan: Plan, checklist_inputs: ChecklistInputs):
    return next(one for one in checklist(wanted_plan, WORK, checklist_inputs) if one.name == name)


def test_every_checklist_item_is_ok_and_says_what_it_checked():
    items = checklist(plan(), WORK, inputs())
    assert {one.status for one in items} == {"ok"}
    assert [one.name for one in items] == [
        "model", "context", "memory", "links", "flags", "port", "key", "disk", "scraping", "alerts", "ramp", "machine",
    ]  # fmt: skip
    assert all(one.message and not one.fix for one in items)
    assert "9.4 req/s (chat@3)" in item("ramp", plan(), inputs()).message


@pytest.mark.parametrize(
    ("code", "name"),
    [("context_below_traffic", "context"), ("memory_held", "memory"), ("tp_over_pcie", "links"),
     ("port_taken", "port"), ("open_to_all_without_key", "key"), ("disk_for_download", "disk"),
     ("model_gated", "model"), ("some_new_code", "flags")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("level", "status"), [(Level.ERROR, "error"), (Level.WARNING, "warning"), (Level.ADVICE, "ok")]
)
def test_plan_finding_belongs_to_one_item(code, name, level, status):
    finding = PlanFinding(code, level, "why", Changes(set={"max-model-len": 8192, "x": True}, unset=("y",)))
    items = checklist(plan(finding), WORK, inputs())
    touched = [one for one in items if one.status != "ok"]
    assert [(one.name, one.status) for one in touched] == ([] if status == "ok" else [(name, status)])
    for one in touched:
        assert (one.message, one.fix) == ("why", "--set max-model-len=8192 --set x=true --unset y")
        assert one.codes == (code,)


def test_fix_can_be_pasted_into_a_shell():
    finding = PlanFinding("port_taken", Level.ERROR, "why", Changes(set={"speculative-config": '{"a": 1}'}))
    (item,) = [one for one in checklist(plan(finding), WORK, inputs()) if one.fix]
    assert item.fix == """--set 'speculative-config={"a": 1}'"""


@pytest.mark.parametrize(("gpus", "why"), [((), "no GPU is known"), ((0,), "too little is known about the model")])
def test_memory_without_a_budget_is_unknown(gpus, why):
    found = item("memory", plan(memory=None, gpus=gpus), inputs())
    assert (found.status, found.message) == ("unknown", f"unknown whether it fits: {why}")
    held = PlanFinding("memory_held", Level.ERROR, "others hold it")
    assert item("memory", plan(held, memory=None), inputs()).status == "error"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("disk", {"disks": [Disk("state folder", "/s", 1.5)]}, "state folder (/s) has 1.5 GiB free"),
        ("scraping", {"monitoring": Monitoring(URL, ("gpubox:8001",), ("A", "B"))}, "does not scrape port 8000"),
        ("scraping", {"monitoring": Monitoring(URL, problem="no Prometheus")}, "no Prometheus"),
        ("alerts", {"monitoring": Monitoring(URL, ("gpubox:8000",), ("A",))}, "1 of 2 alerting rules are missing"),
        ("ramp", {"runs": [run(model="org/other")]}, "its ceiling is unknown"),
        ("ramp", {"runs": [run(gpu_kind="NVIDIA H100")]}, "on NVIDIA RTX A6000"),
        ("ramp", {"runs": [run(measurements=(Measurement(RAMP, 1.0, (), sentence="too short."),))]}, "too short"),
        ("machine", {"problems": [{"what": "few files", "do": "ulimit"}, {"what": "x", "do": "y"}]}, "and 1 more"),
    ],
)  # fmt: skip
def test_missing_requirement_is_a_warning_with_a_fix(name, changes, words):
    found = item(name, plan(), inputs(**changes))
    assert found.status == "warning"
    assert words in found.message
    assert found.fix


def test_model_not_downloaded_is_a_warning():
    one = item("model", plan(), inputs(model_missing=True))
    assert (one.status, one.fix) == ("warning", "vllm-console models get org/model")
    assert "is not on this machine" in one.message
    finding = PlanFinding("model_missing", Level.ERROR, "why")
    assert item("model", plan(finding), inputs(model_missing=True)).message == "why"


def test_webhook_counts_as_alerting():
    found = item("alerts", plan(), inputs(monitoring=Monitoring(URL, problem="none"), webhook=True))
    assert found.status == "ok"


@pytest.fixture
def prometheus():
    """A Prometheus with these responses by path; returns its address."""
    answers: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers[self.path.partition("?")[0]])

        def log_message(self, *_: object) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield answers, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def answer(**data: object) -> bytes:
    return json.dumps({"status": "success", "data": data}).encode()


def test_prometheus_targets_and_rules_are_read(prometheus):
    answers, url = prometheus
    odd = [{"scrapeUrl": "http://[bad"}, {"scrapeUrl": "http://a:99999999"}, {"scrapeUrl": None}, 7]
    answers["/api/v1/targets"] = answer(activeTargets=[*odd, {"scrapeUrl": "http://gpubox:8000/metrics?engine=0"}])
    rules = [{"type": "alerting", "name": "A"}, {"type": "recording", "name": "B"}, None]
    answers["/api/v1/rules"] = answer(groups=[{"rules": rules}, {}, 3])
    found = ask_prometheus(url + "/")
    assert (found.problem, found.alerts) == ("", ("A",))
    assert found.targets == ("gpubox:8000",)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"status": "error"}', b"[" * 100_000, b"\xff"])
def test_non_prometheus_endpoint_is_reported_in_one_sentence(prometheus, body):
    answers, url = prometheus
    answers["/api/v1/targets"] = answers["/api/v1/rules"] = body
    assert ask_prometheus(url).problem == f"no Prometheus at {url}: the response is not from Prometheus"
    assert "nothing answers" in ask_prometheus("http://127.0.0.1:9").problem
    assert ask_prometheus("nonsense").problem
