"""Pictures of the comparison of two runs."""

from __future__ import annotations

import pytest
from textual.app import App

from vllm_console.telemetry.compare import compare
from vllm_console.ui.screens.compare import CompareScreen
from vllm_console.ui.theme import CONSOLE_THEME


class Host(App[None]):
    """The comparison, and nothing else."""

    CSS = "Screen { background: ansi_default; color: ansi_default; }"

    def __init__(self, found) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"
        self.register_theme(CONSOLE_THEME)
        self.theme = CONSOLE_THEME.name
        self._found = found

    def on_mount(self) -> None:
        self.push_screen(CompareScreen(self._found, lambda: None))


def found(made, case):
    before = made.minutes(1)
    if case == "better":
        return compare(*made.pair(before, made.minutes(2, slower=0.6)))
    if case == "worse":
        return compare(*made.pair(before, made.minutes(2, slower=1.6, preempted=0.06)))
    if case == "unlike":
        return compare(*made.pair(before, made.minutes(2, rate=3.4)))
    return compare(*made.pair(before, made.minutes(2, 2)))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@pytest.mark.parametrize("case", ["better", "worse", "unlike", "little"])
def test_comparison(snap_compare, made, size, case):
    assert snap_compare(Host(found(made, case)), terminal_size=size)
