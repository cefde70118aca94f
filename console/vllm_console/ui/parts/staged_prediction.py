"""Predicts the effect of staged changes, or of the best fix, on the selected server's traffic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from rich.style import Style

from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import count, percent, plain, seconds, seconds_range
from vllm_console.ui.findings import MAKES_WORSE, edits_of, findings_of, staged_fix
from vllm_console.ui.parts.staged_plan import CHECKING, StagedPlans
from vllm_console.ui.parts.staging import Staging
from vllm_console.ui.theme import ACCENT, DIM
from vllm_console.ui.threads import begin_worker, in_thread
from vllm_console.ui.widgets.draw import Part
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper.records import State
from vllm_launchers.vllm.flags.changes import Changes, Edits, FlagValue

if TYPE_CHECKING:
    from vllm_console.fleet.predictions import PredictedChange
    from vllm_console.prediction.predict import Estimate, Prediction
    from vllm_console.ui.app import ConsoleApp

DEBOUNCE_SECONDS = 0.5
"""Debounce time, after the plan's verdict, before the effect of staged changes is predicted."""
AGE_SECONDS = 120.0
"""Age at which the prediction of newly staged changes is recomputed, since traffic changes."""
NEW_SECONDS = 600.0
"""How long changes count as newly staged, from when they were staged or their server was selected."""
FIX_DELAY_SECONDS = 3.0
"""How long a fix must remain the best one before its effect is predicted."""
FIX_EVERY_SECONDS = 600.0
"""Minimum time between predictions of a server's fixes, and of changes that are no longer newly staged. The best fix
changes with the figures, each prediction costs a few seconds of CPU, and consoles stay open all day. Staging a fix
predicts it right away."""
OUTDATED_SECONDS = 1800.0
"""Age at which a prediction is neither shown nor kept any longer, and at the latest recomputed."""
RETRY_SECONDS = 60.0
"""Age at which a failed prediction of newly staged changes is retried, since a run's first requests are too few. A
canceled prediction of a fix is retried after the same time."""
MOST_KEPT = 20
GROUP = "prediction"
PREDICTING = "predicting…"

_CONCERNED = {
    "kv_cache_pressure": "KV cache mean",
    "preempting": "preemptions",
    "slow_tokens": "ITL",
    "prefill_contention": "ITL",
}
"""Finding code → prefix of the figure it is about; all others are about TTFT."""

_Key = tuple[str, int, tuple[tuple[str, FlagValue | None], ...]]
"""Server, generation and changes, sorted by flag."""


class _Answer(msgspec.Struct, frozen=True):
    found: PredictedChange | None
    problem: str
    at: float

    @property
    def age(self) -> float:
        return time.monotonic() - self.at

    @property
    def refused(self) -> bool:
        """Whether there is no prediction, for a reason that may be temporary."""
        return self.found is None or bool(self.found.prediction.outside and not _figures(self.found.prediction))


