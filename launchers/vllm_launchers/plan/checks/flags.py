"""Flags and variables that the chosen vLLM does not know, knows no more, or will not take. Pure.

Codes: ``flag_unknown``, ``flag_dead``, ``flag_too_new``, ``flag_value``, ``flag_deprecated``, ``config_drops_false``;
``variable_dead``, ``variable_unknown``, ``variable_misread``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches

from vllm_launchers.machine.flags.judge import judge, problem
from vllm_launchers.machine.flags.model import FlagSpec, FlagTable, ValueKind
from vllm_launchers.machine.flags.releases import first_release, parse_release, variable_releases
from vllm_launchers.machine.flags.search import resolve
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.flags import TRUE_ONLY, flag_words
from vllm_launchers.plan.model import Changes, Flags, FlagValue
from vllm_launchers.plan.retired.flags import RETIRED_FLAGS
from vllm_launchers.plan.retired.model import NEVER, Fate, Release, RetiredFlag, unread_fate
from vllm_launchers.plan.retired.values import retired_value
from vllm_launchers.plan.retired.variables import MISREAD_VARIABLES, RETIRED_VARIABLES

__all__ = ["flag_findings", "variable_findings"]

NEAR = 0.75
"""How alike two names must be for one to be offered in place of the other."""
CLEARLY = 0.8
"""How alike they must be for the change to be offered too; and no third name may come as near (``_APART``)."""

_APART = 0.05
_FALSE_DROPPED_TO: Release = (0, 32, 99)
"""Up to here ``vllm serve --config`` drops ``x: false``: what 0.28 did about it holds for its API server alone."""
_BATCHED = "--max-num-batched-tokens "
_OPEN_VALUES = ("quantization", "kv-cache-dtype", "load-format", "tokenizer-mode")
"""Flags that take, beside their words, what plugins add: an unknown value is most likely a slip, but not surely."""


@dataclass(frozen=True, slots=True)
class _Engine:
    """The vLLM that is asked about."""

    table: FlagTable | None
    release: Release | None

    @property
    def name(self) -> str:
        return "vLLM " + ".".join(map(str, self.release)) if self.release else "this vLLM"


def flag_findings(
    flags: Flags, environment: Mapping[str, str], table: FlagTable | None, release: Release | None
) -> list[Finding]:
    """What the vLLM with that flag table, of that release, will say to these flags and variables.

    Without a table only what is surely dead in the release is found; without both, nothing but misread variables.
    ``flags`` are normalised names (no dashes before them); ``environment`` is what is set for the server on purpose.
    """
    if release is None and table is not None and table.version:
        release = parse_release(table.version)
    engine = _Engine(table, release)
    found: list[Finding] = []
    known: dict[str, FlagValue] = {}
    for name, value in flags.items():
        of_name = list(_flag(name, value, flags, engine))
        found += of_name
        if not any(finding.level is Level.ERROR for finding in of_name):
            known[name] = value
    if table is not None:
        found += _values(known, engine)
    return found + variable_findings(flags, environment, table, release)


def variable_findings(
    flags: Flags, environment: Mapping[str, str], table: FlagTable | None, release: Release | None
) -> list[Finding]:
    """As :func:`flag_findings`, for the environment variables alone."""
    engine = _Engine(table, release)
    found: list[Finding] = []
    for name, value in environment.items():
        if name.startswith("VLLM_"):
            found += _variable(name, value, flags, engine)
    return found


def _flag(name: str, value: FlagValue, flags: Flags, engine: _Engine) -> Iterator[Finding]:
    """What is to be said of a flag's name."""
    head, _, key = name.partition(".")
    retired = RETIRED_FLAGS.get(head)
    fate = retired.fate(engine.release) if retired and engine.release else None
    spec, several = resolve(engine.table, head) if engine.table else (None, ())
    if spec is not None and spec.name == head:
        if retired and fate is Fate.IGNORED:
            yield _dead(retired, flags, engine, Fate.IGNORED)
        if spec.deprecated:
            yield _deprecated(spec)
    elif retired and (fate is Fate.REFUSED or engine.table):
        taken = spec is not None and spec.opposite == head
        yield _dead(retired, flags, engine, Fate.WARNED if taken else Fate.REFUSED)
    elif spec is not None:
        yield from _second_name(spec, head, key, value)
    elif engine.table is not None:
        yield _unknown(head, key, value, several, engine)
    if head == "config" and engine.release and engine.release <= _FALSE_DROPPED_TO:
        message = f"{engine.name} drops a line 'x: false' of the --config file without a word; write 'no-x: true' there"
        yield Finding("config_drops_false", Level.ADVICE, message)


