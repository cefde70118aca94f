"""Verbs on servers: restart, stop, remove, switch, load. Asks first, runs them in a thread, reports the outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vllm_console.fleet.markers import flag_change
from vllm_console.fleet.snapshot import ServerView
from vllm_console.fleet.types import DRAIN_SECONDS
from vllm_console.text import plain, rate, took
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.bars import shown_value
from vllm_console.ui.panes.finding import draining
from vllm_console.ui.parts.staged_plan import StagedPlans
from vllm_console.ui.parts.staged_prediction import Predictions
from vllm_console.ui.parts.staging import Staging, combined_warning
from vllm_console.ui.theme import BAD, WARN
from vllm_console.ui.widgets.draw import Part
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper.records import PreparationStep, State
from vllm_launchers.launch.errors import NoPlaceError, UnfitError, node_alone
from vllm_launchers.launch.request import AS_CONFIGURED, RestartOptions
from vllm_launchers.plan.findings import PlanFinding
from vllm_launchers.plan.flags import SLEEP_MODE
from vllm_launchers.presets.model import Preset
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Changes, Edits, unapplied

if TYPE_CHECKING:
    from vllm_console.fleet.rolling import AnswerComparison
    from vllm_console.ui.app import ConsoleApp
    from vllm_console.ui.screens.dialogs import Confirm, DialogAnswer

T = TypeVar("T")

Refused = Callable[[Exception], bool]
"""Reports why a plan was refused; returns False for other errors, which the app reports."""


class RefusalError(Exception):
    """A key or command does not apply; the text says why. ``about`` names the server that it is about, if any."""

    def __init__(self, text: str, about: str = "") -> None:
        super().__init__(text)
        self.about = about


class RunningVerb(StrEnum):
    """The verb running on a server, as the participle after "is being"."""

    RESTART = "restarted"
    STOP = "stopped"
    SWITCH = "switched to another preset"
    REMOVE = "removed"
    SLEEP = "put to sleep"
    WAKE = "woken up"


class _InProgress(msgspec.Struct):
    verb: RunningVerb
    before: tuple[int, State, float]
    earlier_restart: float | None = None
    """When the previous, abandoned restart was requested."""
    accepted: bool = False


class VerbsInProgress:
    """The verb in progress on each server, from the key press until a snapshot shows its effect.

    Prevents a second verb from undoing the first.
    """

    def __init__(self) -> None:
        self._by_server: dict[str, _InProgress] = {}

    def begin(self, server: ServerView, verb: RunningVerb) -> None:
        """Record that a verb was requested; ``server`` is its state before the verb."""
        earlier = server.restart.asked_at if server.restart is not None else None
        self._by_server[server.name] = _InProgress(verb, _identity(server), earlier)

    def accept(self, name: str) -> None:
        """Record that the verb was accepted; it stays in progress until a snapshot shows its effect."""
        if name in self._by_server:
            self._by_server[name].accepted = True

    def drop(self, name: str) -> None:
        """Forget the verb: it was refused or has finished."""
        self._by_server.pop(name, None)

    def on(self, server: ServerView, *, to_stop: bool = False) -> RunningVerb | None:
        """The verb in progress on a server. With ``to_stop``, ignores a restart that is still stopping."""
        found = self._by_server.get(server.name)
        if found is None or (to_stop and _stopping_to_start(found, server)):
            return None
        return found.verb

    def observe(self, servers: Sequence[ServerView]) -> None:
        """Drop verbs that a snapshot shows as done: a newer generation, another state, or the server is gone."""
        present = {server.name: server for server in servers}
        for name, found in list(self._by_server.items()):
            server = present.get(name)
            if not found.accepted or (server is not None and _stopping_to_start(found, server)):
                continue
            if server is None or _identity(server) != found.before or _abandoned(found, server):
                self.drop(name)


def _identity(server: ServerView) -> tuple[int, State, float]:
    return server.generation, server.state, server.state_since


def _abandoned(found: _InProgress, server: ServerView) -> bool:
    """Whether the restart was refused or canceled before it touched the server."""
    restart = server.restart
    return restart is not None and restart.abandoned and restart.asked_at != found.earlier_restart


def _stopping_to_start(found: _InProgress, server: ServerView) -> bool:
    """Whether the old generation is stopping, or about to, so that the new one can start."""
    starts = found.verb in (RunningVerb.RESTART, RunningVerb.SWITCH)
    preparing = server.restart is not None and server.restart.under_way
    stopping = server.state is State.STOPPING or preparing
    return starts and found.accepted and stopping and server.generation == found.before[0]


class RollingUpdates:
    """Starts a second instance of a server. Once that is ready, compares their answers and offers to stop the old one.

    It tracks only updates started from this console; if the console exits, both servers keep running.
    """

    def __init__(self, verbs: ServerVerbs, console: ConsoleApp, staging: Staging) -> None:
        self._verbs, self._console, self._staging = verbs, console, staging
        self._started: dict[str, tuple[int, str]] = {}
        """Generation and old server's name of each starting new server, by its name."""

    def update(self, selected: ServerView | None) -> None:
        """Start a second instance with the staged flags, after confirmation."""
        server = self._verbs.idle(selected)
        if server.state is not State.READY:
            text = f"{server.name} is {server.state}: a rolling update needs a server that is ready."
            raise RefusalError(text, server.name)
        staged = self._staging.of(server.name)
        gpus = f", GPU {', '.join(map(str, server.gpus))}" if server.gpus else ""
        details = [
            f"{server.name} on port {server.port}{gpus} keeps serving until you stop it.",
            "The second one starts on another port, on GPUs with room.",
        ]
        details += change_rows(server, staged)
        self._verbs.ask(
            f"Start a second {server.name} next to it?", details, "start", lambda: self._start(server, staged)
        )

    def _start(self, server: ServerView, staged: Edits) -> None:
        fleet, name = self._console.fleet, server.name

        def started(new: ServerView) -> str:
            self._started[new.name] = (new.generation, name)
            if self._staging.of(name) == staged:
                self._staging.put(name, {})
            return f"{new.name} is starting at {new.url}; {name} keeps serving."

        def run(options: RestartOptions, refused: Refused) -> None:
            call = partial(fleet.start_beside, name, Changes.of(staged), options)
            self._console.act(f"Starting a second {name}…", call, started, refused, about=name)

        self._verbs.run_planned(server, "start", edits_flags(), run, f"A second {name}")

    def observe(self, servers: Sequence[ServerView]) -> None:
        """Handle new servers that became ready or failed for good."""
        present = {server.name: server for server in servers}
        for name, (generation, old) in list(self._started.items()):
            new = present.get(name)
            if new is None or new.generation < generation:
                continue  # the snapshot is older than the start
            if new.state is State.READY:
                self._compare(old, new)
            elif new.state.alive or new.next_attempt_at is not None:
                continue
            del self._started[name]  # a failure is reported like that of any server

    def _compare(self, old: str, new: ServerView) -> None:
        fleet = self._console.fleet
        call = partial(fleet.compare_answers, old, new.name)
        doing = f"{new.name} is ready; comparing answers…"
        self._console.act(doing, call, partial(self._offer, old, new), about=new.name)

    def _offer(self, old: str, new: ServerView, compared: AnswerComparison) -> str:
        snapshot = self._console.snapshot
        server = snapshot.server(old) if snapshot is not None else None
        message = f"{new.name} is ready at {new.url}: {compared.sentence}."
        if server is not None and self._console.operations.on_top:
            details = [f"New address: {new.url}", f"{compared.sentence.capitalize()}."]
            details += [f"  {plain(repr(prompt))}" for prompt in compared.different]
            question = f"{new.name} is ready. Stop {old}?"
            stop = partial(self._verbs.stop_now, server)
            self._verbs.ask(question, [*details, *in_flight(server)], "stop", stop, late=True)
        return message


