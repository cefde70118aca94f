"""Which server gets the probe, and what that changes in its environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_launchers.plan.probe import ProbePlan, plan_probe
from vllm_launchers.probe.environment import FOLDER, PLUGIN, probe_variables, with_probe
from vllm_launchers.probe.plugin import vllm_console_probe
from vllm_launchers.vllm.engines import Engine, EngineKind, simulated_engine

NAME = "vllm_console_probe"


def vllm(version: str | None) -> Engine:
    return Engine(EngineKind.VLLM, ("vllm",), version, "cuda", "/opt/vllm/bin/vllm")


def planned(engine: Engine, wish: str = "auto", *, asked: bool = False, **flags: object) -> ProbePlan:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return plan_probe(engine, named, {}, wish, asked=asked)


@pytest.mark.parametrize("engine", [simulated_engine(), vllm("0.27.1"), vllm("0.32.0+cpu")])
def test_simulated_engine_and_tested_releases_get_the_probe(engine: Engine) -> None:
    assert planned(engine) == ProbePlan({"PYTHONPATH": str(PLUGIN)})


@pytest.mark.parametrize("version", ["0.11.1", "0.32.1", "0.33.0", None])
def test_other_releases_get_the_probe_only_on_request(version: str | None) -> None:
    assert "not tested with " in planned(vllm(version)).why_not
    assert not planned(vllm(version)).variables
    assert planned(vllm(version), "on").variables


def test_release_without_stat_plugins_never_gets_the_probe() -> None:
    for wish in ("auto", "on"):
        found = planned(vllm("0.11.0"), wish)
        assert found.why_not == "vLLM 0.11.0 cuda supports no statistics plugins; 0.11.1 is the first that does"
        assert not found.variables


def test_probe_does_not_enable_disabled_statistics() -> None:
    assert "--disable-log-stats" in planned(simulated_engine(), "on", disable_log_stats=True).why_not
    assert planned(simulated_engine(), disable_log_stats=False).variables


def test_missing_probe_names_who_decided() -> None:
    assert planned(simulated_engine(), "off", asked=True).why_not == "--no-probe was given"
    assert planned(simulated_engine(), "off").why_not == 'the settings have probe = "off"'


def test_existing_environment_is_kept() -> None:
    assert probe_variables({"PYTHONPATH": f"/mine{os.pathsep}/more"}) == {
        "PYTHONPATH": os.pathsep.join([str(PLUGIN), "/mine", "/more"])
    }
    assert probe_variables({"VLLM_PLUGINS": "lora,mine"})["VLLM_PLUGINS"] == f"lora,mine,{NAME}"
    assert probe_variables({"VLLM_PLUGINS": ""})["VLLM_PLUGINS"] == NAME
    once = with_probe({"PYTHONPATH": "/mine", "VLLM_PLUGINS": "mine"}, Path("/server"))
    assert with_probe(once, Path("/server")) == once
    assert once["VLLMCONSOLE_PROBE"] == "/server/probe"


def test_plugin_reads_the_variable_that_the_keeper_sets() -> None:
    assert vllm_console_probe.FOLDER == FOLDER


def test_plugin_folder_has_the_expected_files() -> None:
    assert (PLUGIN / f"{NAME}.py").is_file()
    assert NAME in (PLUGIN / f"{NAME}-1.0.dist-info" / "entry_points.txt").read_text()
