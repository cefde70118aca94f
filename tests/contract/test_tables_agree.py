"""Facts that are stated in two independent packages must be equal."""

from __future__ import annotations

import contextlib

import pytest

from vllm_console.metrics import parse
from vllm_console.metrics.sample import COUNTERS, GAUGES, LATENCIES, LENGTHS, MAX_TOKENS_PARAM
from vllm_console.ui.parts.flag_catalog import FlagCatalog
from vllm_launchers.plan.common_flags import COMMON_FLAGS
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.plan.flags import SHORT_NAMES, TRUE_ONLY
from vllm_launchers.presets.rules import FLAG_RULES
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.vllm.flags.flag_table import FlagSpec, ValueKind
from vllm_launchers.vllm.flags.releases import RELEASES, assumed_table, release_table
from vllm_launchers.vllm.flags.several_words import LIST_FLAGS

BY_PLAN = {"num-gpu-blocks-override"}
"""vLLM's parser accepts any number; a plan refuses the others."""
TYPED = ("0", "-1", "1", "2", "0.5", "1.5", "4k", "4K", "1.5k", "1.5K", "auto", "fp8", "on")


def test_every_sample_field_has_its_metric_families() -> None:
    assert tuple(parse.GAUGE_FAMILIES) == GAUGES
    assert tuple(parse.COUNTER_FAMILIES) == COUNTERS
    assert set(parse.HISTOGRAM_FAMILIES) == {*LATENCIES, *LENGTHS, MAX_TOKENS_PARAM}


@pytest.mark.parametrize("name", sorted((FLAG_RULES.keys() & assumed_table().flags) - BY_PLAN))
def test_editor_accepts_only_values_that_presets_allow(name: str) -> None:
    catalog = FlagCatalog(release_table(RELEASES[-1]))
    for text in TYPED:
        with contextlib.suppress(FlagError):
            assert FLAG_RULES[name].allows(catalog.value(name, text)), text


@pytest.fixture(scope="module")
def released() -> list[FlagSpec]:
    """Every flag of every supported release."""
    supported = [version for version in RELEASES if not version.startswith(("0.8.", "0.9."))]
    return [spec for version in supported for spec in release_table(version).flags.values()]


def test_short_names_are_the_aliases_of_all_releases(released: list[FlagSpec]) -> None:
    aliases = {alias.lstrip("-"): spec.name for spec in released for alias in spec.aliases}
    assert aliases.pop("O") == "compilation-config", "its value follows without a space: -O3"
    assert aliases == SHORT_NAMES


def test_list_flags_are_those_that_take_several_values_in_all_releases(released: list[FlagSpec]) -> None:
    many = {spec.name for spec in released if spec.many}
    assert many - LIST_FLAGS == {"api-key"}, "a secret: not set here"
    assert {spec.name for spec in released if not spec.many} & LIST_FLAGS == set()


def test_switches_without_a_negation_in_any_release_are_omitted(released: list[FlagSpec]) -> None:
    switches = [spec for spec in released if spec.kind is ValueKind.BOOL]
    never = {spec.name for spec in switches} - {spec.name for spec in switches if spec.negatable}
    assert never <= TRUE_ONLY
    assert {spec.name for spec in switches if spec.default == "true"} & TRUE_ONLY == set()


def test_simulated_engine_accepts_every_flag_of_the_editor(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in COMMON_FLAGS:
        with contextlib.suppress(SystemExit):  # the value may be wrong
            parse_flags(["serve", "m", f"--{flag.name}=1"])
    assert "unrecognized" not in capsys.readouterr().err
