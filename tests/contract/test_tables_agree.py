"""Facts that are stated in two independent packages must be equal."""

from __future__ import annotations

import contextlib

import pytest

from vllm_console.metrics import parse
from vllm_console.metrics.sample import COUNTERS, GAUGES, LATENCIES, LENGTHS
from vllm_launchers.plan.common_flags import COMMON_FLAGS, FlagKind, common_flag, parse_flag_value
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.presets.rules import FLAG_RULES
from vllm_launchers.simulated import settings
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.vllm import engines

KINDS = {
    bool: {FlagKind.BOOL},
    int: {FlagKind.INT, FlagKind.LENGTH},
    float: {FlagKind.FLOAT, FlagKind.SHARE},
    str: {FlagKind.TEXT, FlagKind.JSON},
}
TYPED = ("0", "-1", "1", "2", "0.5", "1.5", "4k", "4K", "1.5k", "1.5K", "auto", "fp8", "on")


def test_simulated_engine_version_matches_the_displayed_one() -> None:
    assert settings.VERSION == engines.SIMULATED_VERSION


def test_every_sample_field_has_its_metric_families() -> None:
    assert tuple(parse.GAUGES) == GAUGES
    assert tuple(parse.COUNTERS) == COUNTERS
    assert set(parse.HISTOGRAMS) == {*LATENCIES, *LENGTHS}


@pytest.mark.parametrize("name", sorted(name for name in FLAG_RULES if common_flag(name)))
def test_editor_accepts_only_values_that_presets_allow(name: str) -> None:
    rule, flag = FLAG_RULES[name], common_flag(name)
    assert flag is not None
    assert flag.kind in KINDS[rule.kind]
    for text in TYPED:
        try:
            value = parse_flag_value(name, text)
        except FlagError:
            continue
        assert rule.allows(value), (text, value)


def test_simulated_engine_accepts_every_flag_of_the_editor(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in COMMON_FLAGS:
        with contextlib.suppress(SystemExit):  # the value may be wrong
            parse_flags(["serve", "m", f"--{flag.name}=1"])
    assert "unrecognized" not in capsys.readouterr().err