class _SentRestart(msgspec.Struct, frozen=True):
    """A restart that is being prepared: the run it replaces, its changes, and when it was requested."""

    generation: int
    staged: Edits
    asked_at: float

    def refused(self, server: ServerView) -> bool:
        """Whether its preparation failed. Its changes are gone then; those of a canceled one are staged again."""
        restart, steps = server.restart, (PreparationStep.REFUSED, PreparationStep.FAILED)
        return restart is not None and restart.asked_at == self.asked_at and restart.step in steps


class _RestartQuestion(msgspec.Struct, frozen=True):
    """A restart confirmation: the server, the changes it restarts with, staged ones that these replace, the dialog."""

    server: str
    staged: Edits
    replaced: Edits
    dialog: Confirm


class ServerVerbs:
    """Changes servers through the fleet, running each verb in a thread and reporting refusals in one sentence.

    ``forget`` is called with the name of a server that is gone or was replaced; ``undecided`` returns what a restart
    would leave undecided about the newest change, as a sentence or empty.
    """

    def __init__(
        self,
        console: ConsoleApp,
        staging: Staging,
        staged_plans: StagedPlans,
        predictions: Predictions,
        forget: Callable[[str], None],
        undecided: Callable[[ServerView], str],
    ) -> None:
        self._console, self._staging, self._staged_plans, self._forget = console, staging, staged_plans, forget
        self._predictions, self._undecided = predictions, undecided
        self.in_progress = VerbsInProgress()
        self.rolling = RollingUpdates(self, console, staging)
        self._question: _RestartQuestion | None = None
        """The last restart confirmation."""
        self._sent: dict[str, _SentRestart] = {}
        """By server, the restart from here that is being prepared."""

    # -- permissions -----------------------------------------------------------------------------------------------

    def chosen(self, server: ServerView | None) -> ServerView:
        """Return the server.

        Raises:
            RefusalError: no server is selected.
        """
        if server is None:
            raise RefusalError(no_server(self._console))
        return server

    def own(self, server: ServerView | None) -> ServerView:
        """Return the server if it may be changed.

        Raises:
            RefusalError: it may not be changed, or no server is selected.
        """
        mine = self.chosen(server)
        if mine.replayed:
            text = f"{mine.name} has ended and is being replayed: it can't be changed. {key_of('time_live')} leaves."
            raise RefusalError(text, mine.name)
        if mine.foreign:
            raise RefusalError(f"{mine.name} {mine.foreign}.", mine.name)
        return mine

    def restarting(self, server: ServerView) -> bool:
        """Whether a restart was requested here or is being prepared, and its new run has not begun."""
        prepared = server.restart is not None and server.restart.under_way
        return prepared or self.in_progress.on(server) is RunningVerb.RESTART

    def idle(self, server: ServerView | None, *, to_stop: bool = False, elsewhere: bool = False) -> ServerView:
        """Return the server if it may be changed and no verb is in progress on it; raise `RefusalError` otherwise."""
        mine = server if elsewhere and server is not None and server.remote_ours else self.own(server)
        if verb := self.in_progress.on(mine, to_stop=to_stop):
            raise RefusalError(f"{mine.name} is being {verb}.", mine.name)
        return mine

    def tunable(self, server: ServerView | None) -> ServerView:
        """Return the server if its flags may be changed; raise `RefusalError` otherwise."""
        return self.alone(self.own(server))

    def alone(self, server: ServerView) -> ServerView:
        """Return the server; raise `RefusalError` if it is one node of several, which can't restart alone."""
        if server.node:
            raise RefusalError(f"{node_alone(server.name, server.node)}.", server.name)
        return server

    # -- verbs -----------------------------------------------------------------------------------------------------

    def restart(self, selected: ServerView | None) -> None:
        """Restart with the staged flags. Confirm first if requests are in flight, the server is already starting or on
        another machine, or a tuner is running."""
        self._ask_to_restart(self.alone(self.idle(selected, elsewhere=True)), replaced={})

    def revert(self, selected: ServerView | None, edits: Edits) -> None:
        """Restart with these changes instead of the staged ones, which are kept unless that is confirmed."""
        server = self.alone(self.idle(selected))
        staged = self._staging.of(server.name)
        self._staging.put(server.name, edits)
        self._ask_to_restart(server, replaced=staged if staged != edits else {})

    def _ask_to_restart(self, server: ServerView, *, replaced: Edits) -> None:
        name, staged = server.name, self._staging.of(server.name)

        def keep_replaced() -> None:
            if replaced and self._staging.of(name) == staged:
                self._staging.put(name, replaced)

        verdict = self._staged_plans.of(server)
        if verdict is not None and verdict.certain and not server.remote:
            keep_replaced()
            raise RefusalError(f"{name} was not restarted: it {verdict.message}", name)
        ended = [*_discarded(server, replaced), *self._ended_by_restart(server, staged)]
        if not ended:
            self._restart(server, staged)
            return
        details = [*ended, *self._changed_by_restart(server, staged)]
        again = partial(self._restart, server, staged)
        note = self._verdict_note(server)
        dialog = self.ask(f"Restart {name}?", details, "restart", again, note, declined=keep_replaced)
        self._question = _RestartQuestion(name, staged, replaced, dialog)

    def _ended_by_restart(self, server: ServerView, staged: Edits) -> list[str]:
        """What a restart interrupts; empty if no confirmation is needed."""
        verdict, details = self._staged_plans.of(server), [*tuner_at_work(server), *in_flight(server)]
        if details and verdict is not None and verdict.refused:
            details = ["The plan has an error: nothing is restarted without another confirmation."]
        if server.state is State.STARTING and not staged and server.next_attempt_at is None:
            details = ["Already starting with these flags; restarting starts over."]
        if server.remote:
            details = [f"On {server.remote}, with its current flags there.", *details]
        return details

    def _changed_by_restart(self, server: ServerView, staged: Edits) -> list[str]:
        verdict = self._staged_plans.of(server)
        downtime = _downtime(server) if verdict is None or not verdict.refused else ""
        return [
            *change_rows(server, staged),
            *filter(None, [combined_warning(server, staged), self._undecided(server), downtime]),
            *_exposure(server),
        ]

    def observe(self, servers: Sequence[ServerView]) -> None:
        """Update an open restart confirmation with requests in flight and the verdict.

        Also report if another restart replaced one requested here.
        """
        for one in servers:
            self._replaced(one)
        if self._question is None:
            return
        asked = self._question
        server = next((one for one in servers if one.name == asked.server), None)
        if server is None or asked.dialog not in self._console.screen_stack:
            return
        if self._staging.of(server.name) == asked.staged:
            ended = self._ended_by_restart(server, asked.staged) or ["No request is in flight."]
            changed = self._changed_by_restart(server, asked.staged)
            asked.dialog.set_details([*_discarded(server, asked.replaced), *ended, *changed])
            asked.dialog.set_note(self._verdict_note(server))

    def _replaced(self, server: ServerView) -> None:
        """If a new run lacks the changes sent from here, report that and stage them again."""
        sent = self._sent.get(server.name)
        if sent is not None and (server.generation > sent.generation or sent.refused(server)):
            self.drop(server.name)
        if sent is None or server.generation <= sent.generation:
            return
        if server.rollback or not unapplied(server.flags, sent.staged):
            return
        again = not self._staging.of(server.name)
        if again:
            self._staging.put(server.name, sent.staged)
        self._console.say(
            f"{server.name} was restarted by someone else: your changes are not in "
            f"effect{'; they have been staged again' if again else ''}.",
            WARN,
            server=server.name,
        )

    def drop(self, name: str) -> None:
        """Forget the restart that was being prepared for a server."""
        self._sent.pop(name, None)

    def _verdict_note(self, server: ServerView) -> Part:
        found = self._staged_plans.of(server)
        return (found.message, found.style) if found is not None else ""

    def _restart(self, server: ServerView, staged: Edits) -> None:
        fleet, name, port = self._console.fleet, server.name, server.port
        predicted = self._predictions.seen(server, staged)

        def restart(options: RestartOptions) -> ServerView:
            if predicted is not None:
                with contextlib.suppress(OperationError):  # restart even if the prediction can't be kept
                    fleet.predictions.keep(name, server.generation, predicted)
            return fleet.restart(name, Changes.of(staged), options)

        def done(view: ServerView) -> str:
            if self._staging.of(name) == staged:
                self._staging.put(name, {})
            if view.restart is not None and view.restart.under_way:
                self._sent[name] = _SentRestart(server.generation, staged, view.restart.asked_at)
                return self._about(name, f"Preparing to restart {name}.")
            self.drop(name)
            if server.remote:
                return f"{name} is restarting."
            number = view.generation + (view.state is State.STOPPING)  # stopping: still the old generation
            moved = f" on port {view.port} ({port} is in use)" if port not in (0, view.port) else ""
            return f"{name} is restarting as run {number}{moved}."

        def run(options: RestartOptions, refused: Refused) -> None:
            call = partial(restart, options)
            self._run(server, RunningVerb.RESTART, f"Restarting {name}…", call, done, refused)

        self.run_planned(server, "restart", edits_flags(), run)

    def cancel_restart(self, server: ServerView) -> None:
        """Cancel a restart being prepared, or going to sleep; the server keeps serving."""
        fleet, name = self._console.fleet, server.name

        def done(_: object) -> str:
            if draining(server):
                return f"{name} keeps serving."
            sent = self._sent.pop(name, None)
            if sent is None or sent.generation != server.generation or not sent.staged or self._staging.of(name):
                return f"{name} keeps its flags."
            self._staging.put(name, sent.staged)
            return f"{name} keeps its flags; the changes are staged again."

        self._console.act("", lambda: fleet.cancel_restart(name), done, about=name)

    def stop(self, selected: ServerView | None) -> None:
        """Stop the server, after confirmation."""
        server = self.idle(selected, to_stop=True, elsewhere=True)
        if not server.state.alive:
            keys = f"{key_of('remove')} removes it, {key_of('restart')} starts it"
            raise RefusalError(f"{server.name} is already {server.state}: {keys}.", server.name)
        self.ask(f"Stop {server.name}?", _ended_by_stop(server), "stop", lambda: self._stop(server))

    def _stop(self, server: ServerView) -> None:
        fleet, name = self._console.fleet, server.name
        self._run(
            server, RunningVerb.STOP, f"Stopping {name}…", lambda: fleet.stop(name), lambda _: f"{name} is stopping."
        )

    # -- several servers -------------------------------------------------------------------------------------------

    def stop_all(self, servers: Sequence[ServerView], began: Callable[[], None]) -> None:
        """Stop several servers after one confirmation; ``began`` is called when stopping begins."""
        able = [server for server in servers if server.state.alive and not self.in_progress.on(server, to_stop=True)]
        self._all("stop", RunningVerb.STOP, servers, able, began, self._stop)

    def restart_all(self, servers: Sequence[ServerView], began: Callable[[], None]) -> None:
        """Restart several servers, each with its staged flags, after one confirmation."""
        able = [server for server in servers if not server.node and not self.in_progress.on(server)]
        self._all("restart", RunningVerb.RESTART, servers, able, began, self._restart_staged)

    def _all(
        self,
        word: str,
        verb: RunningVerb,
        servers: Sequence[ServerView],
        able: Sequence[ServerView],
        began: Callable[[], None],
        do: Callable[[ServerView], None],
    ) -> None:
        if not able:
            names = ", ".join(server.name for server in servers)
            raise RefusalError(f"None of the marked servers can be {verb}: {names}.", servers[0].name)

        def doing() -> None:
            began()
            for server in able:
                do(server)

        details = []
        for server in able:
            facts = [str(server.state), *_ended_by_stop(server)]
            if verb is RunningVerb.RESTART:
                facts += _exposure(server)
                if staged := self._staging.of(server.name):
                    facts.append(", ".join(change_rows(server, staged)))
            warned = "! " if any(fact.startswith("! ") for fact in facts) else ""
            clauses = [_clause(fact.removeprefix("! ")) for fact in facts]
            details.append(f"{warned}{server.name}: {'; '.join(clauses)}")
        details += [f"{server.name}: {server.state}, left as it is" for server in servers if server not in able]
        number = len(able)
        self.ask(f"{word.capitalize()} {counted(number, 'server')}?", details, f"{word} {number}", doing)

    def _restart_staged(self, server: ServerView) -> None:
        self._restart(server, self._staging.of(server.name))

    def remove(self, selected: ServerView | None) -> None:
        """Remove a stopped server after confirmation, with its history or keeping it so that runs can be replayed."""
        server = self.idle(selected)
        if server.state.alive:
            raise RefusalError(f"{server.name} is {server.state}: stop it first ({key_of('stop')}).", server.name)
        fleet, name = self._console.fleet, server.name

        def gone(kept: bool) -> str:
            self._forget(name)
            return f"{name} is removed" + (f"; {key_of('replay')} replays its runs." if kept else ".")

        def remove(*, purge: bool) -> None:
            self._run(server, RunningVerb.REMOVE, f"Removing {name}…", lambda: fleet.forget(name, purge=purge), gone)

        from vllm_console.ui.screens.dialogs import DialogAnswer

        details = ["Deletes its record and log. Its history is kept for 30 days, so its runs can be replayed; a "
                   "purge deletes that, too."]  # fmt: skip
        purge = DialogAnswer("p", "purge", lambda: remove(purge=True))
        self.ask(f"Remove {name}?", details, "remove", lambda: remove(purge=False), other=purge)

    def switch(self, selected: ServerView | None) -> None:
        """Restart a server with another preset, chosen from a list."""
        server = self.alone(self.idle(selected))
        name, present = server.name, server.preset

        def listed(found: tuple[Sequence[Preset], object]) -> str:
            choices = [(preset.name, preset.title) for preset in found[0] if preset.name != present]
            if not choices:
                return "There is no other preset to switch to."
            from vllm_console.ui.screens.dialogs import choose

            question = f"Switch {name} to which preset? (keeps name, GPUs, port)"
            switch = self._console.saying_refusals()(partial(self.switch_to, server))
            choose(self._console, question, choices, switch)
            return ""

        self._console.late_screens.open("", self._console.fleet.presets, listed, once=f"presets for {name}", about=name)

    def switch_to(self, selected: ServerView, preset: str) -> None:
        """Replace a server with this preset, after confirmation."""
        server = self.idle(selected)
        runs = f"preset {server.preset}" if server.preset else "no preset"
        details = [f"Stops {server.name} ({runs}), then starts preset {preset} with its name, GPUs and port."]
        details += [*tuner_at_work(server), *in_flight(server), *_exposure(server)]
        self.ask(f"Switch {server.name} to {preset}?", details, "switch", lambda: self._switch(server, preset))

    def _about(self, name: str, text: str) -> str:
        """Show a message until something else happens to the server. Returns "": nothing is left to report."""
        self._console.say(text, server=name)
        return ""

    def _switch(self, server: ServerView, preset: str) -> None:
        fleet, name = self._console.fleet, server.name

        def done(view: ServerView) -> str:
            self._forget(name)
            if view.restart is not None and view.restart.under_way:
                return self._about(name, f"Preparing to switch {name} to {preset}.")
            return f"Stopping {name}, then starting preset {preset}…"

        def run(options: RestartOptions, refused: Refused) -> None:
            call = partial(fleet.switch, name, preset, options)
            self._run(server, RunningVerb.SWITCH, f"Switching {name} to {preset}…", call, done, refused)

        self.run_planned(server, "switch", f"{key_of('new_server')} launches {preset} with other flags", run)

    def switch_pair(self, selected: ServerView | None) -> None:
        """Put a server to sleep or wake it up, after confirmation; in a standby pair, the other gets its GPUs."""
        server = self.idle(selected)
        other = self._console.server(server.partner) if server.partner else None
        to_sleep, to_wake = server, other
        if server.state is State.ASLEEP:
            to_sleep, to_wake = other if other is not None else server, server
        if server.state not in (State.READY, State.ASLEEP):
            raise RefusalError(f"{server.name} is {server.state}: only a ready server can sleep.", server.name)
        if server.state is State.READY and server.flags.get(SLEEP_MODE) is not True:
            how = f"set --{SLEEP_MODE} ({key_of('edit_flags')}), then restart ({key_of('restart')})"
            raise RefusalError(f"{server.name} can't sleep: {how}.", server.name)
        if to_wake is None or to_wake.state is not State.ASLEEP:
            text = "Its weights move to host memory and its GPUs are freed; it serves no requests until woken up."
            details = [*tuner_at_work(server), text, *_draining()]
            self.ask(f"Put {server.name} to sleep?", details, "sleep", partial(self._sleep, server))
        else:
            details = [f"{to_wake.name} wakes up; its answers are compared with those before it slept."]
            if to_sleep is not to_wake and to_sleep.state is State.READY:
                details = [f"{to_sleep.name} goes to sleep first.", *_draining(), *details]
            self.ask(f"Wake up {to_wake.name}?", details, "wake up", partial(self._wake, to_wake))

    def _sleep(self, server: ServerView) -> None:
        fleet, name = self._console.fleet, server.name
        doing = f"{name} goes to sleep once its requests have ended; {key_of('clear')} cancels it."
        self._run(server, RunningVerb.SLEEP, doing, lambda: fleet.sleep(name), lambda _: f"{name} is asleep.")

    def _wake(self, server: ServerView) -> None:
        fleet, name = self._console.fleet, server.name

        def done(woken: ServerView) -> str:
            if woken.sleep is not None and woken.sleep.checked:
                return f"{name} is awake and answers as before."
            unchecked = woken.sleep.message if woken.sleep is not None else ""
            return f"{name} is awake{f'; {unchecked}' if unchecked else ''}."

        self._run(server, RunningVerb.WAKE, f"Waking up {name}…", lambda: fleet.wake(name), done)

    def toggle_load(self, selected: ServerView | None) -> None:
        """Start or stop sending the preset's workload."""
        server = self.own(selected)
        fleet, name, act = self._console.fleet, server.name, self._console.act
        if server.load:
            act("", lambda: fleet.loads.stop(name), lambda _: f"Stopping the load on {name}.", about=name)
        elif server.state is not State.READY:
            raise RefusalError(f"{name} is {server.state}: a load needs a ready server.", name)
        else:
            self._send_load(server)

    def _send_load(self, server: ServerView) -> None:
        fleet, name, window = self._console.fleet, server.name, server.window

        def send() -> None:
            said = f"Sending {name} its preset's workload for one minute."
            self._console.act("", lambda: fleet.loads.start(name), lambda _: said, about=name)

        others = round((window.requests_running or 0) + (window.requests_waiting or 0)) if window is not None else 0
        if server.tuner is not None:
            self.ask(
                f"A tuner is measuring {name}. Send a load anyway?", ["Its measurements would be wrong."], "send", send
            )
            return
        served = window.requests_per_second if window is not None and not server.load_result else None
        if not others and not served:
            send()
            return
        from vllm_console.ui.screens.ramp import SLOWER_FOR_OTHERS

        many = f"{counted(others, 'request')} {'is' if others == 1 else 'are'} in flight on {name}"
        if not others:
            many = f"{name} served {rate(served, 'req')} in the last minute"
        self.ask(f"{many}. Send a load anyway?", [SLOWER_FOR_OTHERS], "send", send)

    def ramp(self, selected: ServerView | None) -> None:
        """Open the screen that finds the highest request rate at which a server meets its objectives."""
        server = self.idle(selected)
        fleet, name = self._console.fleet, server.name

        def show(_: object) -> str:
            from vllm_console.ui.screens.ramp import RampScreen

            self._console.push_screen(RampScreen(self._console, server.marked_name, name))
            return ""

        def missed(_: object) -> str:
            return f"A ramp runs on {name}: {key_of('ramp')} shows it."

        view = fleet.ramps.view(name)
        if view is not None and view.running:
            show(view)
            return
        if server.state is not State.READY:
            raise RefusalError(f"{name} is {server.state}: a ramp needs a ready server.", name)
        once = f"ramp {name}"
        self._console.late_screens.open("", lambda: fleet.ramps.start(name), show, once=once, about=name, missed=missed)

    def stop_now(self, server: ServerView) -> None:
        """Stop a server without confirmation."""
        self._stop(self.idle(server, to_stop=True))

    # -- running verbs ---------------------------------------------------------------------------------------------

    def _run(
        self,
        server: ServerView,
        verb: RunningVerb,
        doing: str,
        call: Callable[[], T],
        done: Callable[[T], str],
        refused: Refused | None = None,
    ) -> None:
        """Run a verb on a server. ``refused`` reports a plan that won't start, or returns False if the app should."""
        self.in_progress.begin(server, verb)

        def accepted(result: T) -> str:
            if server.remote:  # done once accepted: the outcome of a prepared restart is not visible here
                self.in_progress.drop(server.name)
            else:
                self.in_progress.accept(server.name)
            self._console.messages.accepted(server.name)
            return done(result)

        def failed(error: Exception) -> bool:
            self.in_progress.drop(server.name)
            return refused is not None and refused(error)

        self._console.act(doing, call, accepted, failed, about=server.name)

    def run_planned(
        self,
        server: ServerView,
        what: str,
        fix: str,
        run: Callable[[RestartOptions, Refused], None],
        subject: str = "",
    ) -> None:
        """Run a verb that a plan may refuse, reporting why; if it can be forced, ask, then run it again.

        ``subject`` is what would not start, if not the server itself. ``fix`` says how to change flags.
        """

        def refused(error: Exception) -> bool:
            again = partial(run, RestartOptions(force=True), refused)
            return self._refused(server, error, what, fix, again, subject or server.name)

        run(AS_CONFIGURED, refused)

    def _refused(
        self, server: ServerView, error: Exception, what: str, fix: str, again: Callable[[], None], subject: str
    ) -> bool:
        if not isinstance(error, UnfitError | NoPlaceError):
            return False
        rows = refusal_rows(error, fix)
        forceable = isinstance(error, UnfitError) and error.forceable
        outcome = f"{subject} was not {what}ed"
        if not self._console.operations.on_top or (len(rows) == 1 and not forceable):
            more = f" (+{len(rows) - 1} more)" if len(rows) > 1 else ""
            self._console.say(f"{outcome}: {rows[0]}{more}", BAD, about=server.name)
            return True
        self._console.say(f"{outcome}.", BAD, about=server.name)
        head = f"{subject} {'is unlikely to' if forceable else 'will not'} start"
        details = [f"{number}. {row}" for number, row in enumerate(rows, 1)] if len(rows) > 1 else rows
        if forceable:
            self.ask(f"{head}. {what.capitalize()} anyway?", details, f"{what} anyway", again, late=True)
        else:
            self.ask(f"{head}.", details, "", lambda: None)
        return True

    def ask(
        self,
        question: str,
        details: list[str],
        yes: str,
        then: Callable[[], None],
        note: Part = "",
        *,
        late: bool = False,
        other: DialogAnswer | None = None,
        declined: Callable[[], None] = lambda: None,
    ) -> Confirm:
        """Ask a question; ``then`` is called after a yes, otherwise ``declined``. ``late``: it opens unasked."""
        from vllm_console.ui.screens.dialogs import Confirm  # not needed for the first frame

        def answered(answer: bool | None) -> None:
            with self._console.saying_refusals():
                (then if answer else declined)()

        dialog = Confirm(question, details, yes, late=late, other=other)
        dialog.set_note(note)
        self._console.push_screen(dialog, answered)
        return dialog


