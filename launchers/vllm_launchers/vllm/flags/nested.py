"""The keys of a JSON flag and the values they accept, read from the configuration class of the object."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_launchers.vllm.flags.config_classes import (
    Reading,
    config_fields,
    forbids_other_keys,
    readings,
    rewrites_keys,
)
from vllm_launchers.vllm.flags.evaluate import Evaluator
from vllm_launchers.vllm.flags.flag_table import FlagSpec, ValueKind
from vllm_launchers.vllm.flags.hints import ConfigField, TypeHints
from vllm_launchers.vllm.flags.value_text import default_text, texts

_HELP = 4000
_DEEPEST = 4
_KINDS = {
    frozenset(("bool",)): ValueKind.BOOL,
    frozenset(("int",)): ValueKind.INT,
    frozenset(("float",)): ValueKind.FLOAT,
    frozenset(("int", "float")): ValueKind.FLOAT,
    frozenset(("str",)): ValueKind.TEXT,
    frozenset(("literal", "str")): ValueKind.TEXT,
    frozenset(("list",)): ValueKind.JSON_LIST,
    frozenset(("tuple",)): ValueKind.JSON_LIST,
    frozenset(("set",)): ValueKind.JSON_LIST,
    frozenset(("dict",)): ValueKind.JSON,
}


def parts_of(evaluator: Evaluator, hints: TypeHints, depth: int = 0) -> tuple[FlagSpec, ...]:
    """The keys that a JSON object may have; empty if its class accepts others too."""
    config = hints.config
    if config is None or not forbids_other_keys(evaluator, config) or rewrites_keys(evaluator, config):
        return ()
    validated, nothing = readings(evaluator, config), frozenset[Reading]()
    return tuple(
        _part(evaluator, field, validated.get(field.name, nothing) | validated.get("*", nothing), depth)
        for field in config_fields(evaluator, config).values()
        if field.init and not field.name.startswith("_")
    )


def _part(evaluator: Evaluator, field: ConfigField, validated: frozenset[Reading], depth: int) -> FlagSpec:
    """One key. If its type or validator is not understood, it accepts anything (``OTHER`` without choices)."""
    hints, help = field.hints, field.help.partition("\n\n")[0][:_HELP]
    nullable = "None" in hints.names or Reading.OR_NOTHING in validated
    others = validated - {Reading.OR_NOTHING}
    reading = None if not others else next(iter(others)) if len(others) == 1 else Reading.UNKNOWN
    part = FlagSpec(field.name, ValueKind.OTHER, default_text(field.default), help=help, nullable=nullable)
    if not hints.checked or reading is Reading.UNKNOWN:
        return part
    names = hints.names - {"None"}
    if hints.enum is not None:
        return _member(evaluator, part, hints, reading) if names == {"class"} and hints.config is None else part
    if hints.config is not None:
        parts = parts_of(evaluator, hints, depth + 1) if names == {"class"} and depth < _DEEPEST else ()
        return replace(part, kind=ValueKind.JSON, parts=parts) if parts else part
    if reading is None and (kind := _KINDS.get(names)) is not None:
        ge, gt, le, lt = (field.bounds.get(name) for name in ("ge", "gt", "le", "lt"))
        return replace(part, kind=kind, minimum=ge, above=gt, maximum=le, below=lt)
    if names == {"literal"} and reading in (None, Reading.PLAIN_WORD):
        return _literal(part, hints, reading)
    return part


def _literal(part: FlagSpec, hints: TypeHints, reading: Reading | None) -> FlagSpec:
    options = [option for option in hints.options if option is not None]
    if all(isinstance(option, str) for option in options):
        kind = ValueKind.OTHER if reading is Reading.PLAIN_WORD else ValueKind.TEXT
        return replace(part, kind=kind, choices=texts(options))
    if reading is not Reading.PLAIN_WORD and all(type(option) is int for option in options):
        return replace(part, kind=ValueKind.INT, choices=texts(options))
    return part


def _member(evaluator: Evaluator, part: FlagSpec, hints: TypeHints, reading: Reading | None) -> FlagSpec:
    """An enum member, by name if a validator reads it that way (``choices`` are then the numbers), else by value."""
    assert hints.enum is not None
    values = [member.value for member in evaluator.members(hints.enum)]
    if reading in (Reading.MEMBER_NAME, Reading.MEMBER_NAME_OR_AUTO):
        words = [member.name for member in evaluator.members(hints.enum)]
        words += ["auto"] * (reading is Reading.MEMBER_NAME_OR_AUTO)
        numbers = texts(values) if all(type(value) is int for value in values) else ()
        return replace(part, words=tuple(words), closed=True, choices=numbers)
    known = reading is None and all(isinstance(value, str) for value in values)
    return replace(part, kind=ValueKind.TEXT, choices=texts(values)) if known else part
