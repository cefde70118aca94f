"""The help screen: all keys from the registry, with a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual import on
from textual.binding import BindingType
from textual.strip import Strip
from textual.widgets import Input

from vllm_console.text import plain
from vllm_console.ui.actions import MOVING, SCREENS, Action, bindings, grouped, places, title_of
from vllm_console.ui.keymap import key_of, label_of
from vllm_console.ui.terminal.lines import BLANK, line
from vllm_console.ui.theme import DIM, KEY, STRONG, WARN
from vllm_console.ui.widgets.draw import beside, fit, paragraph
from vllm_console.ui.widgets.entry import Entry
from vllm_console.ui.widgets.reader import ReaderScreen, TextReader, scroll_hint

# Width of the keys, in cells.
_KEYS = 10

_MARKS = (
    ("!", "misses the preset's objective; before a name: a warning was found"),
    ("✗", "before a name: a critical finding"),
    ("✓", "before a name: all objectives met in the last minute"),
    ("Δ", "before a name: effect of the latest change, compared with the previous run"),
    ("±", "before a name: a tuner is running: trial, change being tried, best so far"),
    ("tuning", "a state: a tuner restarts and measures the server; tuning 1/4: trial 1 of at most 4"),
    ("–", "not reported"),
    (
        "~24ms",
        "estimated within a wide histogram bucket; without the sign: exact, or a narrow bucket",
    ),
    ("<300ms", "a bound: vLLM's histogram has no finer bucket"),
    (">3.6s", "a bound: beyond the last bucket, or requests are still running"),
    ("n queued", "still waiting: not in TTFT, which counts a request at its first token"),
    ("sustained", "KV cache usage: the highest level held for 30s in the last minute; its objective applies to it"),
    ("every 5s", "below a chart: time per point; the figure in its title covers the last minute"),
    ("┊", "a marker in a chart: something happened then; {back} and {forward} go to it"),
    ("r1 r2", "marker: run 1, run 2 began. A run lasts from one start to the next; chat@2 is run 2 of chat"),
    ("s", "marker: stopped on request; ✗ crashed; ! a finding began; ✓ it ended; b a load began or ended"),
    ("sim", "a simulated engine: no GPU, no model"),
    ("OWNER", "who started a server; someone else's is read-only"),
    ("*", "marked: stopped or restarted together with the other marked servers"),
)


_Entries = Sequence[tuple[str, str]]

Applying = tuple[str, Sequence[Action]]
"""A heading and the actions available now."""


class HelpScreen(ReaderScreen):
    """Lists all keys, in two columns if they fit; a search shows only matching entries."""

    SCOPE = "help"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("help")]

    def __init__(
        self, read_only: bool = False, *, demo: bool = False, scope: str = "", now: Applying | None = None
    ) -> None:
        """Put the actions available ``now`` first, then the keys of the calling screen, whose scope is ``scope``."""
        self._read_only, self._demo = read_only, demo
        self._wanted = ""
        self._entry = Entry(id="help-input")
        super().__init__(
            TextReader(
                self._title,
                lambda width: help_lines(width, read_only, self._wanted, demo=demo, scope=scope, now=now),
                lambda: (scroll_hint(), (key_of("help_search"), "search", "screen.help_search")),
                entry=self._entry,
                step_back=self._end_search,
            )
        )

    def _title(self) -> str:
        if not self._wanted:
            return "Help: keys of a read-only console" if self._read_only else "Help: keys"
        every, found = (_count(help_entries(self._read_only, wanted, demo=self._demo)) for wanted in ("", self._wanted))
        return f"Help: matching '{plain(self._wanted)}' · {found} of {every}"

    def action_help_search(self) -> None:
        """Open the search."""
        hint = f"words from a key, a mark or its description; enter keeps the list, {key_of('reader_back')} shows all"
        self._entry.open("search", self._wanted, placeholder=hint)

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        if self._entry.purpose is not None:
            self._search(event.value)

    def _search(self, text: str) -> None:
        self._wanted = " ".join(text.split())
        self._reader.redraw()
        self._reader.action_edge(-1)

    @on(Entry.Stepped)
    def _stepped(self, event: Entry.Stepped) -> None:
        event.stop()
        self._reader.action_move(event.step)

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        self._close_entry()

    def _close_entry(self) -> None:
        self._entry.shut()
        self._reader.focus()

    def _end_search(self) -> bool:
        """End the search. Returns whether there was one."""
        searching = bool(self._wanted) or self._entry.purpose is not None
        if self._entry.purpose is not None:
            self._close_entry()
        if searching:
            self._search("")
        return searching


def help_entries(
    read_only: bool, wanted: str = "", *, demo: bool = False, scope: str = "", now: Applying | None = None
) -> Mapping[str, _Entries]:
    """Keys and marks by heading; with ``wanted``, only entries that contain all its words.

    The keys of ``scope`` come first, preceded by the actions available ``now`` unless searching.
    """

    def entries(group: Sequence[Action]) -> _Entries:
        return [(label_of(action), title_of(action, demo=demo, read_only=read_only)) for action in group]

    groups = {title: entries(group) for title, group in grouped(read_only).items()}
    shared = [place for place in ("reader", MOVING) if scope in places(place)]
    here = [SCREENS[place] for place in dict.fromkeys((scope, *shared)) if place in SCREENS]
    groups = {title: groups[title] for title in here if title in groups} | groups
    if now is not None and not wanted:
        groups = {now[0]: entries(now[1])} | groups
    keys = {"back": key_of("marker_back"), "forward": key_of("marker_forward")}
    groups["Marks"] = [(mark, text.format_map(keys)) for mark, text in _MARKS]
    words = wanted.casefold().split()
    found = {
        title: [entry for entry in group if all(word in " ".join(entry).casefold() for word in words)]
        for title, group in groups.items()
    }
    return {title: group for title, group in found.items() if group}


def _count(groups: Mapping[str, _Entries]) -> int:
    return sum(map(len, groups.values()))


def help_lines(
    width: int,
    read_only: bool,
    wanted: str = "",
    *,
    demo: bool = False,
    scope: str = "",
    now: Applying | None = None,
) -> list[Strip]:
    """The lines of the help screen: keys and marks, filtered by ``wanted``."""
    column = width if width < 110 else width // 2
    found = help_entries(read_only, wanted, demo=demo, scope=scope, now=now)
    blocks = [_block(title, entries, column) for title, entries in found.items()]
    if not blocks:
        text = f" No key and no mark matches '{plain(wanted)}'; {key_of('reader_back')} shows all."
        return [line(), line((text, WARN))]
    if column == width:
        return [strip for block in blocks for strip in block]
    left: list[Strip] = []
    right: list[Strip] = []
    for block in blocks:
        (left if len(left) <= len(right) else right).extend(block)
    rows = max(len(left), len(right))
    left += [BLANK] * (rows - len(left))
    right += [BLANK] * (rows - len(right))
    return [beside(a, column, b) for a, b in zip(left, right, strict=True)]


def _block(title: str, entries: _Entries, width: int) -> list[Strip]:
    lines = [line((f" {title}", STRONG))]
    for keys, text in entries:
        # Keys wider than their column get a line of their own.
        lines += [line("  ", (keys, KEY))] if len(keys) > _KEYS else []
        head = fit("" if len(keys) > _KEYS else keys, _KEYS)
        lines += paragraph(text, width - 2, indent=" " * (_KEYS + 3), first=["  ", (head, KEY), " "])
    return [*lines, line((" ", DIM))]
