"""What a person can do on the launch screen, in the flag editor and in the log: their part of the registry."""

from __future__ import annotations

from vllm_console.ui.actions import Action


def _action(id: str, keys: str, title: str, scope: str, short: str = "", *, changes: bool = False) -> Action:
    group = {"launch": "Launch screen", "flags": "Flag editor", "log": "Log"}[scope]
    return Action(id, tuple(keys.split()), title, scope, changes, bool(short), short, group)


LAUNCH_ACTIONS: tuple[Action, ...] = (
    _action("launch_start", "ctrl+s", "Launch what is shown", "launch", "launch", changes=True),
    _action("launch_open", "enter", "Edit the field or flag; on a preset: go to its fields", "launch", "edit"),
    _action("launch_toggle", "space", "Switch a flag on or off; take the next engine or GPUs", "launch", "on/off"),
    _action("launch_fix", "f", "Make the change that mends the finding shown", "launch", "mend"),
    _action("launch_add", "a", "Search all flags and add one", "launch", "add flag"),
    _action("launch_remove", "delete backspace", "Leave the flag out, or empty the field", "launch", "remove"),
    _action("launch_undo", "u", "Take back the change of this flag or field", "launch", "undo"),
    _action("launch_next", "tab", "Next section", "launch", "section"),
    _action("launch_previous", "shift+tab", "Previous section", "launch"),
    _action("launch_copy", "y", "Copy the command line", "launch"),
    _action("launch_down", "down j", "Next line; on the plan: next finding", "launch"),
    _action("launch_up", "up k", "Previous line or finding", "launch"),
    _action("launch_page_down", "pagedown", "A page down", "launch"),
    _action("launch_page_up", "pageup", "A page up", "launch"),
    _action("launch_back", "escape q", "Back, without launching", "launch", "back"),
)

FLAGS_ACTIONS: tuple[Action, ...] = (
    _action("flags_keep", "ctrl+s", "Stage the changes and go back", "flags", "stage", changes=True),
    _action("flags_edit", "enter", "Edit the flag's value", "flags", "edit"),
    _action("flags_toggle", "space", "Switch on or off, or take the next choice", "flags", "on/off"),
    _action("flags_unset", "delete backspace", "Leave the flag out: vLLM's default holds", "flags", "unset"),
    _action("flags_undo", "u", "Take back the change of this flag", "flags", "undo"),
    _action("flags_search", "slash", "Search names and meanings; a name not listed can be added", "flags", "search"),
    _action("flags_traffic", "t", "Set from what was seen: what the measured traffic asks for, with reasons", "flags",
            "set by traffic"),
    _action("flags_changed", "c", "Show only flags that are set or changed", "flags", "only set"),
    _action("flags_down", "down j", "Next flag", "flags"),
    _action("flags_up", "up k", "Previous flag", "flags"),
    _action("flags_page_down", "pagedown", "A page down", "flags"),
    _action("flags_page_up", "pageup", "A page up", "flags"),
    _action("flags_first", "home", "First flag", "flags"),
    _action("flags_last", "end", "Last flag", "flags"),
    _action("flags_back", "escape q", "Back; asks when there are changes", "flags", "back"),
)  # fmt: skip

LOG_ACTIONS: tuple[Action, ...] = (
    _action("log_search", "slash", "Search upwards from here", "log", "search"),
    _action("log_older", "n", "Next match above", "log", "older"),
    _action("log_newer", "N", "Next match below", "log", "newer"),
    _action("log_end", "f end G", "Go to the end and follow", "log", "follow"),
    _action("log_hold", "space", "Stop following, or follow again", "log"),
    _action("log_filter", "v", "Show all lines, warnings and errors, or errors", "log", "level"),
    _action("log_wrap", "w", "Wrap long lines, or cut them", "log", "wrap"),
    _action("log_copy", "y", "Copy the selected line, or all that is shown", "log", "copy"),
    _action("log_select_up", "shift+up K", "Select the line above", "log"),
    _action("log_select_down", "shift+down J", "Select the line below", "log"),
    _action("log_down", "down j", "A line down", "log"),
    _action("log_up", "up k", "A line up", "log"),
    _action("log_page_down", "pagedown ctrl+d", "A page down", "log"),
    _action("log_page_up", "pageup ctrl+u", "A page up", "log"),
    _action("log_left", "left", "Scroll left", "log"),
    _action("log_right", "right", "Scroll right", "log"),
    _action("log_home", "home g", "Go to the oldest line", "log"),
    _action("log_back", "escape q", "End the search; then back", "log", "back"),
)
