"""Commands of the command palette: verbs with arguments, and the registry's actions.

A command is prepared first, which raises `RefusalError` if it does not apply, and run after the palette has closed,
because it may open a screen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from textual.screen import Screen

from vllm_console.fleet.markers import flag_change
from vllm_console.fleet.snapshot import ServerView
from vllm_console.history.time_view import CHART_RANGES, moment_from
from vllm_console.text import clock, duration, plain
from vllm_console.ui.actions import Action, action_named, scoped, title_of
from vllm_console.ui.keymap import key_of, label_of
from vllm_console.ui.panes.bars import shown_value
from vllm_console.ui.panes.pane_bar import NAMES
from vllm_console.ui.panes.servers import COLUMNS, DEFAULT_COLUMNS, sort_names
from vllm_console.ui.parts import staging
from vllm_console.ui.parts.flag_catalog import FlagCatalog
from vllm_console.ui.parts.pane_layout import PANES, PaneLayout
from vllm_console.ui.parts.server_verbs import RefusalError
from vllm_console.ui.parts.staging import StagedStep
from vllm_console.ui.terminal.clipboard import copy
from vllm_console.ui.theme import THEMES
from vllm_launchers.errors import OperationError
from vllm_launchers.plan.command_line import line_of
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.plan.flags import flag_words, normalize, not_set
from vllm_launchers.presets.model import Preset
from vllm_launchers.vllm.flags.changes import Changes

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp
    from vllm_console.ui.screens.operations import OperationsScreen


class Kind(IntEnum):
    """How a text matches, best first."""

    WHOLE = 0
    PREFIX = 1
    WORDS = 2
    """The input consists of prefixes of the first words: ``lb`` for ``launch batch``."""
    WORD = 3
    """The input occurs at the start of a word."""
    PART = 4
    LETTERS = 5
    """The input consists of prefixes of several words, or of letters spread over the command's name."""


class Match(msgspec.Struct, frozen=True, order=True):
    """A match: its kind, the length of the matching span, and where it starts. Smaller is better."""

    kind: Kind
    span: int
    start: int


def match(typed: str, text: str, *, letters: bool = True, words: bool = True, name: int = 0) -> Match | None:
    """Return how ``text`` matches, or None. Ignores case and, when matching letters, spaces.

    ``letters`` allows prefixes of several words: ``la fo`` for ``layout focus``. ``words`` ranks them higher if they
    are the first words. Within the first ``name`` characters, letters may be skipped.
    """
    wanted, here = " ".join(typed.casefold().split()), text.casefold()
    if not wanted:
        return Match(Kind.PREFIX, 0, 0)
    at = here.find(wanted)
    if at == 0:
        return Match(Kind.WHOLE if len(wanted) == len(here) else Kind.PREFIX, len(wanted), 0)
    if letters and words and _begins_words(wanted.replace(" ", ""), here):
        return Match(Kind.WORDS, len(wanted), 0)
    while at > 0:
        if not here[at - 1].isalnum():
            return Match(Kind.WORD, len(wanted), at)
        if (after := here.find(wanted, at + 1)) < 0:
            return Match(Kind.PART, len(wanted), at)
        at = after
    return _by_letters(wanted.replace(" ", ""), here, name) if letters else None


def _begins_words(wanted: str, text: str) -> bool:
    """Whether ``wanted`` consists of prefixes of the text's first words, in order."""
    reached = {0}
    for word in "".join(one if one.isalnum() else " " for one in text).split():
        reached = {
            at + length for at in reached for length in range(1, len(word) + 1) if wanted.startswith(word[:length], at)
        }
        if len(wanted) in reached or not reached:
            return bool(reached)
    return False


