"""Hints that guide new users through the demo, one at a time: findings, fix, restart, compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from textual.strip import Strip

from vllm_console.diagnosis.finding import Severity
from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain
from vllm_console.ui.findings import findings_of
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import clickable, line
from vllm_console.ui.theme import ACCENT, KEY
from vllm_console.ui.widgets.draw import fit


class HintStep(NamedTuple):
    """A step: the action that completes it, and its text with the placeholders ``{key}``, ``{yes}`` and ``{name}``."""

    action: str
    text: str


STEPS = (
    HintStep("findings", "{key} shows the findings of {name}: figures, cause, fixes"),
    HintStep("stage_fix", "{key} stages the best fix; its trade-off is shown"),
    HintStep("restart", "{key}, then {yes}, restarts {name} with the change"),
    HintStep("compare", "{key} compares the runs"),
)
_STAGE, _RESTART = 1, 2
"""If the change is dropped before the restart, hints go back from the second of these steps to the first."""

RESTARTING = "{name} is restarting with the change; wait until it is ready"

SELECT = "select {name}, which was restarted; then {key} compares its runs"

NOTHING_FOUND = "findings appear above the charts; wait for a burst of traffic"


def _troubled(server: ServerView | None) -> bool:
    return server is not None and any(found.severity is not Severity.GOOD for found in findings_of(server))


class DemoHints:
    """Tracks the current hint. Calls ``ended`` once all were followed or hidden."""

    def __init__(self, shown: bool, ended: Callable[[], None]) -> None:
        self._at = 0 if shown else len(STEPS)
        self._ended = ended
        self._generations: dict[str, int] = {}
        self._staged = self._restarted = ""
        """The server that changes were last staged for, and the one last restarted with its own."""

    @property
    def shown(self) -> bool:
        """Whether a hint is shown."""
        return self._at < len(STEPS)

    def followed(self, action: str) -> None:
        """Complete a step and those before it. A comparison before any change, or without a verdict, does not count."""
        taken = next(index for index, step in enumerate(STEPS) if step.action == action)
        if self.shown and self._at <= taken and (taken == self._at or taken < len(STEPS) - 1):
            self._at = taken + 1
            if not self.shown:
                self._ended()

    def observe(self, server: ServerView, staged: bool, *, restarting: bool = False) -> None:
        """Detect completed steps from a server's state; a step that was undone is shown again.

        While ``restarting``, staged changes are being applied.
        """
        before = self._generations.get(server.name, server.generation)
        self._generations[server.name] = server.generation
        if server.generation > before and server.name == self._staged:  # other restarts changed nothing to compare
            self._restarted = server.name
            self.followed("restart")
        elif staged:
            self._staged = server.name
            self.followed("stage_fix")
        elif self._at == _RESTART and not restarting:
            self._at, self._staged = _STAGE, ""

    def hide(self) -> None:
        """Hide hints for good."""
        if self.shown:
            self._at = len(STEPS)
            self._ended()

    def line(
        self,
        server: ServerView | None,
        width: int,
        *,
        staged: bool = False,
        awaited: str = "",
        restarting: bool = False,
    ) -> Strip:
        """The hint line with the key that hides hints, unless changes are ``staged``: then that key drops them.

        ``awaited`` says why a comparison has no verdict yet, e.g. ``Wait about 2m20s for a verdict above``. While
        ``restarting``, there is nothing to do.
        """
        step = STEPS[self._at]
        text = step.text
        if step.action == "findings" and not _troubled(server):
            text = NOTHING_FOUND
        if step.action == "restart" and restarting:
            text = RESTARTING
        name = plain(server.name) if server else ""
        if step.action == "compare" and self._restarted not in ("", name):
            text, name = SELECT, plain(self._restarted)
        elif step.action == "compare" and awaited:
            text = f"{awaited}, then press {{key}}."
        text = text.format(key=key_of(step.action), yes=key_of("question_yes"), name=name)
        head, end = f" hint {self._at + 1}/{len(STEPS)}  ", "" if staged else f"{key_of('clear')} hides hints "
        room = max(1, width - len(head) - len(end) - 1)
        return line((head, ACCENT), fit(text, room), " ", (end, clickable("screen.hide_hints", KEY)))
