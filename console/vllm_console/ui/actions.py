"""The single registry of user actions: the source of key bindings, commands, help, the footer and docs/keys.md."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

import msgspec
from textual.binding import Binding

from vllm_console.ui.parts.staging import TUNING_KEYS


class Action(msgspec.Struct, frozen=True):
    """An action that the user can run with a key.

    ``id`` is its name in settings. ``keys`` are Textual key names; the first is the one shown. ``scope`` is ``app``,
    ``operations`` or one of `SCREENS`. ``changes`` marks actions that change or start something (servers, the board,
    downloads); ``--read-only`` removes them. ``short`` is the name in the footer, empty if it is not shown there; the
    operations screen shows it only where it applies. ``group`` is the heading in help. ``call`` is Textual's action, by
    default the method ``action_<id>``.
    """

    id: str
    keys: tuple[str, ...]
    title: str
    scope: str
    changes: bool = False
    short: str = ""
    group: str = ""
    call: str = ""


def _action(
    id: str, keys: str, title: str, scope: str, group: str, short: str = "", *, changes: bool = False, call: str = ""
) -> Action:
    return Action(id, tuple(keys.split()), title, scope, changes, short, group, call or id)


def _on(
    scope: str, id: str, keys: str, title: str, short: str = "", *, changes: bool = False, call: str = ""
) -> Action:
    return Action(id, tuple(keys.split()), title, scope, changes, short, SCREENS[scope], call or id)


SCREENS = {
    "tuning": "In the tuning bar",
    "launch": "On the launch screen",
    "flags": "On the flags screen",
    "log": "On the log screen",
    "reader": "On text screens: help, findings, comparison, descriptions",
    "help": "On the help screen",
    "findings": "On the findings screen",
    "compare": "On the comparison screen",
    "describe": "On the description of a server",
    "chat": "In a chat",
    "code": "On the code of a chat",
    "question": "In a question",
    "list": "In a list to choose from",
    "moving": "Moving on other screens",
}
"""Scopes of screens other than the operations screen, and their headings."""

TEXT_SCREENS = ("help", "findings", "compare", "describe", "code")
"""Scopes of text screens that have their own keys in addition to those of ``reader``."""

DIALOGS = ("question", "list")
"""Scopes of dialogs, where app-wide keys do not apply."""

MOVING = "moving"
"""The scope of keys that several screens share: they move the cursor or the text."""

MOVED = ("launch", "flags", "log", "reader", "list")
"""The scopes that include those keys."""


_SERVERS, _VIEW, _STAGE, _CONSOLE = "Servers", "View", "Change flags of the selected server", "Console"
_TIME = "Time"

_ACTIONS: tuple[Action, ...] = (
    _action("new_server", "n", "Launch a new server from a preset", "operations", _SERVERS, "new", changes=True),
    _action("find_model", "M", "Launch one of the models on this machine", "operations", _SERVERS, changes=True),
    _action("edit_flags", "e", "Edit all flags of the selected server", "operations", _STAGE, "flags", changes=True),
    _action("restart", "r", "Restart the selected server, or the marked ones, with the staged flags", "operations",
            _SERVERS, "restart", changes=True),
    _action("rolling_update", "U", "Rolling update: start a second instance with the staged flags",
            "operations", _SERVERS, "update", changes=True),
    _action("stop", "s", "Stop the selected server, or the marked ones", "operations", _SERVERS, "stop", changes=True),
    _action("switch_preset", "w", "Switch the selected server to another preset", "operations", _SERVERS, "switch",
            changes=True),
    _action("switch_pair", "W", "Put to sleep or wake up; in a standby pair, swap the two",
            "operations", _SERVERS, "sleep/wake", changes=True),
    _action("remove", "x", "Remove a stopped or failed server: delete its record and log; its runs can be replayed",
            "operations", _SERVERS, "remove", changes=True),
    _action("remove_leftovers", "X", "Remove leftovers of ended servers: processes, files in /dev/shm", "operations",
            _SERVERS, changes=True),
    _action("toggle_load", "b", "Start or stop sending the preset's workload", "operations", _SERVERS, "load",
            changes=True),
    _action("ramp", "B", "Find the highest request rate at which the server meets its objectives", "operations",
            _SERVERS, "ramp", changes=True),
    _action("adapters", "F", "Load a LoRA adapter into the server, or unload one", "operations", _SERVERS,
            changes=True),
    _action("chat", "A", "Chat with the server; shows TTFT and ITL for each answer", "operations", _SERVERS, "ask",
            changes=True),
    _action("stage_fix", "f", "Stage a fix for the top finding; again: the next fix", "operations", _SERVERS,
            "fix", changes=True),
    _action("findings", "i", "Findings: evidence, cause, fixes", "operations", _VIEW, "findings"),
    _action("open_log", "l", "Read the server's log full screen", "operations", _VIEW, "log"),
    _action("describe", "d enter", "Describe the server: command, flags with reasons, history", "operations", _VIEW,
            "describe"),
    _action("compare", "c", "Compare with the previous run: did the flag change help?", "operations", _VIEW,
            "compare"),
    _action("filter", "slash", "Filter servers by name, model, preset, state, GPU, port or owner", "operations", _VIEW,
            "filter"),
    _action("sort", "o", "Sort servers by a column; again: reverse the order", "operations", _VIEW, "sort"),
    _action("mark", "asterisk insert", "Mark the server: marked ones are stopped or restarted together", "operations",
            _SERVERS, "mark", changes=True),
    _action("ranks", "N", "Show one row per data-parallel rank; again: one row per server", "operations", _VIEW,
            "ranks"),
    _action("copy_command", "y", "Copy the server's command line", "operations", _VIEW),
    _action("cursor_down", "j down", "Next server", "operations", _VIEW, call="cursor(1)"),
    _action("cursor_up", "k up", "Previous server", "operations", _VIEW, call="cursor(-1)"),
    _action("cursor_first", "g", "First server", "operations", _VIEW),
    _action("cursor_last", "G", "Last server", "operations", _VIEW),
    _action("messages", "m", "Messages and events since the console was opened", "operations", _VIEW, "messages"),
    _action("pane_1", "1", "Enlarge the KV cache; again: all panes", "operations", _VIEW, call="pane(1)"),
    _action("pane_2", "2", "Enlarge preemptions; again: all panes", "operations", _VIEW, call="pane(2)"),
    _action("pane_3", "3", "Enlarge latencies; again: all panes", "operations", _VIEW, call="pane(3)"),
    _action("pane_4", "4", "Enlarge throughput: tokens, requests running and waiting; again: all panes",
            "operations", _VIEW, call="pane(4)"),
    _action("pane_5", "5", "Enlarge the log; again: all panes", "operations", _VIEW, call="pane(5)"),
    _action("pane_6", "6", "Enlarge GPUs and their links; again: all panes", "operations", _VIEW, call="pane(6)"),
    _action("pane_7", "7", "Enlarge finished requests, with time per stage; again: all panes", "operations",
            _VIEW, call="pane(7)"),
    _action("pane_8", "8", "Enlarge the engine's steps: batches, tokens, step times; again: all panes", "operations",
            _VIEW, call="pane(8)"),
    _action("requests_order", "V", "Next view of the finished requests: slowest, newest, preempted, aborted, prefixes",
            "operations", _VIEW),
    _action("gpu_history", "H", "Show GPU and link charts; press again for current readings", "operations",
            _VIEW),
    _action("gpu_charts_next", "J", "Next charts: more of this GPU and its links, then the next GPU", "operations",
            _VIEW, call="gpu_charts(1)"),
    _action("gpu_charts_previous", "K", "Previous charts of this GPU, or of the previous GPU", "operations", _VIEW,
            call="gpu_charts(-1)"),
    _action("next_layout", "L", "Next layout: overview, focus (one large pane), wide, tall, or the best for the size",
            "operations", _VIEW, "layout"),
    _action("describe_gpus", "D", "Describe the GPUs: clocks, every link, every process", "operations", _VIEW, "GPUs"),
    _action("claim_gpus", "C", "Claim GPUs on the shared board, or release them", "operations", _SERVERS, "claim",
            changes=True),
    _action("next_pane", "tab", "Enlarge the next pane", "operations", _VIEW, call="step_pane(1)"),
    _action("previous_pane", "shift+tab", "Enlarge the previous pane", "operations", _VIEW, call="step_pane(-1)"),
    _action("adjust", "a", "Adjust common flags with the arrow keys; checks that they fit",
            "operations", _STAGE, "adjust", changes=True),
    _action("range_shorter", "left_parenthesis", "Shorter range of the charts", "operations", _TIME,
            call="step_range(-1)"),
    _action("range_longer", "right_parenthesis", "Longer range of the charts, 5m to all", "operations", _TIME,
            "range", call="step_range(1)"),
    _action("time_back", "left", "Back in time: the screen shows the moment under the cursor", "operations", _TIME,
            "back", call="time(-1)"),
    _action("time_forward", "right", "Forward in time", "operations", _TIME, "forward", call="time(1)"),
    _action("time_page_back", "shift+left pageup", "Back by the width of a chart", "operations", _TIME,
            call="time(0, -1)"),
    _action("time_page_forward", "shift+right pagedown", "Forward by the width of a chart", "operations", _TIME,
            call="time(0, 1)"),
    _action("marker_back", "comma", "Back to the previous marker: restart, crash, finding, load", "operations", _TIME,
            "marker before", call="marker(-1)"),
    _action("marker_forward", "full_stop", "Forward to the next marker", "operations", _TIME,
            "after", call="marker(1)"),
    _action("time_first", "home", "To the beginning of the charts", "operations", _TIME),
    _action("time_live", "end", "Back to live; leave a replay", "operations", _TIME, "live"),
    _action("replay", "O", "Replay a run that has ended, even of a removed server", "operations", _TIME),
    _action("log_scale", "Y", "Latencies on a logarithmic or linear scale", "operations", _TIME),
    *(
        _action(one.id, one.key, one.title, "operations", _STAGE, changes=True, call=f"stage('{one.id}')")
        for one in TUNING_KEYS.values()
    ),
    _action("stage_traffic", "t", "Suggest flags from measured traffic", "operations", _STAGE, changes=True),
    _action("previous_flags", "z", "Stage a revert to the previous run's flags", "operations", _STAGE,
            "revert", changes=True),
    _action("drop_last", "backspace", "Drop the last staged change", "operations", _STAGE, "drop last", changes=True),
    _action("clear", "escape", "Drop staged changes (asks if several); then clear filter, marks, large pane, "
                               "replay, hints",
            "operations", _STAGE, "drop"),
    _action("demo", "E", "Open the demo (if no server is shown)", "operations", _CONSOLE, changes=True),
    _action("pause", "space", "Pause / resume", "app", _CONSOLE),
    _action("refresh_faster", "plus equals_sign", "Refresh faster", "app", _CONSOLE),
    _action("refresh_slower", "minus", "Refresh slower", "app", _CONSOLE),
    _action("commands", "colon ctrl+p", "Type a command, such as range 6h", "app", _CONSOLE),
    _action("next_theme", "T", "Next color theme", "app", _CONSOLE),
    _action("picture", "I", "Save a picture of the screen (SVG)", "app", _CONSOLE),
    _action("help", "question_mark f1", "Help: all keys", "app", _CONSOLE, "help"),
    _action("quit", "q ctrl+q", "Quit; servers stay up", "app", _CONSOLE, "quit"),
    _on("tuning", "tuning_right", "right", "Next flag", "flag", call="move(1)"),
    _on("tuning", "tuning_left", "left", "Previous flag", call="move(-1)"),
    _on("tuning", "tuning_up", "up", "Raise the flag's value, or switch it", "value", changes=True, call="step(1)"),
    _on("tuning", "tuning_down", "down", "Lower the flag's value, or switch it", changes=True, call="step(-1)"),
    _on("tuning", "tuning_keep", "enter", "Keep the changes staged and leave", "keep"),
    _on("tuning", "tuning_leave", "escape", "Cancel: restore what was staged before", "leave"),
    _on("launch", "launch_start", "ctrl+s", "Launch the server as shown", "launch", changes=True),
    _on("launch", "launch_open", "enter", "Edit the field or flag; on a preset: go to its settings", "edit"),
    _on("launch", "launch_toggle", "space", "Toggle a flag; next engine or GPUs", "on/off"),
    _on("launch", "launch_fix", "f", "Apply the fix of the finding shown", "fix"),
    _on("launch", "launch_layouts", "l", "Other layouts side by side: ↑ ↓ choose, enter applies one", "layouts"),
    _on("launch", "launch_next", "tab", "Next section", "section", call="section(1)"),
    _on("launch", "launch_get", "d", "Download the model from the Hugging Face hub if it is missing", changes=True),
    _on("launch", "launch_add", "a", "Search all flags and add one", "add flag"),
    _on("launch", "launch_remove", "delete backspace", "Remove the flag, or clear the field", "remove"),
    _on("launch", "launch_undo", "u", "Undo the change of this flag or field", "undo"),
    _on("launch", "launch_previous", "shift+tab", "Previous section", call="section(-1)"),
    _on("launch", "launch_copy", "y", "Copy the command line"),
    _on("launch", "launch_back", "escape q", "Back, without launching", "back"),
    _on("flags", "flags_keep", "ctrl+s", "Stage the changes and go back", "stage", changes=True),
    _on("flags", "flags_edit", "enter", "Edit the flag's value", "edit"),
    _on("flags", "flags_toggle", "space", "Toggle, or next choice", "on/off"),
    _on("flags", "flags_unset", "delete backspace", "Unset the flag: vLLM's default applies", "unset"),
    _on("flags", "flags_undo", "u", "Undo the change of this flag", "undo"),
    _on("flags", "flags_search", "slash", "Search names and descriptions; unlisted flags can be added", "search"),
    _on("flags", "flags_traffic", "t", "Suggest flags from measured traffic, with reasons", "from traffic"),
    _on("flags", "flags_changed", "c", "Show only flags that are set or changed", "only set"),
    _on("flags", "flags_back", "escape q", "Back; asks if there are unstaged changes", "back"),
    _on("log", "log_search", "slash", "Search upwards from here", "search"),
    _on("log", "log_wrap", "w", "Wrap or cut long lines", "wrap"),
    _on("log", "log_right", "right", "Scroll right", "scroll", call="sideways(1)"),
    _on("log", "log_left", "left", "Scroll left", call="sideways(-1)"),
    _on("log", "log_end", "f", "Go to the end and follow", "follow"),
    _on("log", "log_hold", "space", "Stop or resume following"),
    _on("log", "log_filter", "v", "Level: all lines, warnings and errors, errors only", "level"),
    _on("log", "log_time", "t", "Go to a time: 10:03, 11-20 10:03, -10m", "time"),
    _on("log", "log_older", "n", "Next match above", "older", call="next_match(-1)"),
    _on("log", "log_newer", "N", "Next match below", "newer", call="next_match(1)"),
    _on("log", "log_matching", "m ampersand", "Show only matching lines, or all lines", "matches"),
    _on("log", "log_access", "a", "Access lines: folded, failed requests only, or all", "access"),
    _on("log", "log_copy", "y", "Copy the selected line, or the lines shown", "copy"),
    _on("log", "log_select_up", "shift+up K", "Select the line above", call="select(-1)"),
    _on("log", "log_select_down", "shift+down J", "Select the line below", call="select(1)"),
    _on("log", "log_back", "escape q", "End the search, then back", "back"),
    _on("reader", "reader_page", "space", "Page down", call="page(1)"),
    _on("reader", "reader_back", "escape q", "End the search, then back", "back", call="back"),
    _on("help", "help_search", "slash", "Show only the keys and marks that match", "search"),
    _on("findings", "findings_stage", "enter f", "Stage the fix and go back", "stage", changes=True, call="stage"),
    _on("compare", "compare_before", "b", "Choose the before run", "before"),
    _on("compare", "compare_after", "a", "Choose the after run", "after"),
    _on("compare", "compare_revert", "z", "Revert: restart with the before run's flags", "revert", changes=True),
    _on("describe", "describe_copy", "y", "Copy the command line", "copy"),
    _on("chat", "chat_send", "enter", "Send the prompt", "send"),
    _on("chat", "chat_back", "escape", "Stop the answer; then back", "stop/back"),
    _on("chat", "chat_stop", "ctrl+c", "Stop the answer"),
    _on("chat", "chat_options", "ctrl+o", "System prompt, temperature, max tokens, stop, raw text", "options"),
    _on("chat", "chat_other", "ctrl+b", "A/B mode on or off: also send each prompt to a second server", "A/B"),
    _on("chat", "chat_code", "ctrl+g", "The same request as curl, Python or JavaScript", "code"),
    _on("chat", "chat_copy", "ctrl+y", "Copy the last answer", "copy"),
    _on("chat", "chat_new", "ctrl+n", "Start a new conversation", "new"),
    _on("chat", "chat_break", "ctrl+j", "Insert a line break"),
    _on("chat", "chat_page_up", "pageup", "Page up", call="page(-1)"),
    _on("chat", "chat_page_down", "pagedown", "Page down", call="page(1)"),
    _on("chat", "chat_up", "up", "Line up", call="scroll(-1)"),
    _on("chat", "chat_down", "down", "Line down", call="scroll(1)"),
    _on("code", "code_next", "tab", "Next language", "language", call="next_language"),
    _on("code", "code_copy", "y", "Copy the code", "copy", call="copy_code"),
    _on("question", "question_yes", "y", "Yes", call="answer(True)"),
    _on("question", "question_enter", "enter", "Yes (ignored if the question has only just appeared)", call="enter"),
    _on("question", "question_no", "n escape q", "No", call="answer(False)"),
    _on("list", "list_take", "enter", "Choose", call="take"),
    _on("list", "list_leave", "escape q", "Back, without a choice", call="leave"),
    _on(MOVING, "move_down", "j down", "Next line, finding, fix or choice", call="move(1)"),
    _on(MOVING, "move_up", "k up", "Previous line, finding, fix or choice", call="move(-1)"),
    _on(MOVING, "page_down", "pagedown ctrl+d", "Page down", call="page(1)"),
    _on(MOVING, "page_up", "pageup ctrl+u", "Page up", call="page(-1)"),
    _on(MOVING, "move_first", "home g", "To the top", call="edge(-1)"),
    _on(MOVING, "move_last", "end G", "To the end; in a log, also follow", call="edge(1)"),
)  # fmt: skip


_DEMO_TITLES = {"quit": "Quit; the demo's servers end with it"}


_READ_ONLY_TITLES = {"clear": "Clear the filter, large pane, replay, hints"}


def title_of(action: Action, *, demo: bool, read_only: bool) -> str:
    """A short description of an action; in the demo and in a read-only console, some differ."""
    special = (_DEMO_TITLES if demo else {}) | (_READ_ONLY_TITLES if read_only else {})
    return special.get(action.id, action.title)


def actions() -> tuple[Action, ...]:
    """Every action of every screen."""
    return _ACTIONS


_BY_ID = {action.id: action for action in _ACTIONS}


def action_named(id: str) -> Action:
    """Return the action with this id.

    Raises:
        KeyError: there is none.
    """
    return _BY_ID[id]


@lru_cache(maxsize=64)
def scoped(scope: str, read_only: bool = False) -> tuple[Action, ...]:
    """Return the actions of a scope in registry order; ``read_only`` leaves out those that change something."""
    scopes = (scope, MOVING) if scope in MOVED else (scope,)
    return tuple(action for action in _ACTIONS if action.scope in scopes and not (read_only and action.changes))


def bindings(scope: str, priority: Collection[str] = ()) -> list[Binding]:
    """Return the Textual bindings of a scope, each with its action's id so that settings can rebind it.

    Bindings with an id in ``priority`` take precedence over those of the focused widget.
    """
    return [
        Binding(
            ",".join(action.keys), action.call, action.title, show=False, id=action.id, priority=action.id in priority
        )
        for action in scoped(scope)
    ]


def places(scope: str) -> Sequence[str]:
    """Every scope in which the keys of ``scope`` apply, itself included."""
    if scope == "app":
        return ("operations", *(one for one in SCREENS if one not in DIALOGS))
    scopes = MOVED if scope == MOVING else (scope,)
    return (*scopes, *TEXT_SCREENS) if "reader" in scopes else scopes


def changing(method: str) -> bool:
    """Whether the method ``action_<method>`` changes a server or the shared board."""
    return any(action.changes and action.call.partition("(")[0] == method for action in _ACTIONS)


CHANGING_SCOPES = ("tuning", "launch", "flags", "chat", "code")
"""Scopes of screens that only a changing action opens."""


def grouped(read_only: bool = False) -> dict[str, list[Action]]:
    """All actions, grouped under the headings of help and docs/keys.md, the operations screen's first.

    ``read_only`` leaves out those that can't be used in a read-only console.
    """
    groups: dict[str, list[Action]] = {}
    for action in actions():
        if not (read_only and (action.changes or action.scope in CHANGING_SCOPES)):
            groups.setdefault(action.group, []).append(action)
    return groups
