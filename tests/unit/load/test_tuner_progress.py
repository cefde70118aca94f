"""Messages about a running tuner."""

from __future__ import annotations

from types import ModuleType

import pytest
from msgspec.structs import replace

from vllm_console.load.tuner_progress import TunerFigure, TunerProgress, TunerStep, figure_text


def tuned(fakes: ModuleType) -> TunerProgress:
    progress: TunerProgress = fakes.tuned(fakes.NOW).tuner
    return progress


def test_sentence(fakes: ModuleType) -> None:
    assert tuned(fakes).sentence(fakes.NOW) == (
        "trial 2 of 4; measuring max-num-seqs 256 → 128, max-num-batched-tokens 2048 → 8192 for 40s; "
        "best so far: max-num-seqs 128, 9.1 req/s (original 7.9 req/s); at most 11m40s left; pid 4711"
    )


@pytest.mark.parametrize(
    ("changes", "doing", "found"),
    [
        ({"original": None}, "measuring the original flags", ""),
        ({"step": TunerStep.PREDICTING, "best": None}, "predicting every combination of flags",
         "best so far: the original flags, 7.9 req/s"),
        ({"step": TunerStep.FINISHING, "best": None}, "ending with the original flags",
         "best so far: the original flags, 7.9 req/s"),
    ],
)  # fmt: skip
def test_steps_outside_trials(fakes: ModuleType, changes: dict[str, object], doing: str, found: str) -> None:
    progress = replace(tuned(fakes), trial=0, set={}, **changes)
    assert (progress.doing(), progress.place, progress.found()) == (doing, "", found)


def test_started_runs(fakes: ModuleType) -> None:
    assert [run for run in range(6) if tuned(fakes).started(run)] == [2, 3]


def test_requested_restart_is_recognized(fakes: ModuleType) -> None:
    restarting = replace(tuned(fakes), step=TunerStep.RESTARTING)
    assert [restarting.asked(restarting.since + by) for by in (-1.0, 0.0, 1.0)] == [False, True, True]
    assert not tuned(fakes).asked(fakes.NOW)


def test_kept_flags(fakes: ModuleType) -> None:
    progress = replace(tuned(fakes), was={"max-num-seqs": 256, "gpu-memory-utilization": None})
    assert progress.kept({"max-num-seqs": 128, "max-model-len": 1}) == "max-num-seqs 128"
    assert progress.kept({"max-num-seqs": 256}) == ""
    assert replace(progress, was={"async-scheduling": None}).kept({"async-scheduling": True}) == "async-scheduling on"
    assert progress.restoring({"max-num-seqs": 256}) == ""
    changed = {"max-num-seqs": 128, "gpu-memory-utilization": 0.8}
    assert progress.restoring(changed) == "--set max-num-seqs=256 --unset gpu-memory-utilization"


@pytest.mark.parametrize(
    ("figure", "unit", "text"),
    [
        (TunerFigure(7.9), "requests/s", "7.9 req/s"),
        (TunerFigure(7.9, "least"), "requests/s", "≥7.9 req/s"),
        (TunerFigure(410.0), "tokens/s", "410 tok/s"),
        (TunerFigure(0.21, "most"), "s", "<210ms"),
    ],
)
def test_figures(figure: TunerFigure, unit: str, text: str) -> None:
    assert figure_text(figure, unit) == text