def _by_letters(wanted: str, text: str, name: int) -> Match | None:
    """Return the shortest span of the text that contains the letters in order, starting at a word.

    Each letter directly follows the previous one or starts a word; within the first ``name`` characters, others may be
    skipped.
    """
    starts = [at for at, letter in enumerate(text) if letter.isalnum() and not (at and text[at - 1].isalnum())]
    reached = {at: at for at in starts if text[at] == wanted[0]}
    """Maps the position of the last matched letter to that of the first."""
    for letter in wanted[1:]:
        further: dict[int, int] = {}
        for at, first in reached.items():
            places = {at + 1, *range(at + 1, name), *(start for start in starts if start > at)}
            for place in places:
                if place < len(text) and text[place] == letter:
                    further[place] = max(first, further.get(place, 0))
        reached = further
    return min((Match(Kind.LETTERS, at + 1 - first, first) for at, first in reached.items()), default=None)


# -- commands ---------------------------------------------------------------------------------------------------------


Do = Callable[[], object]
"""Runs a command; a coroutine that it returns is awaited."""

ReadStep = Callable[[str], tuple[ServerView, StagedStep]]
"""Parses a flag change for the selected server."""

EXPORTS = {
    "shell": "sh", "config": "yaml", "systemd": "service", "systemd-user": "service", "compose": "compose.yaml",
    "kubernetes": "k8s.yaml", "kserve": "kserve.yaml", "llm-d": "llm-d.yaml", "production-stack": "stack.yaml",
    "nginx": "nginx.conf", "llama-swap": "llama-swap.yaml", "litellm": "litellm.yaml",
}  # fmt: skip
"""Export formats, and the file name suffix of each."""

MOST_NAMED = 8
"""Maximum number of alternatives that an error message lists."""


class TypedCommand(msgspec.Struct, frozen=True):
    """A command that can be typed.

    ``prepare`` raises `RefusalError`. An ``open`` command is incomplete: its value has yet to be typed. ``wrong`` says
    why it can't run, if that is already known.
    """

    text: str
    title: str
    prepare: Callable[[], Do]
    key: str = ""
    open: bool = False
    wrong: str = ""

    def preselected(self, typed: str) -> bool:
        """Whether enter runs it if it is the best match. Flags are set only if the verb itself was typed."""
        verb = self.text.partition(" ")[0]
        return verb not in _SETTING or typed.split()[:1] == [verb]


_SETTING = ("set", "unset")

EXAMPLES = ("launch batch", "set max-num-seqs=64", "range 6h", "layout focus", "theme dark")
"""Commands that show what can be typed."""


class Argument(msgspec.Struct, frozen=True):
    """A possible argument of a verb, and what the command then does."""

    text: str
    title: str
    open: bool = False


class Verb(msgspec.Struct, frozen=True):
    """A command word that takes an argument.

    ``prepare`` gets the argument, which may be empty only if ``optional``. With ``preview``, which says what the
    command would do, it accepts arguments that ``arguments`` does not list.
    """

    name: str
    title: str
    arguments: Callable[[], Sequence[Argument]]
    prepare: Callable[[str], Do]
    changes: bool = False
    optional: bool = False
    preview: Callable[[str], str] | None = None


