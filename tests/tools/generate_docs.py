"""Writes the generated parts of the documents: tables of keys, settings, each command's options, and guides' claims.

    python tests/tools/generate_docs.py            # rewrites docs/*.md in place

A generated part is between ``<!-- generated: NAME -->`` and ``<!-- /generated -->``. NAME is ``keys``, ``keymaps``,
``settings``, ``options`` or ``claims TOPIC``. ``tests/contract/test_docs.py`` checks that every part is current.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from guides.table import TOPICS
from vllm_console.cli.main import COMMANDS, implementation
from vllm_console.settings import Config
from vllm_console.ui.actions import Action, action_named, grouped
from vllm_console.ui.keymap import PRESETS, key_label

DOCS = Path(__file__).parents[2] / "docs"

_PART = re.compile(r"(<!-- generated: ([a-z ]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)

EVERYWHERE = ("help", "json")
"""Options documented once for all commands."""


def generated(text: str) -> str:
    """The text with every generated part rewritten.

    Raises:
        KeyError: a part has an unknown name.
    """
    return _PART.sub(lambda part: f"{part[1]}{_content(part[2])}{part[3]}", text)


def names(text: str) -> list[str]:
    """The names of a text's generated parts, in order."""
    return [part[2] for part in _PART.finditer(text)]


def _content(name: str) -> str:
    kind, _, of = name.partition(" ")
    parts = {
        "keys": keys,
        "keymaps": keymaps,
        "settings": settings,
        "options": every_command,
        "claims": lambda: claims(of),
    }
    return parts[kind]()


def keys() -> str:
    """Every action of the registry, in the order and under the headings of the help screen."""
    parts = []
    for title, group in grouped().items():
        rows = [f"| {_keys(action)} | {_cell(action.title)} | `{action.id}` |" for action in group]
        parts.append("\n".join([f"## {title}", "", "| key | action | id |", "|---|---|---|", *rows]))
    return "\n" + "\n\n".join(parts) + "\n\n"


def _keys(action: Action) -> str:
    return " ".join(f"`{key_label(key)}`" for key in action.keys)


def keymaps() -> str:
    """The changes of each key preset."""
    parts = []
    for preset, changed in PRESETS.items():
        rows = [
            f"| {' '.join(f'`{key_label(key)}`' for key in text.split())} | {_cell(action_named(id).title)} | `{id}` |"
            for id, text in changed.items()
        ]
        if rows:
            parts.append("\n".join([f"### {preset}", "", "| key | action | id |", "|---|---|---|", *rows]))
    return "\n" + "\n\n".join(parts) + "\n\n"


def settings() -> str:
    """Every key of ``config.toml`` with its type, default and description."""
    schema: dict[str, Any] = msgspec.json.schema(Config)
    rows = _settings(schema["$defs"], "Config", "")
    return "\n".join(["", "| key | type | default | meaning |", "|---|---|---|---|", *rows, "", ""])


def _settings(shapes: Mapping[str, Any], shape: str, within: str) -> Iterator[str]:
    for key, field in shapes[shape]["properties"].items():
        if nested := _shape(field):
            yield from _settings(shapes, nested, f"{key}.")
        else:
            cells = (f"`{within}{key}`", _type(field), f"`{_toml(field['default'])}`", field["description"])
            yield f"| {' | '.join(map(_cell, cells))} |"


def _shape(field: Mapping[str, Any]) -> str:
    """The name of a field's table; empty if the field is a value."""
    reference = field.get("$ref") or next((one["$ref"] for one in field.get("allOf", ()) if "$ref" in one), "")
    return str(reference).rpartition("/")[2]


def _type(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in sorted(field["enum"]))
    if field["type"] == "array":
        inner = _type(field["items"])
        return f"list of {inner}" if "enum" in field["items"] else f"list of {inner}s"
    return {"boolean": "boolean", "number": "number", "string": "string", "object": "table"}[field["type"]]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list | dict):
        return "{}" if isinstance(value, dict) else "[]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def every_command() -> str:
    """The options of every command, by name."""
    return "\n" + "\n".join(options(command) for command in sorted(COMMANDS))


def options(command: str) -> str:
    """A command's usage and the description of each option."""
    parser = command_parser(command)
    listed = [action for action in parser._actions if action.dest not in EVERYWHERE and (action.help or _named(action))]
    rows = [f"| {_option(action)} | {_cell((action.help or '') % vars(action))} |" for action in listed]
    table = ["", "| option | meaning |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## {command}", "", "```text", _usage(command, parser), "```", *table, ""])


def command_parser(command: str) -> argparse.ArgumentParser:
    """The parser of one command.

    Raises:
        KeyError: there is no such command.
    """
    if command not in COMMANDS:
        raise KeyError(command)
    parser = argparse.ArgumentParser(prog=f"vllm-console {command}")
    implementation(command, "add_arguments")(parser)
    return parser


def _usage(command: str, parser: argparse.ArgumentParser) -> str:
    words = [_positional(action) for action in parser._actions if not _named(action)]
    words += [
        f"{action.option_strings[-1]} {_value(action)}"
        for action in parser._actions
        if _named(action) and action.required
    ]
    rest = any(_named(action) and not action.required for action in parser._actions)
    return " ".join(["vllm-console", command, *words, *(["[OPTIONS]"] if rest else [])])


def _named(action: argparse.Action) -> bool:
    """Whether it is an option, not a positional argument."""
    return bool(action.option_strings)


def _positional(action: argparse.Action) -> str:
    word = _value(action)
    return {"?": f"[{word}]", "*": f"[{word}…]", "+": f"{word}…"}.get(str(action.nargs), word)


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _option(action: argparse.Action) -> str:
    if not _named(action):
        return f"`{_cell(_value(action))}`"
    value = "" if action.nargs == 0 else f" {_value(action)}"
    return ", ".join(f"`{name}{_cell(value)}`" for name in action.option_strings)


def claims(topic: str) -> str:
    """Claims of operating guides on a topic, the model's result, and the verdict.

    Raises:
        KeyError: there is no such topic.
    """
    rows = []
    for claim in TOPICS[topic]:
        says, setup, gives, why = map(claim.filled, (claim.says, claim.setup, claim.gives, claim.reason))
        cells = (says, claim.source, setup, gives, f"**{claim.outcome.verdict}**", why)
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    titles = ("claim", "kind", "what is run", "what the model gives", "verdict", "why")
    head = f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|"
    return "\n".join(["", head, *rows, "", ""])


def _cell(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|")


def main() -> None:
    """Rewrite the documents that have generated parts."""
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (now := generated(text)) != text:
            path.write_text(now, encoding="utf-8")
            print(f"{path}: updated")


if __name__ == "__main__":
    main()
