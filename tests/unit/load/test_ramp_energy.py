"""Energy of a ramp's step: from readings between its first and last sample, only of the server's GPUs."""

from __future__ import annotations

import pytest

from vllm_console.history.energy import Tariff
from vllm_console.load.ramp import EnergyMeter, RampStep, conclude
from vllm_console.load.ramp_search import StepOutcome
from vllm_console.load.report import Latency
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_launchers.host.gpu.host import Gpu, Holder, Host
from vllm_launchers.presets.model import Objectives

PID = 4100
OBJECTIVES = Objectives(ttft_p99_seconds=1.0, itl_p99_seconds=1.0, kv_cache_usage=0.85, preemption_rate=0.02)


def host(at: float, watts: float = 250.0) -> Host:
    holders = (Holder(4101, ancestors=(PID,)),)
    return Host(at=at, gpus=(Gpu(0, energy_mj=round(at * watts * 1000), used_by=holders), Gpu(1, used_by=())))


def samples(seconds: int) -> list[Sample]:
    return [Sample(100.0 + s, {"0": EngineSample(generation_tokens_total=50.0 * s)}) for s in range(seconds + 1)]


def test_step_energy_covers_only_its_measured_part() -> None:
    seen = [host(at / 10) for at in range(950, 1400, 5)]
    meter = EnergyMeter(PID, (0,), lambda: seen.pop(0), Tariff(0.36, "EUR"))
    for _ in range(60):
        meter.sample()
    found = meter.energy(samples(20))
    assert found is not None
    assert found.since == 100.0
    assert found.per_output_token == pytest.approx(5.0)
    assert found.document()["cost_per_million_output_tokens"] == pytest.approx(0.5)
    assert meter.energy(samples(20)) is None, "samples of one step are not used for the next"


@pytest.mark.parametrize("gpus", [(0, 1), (1,)])
def test_no_energy_if_the_server_uses_other_gpus(gpus: tuple[int, ...]) -> None:
    seen = [host(99.0 + step) for step in range(25)]
    meter = EnergyMeter(PID, gpus, lambda: seen.pop(0))
    for _ in range(24):
        meter.sample()
    assert meter.energy(samples(20)) is None


def test_no_energy_without_readings() -> None:
    assert EnergyMeter(PID, (0,), lambda: None).energy(samples(20)) is None
    late = [host(99.0 + step) for step in range(6, 25)]
    meter = EnergyMeter(PID, (0,), lambda: late.pop(0))
    for _ in range(18):
        meter.sample()
    assert meter.energy(samples(20)) is None, "its beginning is missing"


def test_result_has_the_energy_of_the_step_near_the_ceiling() -> None:
    seen = [host(99.0 + step) for step in range(25)]
    meter = EnergyMeter(PID, (0,), lambda: seen.pop(0))
    for _ in range(24):
        meter.sample()
    energy, latency = meter.energy(samples(20)), Latency(count=10, p99=0.5)
    steps = [
        RampStep(StepOutcome(rate, ok, why), 200, 200, 0, latency, latency, latency, 50.0, 0.5, 0.0, 0.0, rate, known)
        for rate, ok, why, known in ((2.0, True, "", energy), (4.0, False, "ttft_p99_seconds", None))
    ]
    document = conclude(steps, OBJECTIVES, fixed=True).document()
    assert document["energy"]["joules_per_output_token"] == pytest.approx(5.0)
    assert ["energy" in step for step in document["steps"]] == [True, False]
