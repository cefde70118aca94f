"""The user's key map: the registry's keys, overridden by a preset, overridden by the user's own keys.

Footers, help and messages get key names from here, so they always name the right key.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from difflib import get_close_matches
from types import MappingProxyType

from textual.keys import Keys

from vllm_console.ui.actions import SCREENS, Action, action_named, actions, places, scoped

PRESETS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "vim": {
        "time_back": "h left", "time_forward": "l right", "time_first": "0 home", "time_live": "dollar_sign end",
        "time_page_back": "ctrl+b pageup shift+left", "time_page_forward": "ctrl+f pagedown shift+right",
        "open_log": "o", "sort": "S", "drop_last": "u backspace",
        "tuning_left": "h left", "tuning_right": "l right", "tuning_up": "k up", "tuning_down": "j down",
        "launch_layouts": "L", "launch_remove": "x delete backspace",
        "flags_unset": "x delete backspace", "log_left": "h left", "log_right": "l right",
        "page_down": "ctrl+f ctrl+d pagedown", "page_up": "ctrl+b ctrl+u pageup",
    },
    "arrows": {
        "cursor_down": "down", "cursor_up": "up", "cursor_first": "home", "cursor_last": "end",
        "time_first": "ctrl+home", "time_live": "ctrl+end",
        "mark": "insert asterisk", "help": "f1 question_mark",
        "new_server": "f2 n", "open_log": "f3 l", "edit_flags": "f4 e", "restart": "f5 r", "sort": "f6 o",
        "filter": "f7 slash", "stop": "f9 s", "quit": "f10 q ctrl+q",
        "move_down": "down", "move_up": "up", "move_first": "home", "move_last": "end",
        "flags_search": "f7 slash", "log_search": "f7 slash", "help_search": "f7 slash",
        "log_select_up": "shift+up", "log_select_down": "shift+down",
    },
}  # fmt: skip
"""Key presets: action id → its keys, separated by spaces. Other actions keep the registry's keys."""

_LABELS = {
    "slash": "/", "question_mark": "?", "colon": ":", "plus": "+", "equals_sign": "=", "minus": "-",
    "left_square_bracket": "[", "right_square_bracket": "]", "left_curly_bracket": "{", "right_curly_bracket": "}",
    "less_than_sign": "<", "greater_than_sign": ">", "up": "↑", "down": "↓", "left": "←", "right": "→",
    "left_parenthesis": "(", "right_parenthesis": ")", "shift+left": "shift+←", "shift+right": "shift+→",
    "shift+up": "shift+↑", "shift+down": "shift+↓",
    "pageup": "pgup", "pagedown": "pgdn", "comma": ",", "full_stop": ".", "asterisk": "*", "ampersand": "&",
    "escape": "esc", "dollar_sign": "$", "exclamation_mark": "!", "at": "@", "number_sign": "#", "percent_sign": "%",
    "semicolon": ";", "quotation_mark": '"', "apostrophe": "'", "underscore": "_", "vertical_line": "|",
    "backslash": "\\", "circumflex_accent": "^", "grave_accent": "`", "tilde": "~",
}  # fmt: skip

_NAMES = {label: key for key, label in _LABELS.items()}
"""Key as displayed → Textual's name."""

_SHORT = {"backspace": "bksp", "delete": "del"}
"""Abbreviations of key names in key hints."""

_MODIFIERS = {"ctrl", "shift", "alt", "super", "hyper", "meta"}

ChosenKeys = Mapping[str, tuple[str, ...]]
"""Action id → its keys; the first is the one shown."""

_NONE: ChosenKeys = MappingProxyType({})


class _Keys:
    """The keys that differ from the registry's, and whether arrows are written as words."""

    def __init__(self, chosen: ChosenKeys, *, ascii: bool) -> None:
        self.chosen, self.ascii = chosen, ascii
        self.shown: dict[str, str] = {}
        """Cache of `key_of`, which is called dozens of times a second."""


_OF_REGISTRY = _Keys(_NONE, ascii=False)
_keys: ContextVar[_Keys] = ContextVar("keys", default=_OF_REGISTRY)

_ARROWS = {"←": "left", "→": "right", "↑": "up", "↓": "down"}


class KeysError(ValueError):
    """Invalid keys; the text has one sentence per problem."""


