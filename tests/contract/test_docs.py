"""The documents match the program: links, generated parts, and completeness."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from guides.table import TOPICS
from tools import generate_docs
from vllm_console.cli.main import COMMANDS
from vllm_console.diagnosis.finding import Cause
from vllm_console.diagnosis.live.findings import RULES
from vllm_console.settings import Alerts, Config, EnergyPrice, read_settings
from vllm_console.ui.actions import actions
from vllm_console.ui.keymap import chosen_keys
from vllm_launchers.presets.load import read_presets

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SOURCES = (ROOT / "console/vllm_console", ROOT / "launchers/vllm_launchers")
README_LINES = 200
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
PROJECT_FILE = re.compile(r"`(?:[^`]* )?((?:tests|docs|presets|console|launchers|\.ci)/[\w./-]+)(?: [^`]*)?`")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """A page without code blocks, where brackets are not links and ``#`` is not a heading."""
    return CODE_BLOCK.sub("", text)


def anchors(path: Path) -> Iterator[str]:
    for heading in HEADING.findall(prose(path.read_text(encoding="utf-8"))):
        yield re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def sections(text: str, level: int) -> list[str]:
    return [heading for mark, heading in re.findall(r"^(#+) (.+)$", prose(text), re.MULTILINE) if len(mark) == level]


def words_of_first_column(table: str) -> list[str]:
    """The first word of each row's first cell, if that is code."""
    return re.findall(r"^\| `(\w+)[^`]*` \|", table, re.MULTILINE)


def with_json() -> set[str]:
    return {name for name in COMMANDS if "--json" in generate_docs.command_parser(name).format_usage()}


