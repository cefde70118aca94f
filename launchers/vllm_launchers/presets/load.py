"""Read presets: shipped ones and the user's own, which may extend others.

Each mistake in a file is reported as one sentence, and all of them at once. An invalid file does not affect others.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vllm_launchers.errors import NotFoundError
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.presets.model import EnvironmentSetting, FlagSetting, Objectives, Preset, Workload
from vllm_launchers.presets.rules import ENVIRONMENT_NAME, FLAG_NAME, FLAG_RULES, refused_flag, refused_value
from vllm_launchers.secrets import holds_secret, is_secret_name
from vllm_launchers.typed_decoding import convert

TEXTS = ("title", "summary", "model")
TABLES = ("flags", "environment", "workload", "objectives")
KEYS = ("extends", "drop", *TEXTS, *TABLES)
REQUIRED = (*TEXTS, "flags", "workload", "objectives")
MAX_TEXT = 2000
_MAX_INT = 2**63 - 1

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


MOST_MISTAKES = 10
"""Maximum number of mistakes listed per file."""


class Problem(Exception):  # noqa: N818 - it becomes a PresetError once the file is known
    """The mistakes in a document, each a sentence: dotted key and what was expected."""

    def __init__(self, *mistakes: str) -> None:
        more = len(mistakes) - MOST_MISTAKES
        self.mistakes = (*mistakes[:MOST_MISTAKES], *([f"{more} more mistakes"] if more > 0 else []))
        super().__init__(self.mistakes[0])


@contextlib.contextmanager
def _noting(found: list[str]) -> Iterator[None]:
    """Note a mistake and continue: all of them are reported together."""
    try:
        yield
    except Problem as problem:
        found += problem.mistakes


def short_text(text: str, limit: int = 60) -> str:
    """Text from a file, sanitized and short enough for a sentence."""
    safe = (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    )
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def near(word: str, known: Iterable[str], otherwise: str) -> str:
    """``; did you mean 'x'?``, or the known names after the text ``otherwise``."""
    import difflib  # only needed if something is wrong

    names = list(known)
    close = difflib.get_close_matches(word[:100].lower(), names, 1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; {otherwise}{', '.join(names)}" if names else ""


def check_document(document: Mapping[str, Any], *, complete: bool) -> None:
    """Validate one file's document; if ``complete``, it must have all required keys. Raises `Problem`."""
    found = [f"unknown key '{short_text(key)}'{near(key, KEYS, 'valid keys: ')}" for key in document if key not in KEYS]
    for key in ("extends", *TEXTS):
        if key in document:
            with _noting(found):
                _check_text(key, document[key])
    tables = {key: document[key] for key in TABLES if isinstance(document.get(key), dict)}
    for key in TABLES:
        if key in document and key not in tables:
            found.append(f"{key}: expected a table, not {_kind(document[key])}")
    for check, key in ((_check_flag, "flags"), (_check_variable, "environment")):
        for name, setting in tables.get(key, {}).items():
            with _noting(found):
                check(name, setting)
    shapes: tuple[tuple[str, type[msgspec.Struct]], ...] = (("workload", Workload), ("objectives", Objectives))
    for key, shape in shapes:
        with _noting(found):
            _check_struct(key, tables.get(key, {}), shape, complete=complete and key in tables)
    with _noting(found):
        _check_drop(document)
    if complete and (missing := [key for key in REQUIRED if key not in document]):
        wanted = ", ".join(REQUIRED)
        found.append(f"'{missing[0]}' is missing; a preset needs {wanted}, or 'extends = \"…\"' to inherit them")
    if found:
        raise Problem(*found)


def merge_preset(base: Mapping[str, Any], document: Mapping[str, Any], base_name: str) -> dict[str, Any]:
    """Merge ``document`` into what it extends: texts replace, tables are merged key by key, ``drop`` removes.

    Raises:
        Problem: ``drop`` names something that is not inherited.
    """
    merged: dict[str, Any] = dict(base)
    for table in TABLES:
        merged[table] = {**base.get(table, {}), **document.get(table, {})}
    for key in TEXTS:
        if key in document:
            merged[key] = document[key]
    for name in document.get("drop", []):
        holders = [table for table in ("flags", "environment") if name in base.get(table, {})]
        if not holders:
            inherited = [*base.get("flags", {}), *base.get("environment", {})]
            raise Problem(f"drop: '{short_text(name)}' is not set by '{base_name}'{near(name, inherited, 'it sets: ')}")
        for table in holders:
            if name in document.get(table, {}):
                raise Problem(f"drop: '{short_text(name)}' is both dropped and set here; use only one of them")
            del merged[table][name]
    return merged


