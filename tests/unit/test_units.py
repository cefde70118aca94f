"""Numbers in words."""

from __future__ import annotations

import pytest

from vllm_console.history.energy import cost_text, joules_text
from vllm_launchers.units import three_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.254, "0.254"), (6.944, "6.94"), (999.4, "999"), (999.7, "1,000"), (1250.0, "1,250"), (12_345.6, "12,346")],
)
def test_three_digits_are_never_a_power_of_ten(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_energy_and_cost_have_three_digits() -> None:
    assert joules_text(999.8) == "1,000 J"
    assert joules_text(99_900.0) == "99.9 kJ"
    assert cost_text(1200.0, "JPY") == "1,200 JPY"
