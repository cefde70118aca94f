"""A server's health: a thread that checks ``/health``, and the evaluation of its results.

Each check is one HTTP GET with an overall deadline, over TLS if the server uses it, on a fresh connection to a socket
on which the server's own processes listen. Nothing is sent to a foreign process that answers on the port.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from vllm_launchers.keeper import golden
from vllm_launchers.keeper.context import Tuning
from vllm_launchers.keeper.lifecycle import HealthChecked, HelperFailed, Post, Transition, WarmedUp
from vllm_launchers.keeper.records import GoldenAnswer, State, WarmUp, WarmUpOutcome, WarmUpReport
from vllm_launchers.keeper.server_client import RequestTimeoutError, Response, ServerClient, base_model
from vllm_launchers.listeners import Owner, WrongProcessError
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.values import Value

DEADLINE_SECONDS = 10.0
"""As in the health checks of the exported Compose and Kubernetes files.

A busy API server may take seconds, because it tokenizes long prompts in the thread that also answers ``/health``. It
therefore takes about half a minute of silence until a server counts as unresponsive; errors and refused connections
count immediately.
"""


class HealthTarget(Value):
    """What to check: the process ``owner`` with start number ``epoch``, and the interval in seconds."""

    epoch: int
    owner: Owner
    host: str
    port: int
    interval: float
    tls: bool = False


class HealthChecker(threading.Thread):
    """Checks its target until it gets another one, or none."""

    def __init__(self, post: Post) -> None:
        super().__init__(name="health-checker", daemon=True)
        self._post = post
        self._change = threading.Condition()
        self._target: HealthTarget | None = None

    def aim(self, target: HealthTarget | None) -> None:
        """Check this target from now on; None pauses. Modules are imported here, before anything on disk can change."""
        if target is not None and target.tls:
            with contextlib.suppress(ImportError):  # Python without TLS: each check reports it
                importlib.import_module("ssl")
        with self._change:
            self._target = target
            self._change.notify()

    def run(self) -> None:
        """Check for as long as the keeper lives."""
        while True:
            with self._change:
                while self._target is None:
                    self._change.wait()
                target = self._target
            try:
                self._post(_health_checked(target))
            except Exception as error:  # noqa: BLE001 - the thread's boundary: reported, and checks continue
                self._post(HelperFailed("health checker", repr(error)))
            self._rest(target)

    def _rest(self, target: HealthTarget) -> None:
        with self._change:
            if self._target == target:
                self._change.wait(target.interval)


def _health_checked(target: HealthTarget) -> HealthChecked:
    try:
        problem = check(target.owner, target.host, target.port, tls=target.tls)
    except WrongProcessError as error:
        return HealthChecked(target.epoch, healthy=False, detail=str(error), foreign=True)
    return HealthChecked(target.epoch, healthy=not problem, detail=problem)


def check(owner: Owner, host: str, port: int, *, tls: bool = False) -> str:
    """Check once; returns what went wrong as a clause, empty on a 200.

    Raises:
        WrongProcessError: a process other than the owner listens on the port. Nothing is sent to it.
    """
    try:
        response = ServerClient(owner, host, port, tls=tls).ask("GET", "/health", seconds=DEADLINE_SECONDS)
    except WrongProcessError:
        raise
    except RequestTimeoutError:
        return f"no response within {DEADLINE_SECONDS:g}s"
    except OSError as error:
        return (error.strerror or "").lower() or str(error)
    except ImportError as error:
        return f"this Python has no TLS ({error})"
    return "" if response.status == 200 else f"HTTP {response.status}"


class Health:
    """Evaluates a server's health checks: counts consecutive failures."""

    def __init__(self, tuning: Tuning) -> None:
        self._limit = tuning.failed_health_checks
        self.reset()

    def reset(self) -> None:
        """Forget the previous process."""
        self._failed = 0
        self.since = time.monotonic()
        """Monotonic time since when the server responds, or does not."""
        self.reason = ""
        """The cause of the last transition, or why the last check did not count; a clause."""

    def transition(self, checked: HealthChecked, state: State, port: int) -> Transition | None:
        """The transition that a check causes in this state, if any."""
        if not checked.healthy:
            self._failed = 0 if state is State.ASLEEP else self._failed + 1  # failures before it wakes up do not count
            if checked.foreign:
                self.reason = checked.detail
            if state is not State.READY or self._failed < self._limit:
                return None
            if not checked.foreign:
                self.reason = f"/health on port {port}: {checked.detail} ({self._failed} times in a row)"
            self.since = time.monotonic()
            return Transition.UNANSWERED
        self._failed = 0
        self.reason = ""
        if state in (State.READY, State.ASLEEP):
            return None
        self.since = time.monotonic()
        return Transition.ANSWERED if state is State.STARTING else Transition.RECOVERED


