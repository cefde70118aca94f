"""Formatted numbers."""

from __future__ import annotations

import pytest

from vllm_console.history.energy import cost_text, joules_text
from vllm_launchers.units import natural_key, three_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.254, "0.254"), (6.944, "6.94"), (999.4, "999"), (999.7, "1,000"), (1250.0, "1,250"), (12_345.6, "12,346")],
)
def test_three_digits_are_never_a_power_of_ten(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_numbers_in_names_are_sorted_by_value() -> None:
    names = ["replica-10", "Chat", "replica-2", "coder", "replica"]
    assert sorted(names, key=natural_key) == ["Chat", "coder", "replica", "replica-2", "replica-10"]


def test_energy_and_cost_have_three_digits() -> None:
    assert joules_text(999.8) == "1,000 J"
    assert joules_text(99_900.0) == "99.9 kJ"
    assert cost_text(1200.0, "JPY") == "1,200 JPY"
