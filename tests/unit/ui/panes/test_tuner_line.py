"""The line of a running tuner: the current trial is kept longest."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.load.tuner_progress import TunerFigure, TunerStep
from vllm_console.ui.panes.servers import columns_for, row
from vllm_console.ui.panes.state import state_lines
from vllm_console.ui.panes.tuner import tuner_line
from vllm_launchers.keeper.records import State


def shown(server, now, width):
    return tuner_line(server, now, width).text.rstrip()


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (200, " ± chat  tuner, trial 2 of 4: measuring max-num-seqs 256 → 128, max-num-batched-tokens 2048 → 8192 · "
              "best so far: max-num-seqs 128, 9.1 req/s (original 7.9 req/s) · at most 11m40s left"),
        (120, " ± chat  tuner 2/4: measuring max-num-seqs 256 → 128, max-num-batched-tokens 2048 → 8192 · "
              "best 9.1 req/s · 11m40s left"),
        (80, " ± chat  tuner 2/4: measuring seqs 128, tokens 8192 · best 9.1 req/s"),
        (60, " ± chat  tuner 2/4: measuring seqs 128, tokens 8192"),
        (40, " ± chat  tuner 2/4: measuring seqs 128…"),
    ],
)  # fmt: skip
def test_line_fits_each_width(fakes, width, text):
    found = shown(fakes.tuned(fakes.NOW), fakes.NOW, width)
    assert found == text
    assert len(found) <= width


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step": TunerStep.MEASURING, "original": None}, "tuner: measuring the original flags · at most 11m40s left"),
        ({"step": TunerStep.MEASURING, "original": None, "so_far": TunerFigure(7.0, "least")},
         "tuner: measuring the original flags · so far ≥7.0 req/s · at most 11m40s left"),
        ({"step": TunerStep.PREDICTING, "best": None},
         "tuner: predicting · best: the original flags, 7.9 req/s · 11m40s left"),
        ({"step": TunerStep.RESTARTING, "original": None},
         "tuner: restarting with the original flags · at most 11m40s left"),
        ({"step": TunerStep.FINISHING}, "tuner: ending with the original flags · best: max-num-seqs 128, 9.1 req/s "
         "(original 7.9 req/s) · 11m40s left"),
    ],
)  # fmt: skip
def test_steps_outside_trials(fakes, changes, text):
    server = fakes.tuned(fakes.NOW)
    server = replace(server, tuner=replace(server.tuner, trial=0, set={}, **changes))
    assert shown(server, fakes.NOW, 120) == f" ± chat  {text}"


def test_table_shows_the_trial(fakes):
    server = fakes.tuned(fakes.NOW)
    text = row(server, columns_for([server], 80), fakes.NOW, 80, selected=True).text
    assert "tuning 2/4" in text
    starting = replace(server, state=State.STARTING, window=None)
    assert "tuner: " in row(starting, columns_for([starting], 80), fakes.NOW, 80, selected=True).text
    before = replace(starting, generation=1)
    assert "tuner: " not in row(before, columns_for([before], 80), fakes.NOW, 80, selected=True).text


def test_start_by_the_tuner_is_explained(fakes):
    server = replace(fakes.tuned(fakes.NOW), state=State.STARTING)
    why = " Restarted: trial 2 of 4 of a tuner, max-num-seqs 256 → 128, max-num-batched-tokens 2048 → 8192"
    assert state_lines(server, fakes.NOW, 120, 20)[1].text.rstrip() == why
    stopping = replace(server, state=State.STOPPING, generation=2)
    assert state_lines(stopping, fakes.NOW, 120, 20)[1].text.rstrip() == why
