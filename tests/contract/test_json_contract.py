"""Every key that a command prints as JSON is described in ``docs/json.md``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fakes import made_runs
from fakes.commands import run_command
from vllm_console.alerts.check import Report, report_document
from vllm_console.cli.models import model_document
from vllm_console.cli.predict import prediction_document
from vllm_console.cli.requests import prefixes_document, step_document
from vllm_console.cli.servers import status_document
from vllm_console.diagnosis.finding import (
    Cause,
    Diagnosis,
    Finding,
    Fix,
    Measure,
    Severity,
    diagnosis_document,
    finding_document,
)
from vllm_console.diagnosis.objectives import Judged
from vllm_console.fleet.predictions import PredictedChange
from vllm_console.fleet.snapshot import ServerView
from vllm_console.history.prefix_use import prefix_use
from vllm_console.history.probe_records import EngineStep, FinishedRequest, Resumed
from vllm_console.load.report import Latency, LoadReport
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_console.metrics.window import metrics_document
from vllm_console.prediction.predict import Estimates, Prediction
from vllm_console.prediction.score import TrackRecord
from vllm_console.runs.compare import compare
from vllm_console.runs.document import comparison_document, run_document
from vllm_console.runs.store import FlagChange
from vllm_launchers.keeper.records import State
from vllm_launchers.plan.model import MemoryFit
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.modelfacts.local import LocalModel

DESCRIBED = (Path(__file__).parents[2] / "docs/json.md").read_text(encoding="utf-8")

FREE = ("flags", "env", "environment", "failures", "engines", "finding_minutes", "program", "machine", "folders",
        "servers", "host", "set", "was", "changes", "gpus")  # fmt: skip
"""Keys whose values have variable keys (flags, labels), or are described in prose."""


def keys(document: object) -> Iterator[str]:
    """Every key of a document, at any depth."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key
            if key not in FREE:
                yield from keys(value)
    elif isinstance(document, list):
        for value in document:
            yield from keys(value)


def undescribed(document: object) -> set[str]:
    """Keys that the page doesn't describe; ``p90_above`` is covered by ``…_above``."""
    found = {re.sub(r"^p\d+(?=_)", "…", key) for key in keys(document)}
    return {key for key in found if not re.search(rf'["`]{re.escape(key)}["`]', DESCRIBED)}


@pytest.mark.parametrize(
    "words",
    [
        ["presets"],
        ["plan", "chatbot", "--engine", "simulated", "--host", "2xrtx3090"],
        ["plan", "chatbot", "--host", "2xrtx3090", "--vllm-version", "0.33.0", "--nodes", "2", "--gpus", "0,1"],
        ["engines"],
        ["models", "--fits", "chatbot"],
        ["topology", "--host", "2xrtx3090"],
        ["host", "--host", "2xrtx3090"],
        ["gpus", "--free", "1", "--host", "2xrtx3090"],
        ["doctor"],
        ["board"],
        ["leftovers"],
        ["check", "--before-launch", "chatbot", "--prometheus", "http://127.0.0.1:9"],
    ],
    ids=lambda words: words[0],
)
def test_commands(words: list[str], tmp_path: Path) -> None:
    board = tmp_path / "board"
    board.mkdir()
    board.chmod(0o1777)
    (tmp_path / "config.toml").write_text(f'board = "{board}"\n')
    place = ["--config", str(tmp_path / "config.toml"), "--state", str(tmp_path / "state")]
    env = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_command([*place, *words, "--json"], env)
    assert not undescribed(json.loads(done.stdout)), done.stderr


def test_server_and_its_findings(fakes: ModuleType) -> None:
    fix = Fix(Changes(set={"max-num-seqs": 128}), "why", "trade-off")
    finding = Finding("preempting", Severity.CRITICAL, 0.0, "symptom", "cause", (Measure("a", "1"),), (fix,))
    diagnosis = Diagnosis(Cause.OTHER, 0.5, 1, "line", "explanation", (fix,))
    server = ServerView(name="chat", state=State.READY, state_since=0.0, notice="note", findings=(finding,),
                        diagnosis=diagnosis, tuner=fakes.tuned(0.0).tuner)  # fmt: skip
    for document in (status_document(server), finding_document(finding), diagnosis_document(diagnosis)):
        assert not undescribed(document)
    report = Report("chat", State.READY, 60.0, (Judged("ttft_p99_seconds", 1.0, 2.0, True, "source"),), (finding,), ())
    assert not undescribed(report_document(report))


def test_models() -> None:
    one = LocalModel("org/name", "cache", "/cache", 1, ModelFacts("org/name"))
    assert not undescribed([model_document(one, {"org/name": MemoryFit(True, "", 7)}, {})])


def test_prediction() -> None:
    found = PredictedChange((FlagChange("max-num-seqs", 64, 12),), Prediction(Estimates()), 1, 1.0, "", TrackRecord())
    assert not undescribed(prediction_document(found))


def test_metrics_and_load_report() -> None:
    sample = Sample(at=0.0, engines={"0": EngineSample(requests_running=1.0)})
    assert not undescribed(metrics_document(sample))
    report = LoadReport(1, 1, 0, 1.0, 1, *[Latency(unfinished=1, above={"p99": 1.0})] * 3)
    assert not undescribed(report.document())


def test_runs_and_comparisons() -> None:
    assert not undescribed([run_document(run) for run in made_runs.runs()])
    pair = made_runs.pair(made_runs.minutes(1), made_runs.minutes(2, slower=1.5))
    assert not undescribed(comparison_document(compare(*pair)))


def test_steps_and_prefixes() -> None:
    step = EngineStep(1.0, 0, 1, 0, 0.5, None, 10, 5, 10, 1, 0, 1, 0.02, 0.02, None, None, None, 0)
    assert not undescribed([step_document(step)])
    resumed = [Resumed(1.0, 0, 1, 10, 5, 0)]
    request = FinishedRequest("r", 0.0, 1.0, 0, 100, 8, 64, 0.1, 0.1, 0.7, 1.0, 0, "stop", 0)
    assert not undescribed(prefixes_document(prefix_use([request], resumed)))
