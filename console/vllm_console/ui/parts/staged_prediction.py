"""The prediction of what staged changes would do to the selected server's traffic, in one line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from rich.style import Style
from textual.timer import Timer

from vllm_console.fleet.snapshot import ServerView, State
from vllm_console.fleet.verbs import FleetError
from vllm_console.text import count, plain, seconds
from vllm_console.ui.parts.staging import Staged, Staging, changes_of
from vllm_console.ui.parts.verdict import CHECKING, Verdicts
from vllm_console.ui.theme import ACCENT, DIM
from vllm_console.ui.threads import begin_worker, in_thread
from vllm_console.ui.widgets.draw import Part

if TYPE_CHECKING:
    from vllm_console.fleet.predictions import PredictedChange
    from vllm_console.prediction.predict import Estimate, Prediction
    from vllm_console.ui.app import ConsoleApp

DEBOUNCE_SECONDS = 0.5
"""How long staged changes must stand, with a plan's verdict, before their effect is predicted."""
AGE_SECONDS = 120.0
"""Age at which a prediction is recomputed, since traffic changes."""
MOST_KEPT = 20
PREDICTING = "predicting…"

_Key = tuple[str, int, Staged]
"""A server, its generation, and what is staged for it."""


class _Answer(msgspec.Struct, frozen=True):
    found: PredictedChange | None
    problem: str
    at: float
    """Seconds of the monotonic clock."""

    @property
    def recent(self) -> bool:
        """Whether it still counts."""
        return time.monotonic() - self.at < AGE_SECONDS


class Predictions:
    """Predicts what is staged for the selected server, one at a time; ``changed`` is called with each answer."""

    def __init__(self, console: ConsoleApp, staging: Staging, verdicts: Verdicts, changed: Callable[[], None]) -> None:
        self._console, self._staging, self._verdicts, self._changed = console, staging, verdicts, changed
        self._answers: dict[_Key, _Answer] = {}
        self._wanted: _Key | None = None
        self._timer: Timer | None = None
        self._running = False

    def observe(self, server: ServerView | None) -> None:
        """Predict what is staged for the selected server, if that is new; end what is computed for anything else."""
        key = self._key(server)
        known = self._answers.get(key) if key is not None else None
        if known is not None and known.recent:
            key = None
        if key == self._wanted:
            return
        self._cancel()
        if key is not None:
            self._wanted = key
            self._timer = self._console.set_timer(DEBOUNCE_SECONDS, partial(self._begin, key))

    def seen(self, server: ServerView, staged: Staged) -> PredictedChange | None:
        """The prediction for these changes, if it was made within `AGE_SECONDS`."""
        known = self._answers.get((server.name, server.generation, staged))
        return known.found if known is not None and known.recent else None

    def text(self, server: ServerView | None, width: int) -> Part:
        """What is predicted, or why nothing is; empty where nothing is staged, or it is not known."""
        key = self._key(server)
        known = self._answers.get(key) if key is not None else None
        if known is None:
            return (PREDICTING, DIM) if self._running and key == self._wanted else ""
        if known.found is None:
            return (f"not predicted: {plain(known.problem)}", DIM) if known.problem else ""
        return prediction_text(known.found, width)

    def _key(self, server: ServerView | None) -> _Key | None:
        """What is to be predicted; None for what can't be, and for changes that the plan refuses."""
        if server is None or not server.ours or server.state is not State.READY:
            return None
        if server.moment is not None or server.replayed or server.elsewhere or self._console.read_only:
            return None
        staged, verdict = self._staging.of(server.name), self._verdicts.of(server)
        if not staged or verdict is None or verdict.sign == "✗" or verdict.message == CHECKING:
            return None
        return server.name, server.generation, staged

    def _cancel(self) -> None:
        self._wanted = None
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        if self._running:
            self._running = False
            self._console.fleet.cancel_prediction()

    def _begin(self, key: _Key) -> None:
        self._timer, self._running = None, True
        begin_worker(self._console, partial(self._ask, key), "prediction", "prediction")
        self._changed()

    async def _ask(self, key: _Key) -> None:
        call = partial(self._console.fleet.predict_staged, key[0], changes_of(key[2]))
        found, problem = None, ""
        try:
            found = await in_thread(call, "prediction")
        except FleetError as error:
            problem = str(error).removeprefix(f"{key[0]}: ")
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            problem = str(error)
        if key != self._wanted:
            return
        self._wanted, self._running = None, False
        self._answers[key] = _Answer(found, problem, time.monotonic())
        while len(self._answers) > MOST_KEPT:
            del self._answers[next(iter(self._answers))]
        if why := (found.prediction.outside if found is not None else problem):
            self._console.messages.note("", f"{key[0]}: {'predicted' if found is not None else 'not predicted'}: {why}")
        self._changed()


def prediction_text(found: PredictedChange, width: int) -> tuple[str, Style]:
    """``predicted: TTFT p99 1.9s → 1.1s (890ms–1.4s) · ITL p50 …``, as much as fits; dim, why it says little."""
    from vllm_console.fleet.predictions import METRICS  # most consoles predict nothing

    prediction = found.prediction
    text = "predicted from metrics: " if found.source == METRICS else "predicted: "
    if prediction.outside:
        return text + plain(prediction.outside), DIM
    parts = list(_figures(prediction))
    while len(parts) > 1 and len(text + " · ".join(parts)) > width - 2:
        parts.pop()
    return text + " · ".join(parts), ACCENT


def _figures(prediction: Prediction) -> Iterator[str]:
    """Each figure that is known before and after; a p99 where enough requests tell it, else the median."""
    now, then = prediction.now, prediction.predicted
    tail = now.ttft_seconds.p99.value is not None and then.ttft_seconds.p99.value is not None
    part = "p99" if tail else "p50"
    figures = (
        (f"TTFT {part}", getattr(now.ttft_seconds, part), getattr(then.ttft_seconds, part), seconds, ""),
        ("ITL p50", now.itl_seconds.p50, then.itl_seconds.p50, seconds, ""),
        ("preemptions", now.preemptions_per_minute, then.preemptions_per_minute, count, "/min"),
        ("tok/s", now.tokens_per_second, then.tokens_per_second, count, ""),
    )
    for name, before, after, form, unit in figures:
        if before.value is None or after.value is None or (name == "preemptions" and not before.value + after.value):
            continue
        yield f"{name} {form(before.value)} → {form(after.value)}{unit}{_interval(after, form)}"


def _interval(one: Estimate, form: Callable[[float | None], str]) -> str:
    return f" ({form(one.low)}–{form(one.high)})" if one.low is not None and one.high is not None else ""