class Predictions:
    """Predicts the selected server's staged changes or, without any, the best fix of its top finding.

    Runs one prediction at a time; calls ``changed`` for each answer.
    """

    def __init__(
        self, console: ConsoleApp, staging: Staging, staged_plans: StagedPlans, changed: Callable[[], None]
    ) -> None:
        self._console, self._staging, self._staged_plans, self._changed = console, staging, staged_plans, changed
        self._answers: dict[_Key, _Answer] = {}
        self._wanted: _Key | None = None
        self._running = self._fix_runs = False
        """Whether a prediction is running, and whether it is that of a fix."""
        self._staged: _Key | None = None
        self._staged_at = 0.0
        """When these changes were staged or their server was selected (monotonic seconds)."""
        self._fix_due: dict[str, float] = {}
        """From when on a fix may be predicted again, by server (monotonic seconds)."""

    def observe(self, server: ServerView | None) -> None:
        """Start the prediction that is due for the selected server; cancel any other one."""
        key, of_fix = self._staged_key(server), False
        if key != self._staged:
            self._staged, self._staged_at = key, time.monotonic()
            if key is not None and (known := self._answers.get(key)) is not None and known.refused:
                del self._answers[key]  # staged again: the reason for no prediction may be gone
        if key is None:
            key, of_fix = self._fix_key(server), True
        if key is not None and key != self._wanted:
            if of_fix and self._fix_runs and self._wanted is not None and key[:2] == self._wanted[:2]:
                return  # the best fix has changed: finish the running prediction first
            key = key if self._due(key, of_fix=of_fix) else None
        if key == self._wanted:
            return
        self._cancel()
        if key is not None:
            self._wanted = key
            begin_worker(self._console, partial(self._predict, key, of_fix=of_fix), "prediction", GROUP)

    def drop(self, name: str) -> None:
        """Forget the predictions of a removed server."""
        if self._wanted is not None and self._wanted[0] == name:
            self._cancel()
        self._fix_due.pop(name, None)
        self._answers = {key: answer for key, answer in self._answers.items() if key[0] != name}

    def _due(self, key: _Key, *, of_fix: bool) -> bool:
        if of_fix and time.monotonic() < self._fix_due.get(key[0], 0.0):
            return False
        known = self._answers.get(key)
        if known is None:
            return True
        if not of_fix and time.monotonic() - self._staged_at < NEW_SECONDS:
            return known.age >= (RETRY_SECONDS if known.refused else AGE_SECONDS)
        return known.age >= (FIX_EVERY_SECONDS if known.refused else OUTDATED_SECONDS)

    def seen(self, server: ServerView, staged: Edits) -> PredictedChange | None:
        """The prediction for these changes, unless it is older than `OUTDATED_SECONDS`."""
        known = self._known(_key(server, staged))
        return known.found if known is not None else None

    def _known(self, key: _Key | None) -> _Answer | None:
        known = self._answers.get(key) if key is not None else None
        return known if known is not None and known.age < OUTDATED_SECONDS else None

    def on_finding(self, server: ServerView) -> str:
        """The effect on the top finding, in brief, of what is staged or else of the best fix; empty if unknown."""
        known = self._known(self._staged_key(server) or self._fix_key(server))
        found = findings_of(server)
        if known is None or known.found is None or not found:
            return ""
        return brief_prediction(known.found, found[0].code)

    def text(self, server: ServerView | None, width: int) -> Part:
        """The prediction for the staged changes, or why there is none; empty if nothing is staged or known."""
        key = self._staged_key(server)
        known = self._known(key)
        if known is None:
            return (PREDICTING, DIM) if self._running and key == self._wanted else ""
        if known.found is None:
            return (_not_predicted(known.problem), DIM) if known.problem else ""
        return prediction_text(known.found, width, self._fixes(server) if server is not None else "")

    def _fixes(self, server: ServerView) -> str:
        """The code of the top finding if its fix is staged, else empty."""
        found = findings_of(server)
        fixes = staged_fix(server, found[0].flag_fixes, self._staging.of(server.name)) if found else None
        return found[0].code if fixes is not None else ""

    def _predictable(self, server: ServerView) -> bool:
        if not server.ours or server.state is not State.READY or self._console.read_only:
            return False
        return server.moment is None and not server.replayed and not server.elsewhere

    def _fix_key(self, server: ServerView | None) -> _Key | None:
        """The key of the best fix of the top finding, if nothing is staged."""
        if server is None or not self._predictable(server) or self._staging.of(server.name):
            return None
        found = findings_of(server)
        fixes = found[0].flag_fixes if found else ()
        edits = edits_of(server.flags, fixes[0]) if fixes else {}
        return _key(server, edits) if edits else None

    def _staged_key(self, server: ServerView | None) -> _Key | None:
        """The key of the staged changes; None if they can't be predicted or the plan refuses them."""
        if server is None or not self._predictable(server):
            return None
        staged, verdict = self._staging.of(server.name), self._staged_plans.of(server)
        if not staged or verdict is None or verdict.refused or verdict.message == CHECKING:
            return None
        return _key(server, staged)

    def _cancel(self) -> None:
        if self._fix_runs and self._wanted is not None:
            self._fix_due[self._wanted[0]] = time.monotonic() + RETRY_SECONDS
        self._wanted = None
        self._console.workers.cancel_group(self._console, GROUP)
        if self._running:
            self._running = self._fix_runs = False
            self._console.fleet.predictions.staged.cancel()

    async def _predict(self, key: _Key, *, of_fix: bool) -> None:
        """Compute a prediction after the delay; a problem with staged changes is recorded in the message list, too."""
        await asyncio.sleep(FIX_DELAY_SECONDS if of_fix else DEBOUNCE_SECONDS)
        self._running, self._fix_runs = True, of_fix
        if of_fix:
            self._fix_due[key[0]] = time.monotonic() + FIX_EVERY_SECONDS
        self._changed()
        call = partial(self._console.fleet.predictions.staged.ask, key[0], Changes.of(dict(key[2])))
        found, problem = None, ""
        try:
            found = await in_thread(call, "prediction")
        except OperationError as error:
            problem = str(error).removeprefix(f"{key[0]}: ")
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            problem = str(error)
        self._wanted, self._running, self._fix_runs = None, False, False
        self._answers[key] = _Answer(found, problem, time.monotonic())
        while len(self._answers) > MOST_KEPT:
            del self._answers[next(iter(self._answers))]
        if not of_fix and (why := (found.prediction.outside if found is not None else problem)):
            figures = _figures(found.prediction) if found is not None else []
            self._console.messages.note("", f"{key[0]}: {f'predicted: {why}' if figures else _not_predicted(why)}")
        self._changed()