def test_commands_without_json_are_named() -> None:
    (sentence,) = re.findall(r"All commands but (.+?) take `--json`", page("commands.md"))
    assert sorted(re.findall(r"`(\w+)`", sentence)) == sorted(set(COMMANDS) - with_json())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_are_valid(path: Path) -> None:
    broken = []
    for link in LINK.findall(prose(path.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        place = (path.parent / file).resolve() if file else path
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_named_project_files_exist(path: Path) -> None:
    named = PROJECT_FILE.findall(prose(path.read_text(encoding="utf-8")))
    assert not [name for name in named if not (ROOT / name).exists()]


def with_runs(path: Path) -> Any:
    """A page to check; the one with model runs is checked where ``test_guides.py`` has already run them."""
    return pytest.param(path, marks=pytest.mark.xdist_group("guides") if path.name == "guides.md" else ())


@pytest.mark.parametrize("path", map(with_runs, PAGES), ids=[path.name for path in PAGES])
def test_generated_parts_are_current(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert generate_docs.generated(text) == text, "run: python tests/tools/generate_docs.py"


def test_unknown_generated_part_is_an_error() -> None:
    with pytest.raises(KeyError):
        generate_docs.generated("<!-- generated: nothing -->\n<!-- /generated -->")


def test_each_page_has_its_generated_parts() -> None:
    assert generate_docs.names(page("keys.md")) == ["keys", "keymaps"]
    assert generate_docs.names(page("settings.md")) == ["settings"]
    assert generate_docs.names(page("guides.md")) == [f"claims {topic}" for topic in TOPICS]
    assert generate_docs.names(page("options.md")) == ["options"]


def test_readme_length_is_limited() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_readme_links_to_every_page() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {str(path.relative_to(ROOT)) for path in PAGES if path.name != "README.md"} <= linked


def test_readme_table_names_exactly_the_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- commands -->")[2].partition("<!-- /commands -->")[0]
    assert sorted(words_of_first_column(table)) == sorted(COMMANDS)


def test_every_command_is_explained_with_its_options() -> None:
    assert sorted(sections(page("commands.md"), 3)) == sorted(COMMANDS)
    assert sections(page("options.md"), 2) == sorted(COMMANDS)


def test_every_json_document_is_described() -> None:
    described = set(sections(page("json.md"), 3)) & set(COMMANDS)
    assert described == with_json()


def test_every_finding_code_and_cause_is_documented() -> None:
    text = page("json.md")
    codes = {rule.code for rule in RULES} | {str(cause) for cause in Cause}
    assert not {code for code in codes if f"`{code}`" not in text}


def test_every_setting_is_described() -> None:
    text = page("settings.md")
    tables = {"alerts": Alerts, "energy": EnergyPrice}
    keys = {f"{name}.{field.name}" for name, table in tables.items() for field in msgspec.structs.fields(table)}
    keys |= {field.name for field in msgspec.structs.fields(Config)} - tables.keys()
    assert keys == set(re.findall(r"^\| `([\w.]+)` \|.*\|.*\| .+ \|$", text.partition("<!-- /generated -->")[0], re.M))


@pytest.mark.parametrize("name", ["settings.md", "keys.md"])
def test_example_settings_are_accepted(name: str, tmp_path: Path) -> None:
    for example in re.findall(r"^```toml\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL):
        file = tmp_path / "config.toml"
        file.write_text(example)
        settings = read_settings(file)
        assert set(settings.keys) <= set(chosen_keys(settings.keymap, settings.keys))


def test_example_preset_is_accepted(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.toml").write_text(example)
    presets, problems = read_presets(tmp_path)
    assert not problems
    assert presets["mine"].flags["tensor-parallel-size"].value == 2


def test_every_action_is_in_the_table_of_keys() -> None:
    lines = page("keys.md").splitlines()
    lines = lines[lines.index("<!-- generated: keys -->") : lines.index("## Presets of keys")]
    rows = [line for line in lines if line.startswith("| `")]
    assert [row.split(" | ")[-1].strip("` |") for row in rows if "`restart`" in row] == ["restart"]
    assert sorted(row.split(" | ")[-1].strip("` |") for row in rows) == sorted(action.id for action in actions())
    assert any("`[`" in row for row in rows)


def layers_of(package: str) -> list[list[str]]:
    """Packages and modules of a root package from top to bottom, as import-linter checks them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = [found["layers"] for found in contracts["contracts"] if found.get("containers") == [package]]
    return [layer.split(" | ") for layer in layers]


@pytest.mark.parametrize("folder", SOURCES, ids=lambda folder: folder.name)
def test_architecture_names_every_package_and_module(folder: Path) -> None:
    named = words_of_first_column(page("architecture.md").partition("\n## ")[2])  # below the diagrams
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    modules = {path.name for path in folder.glob("*.py") if path.name != "__init__.py"}
    assert packages <= set(named)
    assert modules <= set(re.findall(r"`(\w+\.py)`", page("architecture.md")))
    rank = {name: number for number, layer in enumerate(layers_of(folder.name)) for name in layer}
    assert set(rank) == packages | {module.removesuffix(".py") for module in modules}
    ranks = [rank[name] for name in named if name in packages]
    assert ranks == sorted(ranks), "packages from top to bottom"


@pytest.mark.parametrize("folder", SOURCES, ids=lambda folder: folder.name)
def test_architecture_draws_the_layers_that_are_checked(folder: Path) -> None:
    (diagram,) = re.findall(r"^```text\n(console .*?)^```$", page("architecture.md"), re.MULTILINE | re.DOTALL)
    console, _, launchers = diagram.partition("launchers ")
    drawn = re.findall(r"^(?:console)? +(\w+(?: \| \w+)*)$", console if "console" in folder.name else launchers, re.M)
    layers = [" | ".join(layer) for layer in layers_of(folder.name)]
    assert drawn == (layers if "__main__" not in layers else layers[1:])


def test_files_in_the_architecture_diagrams_exist() -> None:
    named = set(re.findall(r"[\w/]+\.(?:py|toml)\b", page("architecture.md")))
    assert not [name for name in named if not any((root / name).exists() for root in (ROOT, *SOURCES))]