def to_preset(document: Mapping[str, Any], *, name: str, source: str, shipped: bool) -> Preset:
    """Convert a complete document, validated and merged, to a preset."""
    origin = f"set in {name}.toml"
    return Preset(
        name=name,
        title=document["title"],
        summary=document["summary"],
        model=document["model"],
        flags={
            flag: FlagSetting(**setting) if isinstance(setting, dict) else FlagSetting(setting, origin)
            for flag, setting in document["flags"].items()
        },
        workload=convert(document["workload"], Workload),
        objectives=convert(document["objectives"], Objectives),
        environment={
            key: EnvironmentSetting(**setting) if isinstance(setting, dict) else EnvironmentSetting(setting, origin)
            for key, setting in document.get("environment", {}).items()
        },
        source=source,
        shipped=shipped,
    )


def _check_flag(name: str, setting: object) -> None:
    where = f"flags.{short_text(name)}"
    if not FLAG_NAME.fullmatch(name):
        head, dot, tail = name.partition(".")
        better = head.strip("-").replace("_", "-").lower() + dot + tail
        raise Problem(
            f"{where}: a flag is written without leading dashes, in lowercase, with words joined by '-'"
            + (f": '{short_text(better)}'" if FLAG_NAME.fullmatch(better) else "")
        )
    if refusal := refused_flag(name):
        raise Problem(f"{where}: {refusal}")
    if name.startswith("no-"):
        raise Problem(f"{where}: write '{short_text(name[3:])}' with value = false")
    value = _setting(where, setting, "flags")
    _check_flag_value(f"{where}.value" if isinstance(setting, dict) else where, name, value)


def _check_flag_value(where: str, name: str, value: object) -> None:
    if not isinstance(value, bool | int | float | str):
        raise Problem(f"{where}: expected true, false, a number or text, not {_kind(value)}")
    if isinstance(value, str):
        _check_text(where, value)
        if refusal := refused_value(value):
            raise Problem(f"{where}: {refusal}")
    elif (isinstance(value, float) and not math.isfinite(value)) or abs(value) > _MAX_INT:
        raise Problem(f"{where}: expected a finite number of a sensible size, not {short_text(str(value))}")
    rule = FLAG_RULES.get(name)
    if rule is not None and not rule.allows(value):
        given = f"'{short_text(value)}'" if isinstance(value, str) else short_text(str(value).lower())
        raise Problem(f"{where}: expected {rule.expected}, not {given}")


def _check_variable(name: str, setting: object) -> None:
    where = f"environment.{short_text(name)}"
    if not ENVIRONMENT_NAME.fullmatch(name):
        raise Problem(f"{where}: is not a valid name of an environment variable (letters, digits and '_')")
    if is_secret_name(name):
        raise Problem(f"{where}: secrets don't belong in files; export {name} before you launch, or pass it with --env")
    value = _setting(where, setting, "environment")
    place = f"{where}.value" if isinstance(setting, dict) else where
    if not isinstance(value, str):
        raise Problem(f"{place}: expected text in quotes, not {_kind(value)}")
    _check_text(place, value, empty=True)
    if holds_secret(value):
        raise Problem(f"{place}: it contains a key or a password; export {name} before you launch, or use --env")


def _setting(where: str, setting: object, table: str) -> object:
    """The value of ``name = value`` or ``name = { value = …, why = … }``."""
    if not isinstance(setting, dict):
        return setting
    for key in setting:
        if key not in ("value", "why"):
            if "value" not in setting and isinstance(setting[key], dict) and table == "flags":
                raise Problem(
                    f'{where}: a flag name that contains a dot must be quoted: [flags."{where[6:]}.{short_text(key)}"]'
                )
            raise Problem(f"{where}: unknown key '{short_text(key)}'{near(key, ('value', 'why'), 'valid keys: ')}")
    for key in ("value", "why"):
        if key not in setting:
            what = "the reason for it, for people" if key == "why" else "what it is set to"
            raise Problem(f"{where}: '{key}' is missing ({what})")
    _check_text(f"{where}.why", setting["why"])
    return setting["value"]


def _check_drop(document: Mapping[str, Any]) -> None:
    drop = document.get("drop", [])
    if not isinstance(drop, list) or not all(isinstance(name, str) for name in drop):
        raise Problem('drop: expected a list of names, such as ["kv-cache-dtype"]')
    if drop and "extends" not in document:
        raise Problem("drop: only removes inherited settings, but this preset has no 'extends'")


