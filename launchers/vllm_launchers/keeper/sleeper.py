"""Puts a server to sleep and wakes it up, through vLLM's development routes.

Going to sleep: wait until no request is left, then ``/sleep``. Waking up: ``/wake_up``; after level 2, which dropped
the weights, first the weights' memory, then ``reload_weights``, then the KV cache. ``/reset_prefix_cache`` and the
golden prompts follow. A server that can't be woken up, or whose answers differ, must be restarted.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from vllm_launchers.keeper import golden, processes
from vllm_launchers.keeper.errors import CannotSleepError
from vllm_launchers.keeper.health import HealthTarget
from vllm_launchers.keeper.lifecycle import HelperFailed, Post, SleepProgress, Transition
from vllm_launchers.keeper.record_writer import RecordWriter
from vllm_launchers.keeper.records import GoldenAnswer, ProcessIdentity, ServerRecord, Sleep, SleepStep, State
from vllm_launchers.keeper.server_client import RequestTimeoutError, Response, ServerClient
from vllm_launchers.listeners import WrongProcessError
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.values import Value, replace

SUSPEND_SECONDS = 600.0
"""Limit for ``/sleep`` and ``/wake_up``: level 1 copies all weights, a few GB/s until host memory is pinned."""
RELOAD_SECONDS = 1800.0
"""Limit for reading all weights again, even from a slow disk."""
ANSWER_SECONDS = 120.0
"""Limit for the answer to a golden prompt: requests that waited for the server run beside it."""
POLL_SECONDS = 0.5
TRIES = 3
"""Attempts per golden prompt before its answer counts as different: in a full batch, sums round differently."""
_REQUESTS = lazy_pattern(rb"^vllm:num_requests_(?:running|waiting)(?:\{[^}\n]*\})? ([0-9.eE+]+)", re.MULTILINE)


class SleepOrder(Value):
    """What to do: go to sleep at ``level`` (``wake`` False), or wake up from it.

    ``drain_seconds``: time for its requests to end; ``console``: the process that waits for that.
    """

    wake: bool
    level: int
    drain_seconds: float = 0.0
    console: ProcessIdentity | None = None


class SleepRefusedError(OSError):
    """The server refused a request; the message is a clause."""


class SleepRun(threading.Thread):
    """Carries out one order. Posts `SleepProgress` for each step, but nothing after `cancel`."""

    def __init__(
        self, target: HealthTarget, key: str, order: SleepOrder, recorded: Sequence[GoldenAnswer], post: Post
    ) -> None:
        super().__init__(name="sleep", daemon=True)
        self._epoch, self._order, self._recorded, self._post = target.epoch, order, tuple(recorded), post
        self._client = ServerClient(target.owner, target.host, target.port, key, tls=target.tls)
        self._lock = threading.Lock()
        self._suspends = False
        """Whether ``/sleep`` has been sent or is about to be."""
        self._in_doubt = order.wake
        """Whether the server's state is unknown after an error."""

    def cancel(self) -> None:
        """End the open request and post nothing more."""
        self._client.cancel()

    def cancel_drain(self) -> bool:
        """Cancel while the server still serves; False if it is too late for that."""
        with self._lock:
            if not self._suspends:
                self._client.cancel()
            return not self._suspends

    def run(self) -> None:
        """Carry out the order and post the outcome."""
        try:
            if self._order.wake:
                self._wake()
            else:
                self._sleep()
        except OSError as error:
            known = isinstance(error, WrongProcessError | SleepRefusedError | RequestTimeoutError)
            message = str(error) if known else (error.strerror or str(error)).lower() or "connection cut"
            self._tell(SleepStep.FAILED if self._in_doubt else SleepStep.CANCELED, message)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: reported, and the server has a definite state
            self._post(HelperFailed("sleep", repr(error)))
            step = SleepStep.FAILED if self._in_doubt else SleepStep.CANCELED
            self._tell(step, f"internal error in the keeper: {error!r}")

    def _sleep(self) -> None:
        if self._is_asleep():  # an earlier keeper put it to sleep and has ended since
            self._tell(SleepStep.ASLEEP)
            return
        if left := self._drained():
            self._tell(SleepStep.CANCELED, left)
            return
        with self._lock:
            if self._client.canceled.is_set():
                return
            self._suspends = self._in_doubt = True
        self._tell(SleepStep.SUSPENDING)
        problem: OSError = SleepRefusedError("it accepted /sleep but is not asleep")
        try:
            self._ask("POST", f"/sleep?level={self._order.level}", seconds=SUSPEND_SECONDS)
        except OSError as error:  # it may have fallen asleep anyway
            problem = error
        if not self._is_asleep():
            self._in_doubt = False
            raise problem
        self._tell(SleepStep.ASLEEP)

    def _is_asleep(self) -> bool:
        return bool((self._ask("GET", "/is_sleeping").document or {}).get("is_sleeping"))

    def _drained(self) -> str:
        """Wait until no request is left; returns why that failed, as a clause."""
        order, ends = self._order, time.monotonic() + self._order.drain_seconds
        while not self._client.canceled.is_set():
            counts = [float(count) for count in _REQUESTS.findall(self._ask("GET", "/metrics").body)]
            if not counts:
                return "its /metrics does not show how many requests are left"
            if not (left := round(sum(counts))):
                return ""
            if time.monotonic() >= ends:
                return f"{left} request{'s' * (left > 1)} left after {order.drain_seconds:g}s"
            if order.console is not None and not processes.alive(order.console):
                return "the console that requested it has ended"
            self._client.canceled.wait(POLL_SECONDS)
        return "canceled"

    def _wake(self) -> None:
        self._tell(SleepStep.WAKING)
        if self._order.level == 2:
            self._ask("POST", "/wake_up?tags=weights", seconds=SUSPEND_SECONDS)
            self._ask("POST", "/collective_rpc", {"method": "reload_weights"}, seconds=RELOAD_SECONDS)
            self._ask("POST", "/wake_up?tags=kv_cache", seconds=SUSPEND_SECONDS)
        else:
            self._ask("POST", "/wake_up", seconds=SUSPEND_SECONDS)
        if (self._ask("GET", "/is_sleeping").document or {}).get("is_sleeping") is not False:
            raise SleepRefusedError("it accepted /wake_up but is still asleep")
        self._tell(SleepStep.CHECKING)
        self._ask("POST", "/reset_prefix_cache")
        differing = tuple(one.prompt for one in self._recorded)
        for _ in range(TRIES):
            if not differing:
                break
            again = golden.answers(self._client, ANSWER_SECONDS, differing)
            differing = golden.differing([one for one in self._recorded if one.prompt in differing], again)
        checked = len(self._recorded)
        if differing:
            message = (
                f"{len(differing)} of {checked} golden prompts answered differently after level {self._order.level}"
            )
            self._tell(SleepStep.MISMATCH, message, checked, differing)
        else:
            self._tell(SleepStep.AWAKE, "" if checked else "no golden answers were recorded to compare with", checked)

    def _ask(self, method: str, path: str, body: object = None, *, seconds: float | None = None) -> Response:
        response = self._client.ask(method, path, body, seconds=seconds)
        if response.status != 200:
            raise SleepRefusedError(f"{path}: {response.message}")
        return response

    def _tell(self, step: SleepStep, message: str = "", checked: int = 0, differing: tuple[str, ...] = ()) -> None:
        if not self._client.canceled.is_set():
            self._post(SleepProgress(self._epoch, step, message, checked, differing))


