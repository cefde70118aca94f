"""Malicious names, and a fleet in which every text is malicious."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from fakes import fake_fleet
from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.history.time_view import LIVE, TimeView
from vllm_console.runs.compare import Comparison
from vllm_launchers.errors import OperationError
from vllm_launchers.values import Value, as_dict, replace

MARK = "[/x]"
"""The visible part of each name: markup as text."""
STOLEN = "STOLEN"
"""Occurs only inside escape sequences."""
MARKUP = f"{MARK}[@click=app.quit]y[/][bold red] [/"
SHELL = "$(touch pwned);`touch pwned`|touch pwned&\ntouch pwned\n'\"\\ ${IFS} ~ *.toml !! ../../../../etc/passwd"
ESCAPES = (
    f"\x1b]0;{STOLEN}\x07",
    f"\x1b]2;{STOLEN}\x1b\\",
    f"\x1b]8;;http://{STOLEN}\x1b\\",
    f"\x1b]52;c;{STOLEN}\x07",
    f"\x1b]9;{STOLEN}\x07",
    "\x1b[2J\x1b[6n\x1b[5;7;46m\x1b[?1049l\x1bc",
    f"\x1bPq#0{STOLEN}\x1b\\\x1b_{STOLEN}\x1b\\",
    f"\x9b31m\x9d0;{STOLEN}\x9c\x90{STOLEN}\x9c",
)
"""Titles, links, clipboard, notifications, screen clearing, terminal queries, images; some with C1 characters."""
UNSEEN = "\u202egnp.\u2066\u200b\u2060\ufeff\U000e0041\x00\x08\x0e\x7f\x85\u2028"
HEAP = "a" + "\u0301" * 300
EVIL = f"{MARKUP}{''.join(ESCAPES)}{UNSEEN}{HEAP}漢字 {SHELL}"
"""Everything except lone surrogates, which JSON can contain and a command line cannot."""
WORST = f"{EVIL}\ud800\udfff\r\n\t"

HARM = re.compile(
    rb"\x1b\](?!22;(?:default|pointer)(?:\x07|\x1b))|\x1bP|\x1b_|\x1bc|\x1b\[(?:2J|6n|5;7;46m)|\xc2[\x80-\x9f]|\xe2\x80[\xae\xa8\x8b]"
    rb"|\xe2\x81[\xa6\xa0]|\xef\xbb\xbf|\xf3\xa0\x81\x81|(?:\xcc\x81){9}|[\x00\x08\x0e\x7f]"
)
"""Bytes in terminal output that can only come from these names. (OSC 22 is the pointer's shape.)"""


def poisoned(value: Any, evil: str = WORST) -> Any:
    """The value with ``evil`` prepended to each text, and with an additional hostile key in each mapping."""
    if isinstance(value, str):
        return value if isinstance(value, Enum) else evil + value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(poisoned(item, evil) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(poisoned(item, evil) for item in value)
    if isinstance(value, Mapping):
        whole = {key: poisoned(item, evil) for key, item in value.items()}
        return {**whole, evil: next(reversed(whole.values()))} if whole else whole
    if isinstance(value, Value):
        return replace(value, **{name: poisoned(field, evil) for name, field in as_dict(value).items()})
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{name: poisoned(getattr(value, name), evil) for name in _names(value)})
    return value


def _names(value: msgspec.Struct) -> tuple[str, ...]:
    return value.__struct_fields__


class HostileFleet(fake_fleet.FakeFleet):
    """A fleet whose every result is hostile; its servers' logs are at ``log``."""

    def __init__(self, *servers: object, log: Path, comparison: Comparison) -> None:
        super().__init__(*servers)
        self.log = log
        self.comparison = comparison

    def snapshot(self, selected: str | None = None, time: TimeView = LIVE) -> FleetSnapshot:
        found = super().snapshot(selected, time)
        notices = (WORST, *found.notices)
        bare = msgspec.structs.replace(found, servers=(), notices=notices)
        return msgspec.structs.replace(poisoned(bare), servers=tuple(map(self._seen, found.servers)))

    def _seen(self, view: ServerView) -> ServerView:
        notice = view.notice or "a notice"
        named = poisoned(msgspec.structs.replace(view, notice=notice))
        node = named.node if view.node else ""  # if this were hostile, the server could not be restarted or switched
        return msgspec.structs.replace(named, log_path=str(self.log), series=view.series, node=node)

    def _view(self, name: str) -> ServerView:
        return next(view for view in self.snapshot().servers if view.name == name)

    def _did(self, *call: object) -> None:
        super()._did(*call)
        if call[0] in ("stop", "restart", "switch", "forget", "start_load"):
            raise OperationError(WORST)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in (
            "presets",
            "engines",
            "flags",
            "suggest",
            "plan",
            "plan_restart",
            "find_leftovers",
            "board",
            "compare",
            "compare_again",
        ):
            return found
        return lambda *words, **more: poisoned(found(*words, **more))