def _check_text(where: str, value: object, *, empty: bool = False) -> None:
    if not isinstance(value, str):
        raise Problem(f"{where}: expected text in quotes, not {_kind(value)}")
    if not empty and not value.strip():
        raise Problem(f"{where}: is empty")
    if len(value) > MAX_TEXT:
        raise Problem(f"{where}: longer than {MAX_TEXT:,} characters")
    if not value.isprintable():
        raise Problem(f"{where}: holds a line break or a control character: '{short_text(value)}'")


def _check_struct(where: str, table: Mapping[str, Any], shape: type[_Struct], *, complete: bool) -> None:
    """Check each key against the ranges of the struct's own fields."""
    fields = _fields(shape)
    found: list[str] = []
    for key, value in table.items():
        if key not in fields:
            found.append(f"{where}: unknown key '{short_text(key)}'{near(key, fields, 'valid keys: ')}")
            continue
        try:
            convert(value, fields[key])
        except msgspec.ValidationError as error:
            found.append(f"{where}.{key}: {_sentence(str(error), value)}")
            continue
        if isinstance(value, float) and not math.isfinite(value):
            found.append(f"{where}.{key}: expected a number, not {value}")
    missing = [name for name in fields if name not in table]
    if complete and missing:
        found.append(f"{where}: '{missing[0]}' is missing; it needs {', '.join(fields)}")
    if found:
        raise Problem(*found)