def _key(server: ServerView, edits: Edits) -> _Key:
    return server.name, server.generation, tuple(sorted(edits.items()))


def prediction_text(found: PredictedChange, width: int, code: str = "") -> tuple[str, Style]:
    """``predicted: TTFT p99 1.9s → 0.9–1.4s · ITL p50 …``, as much as fits; dim and with the reason if uncertain.

    ``code`` is the finding to fix, if any; if the change worsens it, the text starts with that.
    """
    prediction = found.prediction
    figures = _figures(prediction)
    parts = [one.text for one in figures if not one.unknown]
    unknown = [one.name for one in figures if one.unknown]
    if prediction.outside and not parts:
        return _not_predicted(prediction.outside), DIM
    missing = f"no prediction for {', '.join(unknown)}"
    if unknown and not parts:
        return missing, DIM
    parts += [missing] if unknown else []
    lead = _lead(found, _worsened(figures, code))
    while len(parts) > 1 and len(lead + " · ".join(parts)) > width - 2:
        parts.pop()
    text = lead + " · ".join(parts)
    return (f"{text}. {plain(prediction.outside)}", DIM) if prediction.outside else (text, ACCENT)


def _not_predicted(why: str) -> str:
    return f"not predicted: {plain(why).removeprefix('No prediction: ')}"


def brief_prediction(found: PredictedChange, code: str) -> str:
    """``predicted: TTFT p99 3.5s → 361–460ms``: the figure that the finding is about; empty if unknown.

    ``code`` is the finding that the change should fix.
    """
    figures = _figures(found.prediction)
    shown = _concerned(figures, code) or next(iter(figures), None)
    if shown is None or shown.unknown:
        return ""
    return _lead(found, shown.worse and shown is _concerned(figures, code)) + shown.text


def _lead(found: PredictedChange, worse: bool) -> str:
    from vllm_console.fleet.predictions import METRICS  # not needed by most consoles

    known = "predicted from metrics" if found.source == METRICS else "predicted"
    return f"{known} {MAKES_WORSE}: " if worse else f"{known}: "


class _Figure(msgspec.Struct, frozen=True):
    """The prediction of a figure: ``TTFT p99 1.9s → 0.9–1.4s``, whether that is worse, and whether it is unknown."""

    name: str
    text: str
    worse: bool
    unknown: bool


def _concerned(figures: Sequence[_Figure], code: str) -> _Figure | None:
    """The figure that a finding is about; None without a finding or figure."""
    name = _CONCERNED.get(code, "TTFT") if code else None
    return next((one for one in figures if name is not None and one.name.startswith(name)), None)


def _worsened(figures: Sequence[_Figure], code: str) -> bool:
    concerned = _concerned(figures, code)
    return concerned is not None and concerned.worse


def _figures(prediction: Prediction) -> list[_Figure]:
    """The figures known before and after the change; p99 TTFT if there are enough requests, else the median.

    The predicted value is an interval, or words if that is too wide or the prediction is flagged.
    """
    from vllm_console.prediction.effect import NOT_KNOWN, in_words, is_rough, surely_rises

    now, then = prediction.now, prediction.predicted
    tail = now.ttft_seconds.p99.value is not None and then.ttft_seconds.p99.value is not None
    part = "p99" if tail else "p50"
    figures = (
        (f"TTFT {part}", getattr(now.ttft_seconds, part), getattr(then.ttft_seconds, part), seconds, ""),
        ("ITL p50", now.itl_seconds.p50, then.itl_seconds.p50, seconds, ""),
        ("preemptions", now.preemptions_per_minute, then.preemptions_per_minute, count, "/min"),
        ("tok/s", now.tokens_per_second, then.tokens_per_second, count, ""),
        ("KV cache mean", now.kv_cache_usage, then.kv_cache_usage, percent, ""),
    )
    found = []
    for name, before, after, form, unit in figures:
        if before.value is None or after.value is None or (name == "preemptions" and not before.value + after.value):
            continue
        worse = surely_rises(after, before) if name == "tok/s" else surely_rises(before, after)
        rough = bool(prediction.outside) or is_rough(before, after)
        effect = in_words(before, after) if rough else f"{_interval(after, form)}{unit}"
        found.append(_Figure(name, f"{name} {form(before.value)} → {effect}", worse, effect == NOT_KNOWN))
    return found


def _interval(one: Estimate, form: Callable[[float | None], str]) -> str:
    """An interval; just the value if both ends look the same or are unknown."""
    low, high = form(one.low), form(one.high)
    if one.low is None or one.high is None or low == high:
        return form(one.value)
    if form is seconds:
        return seconds_range(one.low, one.high)
    return f"{low.removesuffix('%')}–{high}"