class Commands:
    """The commands of one screen. The operations screen also has the verbs on servers."""

    def __init__(self, console: ConsoleApp, screen: Screen[object]) -> None:
        self._console, self._screen = console, screen
        self._on_servers = ServerCommands(console) if screen is console.operations else None
        verbs = [
            *(self._on_servers.verbs if self._on_servers is not None else ()),
            _choice("theme", "Color theme", lambda: {name: one.title for name, one in THEMES.items()}, self._theme),
        ]
        self._verbs = {verb.name: verb for verb in verbs}
        self._known: list[TypedCommand] | None = None
        """Cache of every command with each known argument, since each key press needs it."""

    @property
    def examples(self) -> str:
        """Commands that can be typed here, for the empty input."""
        verbs = {verb.name for verb in self._allowed_verbs()}
        return ", ".join([*(text for text in EXAMPLES if text.partition(" ")[0] in verbs), "…"])

    def learn(self, presets: Sequence[Preset], catalog: FlagCatalog) -> None:
        """Set the presets and flags to complete."""
        if self._on_servers is not None:
            self._on_servers.presets, self._on_servers.catalog = presets, catalog
        self._known = None

    def matching(self, typed: str, recent: Sequence[str]) -> list[TypedCommand]:
        """Return the matching commands, best kind of match first, then most recent first."""
        typed = " ".join(typed.split()) + (" " if typed.endswith(" ") and typed.strip() else "")
        verb, argument = self._split(typed)
        if verb is not None and " " in typed:
            listed = [one for one in self._every() if one.text.startswith(f"{verb.name} ")]
            found = _ranked(argument, listed, recent, skip=len(verb.name) + 1)
            exact = next((one for one in listed if one.text == typed.strip() and not one.open), None)
            if verb.preview is not None and argument and exact is None:
                free = self._free(verb, argument)
                found.insert(len(found) if free.wrong else 0, free)
            return found
        if typed:
            return _ranked(typed, self._every(), recent)
        known = {command.text: command for command in self._every()}
        last = [known.get(text) or self._typed_before(text) for text in recent]
        first = [command for command in last if command is not None]
        shown = {command.text for command in first}
        return [*first, *(command for command in self._words() if command.text not in shown)]

    def refusal(self, typed: str) -> str:
        """Explain in one sentence why nothing matches."""
        verb, argument = self._split(typed)
        if verb is None:
            word = plain(typed.split(maxsplit=1)[0]) if typed.split() else ""
            elsewhere = () if self._on_servers is not None else ServerCommands(self._console).verbs
            if any(one.name == word for one in elsewhere):
                return f"{word} works on the main screen; leave this one first."
            if word in self._verbs:
                return f"{word} changes something, and this console is read-only."
            return f"No command matches '{plain(typed.strip())}'."
        try:
            verb.prepare(argument)
        except RefusalError as error:
            return str(error)
        return f"{verb.name} needs an argument."

    def _split(self, typed: str) -> tuple[Verb | None, str]:
        name, _, argument = typed.strip().partition(" ")
        verb = self._verbs.get(name)
        return (None if verb is None or (verb.changes and self._console.read_only) else verb), argument.strip()

    def _with(self, verb: Verb, argument: Argument) -> TypedCommand:
        text = f"{verb.name} {argument.text}"
        prepare = partial(verb.prepare, argument.text)
        return TypedCommand(text, argument.title, prepare, open=argument.open)

    def _free(self, verb: Verb, argument: str) -> TypedCommand:
        """A command with an unlisted argument: its preview, or why it can't run."""
        title, wrong = "", ""
        try:
            title = verb.preview(argument) if verb.preview is not None else ""
        except RefusalError as error:
            wrong = str(error)
        text = f"{verb.name} {argument}"
        return TypedCommand(text, title, partial(verb.prepare, argument), wrong=wrong)

    def _typed_before(self, text: str) -> TypedCommand | None:
        """An earlier command that is not listed, if it can still run."""
        verb, argument = self._split(text)
        if verb is None or verb.preview is None or not argument:
            return None
        command = self._free(verb, argument)
        return None if command.wrong else command

    def _every(self) -> Sequence[TypedCommand]:
        if self._known is None:
            self._known = []
            for verb in self._allowed_verbs():
                self._known += [self._alone(verb)] if verb.optional else []
                self._known += [self._with(verb, argument) for argument in verb.arguments()]
            self._known += self._of_registry()
        return self._known

    def _words(self) -> Iterator[TypedCommand]:
        """Every verb once, and the registry's actions."""
        for verb in self._allowed_verbs():
            yield self._alone(verb)
        yield from self._of_registry()

    def _allowed_verbs(self) -> Iterator[Verb]:
        return (verb for verb in self._verbs.values() if not (verb.changes and self._console.read_only))

    def _alone(self, verb: Verb) -> TypedCommand:
        """A verb without an argument: a complete command if the argument is optional, else a prefix."""
        action = SERVER_ACTIONS.get(verb.name)
        key = key_of(action) if action is not None else ""
        text = verb.name if verb.optional else f"{verb.name} "
        return TypedCommand(text, verb.title, partial(verb.prepare, ""), key, open=not verb.optional)

    def _of_registry(self) -> Iterator[TypedCommand]:
        """The screen's actions and the app-wide ones, except those that a verb covers."""
        read_only = self._console.read_only
        covered = {*SERVER_ACTIONS.values(), "commands"} if self._on_servers is not None else {"commands"}
        scope = getattr(self._screen, "SCOPE", "")
        for action in (*(scoped(scope, read_only) if scope else ()), *scoped("app", read_only)):
            if action.id not in covered:
                yield self._of_action(action)

    def _of_action(self, action: Action) -> TypedCommand:
        words = action.id.removeprefix(f"{action.scope}_").replace("_", " ")
        owner = self._console if action.scope == "app" else self._screen

        def prepare() -> Do:
            return partial(owner.run_action, action.call)

        title = title_of(action, demo=self._console.polling.demo, read_only=self._console.read_only)
        return TypedCommand(words, title, prepare, label_of(action))

    def _theme(self, name: str) -> Do:
        if why := self._console.theme_refusal(name):
            raise RefusalError(why)
        return partial(self._console.choose_theme, name)