def _dead(retired: RetiredFlag, flags: Flags, engine: _Engine, fate: Fate) -> Finding:
    fix = retired.carry(flags)
    if fix is not None and engine.table is not None and any(name not in engine.table.flags for name in fix.set):
        fix = Changes(unset=fix.unset)
    if fate is Fate.REFUSED:
        gone = f"gone since {_short(retired.since)}" if retired.since != NEVER else "from an old guide"
        message = f"{engine.name} refuses --{retired.name} ({gone}): {retired.instead}"
        return Finding("flag_dead", Level.ERROR, message, fix)
    what = "and does nothing with it" if fate is Fate.IGNORED else "only as another flag switched off"
    message = f"{engine.name} takes --{retired.name} {what}: {retired.instead}"
    return Finding("flag_dead", Level.WARNING, message, fix)


def _deprecated(spec: FlagSpec) -> Finding:
    said = " ".join(spec.deprecated.split())
    message = said if f"--{spec.name}" in said else f"--{spec.name} is on its way out: {said}"
    return Finding("flag_deprecated", Level.ADVICE, message)


def _second_name(spec: FlagSpec, head: str, key: str, value: FlagValue) -> Iterator[Finding]:
    """A name that this vLLM takes for a flag, and others perhaps do not."""
    written = f"{head}.{key}" if key else head
    if spec.opposite == head:
        if isinstance(value, bool):
            fix = _swap(written, spec.name, "", not value)
            message = f"--{head} is a name that only vLLM 0.33 and later have for --no-{spec.name}"
            yield Finding("flag_unknown", Level.WARNING, message, fix)
    elif f"--{head}" not in spec.aliases:
        message = f"--{head} is short for --{spec.name}; write it out, since another release may have two such flags"
        yield Finding("flag_unknown", Level.WARNING, message, _swap(written, spec.name, key, value))


def _values(flags: Flags, engine: _Engine) -> Iterator[Finding]:
    """What is to be said of values, each alone and then together."""
    assert engine.table is not None
    known = dict(flags)
    for name, value in flags.items():
        if (finding := _value(name, value, engine)) is not None:
            del known[name]
            yield finding
    for name, sentence in judge(engine.table, known):
        alone = name in known and problem(engine.table, name, known[name]) is not None
        if _BATCHED in sentence and not alone:
            continue  # two flags that contradict each other: `values` says it, with a way out
        spec, _ = resolve(engine.table, name.partition(".")[0])
        choices = (spec.choices or (spec.words if spec.closed else ())) if spec else ()
        fix = _nearest_value(name, str(known[name]), choices) if alone else None
        yield Finding("flag_value", Level.ERROR, f"{engine.name} will not start: {sentence}", fix)


def _value(name: str, value: FlagValue, engine: _Engine) -> Finding | None:
    """What is to be said of a value beside what the parser and the configuration say."""
    spec = engine.table.get(name) if engine.table else None
    if spec is None:
        return None
    shown = f"--{name} {str(value)[:40]}"
    gone = retired_value(name, value)
    if gone is not None and engine.release is not None and engine.release >= gone.since:
        since = f"gone since {_short(gone.since)}" if gone.since != NEVER else "gone long ago"
        fix = Changes(set={name: gone.new_value}) if gone.new_value else None
        return Finding("flag_value", Level.ERROR, f"{engine.name} does not know {shown} ({since}): {gone.instead}", fix)
    if value is False and spec.kind is ValueKind.BOOL and not spec.negatable and name not in TRUE_ONLY:
        message = f"{engine.name} will not start: --{name} cannot be switched off, only left out"
        return Finding("flag_value", Level.ERROR, message, Changes(unset=(name,)))
    if name in _OPEN_VALUES and not spec.closed and spec.words and str(value).lower() not in spec.words:
        fix = _nearest_value(name, str(value), spec.words)
        hint = f"; did you mean {fix.set[name]}?" if fix else ""
        return Finding("flag_value", Level.ERROR, f"{engine.name} knows no {shown}{hint}", fix, surely=False)
    return None


def _nearest_value(name: str, value: str, choices: tuple[str, ...]) -> Changes | None:
    exact = [choice for choice in choices if choice.casefold() == value.casefold()]
    near = exact or get_close_matches(value, choices, 1, NEAR)
    return Changes(set={name: near[0]}) if near else None


