"""The keys shown in the footer: those that apply to the selection, most important first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from vllm_console.diagnosis.finding import Severity
from vllm_console.fleet.snapshot import ServerView
from vllm_console.ui.actions import Action, scoped
from vllm_console.ui.findings import being_applied, findings_of
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.servers import ranks_of
from vllm_console.ui.widgets.draw import KeyHint
from vllm_launchers.keeper.records import State
from vllm_launchers.plan.flags import SLEEP_MODE


class FooterContext(msgspec.Struct, frozen=True):
    """The context of the keys: the selected server, whether it has staged changes, and the number of marked servers."""

    server: ServerView | None = None
    staged: bool = False
    marked: int = 0
    read_only: bool = False
    past: bool = False
    """Whether an earlier moment is shown; mutating keys still act on the present."""
    replay: bool = False
    empty: bool = False
    tuning: bool = False
    """Whether the tuning bar, which has its own keys, is open."""
    named: frozenset[str] = frozenset()
    """Actions whose keys are already shown above the panes."""
    filtered: bool = False
    """Whether the clear key would clear a filter (after any staged changes)."""


def _with_server(applies: Callable[[ServerView], bool]) -> Callable[[FooterContext], bool]:
    return lambda now: now.server is not None and applies(now.server)


def _has_fix(server: ServerView) -> bool:
    found = findings_of(server)
    return bool(found and found[0].flag_fixes) and not being_applied(server, found[0].flag_fixes)


def _has_findings(server: ServerView) -> bool:
    return any(found.severity is not Severity.GOOD for found in findings_of(server))


_APPLIES: Mapping[str, Callable[[FooterContext], bool]] = {
    "stage_fix": _with_server(_has_fix),
    "findings": _with_server(_has_findings),
    "open_log": _with_server(lambda server: bool(server.log_path)),
    "compare": _with_server(lambda server: server.generation > 1),
    "previous_flags": _with_server(lambda server: server.previous_flags is not None),
    "switch_pair": _with_server(lambda server: server.state is State.ASLEEP or server.flags.get(SLEEP_MODE) is True),
    "ranks": _with_server(lambda server: len(ranks_of(server)) > 1),
    "toggle_load": _with_server(lambda server: server.state is State.READY),
    "chat": _with_server(lambda server: server.state is State.READY),
    "ramp": _with_server(lambda server: server.state is State.READY),
    "stop": lambda now: bool(now.marked) or (now.server is not None and now.server.state.alive),
}
"""Conditions of actions that do not always apply."""

_ALWAYS = ("new_server", "filter", "messages")
_FIRST = ("new_server", "find_model", "demo")
_MARKED = ("restart", "stop", "mark", "clear")
_STAGED = ("restart", "adjust", "drop_last", "clear", "stage_fix", "edit_flags", "open_log", "describe")
_OF_TUNING_BAR = ("adjust", "clear")
"""Actions that the tuning bar's own keys replace."""
_OF_OTHERS = ("findings", "ranks", "describe", "sort", *_ALWAYS)
_BY_STATE: Mapping[State, Sequence[str]] = {
    State.FAILED: (
        "stage_fix",
        "findings",
        "open_log",
        "restart",
        "edit_flags",
        "previous_flags",
        "remove",
        "describe",
    ),
    State.STOPPED: ("restart", "edit_flags", "remove", "switch_preset", "open_log", "describe"),
    State.ASLEEP: ("switch_pair", "stop", "open_log", "describe"),
    State.STARTING: ("open_log", "stop", "describe", "restart", "edit_flags"),
    State.STOPPING: ("open_log", "describe"),
}
_RUNNING = (
    "stage_fix", "findings", "restart", "stop", "open_log", "describe", "ranks", "compare", "edit_flags", "chat",
    "ramp", "toggle_load", "switch_pair", "new_server", "switch_preset",
)  # fmt: skip
_UNUSED = ("restart", "stop", "toggle_load", "chat", "ramp", "open_log", "describe", "ranks", "compare",
           "edit_flags", "switch_pair", "switch_preset")  # fmt: skip
"""For servers without traffic: actions that send some come first."""


_PAST = (
    "time_live", "time_back", "time_forward", "marker_back", "marker_forward", "findings", "open_log", "range_longer",
)  # fmt: skip


def footer_hints(now: FooterContext) -> list[KeyHint]:
    """The applicable keys with their click actions, except those already shown above the panes."""
    found = [(action, f"screen.{action.call}") for action in applying(now) if action.short]
    return [(key_of(action.id), _label(action, now), call) for action, call in found if call not in now.named]


def applying(now: FooterContext) -> list[Action]:
    """The actions that apply to the selection, most important first."""
    known: dict[str, Action] = {action.id: action for action in scoped("operations", now.read_only)}
    wanted = [name for name in dict.fromkeys(_wanted(now)) if not (now.tuning and name in _OF_TUNING_BAR)]
    return [known[name] for name in wanted if name in known and _APPLIES.get(name, _always)(now)]


def tail_hints() -> list[KeyHint]:
    """The keys that are always shown: help and quit."""
    return [(key_of(action.id), action.short, f"app.{action.call}") for action in scoped("app") if action.short]


def _wanted(now: FooterContext) -> Sequence[str]:
    wanted = _for_selection(now)
    return ("clear", *wanted) if now.filtered and not now.staged else wanted


def _for_selection(now: FooterContext) -> Sequence[str]:
    if now.past:
        return _PAST
    if now.marked:
        return _MARKED
    if now.server is None:
        return (*(_FIRST if now.empty else ()), *_ALWAYS, "describe_gpus", "claim_gpus")
    if now.server.remote_ours:
        return ("restart", "stop", *_OF_OTHERS)
    if not now.server.ours:
        return _OF_OTHERS
    if now.server.node:  # a node is not restarted or changed alone
        return ("stop" if now.server.state.alive else "remove", "open_log", "describe", *_ALWAYS)
    if now.staged:
        return (*_STAGED, *_ALWAYS)
    running = _UNUSED if _unused(now.server) else _RUNNING
    return (*_BY_STATE.get(now.server.state, running), *_ALWAYS)


def _unused(server: ServerView) -> bool:
    """Whether a server had no requests in the last minute and has no problems."""
    window = server.window
    if window is None or _has_findings(server):
        return False
    return not (window.requests_running or window.requests_waiting or window.requests_per_second)


def _always(_now: FooterContext) -> bool:
    return True


def _label(action: Action, now: FooterContext) -> str:
    if action.id == "restart" and not now.marked and now.server is not None and not now.server.state.alive:
        return "start"
    if action.id == "toggle_load" and now.server is not None and now.server.load:
        return "end load"
    if action.id == "time_live" and now.replay:
        return "leave"
    if action.id == "clear":
        return _cleared(now)
    return action.short


def _cleared(now: FooterContext) -> str:
    if now.filtered and not now.staged:
        return "clear filter"
    return "unmark" if now.marked else "drop"
