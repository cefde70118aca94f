"""A switch to another preset keeps the server's GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.launch.inputs_reader import PlanInputsReader
from vllm_launchers.launch.planner import Planner
from vllm_launchers.launch.request import RestartOptions
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.startup_reports import StartupReportStore

CHATBOT = read_presets(None)[0]["chatbot"]


@pytest.mark.parametrize(
    "variables",
    [
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"},
        {},
    ],
)
def test_server_without_chosen_gpus_keeps_the_variables_that_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    details = Details(
        preset="chatbot",
        model="/models/eight",
        engine=Engine(EngineKind.VLLM, ("/opt/vllm",), "0.33.0", "cuda", "/opt/vllm"),
        environment={**variables, "NOTE": "chat"},
        workload=CHATBOT.workload,
        objectives=CHATBOT.objectives,
    )
    spec = LaunchSpec(("/opt/vllm",), "127.0.0.1", 8000, details=pack(details))
    record = ServerRecord("chat", State.READY, 0.0, 0.0, (Generation(1, spec, 0.0),))
    planner = Planner(tmp_path, PlanInputsReader(), StartupReportStore(tmp_path / "reports.json"))
    environment = planner.plan_switch(record, "batch", RestartOptions()).plan.environment
    assert {name: value for name, value in environment.items() if name.startswith("CUDA_")} == variables
    assert "NOTE" not in environment
