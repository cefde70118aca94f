"""The tool that adds a release to the table: what it writes is read back as it was learned."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from fakes.flag_history import last_release
from vllm_launchers.vllm.flags import releases
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.release_defaults import parse_release

TOOL = Path(__file__).resolve().parents[3] / "tools" / "record_release.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_release", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def read_back(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], FlagTable]:
    """The newest release in other data, as the program reads it."""

    def read_back(data: dict[str, Any]) -> FlagTable:
        monkeypatch.setattr(releases, "_data", lambda: data)
        monkeypatch.setattr(releases, "RELEASES", tuple(data["releases"]))
        monkeypatch.setattr(releases, "_NUMBERS", tuple(map(parse_release, data["releases"])))
        return releases._table.__wrapped__(len(data["releases"]) - 1)

    return read_back


def test_shipped_data_has_the_written_format(tool: ModuleType) -> None:
    shipped = tool.DATA.read_text()
    assert tool.written(json.loads(shipped)) == shipped


def test_release_without_changes(tool: ModuleType, read_back: Callable[..., FlagTable]) -> None:
    newest = releases.release_table("0.33.0")
    data = json.loads(tool.DATA.read_text())
    added = tool.with_release(data, replace(newest, version="0.34.0"))
    assert added["flags"] == data["flags"]
    assert added["variables"] == data["variables"]
    assert read_back(added).flags == newest.flags


def test_added_removed_and_changed_flags(tool: ModuleType, read_back: Callable[..., FlagTable]) -> None:
    newest = releases.release_table("0.33.0")
    flags = dict(newest.flags)
    del flags["seed"]
    flags["quite-new"] = FlagSpec("quite-new", ValueKind.INT, "3", minimum=0, aliases=("-qn",), nullable=True)
    flags["max-lora-rank"] = replace(flags["max-lora-rank"], choices=("1", "2"), default=None)
    variables = (newest.variables | {"VLLM_QUITE_NEW"}) - {"VLLM_PORT"}
    learned = FlagTable("0.34.0", "installation", flags, variables)
    added = tool.with_release(json.loads(tool.DATA.read_text()), learned)
    table = read_back(json.loads(tool.written(added)))
    assert table.version == "0.34.0"
    assert table.flags == flags
    assert table.variables == variables
    assert last_release("seed") == "0.33.0"
    assert releases.first_release("quite-new") == "0.34.0"
    assert releases.variable_releases("VLLM_PORT") == ("0.8.5", "0.33.0")