# -- the warm-up ------------------------------------------------------------------------------------------------------


TEXT = (
    "the people of the town came to the river in the morning and saw that the water was high and the old bridge was "
    "gone so they went back home to find some wood and build a new one"
)
"""Forty common words: 32 tokens or more in any vocabulary."""
TOKENS = tuple(range(5, 37))
"""32 token ids that exist in any vocabulary, for a server with a short context or without a tokenizer."""
SHORT_CONTEXT = 256
"""In a context shorter than this, the words may not fit: some vocabularies spell them letter by letter."""

ATTEMPTS = 3
PAUSE_SECONDS = 1.0
"""Pause before the second attempt; twice as long before the third."""
_POOLING = ("/v1/embeddings", "/pooling", "/classify")
_NOT_OFFERED = frozenset({404, 405, 501})
_COUNTED = lazy_pattern(
    rb"^vllm:(?:request_success|generation_tokens)_total(?:\{[^}\n]*\})? ([0-9.eE+]+)", re.MULTILINE
)


class WarmUpRun(threading.Thread):
    """The warm-up of one process. Posts `WarmedUp` when it is done, nothing after `cancel`."""

    def __init__(
        self,
        target: HealthTarget,
        warm_up: WarmUp,
        key: str,
        post: Post,
        *,
        begun: bool = False,
        golden: bool = False,
        ray: bool = False,
    ) -> None:
        """``begun``: an earlier keeper has sent requests, which the server's counters may include.

        ``golden``: also record the answers to the golden prompts. ``ray``: Ray runs the workers. Then ``/health`` may
        answer although no request can be computed, so no response in time is a failure.
        """
        super().__init__(name="warm-up", daemon=True)
        self._epoch, self._warm_up, self._post = target.epoch, warm_up, post
        self._begun, self._golden = begun, golden
        self._unanswered = WarmUpOutcome.FAILED if ray else WarmUpOutcome.REFUSED
        self._client = ServerClient(target.owner, target.host, target.port, key, tls=target.tls)

    def cancel(self) -> None:
        """Abort at once: a server that is being stopped would wait for the open request."""
        self._client.cancel()

    def run(self) -> None:
        """Send the request, with retries if the server fails, and post the outcome."""
        at, since = time.time(), time.monotonic()
        try:
            outcome, detail = self._attempts()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: reported; a server is not lost by it
            self._post(HelperFailed("warm-up", repr(error)))
            outcome, detail = WarmUpOutcome.REFUSED, f"internal error in the keeper: {error!r}"
        report = WarmUpReport(at, outcome, time.monotonic() - since, detail)
        answers = self._answers() if self._golden and outcome is not WarmUpOutcome.FAILED else ()
        if not self._client.canceled.is_set():
            self._post(WarmedUp(self._epoch, report, answers))

    def _answers(self) -> tuple[GoldenAnswer, ...]:
        """The answers to the golden prompts; empty if the server does not complete text."""
        try:
            return golden.record(self._client, self._warm_up.timeout_seconds)
        except OSError as error:
            self._post(HelperFailed("warm-up", f"the golden prompts were not recorded: {error}"))
            return ()

    def _attempts(self) -> tuple[WarmUpOutcome, str]:
        outcome, detail = WarmUpOutcome.REFUSED, ""
        for attempt in range(ATTEMPTS):
            if attempt and self._client.canceled.wait(PAUSE_SECONDS * attempt):
                break
            try:
                outcome, detail = self._attempt()
            except WrongProcessError as error:
                return WarmUpOutcome.REFUSED, str(error)
            except RequestTimeoutError as error:
                if error.taken:
                    return WarmUpOutcome.FAILED, str(error)
                if outcome is not WarmUpOutcome.FAILED:  # otherwise an earlier attempt has proved a failure
                    outcome, detail = self._unanswered, str(error)
                continue
            except OSError as error:
                outcome, detail = WarmUpOutcome.FAILED, (error.strerror or str(error)).lower() or "connection cut"
            if outcome is not WarmUpOutcome.FAILED:
                break
        return outcome, detail

    def _attempt(self) -> tuple[WarmUpOutcome, str]:
        if not self._begun:  # later, the counters may include our own requests
            metrics = self._client.ask("GET", "/metrics")
            if metrics.status == 200 and any(float(count) for count in _COUNTED.findall(metrics.body)):
                return WarmUpOutcome.SKIPPED, "it has served requests before"
            self._begun = True
        models = self._client.ask("GET", "/v1/models")
        if models.status >= 500:
            return WarmUpOutcome.FAILED, f"/v1/models: {models.message}"
        model = base_model(models.document) if models.status == 200 else None
        if model is None:
            return WarmUpOutcome.REFUSED, f"/v1/models: {models.message if models.status != 200 else 'names no model'}"
        outcome, detail = WarmUpOutcome.REFUSED, ""
        # Name rank 0, too: without the header, any engine may get the request.
        for engine in range(self._warm_up.engines) if self._warm_up.engines > 1 else (None,):
            outcome, detail = self._serve(model, engine)
            if outcome is not WarmUpOutcome.COMPLETED:
                break
        return outcome, detail

    def _serve(self, model: Mapping[str, Any], engine: int | None) -> tuple[WarmUpOutcome, str]:
        """Send requests until the server accepts one, to the engine of rank ``engine`` if given.

        Only vLLM's generating endpoints read that header; a pooling server chooses the engine itself.
        """
        outcome, detail = WarmUpOutcome.REFUSED, ""
        missing = refused = ""
        for path, body in requests(model):
            if path == missing or (refused and path != refused):
                continue
            answer = self._client.ask("POST", path, body, seconds=self._warm_up.timeout_seconds, engine=engine)
            outcome, detail = judge_response(path, answer)
            if outcome is not WarmUpOutcome.REFUSED or answer.status in (401, 403):
                return outcome, detail
            if answer.status in _NOT_OFFERED or "does not support" in detail:  # the latter: vLLM up to 0.10
                missing, refused = path, ""
            else:
                refused = path
        return outcome, detail if refused else "it has no endpoint for text"