def no_server(console: ConsoleApp) -> str:
    """Message for a key that needs a selected server when there is none or none has been read yet."""
    if console.snapshot is None:
        return "Still reading the servers: try again in a moment."
    if wanted := console.operations.filter_text:
        return f"No server matches '{plain(wanted)}'; {key_of('clear')} clears the filter."
    return f"No server selected: {key_of('new_server')} launches one."


def edits_flags() -> str:
    """How to change flags that prevent a restart."""
    return f"{key_of('edit_flags')} edits the flags"


def change_rows(server: ServerView, staged: Edits) -> list[str]:
    """One row per changed flag, or a row saying that none changes."""
    rows = [flag_change(flag, server.flags.get(flag), value) for flag, value in staged.items()]
    return rows or ["No flag changes."]


def _discarded(server: ServerView, staged: Edits) -> list[str]:
    """That a restart discards these staged changes; empty if there are none."""
    if not staged:
        return []
    return [f"Replaces {counted(len(staged), 'staged change')}: {', '.join(change_rows(server, staged))}."]


def in_flight(server: ServerView) -> list[str]:
    """How many requests a stop aborts, or that the number is unknown; empty if the server is idle."""
    if server.state not in (State.READY, State.UNRESPONSIVE):
        return []
    window = server.window
    if window is None or window.requests_running is None:
        return ["The number of requests in flight is unknown; all will be aborted."]
    running, waiting = (round(count or 0) for count in (window.requests_running, window.requests_waiting))
    if not running + waiting:
        if not window.requests_per_second:
            return []
        often = rate(window.requests_per_second, "req")
        return [f"No request is in flight now, but {often} were served in the last minute: new ones will fail."]
    queued = f" ({waiting} queued)" if waiting else ""
    ours = ", including this console's load" if server.load else ""
    return [f"{counted(running + waiting, 'request')} in flight{queued} will be aborted{ours}."]