def chosen_keys(preset: str, own: Mapping[str, str]) -> ChosenKeys:
    """Return the keys that differ from the registry's: the preset's, overridden by the user's own.

    Raises:
        KeysError: an unknown action or key, an action without a key, or two actions of a screen share a key.
    """
    keys = {id: tuple(text.split()) for id, text in PRESETS[preset].items()}
    keys |= {id: tuple(map(_key_name, text.replace(",", " ").split())) for id, text in own.items()}
    if problems := [*_unknown(own), *_conflicts(keys)]:
        raise KeysError("; ".join(problems))
    return keys


def use_keys(keys: ChosenKeys, *, ascii: bool = False) -> None:
    """Set the keys for the current context (an app and its tasks).

    With ``ascii``, arrows are written as words, because ``<`` and ``>`` are keys themselves.
    """
    _keys.set(_Keys(keys, ascii=ascii))


def keys_of(action: Action) -> Sequence[str]:
    """An action's keys by Textual name, the one shown first."""
    return _keys.get().chosen.get(action.id) or action.keys


def changing_keys(scope: str) -> frozenset[str]:
    """The keys of a scope that change something, by Textual name."""
    return frozenset(key for action in scoped(scope) if action.changes for key in keys_of(action))


def key_of(id: str) -> str:
    """The displayed key of an action: ``[``, ``esc``, ``bksp``."""
    shown = _keys.get().shown
    if (known := shown.get(id)) is None:
        key = keys_of(action_named(id))[0]
        known = shown[id] = _SHORT.get(key, key_label(key))
    return known


def label_of(action: Action) -> str:
    """All keys of an action, e.g. ``j ↓``."""
    return " ".join(map(key_label, keys_of(action)))


def key_label(key: str) -> str:
    """How a key is displayed: ``[`` for ``left_square_bracket``."""
    label = _LABELS.get(key, key)
    if _keys.get().ascii and not label.isascii():
        *modifiers, arrow = label.split("+")
        return "+".join((*modifiers, _ARROWS.get(arrow, arrow)))
    return label


def _key_name(text: str) -> str:
    """Textual's name for a key given as displayed or by name: ``[``, ``esc``, ``shift+←``."""
    return _NAMES.get(text, text)


def _unknown(own: Mapping[str, str]) -> list[str]:
    known = {action.id for action in actions()}
    problems = []
    for id, text in own.items():
        if id not in known:
            near = get_close_matches(id, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            problems.append(f"keys: no action named '{id}'{hint}")
        elif not text.replace(",", " ").split():
            problems.append(f"keys: '{id}' has no key")
        for key in text.replace(",", " ").split():
            if not _is_key(_key_name(key)):
                problems.append(
                    f"keys: '{key}' for '{id}' is not a valid key; expected e.g. R, f5, ctrl+r or left_square_bracket"
                )
    return problems


def _is_key(name: str) -> bool:
    """Whether this is a valid Textual key name."""
    *modifiers, base = name.split("+")
    if not set(modifiers) <= _MODIFIERS:
        return False
    if len(base) == 1 or base in _LABELS or base in {key.value for key in Keys}:
        return True
    try:
        return bool(unicodedata.lookup(base.replace("_", " ")))
    except KeyError:
        return False


def _conflicts(keys: ChosenKeys) -> list[str]:
    """One message per key shared by two actions of a screen, if the user or a preset assigned it to one of them.

    Textual itself silently lets one binding shadow another. In the registry, shared keys are intended: ``q`` goes back
    on all screens but the operations screen.
    """
    if not keys:
        return []
    problems: dict[tuple[str, str, str], str] = {}
    taken: dict[tuple[str, str], str] = {}
    for action in actions():
        for key in keys.get(action.id, action.keys):
            for scope in places(action.scope):
                other = taken.setdefault((scope, key), action.id)
                meant = key in action.keys and key in action_named(other).keys
                if other != action.id and (action.id in keys or other in keys) and not meant:
                    place = SCREENS.get(scope, "On the main screen").lower()
                    problems.setdefault(
                        (key, other, action.id),
                        f"keys: '{key_label(key)}' is assigned to both '{other}' and '{action.id}' {place}: "
                        "give one of them another key",
                    )
    return list(problems.values())