SERVER_ACTIONS: Mapping[str, str] = {
    "restart": "restart", "update": "rolling_update",
    "stop": "stop", "remove": "remove", "load": "toggle_load", "ramp": "ramp", "chat": "chat", "lora": "adapters",
    "fix": "stage_fix",
    "flags": "edit_flags", "adjust": "adjust", "mark": "mark", "log": "open_log", "describe": "describe",
    "findings": "findings", "compare": "compare", "revert": "previous_flags", "switch": "switch_preset",
    "sleep": "switch_pair", "wake": "switch_pair",
    "launch": "new_server", "filter": "filter", "sort": "sort", "replay": "replay",
}  # fmt: skip
"""Verbs that run a registry action if they get no argument."""

_APPLY_STAGED = ("restart", "update")
"""Verbs that apply the staged changes of a server."""

_OF_A_SERVER = {
    "restart": "Restart SERVER with its staged changes", "stop": "Stop SERVER",
    "update": "Rolling update: start a second instance of SERVER with its staged flags",
    "remove": "Remove SERVER: delete its record and log; its runs can be replayed",
    "load": "Send SERVER its preset's workload, or stop it",
    "ramp": "Find the highest request rate at which SERVER meets its objectives",
    "chat": "Ask SERVER: a chat, with TTFT and ITL of each answer",
    "lora": "Load a LoRA adapter into SERVER, or unload one",
    "fix": "Stage a fix for the top finding of SERVER",
    "flags": "Edit all flags of SERVER", "adjust": "Adjust the common flags of SERVER with the arrow keys",
    "mark": "Mark or unmark SERVER", "log": "Read the log of SERVER", "describe": "Describe SERVER",
    "findings": "Findings on SERVER", "compare": "Compare SERVER with its previous run",
    "revert": "Stage a revert to SERVER's previous flags",
    "sleep": "Put SERVER to sleep, and wake up its standby pair's other server", "wake": "Wake up SERVER",
}  # fmt: skip