def tuner_at_work(server: ServerView) -> list[str]:
    """Warning that a running tuner gives up if the server is changed, and how to end it; empty without a tuner."""
    tuner = server.tuner
    if tuner is None:
        return []
    trial = f" ({tuner.place}: {tuner.changes})" if tuner.place else ""
    stay = " and leaves these flags" if tuner.place else ""
    return [
        f"! A tuner is running{trial}: if you continue, it stops{stay}.",
        f"Ctrl+c in its terminal (pid {tuner.pid}) ends it with the original flags.",
    ]


def _ended_by_stop(server: ServerView) -> list[str]:
    """What a stop ends: the tuner, requests in flight, and the other nodes of a multi-node server."""
    return [
        *tuner_at_work(server),
        *in_flight(server),
        *([f"It is {server.node}: the other nodes end with it."] if server.node else []),
    ]


def _downtime(server: ServerView) -> str:
    """Expected downtime based on the last restart or start; empty if unknown."""
    if server.state is not State.READY:
        return ""
    if server.downtime_seconds is not None:
        return f"Expected downtime: about {took(server.downtime_seconds)} (last restart)."
    if not server.stages or any(stage.seconds is None for stage in server.stages):
        return ""
    first, last = server.stages[0], server.stages[-1]
    started_in = last.started_at + (last.seconds or 0.0) - first.started_at
    return f"Expected downtime: about {took(started_in)} (last start)."


