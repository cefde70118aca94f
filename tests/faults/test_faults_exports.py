"""Exports of hostile values, run in real shells: the program gets exactly these arguments, nothing else runs."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fakes import hostile
from fakes.plans import plan_with
from vllm_console.alerts.grafana import dashboard
from vllm_console.alerts.prometheus import AlertTarget, model_match, rules_document, rules_yaml
from vllm_launchers.plan.command_line import command_line
from vllm_launchers.plan.export.container import compose
from vllm_launchers.plan.export.kubernetes import kubernetes
from vllm_launchers.plan.export.shell import config_yaml, shell
from vllm_launchers.plan.export.systemd import systemd_unit
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes

RECORDS = """#!{python} -S
import json, os, sys
open({path!r}, 'w').write(json.dumps([sys.argv[1:], {{name: os.environ.get(name) for name in ('A_NAME', 'OTHER')}}]))
"""
VALUES = (
    hostile.EVIL.replace("\0", ""),
    hostile.SHELL,
    "'; touch pwned; '",
    '"$(touch pwned)"',
    "\\'$(touch pwned)",
    "a\\",
    "\n#\ntouch pwned\n",
    "\x1b[201~touch pwned\n",
    "-x",
    "{{ .Values }} ${HOME} %h %%n $$ {% raw %}",
    "!ruby/object:x *a &b <<: - null yes 0x10 1_000 2001-01-01 ~",
    "[Service]\nExecStart=/usr/bin/touch pwned\n",
    "\u202e\u2028\x85\ufeff\x7f日本語",
    "'" * 50 + '"' * 50 + "`" * 50 + "\\" * 50,
)


@pytest.fixture
def argv_file(tmp_path: Path) -> Path:
    """A program in a folder with a hostile name that records its arguments and variables; returns the record's path."""
    folder = tmp_path / "a $(touch pwned) b'\"\\"
    folder.mkdir()
    (folder / "vllm").write_text(RECORDS.format(python=sys.executable, path=str(tmp_path / "argv_file")))
    (folder / "vllm").chmod(0o755 | stat.S_IEXEC)
    return tmp_path / "argv_file"


def plan_of(program: str, value: str) -> Plan:
    """An unvalidated plan with the value in every field, like a record of another version."""
    flags = {"served-model-name": value, "chat-template": value, "max-num-seqs": 8}
    engine = Engine(EngineKind.VLLM, (program,), "0.33.0", "cuda", program)
    made = plan_with(read_presets(None)[0]["chatbot"], engine, Changes(flags))
    model = value.strip().lstrip("-~") or "m"
    argv = tuple(model if word == made.model else word for word in made.argv)
    return msgspec.structs.replace(made, model=model, argv=argv, environment={"A_NAME": value, "OTHER": "x y"})


def ran(words: list[str], text: str, argv_file: Path) -> tuple[list[str], dict[str, str]]:
    """Run an exported command in a shell; returns the program's arguments and variables."""
    argv_file.unlink(missing_ok=True)
    folder = argv_file.parent / "empty"
    folder.mkdir(exist_ok=True)
    done = subprocess.run([*words, text], cwd=folder, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == [], "something else was run"
    argv, environment = json.loads(argv_file.read_text())
    return argv, environment


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_shells_pass_exported_arguments_unchanged(value: str, argv_file: Path) -> None:
    """The script in ``sh`` and ``bash``, and the displayed command line in ``bash``."""
    plan = plan_of(str(next(argv_file.parent.glob("a *")) / "vllm"), value)
    script, line = shell(plan), command_line(plan)
    assert all(character.isprintable() or character in "\n\t" for character in script)
    assert line.isprintable(), "it can be displayed and pasted into a terminal"
    for words, text in ((["sh", "-c"], script), (["bash", "-c"], script), (["bash", "-c"], line)):
        argv, environment = ran(words, text, argv_file)
        assert argv == list(plan.argv[1:])
        assert environment == {"A_NAME": value, "OTHER": "x y"}


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_other_tools_parse_exports_correctly(value: str) -> None:
    plan = plan_of("/opt/vllm/bin/vllm", value)
    texts = [config_yaml(plan), compose(plan), kubernetes(plan), systemd_unit(plan, user=True)]
    for text in texts:
        assert all(character.isprintable() or character in "\n\t" for character in text.replace("\u0301", ""))
    config = yaml.safe_load(texts[0])
    assert config["model"] == plan.model
    assert value.startswith("-") or str(config["served-model-name"]) == value
    (service,) = yaml.safe_load(texts[1])["services"].values()
    assert plan.model in [word.replace("$$", "$") for word in service["command"]]
    assert service["environment"]["A_NAME"].replace("$$", "$") == value
    kinds = [document["kind"] for document in yaml.safe_load_all(texts[2])]
    assert kinds.count("Deployment") == 1
    assert texts[3].count("\nExecStart=") == 1
    assert [line for line in texts[3].splitlines() if line.startswith("[")] == ["[Unit]", "[Service]", "[Install]"]


@pytest.mark.parametrize("value", [*VALUES, hostile.WORST], ids=range(len(VALUES) + 1))
def test_rules_and_dashboards_parse_to_the_intended_values(value: str) -> None:
    preset = read_presets(None)[0]["chatbot"]
    target = AlertTarget(preset.objectives, value, value, model_match(value))
    text = rules_yaml(target)
    assert all(character.isprintable() or character == "\n" for character in text)
    read: Any = yaml.safe_load(text)
    whole = json.dumps(rules_document(target), ensure_ascii=False)
    assert read == json.loads(re.sub("[\ud800-\udfff]", "\ufffd", whole)), "YAML has no lone surrogates"
    assert len(read["groups"][0]["rules"]) == 7
    json.loads(json.dumps(dashboard(target)))


def test_unquoted_argument_is_executed_by_the_shell() -> None:
    """Verifies the tests above: an unquoted argument is executed."""
    folder = Path(os.environ["XDG_CACHE_HOME"])
    subprocess.run(["sh", "-c", "echo $(touch pwned)"], cwd=folder, check=True, capture_output=True)
    assert (folder / "pwned").exists()