def requests(model: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The path and body of each request to try, each only if the server rejected the previous one."""
    name, length = model["id"], model.get("max_model_len")
    length = length if isinstance(length, int) and length > 0 else SHORT_CONTEXT
    tokens = list(TOKENS[: max(1, min(len(TOKENS), length - 2))])
    answer = {"model": name, "max_tokens": 2 if length > len(tokens) + 1 else 1, "temperature": 0}
    words = {"prompt": TEXT, **answer}
    prompts = [{"prompt": tokens, **answer}] if length < SHORT_CONTEXT else [words, {"prompt": tokens, **answer}]
    given: Any = TEXT if length >= SHORT_CONTEXT else tokens
    completions = [("/v1/completions", prompt) for prompt in prompts]
    return completions + [(path, {"model": name, "input": given}) for path in _POOLING]


def judge_response(path: str, answer: Response) -> tuple[WarmUpOutcome, str]:
    """The outcome that a response shows."""
    if answer.status >= 500 and answer.status != 501:
        return WarmUpOutcome.FAILED, f"{path}: {answer.message}"
    document = answer.document
    if answer.status != 200:
        return WarmUpOutcome.REFUSED, f"{path}: {answer.message}"
    if document is None:
        return WarmUpOutcome.REFUSED, f"{path}: 200, but not JSON"
    if document.get("error"):
        return WarmUpOutcome.FAILED, f"{path}: {answer.message}"
    choices = document.get("choices")
    ends = [one.get("finish_reason") for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
    if path == "/v1/completions" and (not ends or "abort" in ends or "error" in ends):
        return WarmUpOutcome.FAILED, f"{path}: 200, but without a completion"
    return WarmUpOutcome.COMPLETED, ""
