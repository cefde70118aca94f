"""Adds a vLLM release to the project's table of releases, from its source.

    python tests/tools/record_release.py VERSION FOLDER

``FOLDER`` is the package that contains ``engine/arg_utils.py`` (from an unpacked source or wheel, or an installation);
it is read, never run. Afterwards add VERSION to ``RELEASES`` in ``vllm/flags/releases.py``, removed flags to
``vllm/removed_flags.py``, and run ``tests/unit/vllm/flags``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_launchers.vllm.flags import releases
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, VariableSpec
from vllm_launchers.vllm.flags.learn import learn_folder

DATA = Path(releases.__file__).with_suffix(".json")
LISTS = ("choices", "words", "aliases")
SWITCHES = ("negatable", "many", "nullable", "bare", "closed")
OPTIONAL = ("default", "minimum", "above", "maximum", "below")
TEXTS = ("opposite", "group")


def properties(spec: FlagSpec) -> dict[str, Any]:
    """A flag's properties in the table. Help texts stay vLLM's own."""
    said: dict[str, Any] = {"kind": spec.kind.value}
    said |= {name: " ".join(values) for name in LISTS if (values := getattr(spec, name))}
    said |= {name: 1 for name in SWITCHES if getattr(spec, name)}
    said |= {name: value for name in OPTIONAL if (value := getattr(spec, name)) is not None}
    said |= {name: value for name in TEXTS if (value := getattr(spec, name))}
    return said | ({"deprecated": "vLLM calls it deprecated"} if spec.deprecated else {})


def with_release(data: Mapping[str, Any], table: FlagTable) -> dict[str, Any]:
    """The table of releases with one more, the newest."""
    index = len(data["releases"])
    flags: dict[str, Any] = {name: list(history) for name, history in data["flags"].items()}
    for name in sorted({*flags, *table.flags}):
        history = flags.setdefault(name, [])
        before = _at_the_end(history)
        spec = table.get(name)
        now = properties(spec) if spec is not None else None
        if now is not None and before is not None and "deprecated" in before and "deprecated" in now:
            now["deprecated"] = before["deprecated"]
        if now != before:
            gone = {key: None for key in before or {} if now and key not in now}
            changed = {key: value for key, value in (now or {}).items() if not before or before.get(key) != value}
            history.append([index, None if now is None else {**changed, **gone}])
    variables = {name: list(span) for name, span in data["variables"].items()}
    for name, span in variables.items():
        if len(span) == 1 and name not in table.variables:
            span.append(index)
    new = table.variables - set(variables)
    return {
        "releases": [*data["releases"], table.version],
        "flags": dict(sorted(flags.items())),
        "variables": dict(sorted({**variables, **{name: [index] for name in new}}.items())),
        "values": with_changes(data["values"], {n: variable_properties(s) for n, s in table.values.items()}, index),
        "capabilities": with_changes(data["capabilities"], table.limits.capabilities, index),
    }


def with_changes(histories: Mapping[str, Any], said: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Histories of values with one more release; null if the value is missing."""
    found: dict[str, Any] = {name: list(history) for name, history in histories.items()}
    for name in {*found, *said}:
        history = found.setdefault(name, [])
        before = history[-1][1] if history else None
        if said.get(name) != before:
            history.append([index, said.get(name)])
    return dict(sorted(found.items()))


def variable_properties(spec: VariableSpec) -> dict[str, Any]:
    """A variable's values in the table."""
    said: dict[str, Any] = {"kind": spec.kind.value}
    said |= {"choices": " ".join(spec.choices)} if spec.choices else {}
    said |= {name: True for name in ("many", "empty") if getattr(spec, name)}
    return said | ({} if spec.exact else {"exact": False})


def _at_the_end(history: list[Any]) -> dict[str, Any] | None:
    now: dict[str, Any] | None = None
    for _, change in history:
        now = None if change is None else {k: v for k, v in {**(now or {}), **change}.items() if v is not None}
    return now


def written(data: Mapping[str, Any]) -> str:
    """The table as text, with one line for each flag and variable."""
    parts = [f'"releases": {json.dumps(data["releases"])}']
    for kind in ("flags", "variables", "values", "capabilities"):
        lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in data[kind].items())
        parts.append(f'"{kind}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Write the table with the new release."""
    version, folder = sys.argv[1:]
    data = json.loads(DATA.read_text())
    if version in data["releases"]:
        sys.exit(f"{version} is in the table already")
    DATA.write_text(written(with_release(data, learn_folder(Path(folder), version=version))))


if __name__ == "__main__":
    main()