class Sleeper:
    """Manages and records a server's sleep. Only the keeper's loop calls this."""

    def __init__(self, writer: RecordWriter, post: Post) -> None:
        self._writer, self._post = writer, post
        self._run: SleepRun | None = None

    @property
    def busy(self) -> bool:
        """Whether the server is going to sleep or waking up."""
        return self._run is not None

    def check(self, *, wake: bool) -> None:
        """Raise `CannotSleepError` if the server can't go to sleep or wake up now."""
        record = self._writer.record
        if not record.current.spec.sleep_mode:
            raise CannotSleepError(f"{record.name} runs without sleep mode; restart it with --enable-sleep-mode first")
        if self.busy:
            step = record.sleep.step if record.sleep is not None else SleepStep.DRAINING
            raise CannotSleepError(f"{record.name} is already going to sleep or waking up ({step})")
        if wake and record.state is not State.ASLEEP:
            raise CannotSleepError(f"{record.name} is {record.state}, not asleep")
        if not wake and record.state is not State.READY:
            raise CannotSleepError(f"{record.name} is {record.state}: only a ready server can be put to sleep")
        if record.preparation is not None and record.preparation.step.under_way:
            raise CannotSleepError(f"a restart of {record.name} is being prepared: cancel that first")

    def begin(self, order: SleepOrder, target: HealthTarget, key: str) -> None:
        """Carry out an order. Raises `UnwrittenError` before anything is done."""
        now = time.time()
        step = SleepStep.WAKING if order.wake else SleepStep.DRAINING
        sleep = Sleep(order.level, now, step, now, console=order.console)
        self._writer.change(insist=True, sleep=sleep)
        self._start(order, target, key)

    def resume(self, target: HealthTarget, key: str) -> None:
        """Resume after the keeper that began it has ended: cancel a drain; repeat anything else, which does no harm.

        A server that was to fall asleep but still serves stays awake if requests are left.
        """
        sleep = self._writer.record.sleep
        if sleep is None or not sleep.step.under_way:
            return
        if sleep.step is SleepStep.DRAINING:
            self._record(SleepStep.CANCELED, "its keeper has ended")
            return
        wake = sleep.step in (SleepStep.WAKING, SleepStep.CHECKING)
        self._start(SleepOrder(wake, sleep.level), target, key)

    def cancel_drain(self) -> bool:
        """Cancel going to sleep while the server still serves; returns whether that worked."""
        sleep = self._writer.record.sleep
        if self._run is None or sleep is None or sleep.step is not SleepStep.DRAINING:
            return False
        if not self._run.cancel_drain():
            return False
        self.end("as requested")
        return True

    def end(self, why: str) -> None:
        """Stop posting, because the server ends or should not sleep."""
        if self._run is None:
            return
        self._run.cancel()
        self._run = None
        self._record(SleepStep.CANCELED, why)

    def progress(self, event: SleepProgress) -> str:
        """Record a step; returns why the server must be restarted, as a clause, or an empty string."""
        record = self._writer.record
        if not event.step.under_way:
            self._run = None
        changes: dict[str, Any] = {"message": event.message, "checked": event.checked, "differing": event.differing}
        sleep = self._next(record, event.step, **changes)
        match event.step:
            case SleepStep.SUSPENDING | SleepStep.ASLEEP if record.state is not State.ASLEEP:
                self._writer.move(Transition.SUSPENDED, "", sleep=sleep)
            case SleepStep.AWAKE | SleepStep.CANCELED if record.state is State.ASLEEP:
                self._writer.move(Transition.WOKEN, "", sleep=sleep)
            case SleepStep.FAILED:
                self._writer.change(sleep=sleep)
                fell = record.sleep is not None and record.sleep.step is SleepStep.SUSPENDING
                return (
                    f"{'it is unknown whether it is asleep' if fell else 'it could not be woken up'}: {event.message}"
                )
            case SleepStep.MISMATCH:
                self._writer.change(sleep=sleep)
                return event.message
            case _:
                self._writer.change(sleep=sleep)
        return ""

    def _start(self, order: SleepOrder, target: HealthTarget, key: str) -> None:
        self._run = SleepRun(target, key, order, self._writer.record.current.golden, self._post)
        self._run.start()

    def _record(self, step: SleepStep, message: str) -> None:
        self._writer.change(sleep=self._next(self._writer.record, step, message=message))

    @staticmethod
    def _next(record: ServerRecord, step: SleepStep, **changes: Any) -> Sleep:
        sleep = record.sleep if record.sleep is not None else Sleep(1, time.time())
        console = sleep.console if step is SleepStep.DRAINING else None
        return replace(sleep, step=step, step_at=time.time(), console=console, **changes)