class ServerCommands:
    """The verbs of the operations screen."""

    def __init__(self, console: ConsoleApp) -> None:
        self._console = console
        self.presets: Sequence[Preset] = ()
        self.catalog = FlagCatalog()
        screen = console.operations
        self.verbs = (
            Verb("go", "Select a server", self._servers("Select SERVER"), self._go),
            *(
                Verb(name, title.replace("SERVER", "the selected server"), self._servers(title),
                     partial(self._act, name), action_named(SERVER_ACTIONS[name]).changes, optional=True)
                for name, title in _OF_A_SERVER.items()
            ),
            Verb("launch", "Launch a new server from a preset", self._to_launch, self._launch, changes=True,
                 optional=True),
            Verb("switch", "Switch the selected server to another preset", self._to_switch, self._switch, changes=True,
                 optional=True),
            Verb("set", "Stage a change: set max-num-seqs=64", self._flags, partial(self._stage, self._step),
                 changes=True, preview=partial(self._preview, self._step)),
            Verb("unset", "Stage unsetting a flag", self._set_flags, partial(self._stage, self._unset_step),
                 changes=True, preview=partial(self._preview, self._unset_step)),
            Verb("range", "Range of the charts: range 6h",
                 lambda: [Argument(one.name, f"Charts over {one.name}") for one in CHART_RANGES], self._range),
            Verb("at", "Show an earlier moment: at 03:10, at 11-22 03:10; at end: live again",
                 lambda: [Argument("end", "Back to live")], self._at, preview=self._preview_at),
            _choice("layout", "Layout of the panes: layout focus", lambda: _LAYOUTS,
                    lambda name: partial(screen.choose_layout, PaneLayout(name))),
            _choice("pane", "Show a pane large",
                    lambda: {pane: f"Show {NAMES[number]} large" for number, pane in enumerate(PANES, 1)},
                    lambda name: partial(screen.show_pane, name)),
            Verb("columns", "Columns of the table: columns +hit -preset", self._columns, self._choose_columns,
                 preview=lambda text: f"Columns: {' '.join(self._column_names(text)) or 'as by default'}"),
            Verb("replay", "Replay a run that has ended, even of a removed server: replay chat@2", lambda: (),
                 lambda text: partial(screen.replay, text) if text else screen.action_replay, optional=True,
                 preview=lambda text: f"Replay run {plain(text)}"),
            _choice("sort", "Sort servers by a column",
                    lambda: {name: f"Sort servers by {COLUMNS[name]}" for name in sort_names(screen.servers)},
                    lambda name: partial(screen.action_sort_by, COLUMNS[name]), "column", screen.action_sort),
            Verb("filter", "Filter the servers", lambda: (),
                 lambda text: partial(screen.filter_by, text) if text else screen.action_filter, optional=True,
                 preview=lambda text: f"Show only servers that match '{text}'"),
            _choice("copy", "Copy the URL, command line or flags of the selected server", lambda: _COPIES, self._copy,
                    "thing to copy"),
            _choice("export", "Write the selected server's launch as a script, unit, Compose or Kubernetes file, or "
                    "for a proxy (marked servers, too)", self._exports, self._export, "form of export"),
        )  # fmt: skip

    @property
    def _screen(self) -> OperationsScreen:
        return self._console.operations

    # -- which server ----------------------------------------------------------------------------------------------

    def _selected(self) -> ServerView:
        return self._screen.verbs.chosen(self._screen.live)

    @property
    def _mine(self) -> ServerView | None:
        server = self._screen.live
        return server if server is not None and server.ours else None

    def _own(self) -> ServerView:
        return self._screen.verbs.own(self._screen.live)

    def _servers(self, title: str) -> Callable[[], Sequence[Argument]]:
        def listed() -> Sequence[Argument]:
            snapshot = self._console.snapshot
            servers = snapshot.servers if snapshot is not None else ()
            return [
                Argument(server.name, f"{title.replace('SERVER', plain(server.name))} ({server.state_text})")
                for server in servers
                if not server.name.count(" ")
            ]

        return listed

    def _go(self, name: str) -> Do:
        snapshot = self._console.snapshot
        _one_of(name, [server.name for server in snapshot.servers] if snapshot is not None else [], "server")
        return partial(self._screen.go_to, name)

    def _act(self, verb: str, name: str) -> Do:
        """Run a registry action on the selected or the named server."""
        call = SERVER_ACTIONS[verb]
        if not name:
            return partial(self._screen.run_action, call)
        change = next((word for word in name.split() if "=" in word), "")
        if change and verb in _APPLY_STAGED and self._console.server(name) is None:
            flag = plain(change.removeprefix("--"))
            raise RefusalError(f"{verb} takes a server and no flags: select it, then 'set {flag}', then '{verb}'.")
        go = self._go(name)

        def do() -> object:
            go()
            server = self._console.server(name)
            # With a named server, ignore the marked ones.
            alone = {"restart": self._screen.verbs.restart, "stop": self._screen.verbs.stop}.get(verb)
            return alone(server) if alone is not None else self._screen.run_action(call)

        return do

    # -- presets ---------------------------------------------------------------------------------------------------

    def _to_launch(self) -> Sequence[Argument]:
        return [Argument(preset.name, f"Launch screen: {plain(preset.title)}") for preset in self.presets]

    def _launch(self, preset: str) -> Do:
        if preset and self.presets:  # not if presets have not been read yet
            _one_of(preset, [one.name for one in self.presets], "preset")
        return partial(self._screen.launch, preset or None)

    def _to_switch(self) -> Sequence[Argument]:
        server = self._mine
        if server is None:
            return ()
        name = plain(server.name)
        others = [preset for preset in self.presets if preset.name != server.preset]
        return [Argument(preset.name, f"Switch {name} to {plain(preset.title)}") for preset in others]

    def _switch(self, preset: str) -> Do:
        server = self._own()
        if not preset:
            return partial(self._screen.verbs.switch, server)
        _one_of(preset, [one.name for one in self.presets], "preset")
        if preset == server.preset:
            raise RefusalError(f"{server.name} runs preset {preset} already.")
        return partial(self._screen.verbs.switch_to, server, preset)

    # -- flags -----------------------------------------------------------------------------------------------------

    def _flags(self) -> Sequence[Argument]:
        if (server := self._mine) is None:
            return ()
        after = self._screen.staging.flags_of(server)
        names = dict.fromkeys([*after, *self.catalog.names])
        found = []
        for name in names:
            facts = self.catalog.facts(name)
            now = f"now {shown_value(after[name])}" if name in after else "unset"
            meaning = f" · {facts.meaning}" if facts is not None and facts.meaning else ""
            found.append(Argument(f"{name}=", f"{now}{meaning}", open=True))
        return found

    def _step(self, text: str) -> tuple[ServerView, StagedStep]:
        """Parse ``FLAG=VALUE`` for the selected server."""
        server = self._own()
        name, equals, value = text.partition("=")
        if not equals:
            name, _, value = text.partition(" ")
        try:
            flag = self.catalog.named(name)
            step = StagedStep(flag, self.catalog.value(flag, value))
        except FlagError as error:
            raise RefusalError(_sentence(str(error))) from error
        return server, self._allowed(server, step)

    def _allowed(self, server: ServerView, step: StagedStep) -> StagedStep:
        staged = self._screen.staging.of(server.name)
        if problem := staging.refused(server, step):
            raise RefusalError(problem)
        if staging.stage(server.flags, staged, step) == staged:
            raise RefusalError(f"{server.name} already has --{step.flag} {shown_value(step.value)}.")
        return step

    def _preview(self, read: ReadStep, text: str) -> str:
        server, step = read(text)
        return f"Stage {flag_change(step.flag, server.flags.get(step.flag), step.value)} on {server.name}"

    def _stage(self, read: ReadStep, text: str) -> Do:
        return partial(self._screen.stage_step, *read(text))

    def _set_flags(self) -> Sequence[Argument]:
        if (server := self._mine) is None:
            return ()
        after = self._screen.staging.flags_of(server)
        return [Argument(name, f"Unset --{name}; now {shown_value(value)}") for name, value in after.items()]

    def _unset_step(self, text: str) -> tuple[ServerView, StagedStep]:
        server = self._own()
        name = text.strip().lstrip("-").replace("_", "-")
        after = self._screen.staging.flags_of(server)
        try:
            name = name if name in after else normalize(name)
        except FlagError as error:
            raise RefusalError(str(error)) from error
        if refusal := not_set(server.name, name, after):
            raise RefusalError(_sentence(refusal))
        return server, self._allowed(server, StagedStep(name, None))

    # -- view ------------------------------------------------------------------------------------------------------

    def _range(self, text: str) -> Do:
        name = text.replace(" ", "").replace("min", "m")
        _one_of(name, [one.name for one in CHART_RANGES], "range")
        return partial(self._screen.time.choose, name)

    def _moment(self, text: str) -> float:
        try:
            return moment_from(text, self._now)
        except ValueError as error:
            raise RefusalError(f"{error}.") from error

    @property
    def _now(self) -> float:
        snapshot = self._console.snapshot
        return snapshot.at if snapshot is not None else time.time()

    def _preview_at(self, text: str) -> str:
        at = self._moment(text)
        return f"Show {clock(at, self._now, seconds=True)}, {duration(self._now - at)} ago"

    def _at(self, text: str) -> Do:
        if not text:
            raise RefusalError("'at' needs a time, for example 'at 03:10', 'at 11-22 03:10' or 'at end'.")
        if text == "end":
            return self._screen.time.live
        return partial(self._screen.time.go, self._moment(text))

    def _columns(self) -> Sequence[Argument]:
        shown = self._screen.columns or DEFAULT_COLUMNS
        more = [Argument(f"+{name}", f"Show column {COLUMNS[name]}") for name in COLUMNS if name not in shown]
        less = [Argument(f"-{name}", f"Hide column {COLUMNS[name]}") for name in shown if name != "name"]
        return [Argument("default", "The default columns"), *more, *less]

    def _column_names(self, text: str) -> tuple[str, ...]:
        """Parse ``+hit -preset``, a list of columns, or ``default`` (empty)."""
        words = text.replace(",", " ").split()
        if words == ["default"]:
            return ()
        signed = [(word[0], word[1:]) if word[0] in "+-" else ("", word) for word in words]
        for _, name in signed:
            _one_of(name, tuple(COLUMNS), "column")
        if not all(sign for sign, _ in signed):
            return tuple(dict.fromkeys(name for sign, name in signed if sign != "-"))
        kept = list(self._screen.columns or DEFAULT_COLUMNS)
        for sign, name in signed:
            kept = [other for other in kept if other != name] + ([name] if sign == "+" else [])
        if not kept:
            raise RefusalError("The table needs at least one column.")
        return tuple(kept)

    def _choose_columns(self, text: str) -> Do:
        if not text:
            raise RefusalError(f"'columns' needs names: {' '.join(COLUMNS)}.")
        return partial(self._screen.choose_columns, self._column_names(text))

    # -- copy and export -------------------------------------------------------------------------------------------

    def _copy(self, what: str) -> Do:
        server = self._selected()
        texts = {
            "url": server.url if server.port else "",
            "command": " ".join(server.command),
            "flags": line_of(flag_words(server.flags)),
            "model": server.model,
            "log": server.log_path,
        }
        if not texts[what]:
            raise RefusalError(f"{server.name} has no known {_COPIED[what]}.")
        subject = f"{_COPIED[what][0].upper()}{_COPIED[what][1:]} of {server.name}"
        return partial(copy, self._console, plain(texts[what]), subject, self._console.say)

    def _exports(self) -> Mapping[str, str]:
        server = self._screen.live
        name = plain(server.name) if server is not None else "NAME"
        return {form: f"Write ./{name}.{ending}" for form, ending in EXPORTS.items()}

    def _export(self, form: str) -> Do:
        server = self._own()
        path = Path(f"{server.name}.{EXPORTS[form]}").absolute()
        if path.exists():
            raise RefusalError(f"{path} already exists: move it first.")
        fleet, name = self._console.fleet, server.name
        marked = [one.name for one in self._screen.marked if one.ours]

        def write() -> Path:
            from vllm_launchers.plan.export import Form, export
            from vllm_launchers.plan.export.proxies import ProxiedServer, ProxyForm, export_for_proxy
            from vllm_launchers.plan.export.quoting import ExportError

            try:
                if form in tuple(ProxyForm):
                    names = dict.fromkeys((name, *marked))
                    servers = [ProxiedServer(each, fleet.plan_restart(each, Changes())) for each in names]
                    text = export_for_proxy(servers, ProxyForm(form))
                else:
                    text = export(fleet.plan_restart(name, Changes()), Form(form), name=name)
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except ExportError as error:
                raise OperationError(f"{name} can't be exported as {form}: {error}") from error
            except OSError as error:
                raise OperationError(f"{path} can't be written: {error.strerror}") from error
            return path

        return partial(self._console.act, f"Exporting {name}…", write, lambda done: f"{name} written to {done}")


