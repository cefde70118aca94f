"""Energy per token and request: from the counters of GPUs that only serve this server, otherwise unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.history.energy import (
    Energy,
    Tariff,
    Totals,
    energy_lines,
    energy_within,
    newest_energy,
    totals_of,
)
from vllm_console.history.gpu_samples import GPU_SAMPLES, GpuSampleStore, read_gpu_samples
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_launchers.host.gpu.host import Gpu, Holder, Host

PID, KEEPER, STRANGER = 4100, 4000, 900
OWN = (Holder(4102, gib=20.0, ancestors=(PID, KEEPER)),)
TOTALS = [Totals(1000.5 + s, 50.0 * s, 400.0 * s, 0.5 * s) for s in range(0, 121)]
"""The server generates 50 tokens per second."""


def gpu(index: int, joules: float | None, **facts: Any) -> Gpu:
    facts = {"used_by": OWN, **facts}
    return Gpu(index, energy_mj=None if joules is None else round(joules * 1000), **facts)


def seen(*changes: Callable[[Host], Host], watts: float = 300.0) -> list[Host]:
    """Samples every five seconds of the server's two GPUs and another user's GPU; ``changes`` apply from the 12th
    sample on."""
    hosts = []
    for number in range(24):
        at = 1002.0 + 5 * number
        joules = 70_000 + watts * (at - 1000)
        stranger = gpu(2, 10_000 + 700 * number, used_by=(Holder(STRANGER),))
        host = Host(at=at, gpus=(gpu(0, joules), gpu(1, joules + 5), stranger))
        for change in changes if number >= 12 else ():
            host = change(host)
        hosts.append(host)
    return hosts


def first_gpu(**facts: Any) -> Callable[[Host], Host]:
    return lambda host: replace(host, gpus=(replace(host.gpus[0], **facts), *host.gpus[1:]))


def less(joules: float) -> Callable[[Host], Host]:
    """The counter restarts, as after a driver reload."""

    def change(host: Host) -> Host:
        return first_gpu(energy_mj=(host.gpus[0].energy_mj or 0) - round(joules * 1000))(host)

    return change


def test_joules_are_measured_over_the_same_time_as_tokens() -> None:
    found = newest_energy(seen(), PID, TOTALS)
    assert found is not None
    assert (found.since, found.seconds, found.gpus) == (1002.0, 115.0, (0, 1))
    assert found.joules == pytest.approx(2 * 300 * 115)
    assert found.per_output_token == pytest.approx(600 / 50)
    assert found.per_token == pytest.approx(600 / 450)
    assert found.per_request == pytest.approx(600 / 0.5)
    priced = replace(found, tariff=Tariff(0.30, "EUR"))
    euros = priced.document()
    assert euros["cost_per_million_output_tokens"] == pytest.approx(12 / 3.6e6 * 1e6 * 0.30)
    assert euros["cost_per_million_tokens"] == pytest.approx(600 / 450 / 3.6 * 0.30)
    assert euros["currency"] == "EUR"
    assert not [key for key in found.document() if "cost" in key or key == "currency"], "no price, no cost"
    lines = energy_lines(priced)
    assert lines[0].startswith(
        "12 J per output token, 1.33 J per token, 1.2 kJ per request: GPUs 0,1 in the last 1m55s"
    )
    assert lines[1].startswith("1 EUR per million output tokens, 0.111 EUR with prompts")


@pytest.mark.parametrize(
    "change",
    [
        first_gpu(energy_mj=None),
        first_gpu(used_by=None),
        first_gpu(used_by=(*OWN, Holder(STRANGER))),
        first_gpu(used_by=(*OWN, Holder(77, kind="graphics"))),
        first_gpu(used_gib=60.0),
        first_gpu(mig_mode=True),
        first_gpu(lost="fell off the bus"),
        lambda host: replace(host, problem="driver not answering"),
        lambda host: replace(host, gpus=tuple(replace(one, used_by=()) for one in host.gpus)),
    ],
    ids=["unsupported", "unseen", "shared", "a display", "shared unseen", "MIG", "lost", "hung", "released"],
)
def test_no_energy_when_the_gpus_are_not_only_the_servers(change: Callable[[Host], Host]) -> None:
    assert newest_energy(seen(change), PID, TOTALS) is None
    assert energy_within(seen(change), PID, TOTALS, 1001.0, 1121.0) is None


@pytest.mark.parametrize(
    ("change", "since"),
    [
        (less(60_000), 1062.0),
        (first_gpu(used_by=(Holder(PID),)), 1002.0),
        (lambda host: replace(host, at=host.at + 20), 1082.0),
        (lambda host: replace(host, gpus=host.gpus[1:]), 1062.0),
    ],
    ids=["reset", "another process of it", "gap", "fewer GPUs"],
)
def test_only_samples_after_a_gap_count(change: Callable[[Host], Host], since: float) -> None:
    totals = [Totals(1000.5 + s, 50.0 * s, None, None) for s in range(160)]
    found = newest_energy(seen(change), PID, totals)
    assert found is not None
    assert found.since == since
    assert found.joules == pytest.approx(300 * len(found.gpus) * found.seconds)
    assert set(found.figures) == {"joules_per_output_token"}
    whole = energy_within(seen(change), PID, totals, 1001.0, found.since + found.seconds + 1)
    assert (whole is None) == (since > 1002.0), "a part of a window does not represent all of it"


def test_window_is_covered_except_for_its_edges() -> None:
    found = energy_within(seen(), PID, TOTALS, 1020.0, 1080.0)
    assert found is not None
    assert (found.since, found.seconds) == (1022.0, 55.0)
    assert found.per_output_token == pytest.approx(12)
    assert energy_within(seen()[:8], PID, TOTALS, 1020.0, 1080.0) is None
    assert energy_within(seen()[8:], PID, TOTALS, 1020.0, 1080.0) is None
    assert energy_within([], PID, TOTALS, 1020.0, 1080.0) is None


def test_unreported_totals_give_no_energy() -> None:
    paused = [one for one in TOTALS if not 1060 < one.at < 1119]
    assert newest_energy(seen()[:20], PID, paused) is None, "the tokens at the last reading are unknown"
    assert newest_energy(seen(), PID, TOTALS[:1]) is None
    fell = [one if one.at < 1060 else one._replace(output=1.0) for one in TOTALS]
    found = newest_energy(seen(), PID, fell)
    assert found is not None
    assert found.per_output_token is None, "its counter was set back"
    idle = newest_energy(seen(), PID, [Totals(one.at, 7.0, 7.0, 7.0) for one in TOTALS])
    assert idle is not None
    assert energy_lines(idle) == []
    assert totals_of(Sample(1.0, {"0": EngineSample(generation_tokens_total=3.0), "1": EngineSample()})).output is None


def test_energy_counter_is_kept_with_the_samples(
    make_stub: Callable[[Host], Any], recorded: Callable[[str], Host], tmp_path: Any, monkeypatch: Any
) -> None:
    stub = make_stub(recorded("4xa6000"))
    assert {one.energy_mj for one in stub.sample().gpus} == {None}, "not supported"
    host = stub.sample("set 0 energy_mj 7000000000000", "holds 0 4102 2048")
    assert host.gpus[0].energy_mj == 7_000_000_000_000, "more than 32 bits"
    store = GpuSampleStore(tmp_path / GPU_SAMPLES)
    store._append(host)
    (kept,) = read_gpu_samples(tmp_path / GPU_SAMPLES, 0.0)
    assert [one.energy_mj for one in kept.gpus] == [7_000_000_000_000, None, None, None]
    assert isinstance(newest_energy([kept], 4102, TOTALS), Energy | None)