def _unknown(head: str, key: str, value: FlagValue, several: tuple[str, ...], engine: _Engine) -> Finding:
    assert engine.table is not None
    written = f"{head}.{key}" if key else head
    first = first_release(head)
    if first is not None and engine.release is not None and engine.release < (parse_release(first) or NEVER):
        message = f"{engine.name} does not have --{head} yet: it came with {first}"
        return Finding("flag_too_new", Level.ERROR, message, Changes(unset=(written,)))
    if several:
        names = " or ".join(f"--{name}" for name in several[:3]) + (" or another" if len(several) > 3 else "")
        return Finding("flag_unknown", Level.ERROR, f"{engine.name} refuses --{head}: it could be {names}")
    new = _other_form(head, value, engine.table)
    if new is not None:
        message = f"{engine.name} has no --{head}; write {flag_words(dict([new]))[0]}"
        return Finding("flag_unknown", Level.ERROR, message, Changes(set=dict([new]), unset=(written,)))
    meant, clear = _meant(head, engine.table)
    hint = f"; did you mean --{meant}?" if meant else ""
    fits = clear and not problem(engine.table, meant + (f".{key}" if key else ""), value)
    fix = _swap(written, meant, key, value) if fits else None
    return Finding("flag_unknown", Level.ERROR, f"{engine.name} has no --{head}{hint}", fix)


def _other_form(head: str, value: FlagValue, table: FlagTable) -> tuple[str, FlagValue] | None:
    """The flag of which ``head`` is a short name written with two dashes, or the opposite."""
    for spec in table.flags.values():
        if f"-{head}" in spec.aliases:
            return spec.name, value
    prefix, _, rest = head.partition("-")
    other = table.get({"enable": "disable", "disable": "enable"}.get(prefix, "") + f"-{rest}")
    if other is not None and other.kind is ValueKind.BOOL and other.negatable and isinstance(value, bool):
        return other.name, not value
    return None


def _swap(written: str, name: str, key: str, value: FlagValue) -> Changes:
    """Take another name for a flag. What that one is set to, by the preset most likely, gives way."""
    return Changes(set={f"{name}.{key}" if key else name: value}, unset=(written,))


def _meant(head: str, table: FlagTable) -> tuple[str, bool]:
    """The flag whose name is nearest, and whether it is clearly that one."""
    near = get_close_matches(head, table.flags, 2, NEAR)
    if not near:
        return "", False
    likeness = [SequenceMatcher(None, head, name).ratio() for name in near]
    return near[0], likeness[0] >= CLEARLY and (len(near) == 1 or likeness[0] - likeness[1] >= _APART)


def _variable(name: str, value: str, flags: Flags, engine: _Engine) -> Iterator[Finding]:
    if meaning := MISREAD_VARIABLES.get(name):
        yield Finding("variable_misread", Level.ADVICE, f"{name}: {meaning}")
        return
    known = engine.table.variables if engine.table else frozenset[str]()
    if name in known or (not known and engine.release is None):
        return
    strict = flags.get("fail-on-environ-validation") is True
    retired = RETIRED_VARIABLES.get(name)
    if retired and (known or (engine.release and retired.fate(engine.release))):
        fix = retired.carry(value, flags) if retired.carry else None
        if fix is not None and engine.table is not None and any(flag not in engine.table.flags for flag in fix.set):
            fix = None
        message = f"{_unread(name, engine)}: {retired.instead}"
        yield Finding("variable_dead", Level.ERROR if strict else Level.WARNING, message, fix)
    elif known:
        yield _unread_variable(name, known, engine, Level.ERROR if strict else Level.WARNING)


def _unread_variable(name: str, known: frozenset[str], engine: _Engine, level: Level) -> Finding:
    span = variable_releases(name)
    if span is None:
        near = get_close_matches(name, known, 1, NEAR)
        hint = f"; did you mean {near[0]}?" if near else ""
        return Finding("variable_unknown", level, f"{_unread(name, engine)}{hint}")
    first, last = span
    if last is not None and engine.release is not None and engine.release > (parse_release(last) or NEVER):
        return Finding("variable_dead", level, f"{_unread(name, engine)}: {last} was the last that did")
    return Finding("variable_unknown", level, f"{_unread(name, engine)}: releases from {first} on do")


def _unread(name: str, engine: _Engine) -> str:
    silent = engine.release is not None and unread_fate(engine.release) is Fate.IGNORED
    return f"{engine.name} does not read {name}" + (" and does not say so" if silent else "")


def _short(release: Release) -> str:
    major, minor, patch = release
    return f"{major}.{minor}.{patch}" if patch else f"{major}.{minor}"