_LAYOUTS: Mapping[str, str] = {
    PaneLayout.AUTO: "The best layout for the terminal's size",
    PaneLayout.OVERVIEW: "All panes",
    PaneLayout.FOCUS: "One large pane, the others as a line each",
    PaneLayout.WIDE: "Panes side by side",
    PaneLayout.TALL: "Panes below each other",
}

_COPIES = {
    "url": "Copy the URL of the selected server's API",
    "command": "Copy its command line",
    "flags": "Copy its flags as command-line arguments",
    "model": "Copy its model",
    "log": "Copy the path of its log",
}
_COPIED = {"url": "URL", "command": "command line", "flags": "flags", "model": "model", "log": "log file"}


def _choice(
    name: str,
    title: str,
    table: Callable[[], Mapping[str, str]],
    prepare: Callable[[str], Do],
    kind: str = "",
    alone: Do | None = None,
) -> Verb:
    """A verb whose argument is a key of ``table``, which maps names to descriptions.

    ``alone`` is what the verb does without an argument. ``kind`` says what the names are, if the verb's name does not.
    """

    def arguments() -> Sequence[Argument]:
        return [Argument(text, about) for text, about in table().items()]

    def checked(text: str) -> Do:
        if not text and alone is not None:
            return alone
        _one_of(text, tuple(table()), kind or name)
        return prepare(text)

    return Verb(name, title, arguments, checked, optional=alone is not None)


