"""``vllm-console tune NAME``: try the flags predicted to be best, and keep those measured to be better."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
import textwrap
import time
from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from vllm_console.cli.fleet_access import refuse_read_only
from vllm_console.cli.load_target import Target, add_shape, find_target, shaped
from vllm_console.cli.options import add_json
from vllm_console.cli.output import OutputError, complain, print_json
from vllm_console.cli.progress import ProgressLine
from vllm_console.cli.ramp import budget_from, confirm_load, keep_ramp, only_one, rate_from
from vllm_console.cli.waiting import Canceling, did_not_happen, is_settled, undone_at_end, wait_for_restart, wait_until
from vllm_console.fleet.types import flag_difference
from vllm_console.load.spans import LoadNote
from vllm_console.load.tune_search import (
    AGAIN_SHARE,
    EVIDENCE_SECONDS,
    GOODPUT,
    OBJECTIVES,
    RANK_SECONDS,
    THROUGHPUT,
    TTFT,
    UNSURE,
    Candidate,
    Decision,
    Measured,
    MeasuredP99,
    NextTrial,
    Trial,
    baseline_cost,
    baseline_seconds,
    decide,
    least_budget,
    longest_evidence,
    measured_ceiling,
    measured_mean,
    measured_of,
    newly_missed,
    next_trial,
    pooled,
    trial_cost,
    trial_start,
)
from vllm_console.load.tuner_progress import TunerBest, TunerFigure, TunerProgress, TunerStep, figure_text, flags_text
from vllm_console.metrics.quantile import exact_quantile
from vllm_console.text import duration, objectives_text, percent, plain, rate
from vllm_console.text import seconds as seconds_text
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.records import PreparationStep, State
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Changes, apply_changes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from vllm_console.fleet.snapshot import ServerView
    from vllm_console.fleet.tuning import CandidateRanking, TuneTarget
    from vllm_console.load.report import Latency, LoadReport, Times
    from vllm_launchers.keeper.records import ServerRecord
    from vllm_launchers.presets.model import Objectives
    from vllm_launchers.vllm.flags.changes import Flags

EVIDENCE_SHARE = 0.6
"""Rate of the traffic that predictions are fitted to, as a share of the measured goodput: busy, but without a long
queue."""

EVIDENCE_REQUESTS = 150
RECORD_SECONDS = 5.0
"""How long the probe may take to write its records; it writes several times a second."""

FEWEST_FOR_P99 = 30
"""Minimum number of answers by which a p99 is judged."""

RECENT_SECONDS = 3600.0
"""The rate of the newest traffic is that of this time up to the newest request, if enough requests arrived in it."""

SLICES = 20
SO_FAR_SECONDS = 5.0
"""Interval between interim figures of the original flags."""

WATCH_SECONDS = 1.0
"""How often to check whether somebody else changed the server being measured."""

START_TIMEOUT = 1800.0
USUAL_START_SECONDS = 60.0
MOST_TRIALS = 50

_T = TypeVar("_T")

_UNITS = {GOODPUT: "requests/s", TTFT: "s", THROUGHPUT: "tokens/s"}
_NAMES = {GOODPUT: "goodput", TTFT: "mean TTFT", THROUGHPUT: "throughput"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Find better flags for one of your running servers. Measures it with its preset's traffic, predicts every "
        "combination of batch sizes and memory shares from the probe's records, and tries the best few: a restart "
        "and a measurement each. Keeps the best one if the improvement is significant and no latency newly misses its "
        "objective, otherwise restores the original flags, also when canceled. The server is unreachable during "
        "restarts."
    )
    parser.add_argument("server", metavar="name")
    parser.add_argument(
        "--objective", choices=OBJECTIVES, default=GOODPUT,
        help="what to improve: the request rate at which the objectives hold (default), the mean time to first "
             "token at one rate, or tokens per second with a constant number of requests in flight",
    )  # fmt: skip
    parser.add_argument(
        "--trials", type=_trials, default=4, metavar="N", help="measurements after the baseline (default 4)"
    )
    parser.add_argument(
        "--budget", type=budget_from, default=1200.0, metavar="DURATION",
        help="time limit, such as 90s, 20m or 1h (default 20m); the last restart, with the flags that stay, is planned "
        "within it, but may take longer",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=rate_from, metavar="R",
        help="with --objective ttft: requests per second (default: as recorded, without pauses, else the preset's)",
    )  # fmt: skip
    add_shape(parser)
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--yes", action="store_true", help="proceed even if other clients use the server: its restarts interrupt them"
    )
    add_json(parser)


def _trials(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_TRIALS:
        raise argparse.ArgumentTypeError(f"'{plain(text, 40)}' must be a number from 1 to {MOST_TRIALS}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Measure, predict, try, decide. Exit code 1 if nothing could be measured, or the flags to keep are not in place.

    Raises:
        UsageError: the budget is too short.
        OperationError: the server can't be measured or restarted, or nothing can be predicted.
        NotFoundError, RefusedError: there is no such server of this user's, or it has other clients.
    """
    from vllm_console.diagnosis.live.rule import objectives_of

    refuse_read_only(args)
    if args.rate is not None and args.objective != TTFT:
        raise UsageError(f"--rate belongs to --objective {TTFT}")
    target = find_target(args, "", others_allowed=False)
    if target.server is None:
        raise UsageError(f"{plain(args.server)} is not one of your servers, and only those can be restarted")
    if target.server.no_probe:
        raise OperationError(f"{args.server} has no probe, so nothing can be predicted: {target.server.no_probe}")
    limits, source = objectives_of(target.server.objectives, target.server.preset)
    others = confirm_load(args, target, "a tuner restarts it several times and makes its other clients wait")
    tuner = _Tuner(args, target, target.server, limits, others)
    tuner.refuse_short_budget()
    with tuner.line, only_one(target) as tuner.note, undone_at_end(tuner.end) as tuner.canceling:
        tuner.say(_heading(args, limits, source))
        tuner.tune()
    result = tuner.result()
    if args.json:
        print_json(result)
    elif not tuner.misplaced:  # that was already reported
        print("\n".join(["", *textwrap.wrap(plain(result["sentence"]), 79)]))
    return 0 if result["original"]["measured"] is not None and not tuner.misplaced else 1