def _clause(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:].removesuffix(".")


def _draining() -> list[str]:
    return [f"Requests get {DRAIN_SECONDS:g}s to finish; if any remain, it keeps serving."]


def _exposure(server: ServerView) -> list[str]:
    """Warning that others can use the server without an API key; part of each question before a start."""
    return [f"! {server.exposed}."] if server.exposed else []


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusal_rows(error: OperationError, fix: str) -> list[str]:
    """Why a restart or switch was refused, one row per problem, worst first. ``fix`` says how to change flags."""
    if isinstance(error, UnfitError) and error.findings:
        return [_finding(finding, fix) for finding in error.findings]
    text = plain(str(error).strip().partition("\n")[0])
    if isinstance(error, NoPlaceError) and error.only_of_command:
        stop, new = key_of("stop"), key_of("new_server")
        text = f"{plain(error.problem)}. {stop} stops it, then {new} launches it under this name on other GPUs"
    return [text.removesuffix(".") + "."]


def _finding(finding: PlanFinding, fix: str) -> str:
    message = plain(finding.message).removesuffix(".")
    return f"{message}. {_fix(finding.fix)} ({fix})." if finding.fix is not None else f"{message}."


def _fix(fix: Changes) -> str:
    words = [f"--{plain(name)} {shown_value(value)}" for name, value in fix.set.items()]
    return "Fix: " + ", ".join([*words, *(f"no --{plain(name)}" for name in fix.unset)])
