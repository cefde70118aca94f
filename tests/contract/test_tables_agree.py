"""What two packages that do not know each other both say must be the same."""

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


def test_the_simulated_engine_has_the_version_under_which_it_is_shown() -> None:
    assert settings.VERSION == engines.SIMULATED_VERSION


def test_every_figure_of_a_sample_has_its_families() -> None:
    assert tuple(parse.GAUGES) == GAUGES
    assert tuple(parse.COUNTERS) == COUNTERS
    assert set(parse.HISTOGRAMS) == {*LATENCIES, *LENGTHS}


@pytest.mark.parametrize("name", sorted(name for name in FLAG_RULES if common_flag(name)))
def test_the_editor_takes_no_value_that_a_preset_may_not_hold(name: str) -> None:
    rule, flag = FLAG_RULES[name], common_flag(name)
    assert flag is not None
    assert flag.kind in KINDS[rule.kind]
    for text in TYPED:
        try:
            value = parse_flag_value(name, text)
        except FlagError:
            continue
        assert rule.allows(value), (text, value)


def test_the_simulated_engine_takes_every_flag_that_the_editor_offers(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in COMMON_FLAGS:
        with contextlib.suppress(SystemExit):  # the value may be wrong
            parse_flags(["serve", "m", f"--{flag.name}=1"])
    assert "unrecognized" not in capsys.readouterr().err