def _heading(args: argparse.Namespace, limits: Objectives, source: str) -> str:
    what = _NAMES[args.objective] + (f" with {objectives_text(limits)} ({source})" if args.objective == GOODPUT else "")
    text = f"{plain(args.server)}: {what}; at most {counted(args.trials, 'trial')} in {duration(args.budget)}"
    return "\n".join([*textwrap.wrap(text, 79), f"  {'':<44}{'PREDICTED':>14}{'MEASURED':>14}"])


def _failed_text(report: LoadReport, pace: float | None) -> str:
    """The number of failed requests and the most common reason; ``pace`` is the load's requests per second, if any."""
    from vllm_console.load.run import UNFINISHED

    kind = max(report.failures, key=lambda one: report.failures[one], default="")
    at = f" at {rate(pace, 'req')}" if pace is not None else ""
    advice = "; if that is more than the server sustains, choose a lower --rate" if kind.startswith(UNFINISHED) else ""
    failed = f"{report.failed} of {counted(report.sent, 'request')} failed{at}{kind and ': '}{kind}"
    return failed + (advice if at else "")


class _Tuner:
    """One tuning run on one server, whose flags are restored unless better ones were found."""

    def __init__(
        self, args: argparse.Namespace, target: Target, server: ServerView, limits: Objectives, others: bool
    ) -> None:
        self._args, self._target, self._limits, self._others = args, target, limits, others
        self._fleet, self._name = target.fleet, server.name
        self._workload = shaped(args, target.workload)
        self._begin, self._until = time.monotonic(), time.time() + args.budget
        self._original: Flags = dict(server.flags)
        self._wanted: Flags = self._original
        """The flags to end with."""
        self._generation = self._first_run = server.generation
        self._taken = ""
        """What somebody else did to the server, such as ``stopped``; from then on it is left alone."""
        self._asked: tuple[ServerView, ServerView, Flags] | None = None
        """While waiting for a restart: the server before it, the server as the restart call returned it, and its new
        flags."""
        self.canceling = Canceling()
        self.note = LoadNote(None)
        """Where the steps are noted for others who watch the server."""
        self._problem = ""
        """Why the last measurement is unusable."""
        self._trying = ""
        """The candidate being measured, as text."""
        self._candidate: Flags = {}
        """The flags set by the candidate being tried; empty for the original flags."""
        self._last_start = self._start_seconds()
        self._longest_restart = 0.0
        """Longest restart so far, in seconds."""
        self._ranking: CandidateRanking | None = None
        self._done: list[Trial] = []
        self._trials: list[dict[str, Any]] = []
        self._measured: Measured | None = None
        """The objective's value with the original flags."""
        self._so_far: TunerFigure | None = None
        """Interim result of their measurement."""
        self._so_far_at = 0.0
        self._noted: TunerProgress | None = None
        self._decision: Decision | None = None
        self._sentence = ""
        """The outcome, if the server runs with the flags to end with."""
        self.misplaced = ""
        """After `end`: why it does not; otherwise empty."""
        self.line = ProgressLine()

    def say(self, text: str) -> None:
        """Print a line, except with --json."""
        self.line.clear()
        if not self._args.json:
            print(text, flush=True)

    def refuse_short_budget(self) -> None:
        """Raise UsageError if not even one trial fits in the budget."""
        objective, restart = self._args.objective, self._restart_seconds
        least = least_budget(objective, restart)
        if self._args.budget < least:
            costs = least, baseline_cost(objective), trial_cost(objective, restart), restart
            needed, original, trial, once = (duration(math.ceil(one)) for one in costs)
            raise UsageError(
                f"--budget {duration(self._args.budget)} is too short for a single trial: at least {needed} are "
                f"needed, {original} to measure the original flags, {duration(RANK_SECONDS)} to predict, and {trial} "
                f"for a trial with two restarts of about {once}"
            )

    @property
    def _left(self) -> float:
        budget: float = self._args.budget
        return budget - (time.monotonic() - self._begin)

    def tune(self) -> None:
        """Measure the server with its original flags, rank candidates, try them, and decide."""
        self._step(TunerStep.MEASURING)
        original = self._measured = self._baseline()
        if original is None:
            self._sentence = f"Nothing could be measured, so nothing was restarted: {self._problem}."
            return
        self.say(self._row("original", "", original))
        self._step(TunerStep.PREDICTING)
        ranking = self._ranking = self._rank(original)
        if not ranking.candidates:
            tried = counted(ranking.considered - ranking.refused, "combination")
            self._sentence = f"None of {tried} is predicted to be at least 2% better: nothing was restarted."
            return
        while (following := self._next(original)) is not None:
            candidate = ranking.candidates[following.place]
            measured, problem = self._try(following, original)
            self._done.append(Trial(following.place, measured))
            self._trials.append(self._document(candidate, measured, problem))
            expected = self._text(TunerFigure(self._expected(candidate, original)))
            expected += "?" if candidate.outside else ""
            self.say(self._row(flags_text(candidate.set), expected, measured, problem))
            if measured is not None and (missed := newly_missed(original, measured)):
                self.say(_indented(_missed_text(missed)))
            if candidate.outside and not any(candidate.outside == one["outside"] for one in self._trials[:-1]):
                self.say(_indented(f"? low confidence: {candidate.outside}"))
        decision = self._decision = decide(original, self._done, self._args.objective, self._gains())
        if decision.significant and decision.place is not None:
            self._wanted = {**self._original, **ranking.candidates[decision.place].set}
        self._sentence = _sentence(self._args.objective, ranking, decision, self._done)

    def end(self) -> None:
        """Apply the flags to end with; report if this was canceled or failed.

        The output may be gone, as with a closed terminal; the flags are applied nevertheless.
        """
        self._candidate = dict(flag_difference(self._original, self._wanted).set)
        self._step(TunerStep.FINISHING)
        self.misplaced, error = self._put_back(), sys.exception()
        with contextlib.suppress(OSError):
            self.line.clear()
            if self.misplaced and self.misplaced not in str(error):
                complain(self.misplaced)
            elif not self.misplaced and isinstance(error, KeyboardInterrupt):
                complain(f"canceled: {self._name} has its original flags")

    def _put_back(self) -> str:
        """Returns why the server does not have the flags to end with; empty if it does."""
        if self._asked is not None:
            with contextlib.suppress(OperationError):  # it is already stopping the server
                self._fleet.cancel_restart(self._name)
            before, asked, new = self._asked
            with contextlib.suppress(OperationError):  # removed meanwhile
                server, _ = self._begun(before, asked)
                if _same(server.flags, new) or _same(server.flags, before.flags):
                    self._generation = server.generation
        try:
            server = self._server()
        except OperationError as error:
            return str(error)
        changes = flag_difference(server.flags, self._wanted)
        if changes.empty and server.state is not State.FAILED:
            return ""
        original = self._wanted is self._original
        with contextlib.suppress(OSError, OutputError):
            self.say(f"  restarting with the {'original' if original else 'better'} flags")
        self._step(TunerStep.FINISHING, restart=True)
        try:
            problem = self._restart(changes)
        except OperationError as error:
            problem = str(error)
        if not problem:
            return ""
        flags = "its original flags" if original else flags_text(flag_difference(self._original, self._wanted).set)
        return f"{self._name} does not have {flags} now: {problem}"

    # -- what is measured ----------------------------------------------------------------------------------------------

    def _baseline(self) -> Measured | None:
        """Measure the original flags; for goodput, then send the traffic that predictions need."""
        seconds = baseline_seconds(self._args.objective, self._args.budget, self._args.trials, self._restart_seconds)
        measured = self._measure(seconds, None)
        if measured is None or self._args.objective != GOODPUT:
            return measured
        if measured.error > UNSURE and not measured.bound:
            again = self._measure(AGAIN_SHARE * seconds, trial_start(measured.value, measured))
            measured = pooled([measured, again]) or measured if again is not None else measured
        pace = EVIDENCE_SHARE * measured.value
        self._load(pace, min(max(EVIDENCE_SECONDS[0], EVIDENCE_REQUESTS / pace), longest_evidence(seconds)))
        self._server()
        return measured

    def _measure(self, seconds: float, start: float | None) -> Measured | None:
        """The objective's value with the current flags; None if there is none, and ``_problem`` says why.

        Raises:
            OperationError: somebody else removed, restarted or stopped it.
        """
        from vllm_console.load.upgrade import FAILED_SHARE

        self._problem = "too few of its requests were answered"
        if self._args.objective == GOODPUT:
            measured = self._goodput(seconds, start)
        else:
            answers: dict[int, Times] = {}
            slices = _Slices(seconds)
            pace = self._ttft_rate() if self._args.objective == TTFT else None

            def values() -> list[float]:
                return [one.ttft for _, one in sorted(answers.items())] if pace is not None else slices.rates

            report = self._load(pace, seconds, answers, slices, lambda: measured_mean(values()))
            failed = report.failed > FAILED_SHARE * max(1, report.sent)
            measured = None if failed else measured_mean(values())
            if measured is not None:
                measured = replace(measured, p99s=measured_p99s(answers, report.itl, self._limits))
            if failed:
                self._problem = _failed_text(report, pace)
        self._server()
        return measured

    def _note_so_far(self, measure: Callable[[], Measured | None]) -> None:
        """Periodically note the interim result of measuring the original flags."""
        now = time.monotonic()
        if self._measured is not None or self._noted is None or now - self._so_far_at < SO_FAR_SECONDS:
            return
        if (measured := measure()) is not None and _figure(measured) != self._so_far:
            self._so_far, self._so_far_at = _figure(measured), now
            self._noted = replace(self._noted, so_far=self._so_far)
            self.note.tuner(self._noted)

    def _goodput(self, seconds: float, start: float | None) -> Measured | None:
        from vllm_console.load.ramp import RampOptions, RampProgress, RampStep, run_ramp
        from vllm_console.load.shape import Exact

        steps: list[RampStep] = []

        def stepped(one: RampStep) -> None:
            steps.append(one)
            if start is None:  # not when it continues a first measurement, which is more accurate
                self._note_so_far(lambda: measured_ceiling([step.outcome for step in steps], seconds))

        def progress(one: RampProgress) -> None:
            self._progress(f"{'warming up at' if one.warming_up else 'measuring'} {rate(one.rate, 'req')}")

        found = self._watched(
            lambda stop: run_ramp(
                self._target.url,
                self._workload,
                self._limits,
                RampOptions((), start, seconds, self._args.seed, self._others),
                exact=Exact(self._args.input_tokens, self._args.output_tokens),
                lookup=self._target.lookup,
                stop=stop,
                on_step=stepped,
                on_progress=progress,
            )
        )
        if found.steps:
            keep_ramp(self._target, self._name, found, self._limits)
        if not found.complete:
            self._server()
            raise OperationError(found.sentence)
        return measured_ceiling([step.outcome for step in found.steps], seconds)

    def _load(
        self,
        pace: float | None,
        seconds: float,
        answers: dict[int, Times] | None = None,
        slices: _Slices | None = None,
        so_far: Callable[[], Measured | None] = lambda: None,
    ) -> LoadReport:
        """Send traffic at a rate, or keep requests in flight."""
        from vllm_console.load.run import LoadProgress, run_load
        from vllm_console.load.shape import Exact

        def progress(one: LoadProgress) -> None:
            if slices is not None:
                slices.add(one.elapsed, one.output_tokens)
            self._note_so_far(so_far)
            self._progress(f"sending {rate(pace, 'req') if pace else f'{self._in_flight} at once'}")

        return self._watched(
            lambda stop: run_load(
                self._target.url,
                None,
                self._workload,
                pace,
                seconds,
                exact=Exact(self._args.input_tokens, self._args.output_tokens),
                max_in_flight=self._in_flight if pace is None else 1024,
                seed=self._args.seed,
                lookup=self._target.lookup,
                stop=stop,
                on_progress=progress,
                answers=answers,
            )
        )

    def _watched(self, send: Callable[[asyncio.Event], Coroutine[Any, Any, _T]]) -> _T:
        """Send traffic, stopping as soon as somebody else changes the server.

        Raises:
            OperationError: it can't be sent.
        """
        from vllm_console.load.client import LoadError

        async def watch(stop: asyncio.Event) -> None:
            while not self._taken_now():
                await asyncio.sleep(WATCH_SECONDS)
            stop.set()

        async def sent() -> _T:
            stop = asyncio.Event()
            watching = asyncio.create_task(watch(stop))
            try:
                return await send(stop)
            finally:
                watching.cancel()

        try:
            return asyncio.run(sent())
        except LoadError as error:
            self._server()
            raise OperationError(str(error)) from error

    @property
    def _in_flight(self) -> int:
        return self._workload.concurrency

    def _ttft_rate(self) -> float:
        """The request rate for measuring TTFT: as given, as recorded, or the preset's."""
        from vllm_console.load.shape import suggested_rate

        if self._args.rate is None:
            recorded = recorded_rate([one.arrived_at for one in self._fleet.probes.requests(self._name)])
            self._args.rate = recorded if recorded is not None else suggested_rate(self._workload)
        return float(self._args.rate)

    # -- what is tried -------------------------------------------------------------------------------------------------

    def _rank(self, original: Measured) -> CandidateRanking:
        target = self._tune_target(original)
        self._progress("predicting", step=True)
        deadline = time.monotonic() + RECORD_SECONDS
        while True:
            try:
                return self._fleet.predictions.rank(self._name, target)
            except OperationError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _tune_target(self, original: Measured) -> TuneTarget:
        from vllm_console.fleet.tuning import TuneTarget

        objective = self._args.objective
        pace = original.value if objective == GOODPUT else self._ttft_rate() if objective == TTFT else 0.0
        return TuneTarget(objective, self._limits, pace, self._in_flight)

    def _next(self, original: Measured) -> Any:
        assert self._ranking is not None
        return next_trial(
            self._gains(),
            self._done,
            original,
            self._args.objective,
            trials=self._args.trials,
            seconds_left=self._left,
            restart_seconds=self._restart_seconds,
        )

    def _gains(self) -> list[float]:
        """The predicted factor by which each candidate changes the value."""
        assert self._ranking is not None
        return [one.predicted / self._ranking.original for one in self._ranking.candidates]

    def _expected(self, candidate: Candidate, original: Measured) -> float:
        """The expected measurement of a candidate: the measured original, improved by the predicted factor."""
        assert self._ranking is not None
        return original.value * candidate.predicted / self._ranking.original

    def _try(self, trial: NextTrial, original: Measured) -> tuple[Measured | None, str]:
        """Restart with a candidate's flags and measure; also returns why it could not be measured, if so.

        Raises:
            OperationError: the server ended meanwhile, or somebody else changed it.
        """
        assert self._ranking is not None
        server, candidate = self._server(), self._ranking.candidates[trial.place]
        self._candidate = candidate.set
        changes = flag_difference(server.flags, {**self._original, **candidate.set})
        if not changes.empty or server.state is not State.READY:
            self._progress(f"restarting with {flags_text(candidate.set)}", step=True)
            self._step(TunerStep.RESTARTING, restart=True)
            if problem := self._restart(changes):
                return None, problem
        start = None
        if self._args.objective == GOODPUT:
            known = measured_of(trial.place, self._done)
            start = trial_start(self._expected(candidate, original), known, guess=bool(candidate.outside))
        self._trying = flags_text(candidate.set)
        self._step(TunerStep.MEASURING)
        try:
            measured = self._measure(trial.seconds, start)
        except OperationError as error:
            raise OperationError(f"the trial with {self._trying} was given up: {error}") from error
        finally:
            self._trying = ""
        return measured, "" if measured is not None else self._problem

    def _restart(self, changes: Changes) -> str:
        """Restart and wait until it is ready. Returns why it failed, or why it came back with other flags.

        Raises:
            OperationError: somebody else changed it.
        """
        began, before = time.monotonic(), self._server()
        try:
            with self.canceling.afterwards():
                wanted = apply_changes(before.flags, changes)
                self._asked = before, self._fleet.restart(self._name, changes), wanted
        except OperationError as error:
            return str(error)
        server, asked_at = self._begun(*self._asked[:2])
        if did_not_happen(server, asked_at):
            self._asked = None
            return server.restart.sentence if server.restart is not None else "another restart took its place"
        server = wait_until(self._fleet, self._name, is_settled, quiet=True, timeout=START_TIMEOUT)
        self._asked = None
        if not server.rollback and not _same(server.flags, wanted):
            raise self._changed_by_others("restarted", server)
        self._generation = server.generation
        if server.rollback:
            return server.rollback
        if server.state is not State.READY:
            return server.reason or f"it is {server.state}"
        self._longest_restart = max(self._longest_restart, time.monotonic() - began)
        return ""

    def _begun(self, before: ServerView, asked: ServerView) -> tuple[ServerView, float | None]:
        return wait_for_restart(self._fleet, before, asked, quiet=True, timeout=START_TIMEOUT)

    def _server(self) -> ServerView:
        """The current server. Raises OperationError if somebody else removed, restarted or stopped it."""
        server = self._fleet.snapshot().server(self._name)
        taken = self._taken_now()
        if server is None or taken:
            raise self._changed_by_others(taken or "removed", server)
        return server

    def _taken_now(self) -> str:
        """Update and return ``_taken``. Reads only the server's record, and ignores errors reading it."""
        if not self._taken:
            with contextlib.suppress(KeeperError):
                self._taken = _done_by_others(self._fleet.access.record(self._name), self._generation)
        return self._taken

    def _changed_by_others(self, what: str, server: ServerView | None) -> OperationError:
        """The error that names which original flags the server does not have now."""
        text = f"{self._name} was {what} by someone else meanwhile; it is left as it is"
        now = flag_difference(self._original, server.flags) if server is not None else Changes()
        flags = flags_text(now.edits)
        return OperationError(f"{text}, with {flags}" if flags else text)

    def _start_seconds(self) -> float:
        from vllm_console.runs.startup import last_start_seconds

        return last_start_seconds(self._fleet.history.runs(self._name)[0]) or USUAL_START_SECONDS

    @property
    def _restart_seconds(self) -> float:
        """Estimated restart time: 20% more than the longest so far (or the last start), plus 4 seconds."""
        return 1.2 * (self._longest_restart or self._last_start) + 4.0

    # -- what is said --------------------------------------------------------------------------------------------------

    def _step(self, step: TunerStep, *, restart: bool = False) -> None:
        """Note the step that begins now; ``restart`` means that it begins another run, too."""
        candidates = self._ranking.candidates if self._ranking is not None else ()
        flags = dict.fromkeys(name for one in candidates for name in one.set)
        tried = bool(self._candidate) and step is not TunerStep.FINISHING
        progress = TunerProgress(
            objective=self._args.objective,
            unit=_UNITS[self._args.objective],
            step=step,
            since=time.time(),
            until=self._until,
            trials=self._args.trials,
            trial=len(self._done) + 1 if tried else 0,
            set=self._candidate,
            was={name: self._original.get(name) for name in flags},
            original=_figure(self._measured) if self._measured is not None else None,
            best=self._best(),
            first_run=self._first_run,
            last_run=self._generation + (restart or self._asked is not None),
        )
        self._noted = progress
        self.note.tuner(progress)

    def _best(self) -> TunerBest | None:
        """The candidate with the best measurement so far; None if none was better than the original flags."""
        if self._measured is None or self._ranking is None or not self._done:
            return None
        place = decide(self._measured, self._done, self._args.objective, self._gains()).place
        measured = measured_of(place, self._done) if place is not None else None
        if place is None or measured is None:
            return None
        trial = max(number for number, one in enumerate(self._done, 1) if one.place == place)
        return TunerBest(trial, self._ranking.candidates[place].set, _figure(measured))

    def _progress(self, text: str, *, step: bool = False) -> None:
        """Show progress; in a file or a pipe only if a line is due or a ``step`` begins."""
        tried = f"; with {self._trying}" if self._trying else ""
        if self._measured is None and self._so_far is not None:
            text = f"{text}; so far {self._text(self._so_far)}"
        line = f"{text}; at most {duration(max(0.0, self._left))} left{tried}"
        self.line.show(line, time.monotonic() - self._begin, always=step)

    def _row(self, words: str, expected: str, measured: Measured | None, problem: str = "") -> str:
        found = self._text(_figure(measured)) if measured is not None else "–"
        row = f"  {plain(words):<44}{expected:>14}{found:>14}"
        return "\n".join([row, _indented(problem)]) if problem else row

    def _text(self, found: TunerFigure) -> str:
        return figure_text(found, _UNITS[self._args.objective])

    def _document(self, candidate: Candidate, measured: Measured | None, problem: str) -> dict[str, Any]:
        assert self._ranking is not None
        return {
            "set": dict(candidate.set),
            "predicted": candidate.predicted,
            "outside": candidate.outside or None,
            "measured": None if measured is None else _measured(measured),
            "run": None if problem else f"{self._name}@{self._generation}",
            "problem": problem or None,
        }

    def result(self) -> dict[str, Any]:
        """The result for ``--json``, after `end`."""
        original, ranking = self._measured, self._ranking
        improvement = self._decision.improvement if self._decision is not None else None
        kept = self._wanted is not self._original and not self.misplaced
        return {
            "server": self._name,
            "objective": self._args.objective,
            "unit": _UNITS[self._args.objective],
            "original": {
                "predicted": ranking.original if ranking is not None else None,
                "measured": None if original is None else _measured(original),
            },
            "considered": ranking.considered if ranking is not None else 0,
            "refused": ranking.refused if ranking is not None else 0,
            "trials": self._trials,
            "improvement": None if improvement is None else msgspec.to_builtins(improvement),
            "kept": dict(flag_difference(self._original, self._wanted).set) if kept else None,
            "seconds": round(time.monotonic() - self._begin, 1),
            "sentence": f"{self.misplaced}." if self.misplaced else self._sentence,
        }