def _sentence(text: str) -> str:
    return text if text.endswith(("?", ".")) else f"{text}."


def _one_of(name: str, known: Sequence[str], kind: str) -> None:
    """Raise `RefusalError` for a name that is not in ``known``."""
    if name in known:
        return
    every = ", ".join(known[:MOST_NAMED]) + (", …" if len(known) > MOST_NAMED else "")
    if not name:
        raise RefusalError(f"Which {kind}? {f'Choose from {every}' if known else 'There is none'}.")
    raise RefusalError(f"No {kind} is called '{plain(name)}'" + (f"; choose from {every}." if known else "."))


def _ranked(typed: str, commands: Sequence[TypedCommand], recent: Sequence[str], skip: int = 0) -> list[TypedCommand]:
    """Return the commands that match by text (from character ``skip``) or by a word of the title, best first."""
    last = {text: at for at, text in enumerate(recent)}
    found: list[tuple[tuple[Kind, int, bool, Match, int], TypedCommand]] = []
    for at, command in enumerate(commands):
        verb = command.text.partition(" ")[0]
        words = bool(skip) or verb not in _SETTING  # hundreds of flags: match initials only after the verb
        by_text = match(typed, command.text[skip:], words=words, name=0 if skip else len(verb))
        by_title = match(typed, command.title, letters=False)
        if by_title is not None:  # a match within a sentence counts less
            by_title = Match(Kind.PART if by_title.kind < Kind.PART else Kind.LETTERS, by_title.span, by_title.start)
        best = min((one for one in (by_text, by_title) if one is not None), default=None)
        if best is not None:
            rank = (best.kind, last.get(command.text, len(last)), command.open, best, at)
            found.append((rank, command))
    return [command for _, command in sorted(found, key=lambda pair: pair[0])]
