"""The process that records an attached endpoint: ``python -m vllm_console.attached_recorder STATE NAME``.

It scrapes the endpoint once a second, stores its history and runs, and is the only one that writes its record. It ends
when the endpoint is detached or attached again. An endpoint that does not answer is retried with increasing pauses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace as replace_struct

from vllm_console.attached import (
    LOCK,
    Endpoint,
    api_key_of,
    attached_folder,
    clear_text_notice,
    read_endpoint,
    spec_of,
)
from vllm_console.history.store import HISTORY, HistoryWriter
from vllm_console.metrics.sample import Sample
from vllm_console.metrics.scrape import ScrapeError, Scraper, still_busy, verifying
from vllm_console.metrics.window import restarted_engines
from vllm_console.recorder import TroubleReporter, WindowRecorder, block_stop_signals, say, stopped_within
from vllm_console.runs.keys import run_key
from vllm_console.runs.store import FILE_NAME, RunName
from vllm_console.text import plain
from vllm_launchers.errors import UsageError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.records import Generation, ServerRecord, State
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.private import open_file, open_standard_streams
from vllm_launchers.values import replace

INTERVAL_SECONDS = 1.0
PLAIN_INTERVAL_SECONDS = 10.0
"""Interval between requests to an endpoint without metrics."""

LONGEST_PAUSE_SECONDS = 60.0
"""Pauses double with each failure, up to this."""

ANSWER_SECONDS = 5.0
"""Request timeout: a busy server may need seconds."""

MOST_GENERATIONS = 10
RETURNS_WITHIN = 16
"""How many processes are remembered: if one returns, several of them answer at the same address."""

RESTARTS, RESTARTS_SECONDS = 3, 60.0
"""This many restarts within this time are not restarts: several servers answer in turn."""

NO_METRICS = frozenset({"status", "redirect", "html", "empty", "garbage"})
"""Kinds of errors that mean that an address has no metrics page."""

MIXED = "several servers answer at this address in turn, so their figures are mixed: attach each of them"
NO_ENGINE = "its metrics page has no engine metrics, like a router's: attach the engines behind it"

_STARTED = lazy_pattern(r"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.eE+-]{1,40})\s", re.MULTILINE)


class _Answer(msgspec.Struct, frozen=True):
    """The result of one request: metrics, or why there are none."""

    sample: Sample | None = None
    started: str = ""
    """When its process started, as stated on the metrics page; empty if missing."""
    model: str | None = None
    no_metrics: str = ""
    """A clause explaining why there are no metrics."""


class Identity:
    """Whether samples are from one server: detects a restart, and several servers that answer in turn."""

    def __init__(self, started: str) -> None:
        self.mixed = False
        self._started = started
        self._past: deque[str] = deque(maxlen=RETURNS_WITHIN)
        self._restarts: deque[float] = deque(maxlen=RESTARTS)
        self._sample: Sample | None = None

    def restarted(self, sample: Sample, started: str) -> bool:
        """Add a sample; return whether it is from a different process than the previous one."""
        before, self._sample = self._sample, sample
        earlier, self._started = self._started, started
        if started and earlier:
            if started == earlier:
                return False
            self._past.append(earlier)
            self.mixed = self.mixed or started in self._past
            return True
        if before is None or not restarted_engines(before, sample):
            return False
        self._restarts.append(sample.at)
        span = self._restarts[-1] - self._restarts[0]
        self.mixed = self.mixed or (len(self._restarts) == RESTARTS and span <= RESTARTS_SECONDS)
        return True


class EndpointRecording:
    """One endpoint: its record, and the requests to it."""

    def __init__(self, state: Path, record: ServerRecord, endpoint: Endpoint, scraper: Scraper) -> None:
        self._folder = attached_folder(state, record.name)
        self._runs_file = state / FILE_NAME
        self._scraper = scraper
        self._endpoint = endpoint
        self._record = self._written = record
        self._identity = Identity(endpoint.started)
        self._failures = self._unanswered = 0
        self._trouble = ""
        self._writer = HistoryWriter(self._folder / HISTORY)
        self._runs = self._of_this_run()
        self._reporters = [TroubleReporter(self._writer), TroubleReporter(self._runs)]
        self._version_known = False

    def close(self) -> None:
        """Store waiting data and close everything."""
        self._writer.close()
        self._runs.flush()
        self._scraper.close()

    def step(self) -> float:
        """Send one request and store the result; return the seconds until the next one."""
        now = time.time()
        try:
            answer = self._ask(now)
        except ScrapeError as error:
            pause = self._failed(error, now)
        else:
            pause = self._answered(answer, now)
        for reporter in self._reporters:
            reporter.report()
        self.write()
        return pause

    def write(self) -> None:
        """Write the record if it has changed; an error is reported once, and the next call retries."""
        if self._record == self._written:
            return
        try:
            folders.write_record(self._folder, self._record)
        except OSError as error:
            trouble = f"{self._folder / 'record.json'} can't be written: {error.strerror}"
            if trouble != self._trouble:
                say(trouble)
            self._trouble = trouble
            return
        self._written, self._trouble = self._record, ""

    def replaced(self, folder: Path) -> bool:
        """Whether the endpoint was detached or attached again: its record is gone or a different one."""
        try:
            found, endpoint = read_endpoint(folder)
        except KeeperError:
            return True
        return (found.created_at, endpoint.asked_at) != (self._record.created_at, self._endpoint.asked_at)

    # -- asking ----------------------------------------------------------------------------------------------------

    def _ask(self, now: float) -> _Answer:
        if self._identity.mixed:
            return self._without_metrics(MIXED)
        try:
            text = self._scraper.metrics_text()
            sample = self._scraper.parse(text, now)
        except ScrapeError as error:
            if error.kind not in NO_METRICS or error.status >= 500:
                raise
            try:
                return self._without_metrics(f"{_without(error)}, so only its reachability is known")
            except ScrapeError as other:
                raise (error if other.kind == error.kind == "redirect" else other) from None
        totals = (one.prompt_tokens_total for one in sample.engines.values())
        if all(total is None for total in totals):
            return self._without_metrics(NO_ENGINE)
        found = _STARTED.search(text)
        return _Answer(sample, found[1] if found else "", sample.model_name)

    def _without_metrics(self, why: str) -> _Answer:
        """The result of ``/v1/models``. Raises ScrapeError."""
        document = self._json("/v1/models")
        models = document.get("data") if isinstance(document, dict) else None
        if not isinstance(models, list):
            place = self._scraper.place
            raise ScrapeError("garbage", f"{place} answers neither /metrics nor /v1/models as vLLM does.")
        first = models[0].get("id") if models and isinstance(models[0], dict) else None
        return _Answer(model=first if isinstance(first, str) else None, no_metrics=why)

    def _json(self, path: str) -> Any:
        try:
            body, _ = self._scraper.get(path)
        except ScrapeError as error:
            if error.status not in (401, 403):
                raise
            raise ScrapeError("status", self._refused(error.status), error.status) from None
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return None

    def _refused(self, status: int) -> str:
        """A sentence about an endpoint that requires a key, or a different one."""
        place, variable = self._scraper.place, self._endpoint.key_env
        if self._endpoint.keyed:
            return f"{place} refuses the API key in {variable} (HTTP {status})."
        if variable:
            return f"{place} requires an API key (HTTP {status}), and {variable} was not set: attach it again with it."
        return f"{place} requires an API key (HTTP {status}): attach it again with --key-env VAR."

    # -- what follows ----------------------------------------------------------------------------------------------

    def _failed(self, error: ScrapeError, now: float) -> float:
        self._unanswered = self._unanswered + 1 if error.kind == "timeout" else 0
        if still_busy(self._unanswered, ready=self._record.state is State.READY):
            return INTERVAL_SECONDS
        self._failures += 1
        reason = str(error)
        if error.kind == "untrusted" and self._endpoint.ca:
            reason += f" {self._endpoint.ca} has no certificate that signed it."
        elif error.kind == "untrusted":
            reason += " Name the file with its CA: attach it again with --ca FILE."
        self._enter(State.UNRESPONSIVE, reason, now)
        return min(LONGEST_PAUSE_SECONDS, INTERVAL_SECONDS * 2.0 ** min(self._failures, 10))

    def _answered(self, answer: _Answer, now: float) -> float:
        self._failures = self._unanswered = 0
        if answer.sample is not None and self._identity.restarted(answer.sample, answer.started):
            self._begin_generation(now)
            if self._identity.mixed:
                return INTERVAL_SECONDS
        self._describe(answer)
        self._enter(State.READY, "", now)
        if answer.sample is None:
            return PLAIN_INTERVAL_SECONDS
        self._writer.append(answer.sample, self._record.current.number)
        self._runs.append(answer.sample)
        return INTERVAL_SECONDS

    def _enter(self, state: State, reason: str, now: float) -> None:
        record = self._record
        since = record.state_since if state is record.state else now
        self._record = replace(record, state=state, state_since=since, reason=plain(reason))
        if state is State.READY and record.current.ready_at is None:
            self._set_current(replace(self._record.current, ready_at=now))

    def _begin_generation(self, now: float) -> None:
        """Begin another run, because its process was restarted."""
        self._runs.flush()
        ended = replace(self._record.current, ended_at=now)
        new = Generation(ended.number + 1, ended.spec, now, now)
        kept = (*self._record.generations[:-1], ended, new)[-MOST_GENERATIONS:]
        self._record = replace(self._record, generations=kept)
        self._runs, self._version_known = self._of_this_run(), False
        self._reporters[1] = TroubleReporter(self._runs)

    def _describe(self, answer: _Answer) -> None:
        details = dict(self._record.current.spec.details)
        if answer.model:
            details["model"] = plain(answer.model, 200)
        if not self._version_known:
            self._version_known = True
            details["engine"] = self._engine()
        notice = "; ".join(filter(None, (answer.no_metrics, clear_text_notice(self._endpoint), self._no_key())))
        self._endpoint = replace_struct(self._endpoint, notice=notice, started=answer.started)
        spec = spec_of(self._endpoint, details)
        if spec != self._record.current.spec:
            self._set_current(replace(self._record.current, spec=spec))

    def _no_key(self) -> str:
        if not self._endpoint.key_env or self._endpoint.keyed:
            return ""
        return f"{self._endpoint.key_env} was not set when its recorder started: it is scraped without a key"

    def _engine(self) -> dict[str, Any] | None:
        """Its vLLM, if it reports a version; requested once per run."""
        version = self._scraper.version()
        if version is None:
            return None
        kind = "simulated" if version.endswith("+simulated") else "vllm"
        return {"kind": kind, "command": [], "version": version, "build": None, "path": ""}

    def _set_current(self, generation: Generation) -> None:
        self._record = replace(self._record, generations=(*self._record.generations[:-1], generation))

    def _of_this_run(self) -> WindowRecorder:
        current = self._record.current
        run = RunName(run_key(self._record, current), self._record.name, current.number)
        return WindowRecorder(self._runs_file, run)


def _without(error: ScrapeError) -> str:
    """A clause explaining why an address that answers provides no metrics."""
    if error.kind == "redirect":
        return f"it redirects /metrics (HTTP {error.status})"
    if error.status in (401, 403):
        return f"its metrics page requires a different key (HTTP {error.status})"
    return "it has no metrics page"


def record(folder: Path, recording: EndpointRecording) -> None:
    """Record until the endpoint is detached or attached again, or a stop signal arrives."""
    while True:
        until = time.monotonic() + recording.step()
        while (left := until - time.monotonic()) > 0:
            if stopped_within(min(left, INTERVAL_SECONDS)) or recording.replaced(folder):
                return


def main(arguments: Sequence[str] | None = None) -> int:
    """Record; return the exit code."""
    open_standard_streams()
    words = sys.argv[1:] if arguments is None else arguments
    state, name = Path(words[0]), words[1]
    block_stop_signals()
    folder = attached_folder(state, name)
    try:
        lock = open_file(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    except OSError as error:
        say(f"{folder / LOCK} can't be opened: {error.strerror}")
        return 1
    try:
        found, endpoint = read_endpoint(folder)
    except KeeperError as error:
        say(str(error))
        return 1
    try:
        key = api_key_of(endpoint)
        tls = verifying(endpoint.ca) if endpoint.address.tls else None
        scraper = Scraper(endpoint.url, ANSWER_SECONDS, key=key, tls=tls)
    except (ScrapeError, UsageError) as error:
        failed = replace(found, state=State.UNRESPONSIVE, state_since=time.time(), reason=str(error))
        with contextlib.suppress(OSError):
            folders.write_record(folder, failed)
        return 1
    recording = EndpointRecording(state, found, replace_struct(endpoint, keyed=bool(key)), scraper)
    with contextlib.closing(recording):
        record(folder, recording)
    return 0


if __name__ == "__main__":
    sys.exit(main())