class _Slices:
    """Tokens per second in slices of a load, without its first fifth, in which the batch fills."""

    def __init__(self, seconds: float) -> None:
        self._until, self._slice = seconds, 0.8 * seconds / SLICES
        self._edge, self._since, self._before = 0.2 * seconds, 0.0, -1
        self.rates: list[float] = []

    def add(self, elapsed: float, tokens: int) -> None:
        """Record that ``tokens`` had been generated after ``elapsed`` seconds."""
        if elapsed < self._edge or elapsed > self._until:
            return
        if self._before >= 0:
            self.rates.append((tokens - self._before) / (elapsed - self._since))
        self._before, self._since = tokens, elapsed
        self._edge = elapsed + self._slice


def measured_p99s(answers: Mapping[int, Times], itl: Latency, limits: Objectives) -> tuple[MeasuredP99, ...]:
    """The latencies that have objectives, of a load with these finished answers (by place) and gaps between tokens.

    TTFT is without the first fifth of the answers: after a restart, the first requests compile kernels.
    """
    from vllm_console.diagnosis.live.frame_sums import enough_slow

    warm = [one.ttft for _, one in sorted(answers.items())][len(answers) // 5 :]
    if len(warm) < FEWEST_FOR_P99:
        return ()
    objective, worst = limits.ttft_p99_seconds, exact_quantile(warm, 0.99)
    slow = sum(one > objective for one in warm)
    ttft = MeasuredP99("TTFT p99", worst, objective, unsure=worst > objective and not enough_slow(slow, len(warm)))
    return (ttft,) if itl.p99 is None else (ttft, MeasuredP99("ITL p99", itl.p99, limits.itl_p99_seconds))


def recorded_rate(arrivals: Sequence[float]) -> float | None:
    """Requests per second of the newest recorded traffic, without its pauses; None if too little is recorded.

    ``arrivals`` are their times. With the pauses, a measurement might not send a single request.
    """
    from vllm_console.load.shape import FEWEST_RECORDED
    from vllm_console.prediction.evidence import PAUSE_SECONDS

    at = sorted(arrivals)
    for since in (at[-1] - RECENT_SECONDS, at[0]) if at else ():
        recent = at[bisect_left(at, since) :]
        gaps = [gap for one, other in pairwise(recent) if (gap := other - one) <= PAUSE_SECONDS]
        if len(gaps) >= FEWEST_RECORDED - 1 and sum(gaps) > 1.0:
            return len(gaps) / sum(gaps)
    return None


def _done_by_others(record: ServerRecord | None, generation: int) -> str:
    """What others did to a server whose run ``generation`` the tuner is not restarting; empty if nothing."""
    if record is None:
        return "removed"
    prepared = record.preparation
    preparing = prepared is not None and prepared.step in (PreparationStep.IMPORTING, PreparationStep.CHECKING)
    if record.current.number != generation or record.next_spec is not None or preparing:
        return "restarted"
    ended_by_itself = record.exit is not None and not record.exit.requested  # its remaining processes are being ended
    stopping = record.state is State.STOPPING and not ended_by_itself
    return "stopped" if stopping or record.state is State.STOPPED else ""


def _same(flags: Flags, others: Flags) -> bool:
    return flag_difference(flags, others).empty


def _measured(one: Measured) -> dict[str, Any]:
    return {"value": one.value, "error": one.error, "bound": one.bound or None}


def _figure(one: Measured) -> TunerFigure:
    return TunerFigure(one.value, one.bound)


def _indented(text: str) -> str:
    return "\n".join(textwrap.wrap(plain(text), 77, initial_indent="    ", subsequent_indent="    "))


def _missed_text(missed: Sequence[MeasuredP99]) -> str:
    """``ITL p99 160ms now misses its objective of 100ms``."""
    return " and ".join(
        f"{one.name} {seconds_text(one.value)} now misses its objective of {seconds_text(one.objective)}"
        for one in missed
    )


def _sentence(objective: str, ranking: CandidateRanking, decision: Decision, done: list[Trial]) -> str:
    name, tried = _NAMES[objective], len({one.place for one in done if one.measured is not None})
    better, rejected = "lower" if objective == TTFT else "higher", decision.rejected
    if not done:
        return (
            "No time was left for a trial because earlier steps took longer than planned: the original flags stay. "
            "Try a longer --budget."
        )
    if not tried:
        return "No trial could be measured: the original flags stay."
    if decision.improvement is not None and decision.place is not None:
        one, words = decision.improvement, flags_text(ranking.candidates[decision.place].set)
        interval = f"{percent(one.low)} to {percent(one.high)}"
        found = f"{words} stays: its {name} is {percent(one.value)} {better} ({interval})."
        if not decision.significant:
            found = (
                f"The original flags stay: with {words} the {name} was {percent(one.value)} {better}, which may be "
                f"chance ({interval}). Try a longer --budget."
            )
    elif rejected is not None:
        found = "The original flags stay."
    else:
        many = f"None of {tried} candidates" if tried > 1 else "The candidate that was tried"
        found = f"{many} was measured to be better: the original flags stay."
    if rejected is None:
        return found
    return (
        f"{found} {flags_text(ranking.candidates[rejected.place].set)} is not kept, although its {name} was "
        f"{percent(rejected.improvement)} {better}: {_missed_text(rejected.missed)}."
    )
