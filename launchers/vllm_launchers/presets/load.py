"""Reads presets: shipped ones and the user's own, which may extend others. An invalid file affects no other."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_launchers.presets.check import Problem, check_document, merge, near, shown, to_preset
from vllm_launchers.presets.model import Preset

MAX_BYTES = 64 * 1024
"""A larger file is not a preset; shipped ones have 2 KB."""

MAX_DOTS = 200
"""Per line: tomllib's time grows with the square of a dotted key's length (60 KB of ``a.a.a…`` take 12 s)."""

MAX_FILES = 500
MAX_DEPTH = 8
"""Maximum length of a chain of presets that extend one another."""

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


class PresetError(Exception):
    """An unusable preset; the message is one sentence that names file, key and what was expected."""

    def __init__(self, path: Path | None, message: str) -> None:
        super().__init__(f"{shown(str(path), 500)}: {message}" if path else message)
        self.path = path
        self.mistake = message
        self.message = str(self)


def shipped_folder() -> Path:
    """Where the shipped presets are: inside an installed package, or beside the sources in a checkout."""
    packaged = Path(__file__).parents[1] / "shipped_presets"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "presets"


def read_presets(own: Path | None = None) -> tuple[dict[str, Preset], list[PresetError]]:
    """All usable presets by name, shipped ones first, and what is wrong with the others.

    ``own`` is the user's folder; it need not exist. A preset there replaces the shipped one of its name, even if it is
    invalid: no one silently gets other flags than they wrote.
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
    """The preset of that name.

    Raises:
        PresetError: it does not exist, or its file is invalid; the message suggests similar names, or names all
        mistakes.
    """
    if name in presets:
        return presets[name]
    mistakes = [problem for problem in problems if problem.path is not None and problem.path.stem == name]
    if len(mistakes) > 1:
        numbered = (f"({number}) {mistake.mistake}" for number, mistake in enumerate(mistakes, 1))
        raise PresetError(mistakes[0].path, f"{len(mistakes)} mistakes: {' '.join(numbered)}")
    if mistakes:
        raise mistakes[0]
    raise PresetError(None, f"no preset is called '{shown(name)}'{near(name, presets, 'there are: ')}")


class _Shelf:
    """All documents that could be read, and how to make presets of them."""

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
        """The complete preset.

        Raises:
            Problem: its document, or one that it extends, is invalid.
        """
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
            raise Problem(f"extends: refers to itself in a circle: {' → '.join((*via, name, base))}")
        if len(via) >= MAX_DEPTH:
            raise Problem(f"extends: more than {MAX_DEPTH} presets in a row")
        if not base_own and (base in self._broken and base != name):
            raise Problem(f"extends: '{shown(base)}' cannot be used itself")
        if not base_own and base not in self._shipped:
            known = sorted({*self._shipped, *self._own} - {name})
            raise Problem(f"extends: no preset is called '{shown(base)}'{near(base, known, 'there are: ')}")
        try:
            inherited = self._merged(base, base_own, (*via, name))
        except Problem as problem:
            if via or str(problem).startswith("extends: "):
                raise
            raise Problem(f"extends: '{shown(base)}' cannot be used itself: {problem}") from None
        return merge(inherited, document, base)


def _read_folder(folder: Path, problems: list[PresetError]) -> dict[str, tuple[Path, dict[str, Any]]]:
    try:
        # Names that begin with a dot are editors' locks and backups.
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".toml" and path.name[0] != ".")
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(PresetError(folder, f"cannot be read: {os.strerror(error.errno or 0)}"))
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
            raise PresetError(path, f"is larger than {MAX_BYTES // 1024} KiB; that is no preset")
        text = data.decode("utf-8")
        if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
            raise PresetError(path, f"holds a line with more than {MAX_DOTS} dots; that is no preset")
        return tomllib.loads(text)
    except OSError as error:
        raise PresetError(path, f"cannot be read: {os.strerror(error.errno or 0)}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PresetError(path, f"is not UTF-8 text (line {line})") from None
    except RecursionError:
        raise PresetError(path, "is nested too deeply; a preset has three levels") from None
    except ValueError as error:  # also TOMLDecodeError, and a number with thousands of digits
        end = f"(at its end, line {len(data.splitlines()) or 1})"
        raise PresetError(path, f"is not TOML: {shown(str(error), 200).replace('(at end of document)', end)}") from None