@cache
def _fields(shape: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Names and annotated types; cached, since msgspec recomputes them each time."""
    return {field.name: field.type for field in msgspec.structs.fields(shape)}


_TYPE_NAMES = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def _sentence(message: str, value: object) -> str:
    """msgspec's message, rephrased: ``Expected `int` >= 1`` becomes ``expected a whole number >= 1, not 0``."""
    wanted = re.sub(r"`(\w+)`", lambda match: _TYPE_NAMES.get(match[1], match[1]), message.partition(", got")[0])
    given = short_text(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else _kind(value)
    return f"{wanted[:1].lower()}{wanted[1:]}, not {given}"


def _kind(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {short_text(str(value))}"
        case str():
            return f"the text '{short_text(value)}'"
        case dict():
            return "a table"
        case list():
            return "a list"
        case _:
            return "a date or time"


MAX_BYTES = 64 * 1024
"""A larger file is not a preset; shipped ones have 2 KB."""

MAX_DOTS = 200
"""Per line: tomllib's time grows quadratically with a dotted key's length (60 KB of ``a.a.a…`` take 12 s)."""

MAX_FILES = 500
MAX_DEPTH = 8
"""Maximum length of a chain of presets that extend one another."""

_NAME = lazy_pattern(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


class PresetError(NotFoundError):
    """An unusable preset; the message is one sentence that names file, key and what was expected."""

    def __init__(self, path: Path | None, message: str) -> None:
        super().__init__(f"{short_text(str(path), 500)}: {message}" if path else message)
        self.path = path
        self.mistake = message


def shipped_folder() -> Path:
    """Where the shipped presets are: inside an installed package, or beside the sources in a checkout."""
    packaged = Path(__file__).parents[1] / "shipped_presets"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "presets"


def read_presets(own: Path | None = None) -> tuple[dict[str, Preset], list[PresetError]]:
    """All usable presets by name, shipped ones first, and the problems of the others.

    ``own`` is the user's folder; it need not exist. A preset there replaces the shipped one of the same name even if it
    is invalid, so that no one silently gets other flags than they wrote.
    """
    problems: list[PresetError] = []
    shelf = _Shelf(_read_folder(shipped_folder(), problems), _read_folder(own, problems) if own else {}, problems)
    presets: dict[str, Preset] = {}
    for name in shelf.names():
        try:
            presets[name] = shelf.preset(name)
        except Problem as problem:
            problems += [PresetError(shelf.path(name), mistake) for mistake in problem.mistakes]
    return presets, problems


def find_preset(name: str, presets: Mapping[str, Preset], problems: Iterable[PresetError] = ()) -> Preset:
    """The preset with this name. Raises `PresetError` with similar names, or with the mistakes in its file."""
    if name in presets:
        return presets[name]
    mistakes = [problem for problem in problems if problem.path is not None and problem.path.stem == name]
    if len(mistakes) > 1:
        numbered = (f"({number}) {mistake.mistake}" for number, mistake in enumerate(mistakes, 1))
        raise PresetError(mistakes[0].path, f"{len(mistakes)} mistakes: {' '.join(numbered)}")
    if mistakes:
        raise mistakes[0]
    raise PresetError(None, f"no preset is called '{short_text(name)}'{near(name, presets, 'available: ')}")


class _Shelf:
    """All documents that could be read; makes presets of them."""

    def __init__(
        self,
        shipped: Mapping[str, tuple[Path, dict[str, Any]]],
        own: Mapping[str, tuple[Path, dict[str, Any]]],
        problems: Collection[PresetError],
    ) -> None:
        self._shipped = shipped
        self._own = own
        self._broken = {error.path.stem for error in problems if error.path is not None}

    def names(self) -> list[str]:
        """Shipped names first, each group sorted; without the user's files that could not be read at all."""
        names = [*self._shipped, *(name for name in self._own if name not in self._shipped)]
        return [name for name in names if name in self._own or name not in self._broken]

    def preset(self, name: str) -> Preset:
        """The complete preset. Raises `Problem` if its document, or one that it extends, is invalid."""
        own = name in self._own
        return to_preset(self._merged(name, own, ()), name=name, source=str(self.path(name)), shipped=not own)

    def path(self, name: str) -> Path:
        """Its file."""
        return (self._own if name in self._own else self._shipped)[name][0]

    def _merged(self, name: str, own: bool, via: tuple[str, ...]) -> dict[str, Any]:
        _, document = (self._own if own else self._shipped)[name]
        check_document(document, complete="extends" not in document)
        if "extends" not in document:
            return document
        base = document["extends"]
        base_own = base in self._own and base != name  # the user's own 'chatbot' extends the shipped one
        if base in via or (base == name and base not in self._shipped):
            raise Problem(f"extends: circular reference: {' → '.join((*via, name, base))}")
        if len(via) >= MAX_DEPTH:
            raise Problem(f"extends: a chain of more than {MAX_DEPTH} presets")
        if not base_own and (base in self._broken and base != name):
            raise Problem(f"extends: '{short_text(base)}' is itself invalid")
        if not base_own and base not in self._shipped:
            known = sorted({*self._shipped, *self._own} - {name})
            raise Problem(f"extends: no preset is called '{short_text(base)}'{near(base, known, 'available: ')}")
        try:
            inherited = self._merged(base, base_own, (*via, name))
        except Problem as problem:
            if via or str(problem).startswith("extends: "):
                raise
            raise Problem(f"extends: '{short_text(base)}' is itself invalid: {problem}") from None
        return merge_preset(inherited, document, base)


def _read_folder(folder: Path, problems: list[PresetError]) -> dict[str, tuple[Path, dict[str, Any]]]:
    try:
        # Names that begin with a dot are editors' locks and backups.
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".toml" and path.name[0] != ".")
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(PresetError(folder, f"can't be read: {os.strerror(error.errno or 0)}"))
        return {}
    if len(paths) > MAX_FILES:
        problems.append(PresetError(folder, f"holds {len(paths)} presets; the first {MAX_FILES} are read"))
    documents: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in paths[:MAX_FILES]:
        try:
            documents[path.stem] = (path, _read_file(path))
        except PresetError as error:
            problems.append(error)
    return documents


def _read_file(path: Path) -> dict[str, Any]:
    if not _NAME.fullmatch(path.stem):
        raise PresetError(path, "a preset's file name is its name: letters, digits, '-', '_' and '.', 64 at most")
    try:
        if not path.is_file():  # also avoids blocking on a pipe
            raise PresetError(path, "is not a file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise PresetError(path, f"is larger than {MAX_BYTES // 1024} KiB; that is not a preset")
        text = data.decode("utf-8-sig")
        if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
            raise PresetError(path, f"holds a line with more than {MAX_DOTS} dots; that is not a preset")
        return tomllib.loads(text)
    except OSError as error:
        raise PresetError(path, f"can't be read: {os.strerror(error.errno or 0)}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PresetError(path, f"is not UTF-8 text (line {line})") from None
    except RecursionError:
        raise PresetError(path, "is nested too deeply; a preset has three levels") from None
    except ValueError as error:  # also TOMLDecodeError, and a number with thousands of digits
        end = f"(at its end, line {len(data.splitlines()) or 1})"
        raise PresetError(
            path, f"is not TOML: {short_text(str(error), 200).replace('(at end of document)', end)}"
        ) from None
