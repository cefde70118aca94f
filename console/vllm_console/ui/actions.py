"""The one registry of what a person can do: key bindings, palette, help, footer and the README's table come from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from textual.binding import Binding


@dataclass(frozen=True, slots=True)
class Action:
    """Something a person can do with a key.

    ``id`` names the method ``action_<id>`` (words joined by ``_``); ``keys`` are Textual key names, the first is shown;
    ``scope`` is ``app``, ``operations``, ``launch``, ``flags`` or ``log``; ``changes`` marks what alters a server or
    the shared board, and vanishes under ``--read-only``; ``footer`` puts it into the footer line, in the order of the
    registry; ``short`` is its name there; ``group`` is the heading it stands under in help.
    """

    id: str
    keys: tuple[str, ...]
    title: str
    scope: str
    changes: bool = False
    footer: bool = False
    short: str = ""
    group: str = ""

    @property
    def label(self) -> str:
        """Its shown keys, e.g. ``j ↓``."""
        return " ".join(key_label(key) for key in self.keys)


def _action(
    id: str, keys: str, title: str, scope: str, group: str, short: str = "", *, changes: bool = False
) -> Action:
    return Action(id, tuple(keys.split()), title, scope, changes, bool(short), short, group)


_SERVERS, _VIEW, _STAGE, _CONSOLE = "Servers", "Look", "Change flags of the selected server", "Console"

_ACTIONS: tuple[Action, ...] = (
    _action("new_server", "n", "Launch a new server from a preset", "operations", _SERVERS, "new", changes=True),
    _action("edit_flags", "e", "Edit all flags of the selected server", "operations", _STAGE, "flags", changes=True),
    _action("restart", "r", "Restart the selected server with the staged flags", "operations", _SERVERS, "restart",
            changes=True),
    _action("stop", "s", "Stop the selected server", "operations", _SERVERS, "stop", changes=True),
    _action("switch_preset", "w", "Switch the selected server to another preset", "operations", _SERVERS, "switch",
            changes=True),
    _action("forget", "x", "Forget a stopped or failed server: its record, log and history", "operations", _SERVERS,
            changes=True),
    _action("remove_leftovers", "X", "Remove what ended servers left: processes, files in /dev/shm", "operations",
            _SERVERS, changes=True),
    _action("toggle_load", "b", "Send the preset's workload to the server, or end it", "operations", _SERVERS, "load",
            changes=True),
    _action("stage_cure", "f", "Stage the cure of what is found; again: the next cure", "operations", _SERVERS,
            changes=True),
    _action("why", "i", "Why: what is found of the server, with figures, causes and all cures", "operations", _VIEW),
    _action("open_log", "l", "Read the server's log on the whole screen", "operations", _VIEW, "log"),
    _action("describe", "d enter", "Describe the server: command, flags with reasons, history", "operations", _VIEW,
            "describe"),
    _action("compare", "c", "Compare with the run before: did the change of flags help?", "operations", _VIEW,
            "compare"),
    _action("filter", "slash", "Show only servers whose name, preset or state contains a text", "operations", _VIEW,
            "filter"),
    _action("copy_command", "y", "Copy the server's command line", "operations", _VIEW),
    _action("cursor_down", "j down", "Next server", "operations", _VIEW),
    _action("cursor_up", "k up", "Previous server", "operations", _VIEW),
    _action("cursor_first", "home", "First server", "operations", _VIEW),
    _action("cursor_last", "end", "Last server", "operations", _VIEW),
    _action("pane_1", "1", "KV cache; again: all panes", "operations", _VIEW),
    _action("pane_2", "2", "Preemptions; again: all panes", "operations", _VIEW),
    _action("pane_3", "3", "Latency; again: all panes", "operations", _VIEW),
    _action("pane_4", "4", "Requests and throughput; again: all panes", "operations", _VIEW),
    _action("pane_5", "5", "Log; again: all panes", "operations", _VIEW),
    _action("pane_6", "6 g", "GPUs and their links; again: all panes", "operations", _VIEW),
    _action("describe_gpus", "G", "Describe the GPUs: clocks, every link, every process", "operations", _VIEW),
    _action("claim_gpus", "C", "Claim GPUs on the shared board, or take claims back", "operations", _SERVERS,
            changes=True),
    _action("next_pane", "tab", "Next pane", "operations", _VIEW),
    _action("previous_pane", "shift+tab", "Previous pane", "operations", _VIEW),
    _action("halve_sequences", "left_square_bracket", "Halve --max-num-seqs", "operations", _STAGE, changes=True),
    _action("double_sequences", "right_square_bracket", "Double --max-num-seqs", "operations", _STAGE, changes=True),
    _action("halve_context", "left_curly_bracket", "Halve --max-model-len", "operations", _STAGE, changes=True),
    _action("double_context", "right_curly_bracket", "Double --max-model-len", "operations", _STAGE, changes=True),
    _action("lower_utilization", "less_than_sign", "Lower --gpu-memory-utilization by 0.02", "operations", _STAGE,
            changes=True),
    _action("raise_utilization", "greater_than_sign", "Raise --gpu-memory-utilization by 0.02", "operations", _STAGE,
            changes=True),
    _action("toggle_prefix_caching", "p", "Prefix caching on or off", "operations", _STAGE, changes=True),
    _action("toggle_chunked_prefill", "P", "Chunked prefill on or off", "operations", _STAGE, changes=True),
    _action("cycle_kv_dtype", "v", "KV cache in FP8 or in the model's own type", "operations", _STAGE, changes=True),
    _action("stage_traffic", "t", "Set flags from the traffic that was seen", "operations", _STAGE, changes=True),
    _action("previous_flags", "z", "Stage the flags of the previous generation", "operations", _STAGE, changes=True),
    _action("drop_last", "backspace", "Drop the change staged last", "operations", _STAGE, changes=True),
    _action("clear", "escape", "Drop all staged changes; then the filter", "operations", _STAGE),
    _action("pause", "space", "Pause or go on", "app", _CONSOLE),
    _action("refresh_faster", "plus equals_sign", "Look more often", "app", _CONSOLE),
    _action("refresh_slower", "minus", "Look less often", "app", _CONSOLE),
    _action("commands", "colon ctrl+p", "Command palette", "app", _CONSOLE),
    _action("help", "question_mark f1", "Help: all keys", "app", _CONSOLE, "help"),
    _action("quit", "q ctrl+q", "Quit; servers stay up", "app", _CONSOLE, "quit"),
)  # fmt: skip


@cache
def actions() -> tuple[Action, ...]:
    """Every action of every screen."""
    from vllm_console.ui.screen_actions import FLAGS_ACTIONS, LAUNCH_ACTIONS, LOG_ACTIONS

    return (*_ACTIONS, *LAUNCH_ACTIONS, *FLAGS_ACTIONS, *LOG_ACTIONS)


_LABELS = {
    "slash": "/", "question_mark": "?", "colon": ":", "plus": "+", "equals_sign": "=", "minus": "-",
    "left_square_bracket": "[", "right_square_bracket": "]", "left_curly_bracket": "{", "right_curly_bracket": "}",
    "less_than_sign": "<", "greater_than_sign": ">", "up": "↑", "down": "↓", "escape": "esc",
}  # fmt: skip


def key_label(key: str) -> str:
    """How a key is written for people: ``left_square_bracket`` is ``[``."""
    return _LABELS.get(key, key)


def scoped(scope: str, read_only: bool = False) -> Iterator[Action]:
    """The actions of a scope, in the order of the registry; read-only leaves out what changes something."""
    found = _ACTIONS if scope in ("app", "operations") else actions()
    return (action for action in found if action.scope == scope and not (read_only and action.changes))


def bindings(scope: str) -> list[Binding]:
    """Textual bindings of a scope; each has the action's id, so that a person's settings can move it."""
    return [
        Binding(",".join(action.keys), action.id, action.title, show=False, id=action.id) for action in scoped(scope)
    ]


def changing(action_id: str) -> bool:
    """Whether the action of this id alters a server."""
    return any(action.id == action_id and action.changes for action in _ACTIONS)


SCREENS = {"launch": "On the launch screen", "flags": "On the flags screen", "log": "On the log screen"}
"""Scopes of screens other than the operations screen, and their headings."""


def check_keys(keys: Mapping[str, str]) -> list[str]:
    """What is wrong with a person's own keys (action's id to a key), one sentence each; empty when all is well.

    Textual itself ignores unknown ids and lets one binding shadow another in silence.
    """
    problems = []
    known = {action.id: action for action in actions()}
    for action_id in keys:
        if action_id not in known:
            near = get_close_matches(action_id, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            problems.append(f"keys: there is no action '{action_id}'{hint}")
    taken: dict[tuple[str, str], str] = {}
    for action in actions():
        chosen = keys[action.id].replace(",", " ").split() if action.id in keys else action.keys
        for key in chosen:
            for scope in {action.scope, "app"} if action.scope != "app" else {a.scope for a in actions()}:
                other = taken.setdefault((scope, key), action.id)
                if other != action.id and (action.id in keys or other in keys):
                    problems.append(f"keys: '{key_label(key)}' would mean both '{other}' and '{action.id}'")
    return list(dict.fromkeys(problems))


def grouped(read_only: bool = False) -> dict[str, list[Action]]:
    """All actions under the headings that help and README show, the operations screen's first."""
    groups: dict[str, list[Action]] = {}
    for action in actions():
        if not (read_only and action.changes):
            groups.setdefault(SCREENS.get(action.scope) or action.group, []).append(action)
    return groups


def keys_markdown() -> str:
    """The tables of keys for the README; those of the screens that one goes to and comes back from are folded."""
    parts = []
    for title, group in grouped().items():
        rows = [f"| {' '.join(f'`{key_label(key)}`' for key in action.keys)} | {action.title} |" for action in group]
        table = "\n".join(["| key | what it does |", "|---|---|", *rows])
        if title in SCREENS.values():
            parts.append(f"<details><summary>{title}</summary>\n\n{table}\n\n</details>\n")
        else:
            parts.append(f"**{title}**\n\n{table}\n")
    return "\n".join(parts)
