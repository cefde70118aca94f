"""The JSON Schema of preset files, for editors: ``python -m vllm_launchers.presets.schema`` writes it.

Generated from the same structs and rules that the loader validates with; a test detects a stale file.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from vllm_launchers.presets.load import MAX_DEPTH, MAX_TEXT, REQUIRED, shipped_folder
from vllm_launchers.presets.model import Objectives, Workload
from vllm_launchers.presets.rules import ENVIRONMENT_NAME_PATTERN, FLAG_NAME_PATTERN, FLAG_RULES, MANAGED_FLAGS
from vllm_launchers.secrets import SECRET_FLAGS

# A line break or a control character; the loader rejects unprintable text.
_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT, "pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$"}
_SECRET_VARIABLE = (
    r"(^|_)([Aa][Pp][Ii]_?[Kk][Ee][Yy]|[Kk][Ee][Yy]|[Tt][Oo][Kk][Ee][Nn]|[Ss][Ee][Cc][Rr][Ee][Tt]"
    r"|[Pp][Aa][Ss][Ss][Ww][Oo][Rr][Dd]|[Pp][Aa][Ss][Ss][Ww][Dd]|[Cc][Rr][Ee][Dd][Ee][Nn][Tt][Ii][Aa][Ll][Ss]?)$"
)


def schema() -> dict[str, Any]:
    """The schema as a JSON document (draft 2020-12)."""
    extends = {
        "type": "string",
        "minLength": 1,
        "description": f"preset to inherit from; at most {MAX_DEPTH} in a row",
    }
    drop = {"type": "array", "items": {"type": "string"}, "description": "inherited flags and variables to leave out"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vllm-console preset",
        "description": "What to run, for which traffic, and how well: see the shipped presets for examples.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "extends": extends,
            "drop": drop,
            "title": _TEXT | {"description": "display name"},
            "summary": _TEXT | {"description": "one line: the traffic it is for"},
            "model": _TEXT | {"description": "a hub id such as Qwen/Qwen3-8B-AWQ, or the whole path of a folder"},
            "flags": _flags(),
            "environment": _environment(),
            "workload": _table(Workload),
            "objectives": _table(Objectives),
        },
        "dependentRequired": {"drop": ["extends"]},
        "if": {"not": {"required": ["extends"]}},
        "then": {
            "required": list(REQUIRED),
            "properties": {
                "workload": {"required": [field.name for field in msgspec.structs.fields(Workload)]},
                "objectives": {"required": [field.name for field in msgspec.structs.fields(Objectives)]},
            },
        },
    }


def _setting(value: dict[str, Any], description: str) -> dict[str, Any]:
    """Either the bare value, or a table of value and reason."""
    table = {
        "type": "object",
        "additionalProperties": False,
        "required": ["value", "why"],
        "properties": {"value": value, "why": _TEXT | {"description": "the reason, and what it costs"}},
    }
    return {"description": description, "if": {"type": "object"}, "then": table, "else": value}


def _flags() -> dict[str, Any]:
    any_value = {"type": ["boolean", "number", "string"]}
    known = {
        name: _setting(_TEXT if rule.kind is str else rule.schema(), rule.description)
        for name, rule in FLAG_RULES.items()
    }
    return {
        "type": "object",
        "description": "flags of 'vllm serve', without leading dashes; --no-x is x = false",
        "propertyNames": {
            "pattern": FLAG_NAME_PATTERN,
            "not": {"anyOf": [{"enum": [*MANAGED_FLAGS, *SECRET_FLAGS]}, {"pattern": "^no-"}]},
        },
        "properties": known,
        "additionalProperties": _setting(any_value, "a flag of 'vllm serve'"),
    }


def _environment() -> dict[str, Any]:
    value = {"type": "string", "maxLength": MAX_TEXT}
    return {
        "type": "object",
        "description": "environment of the server; no secrets: export those, or give them with --env",
        "propertyNames": {"pattern": ENVIRONMENT_NAME_PATTERN, "not": {"pattern": _SECRET_VARIABLE}},
        "additionalProperties": _setting(value, "an environment variable"),
    }


def _table(shape: type[msgspec.Struct]) -> dict[str, Any]:
    """A struct's schema without its required keys: with ``extends`` a subset is enough."""
    _, components = msgspec.json.schema_components([shape])
    component: dict[str, Any] = dict(components[shape.__name__])
    component.pop("required", None)
    return component


def text() -> str:
    """The schema file as it is on disk."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (shipped_folder() / "schema.json").write_text(text(), encoding="utf-8")
