"""Every argument is read back unchanged by the other tool's own parser."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.plan.command_line import line_word
from vllm_launchers.plan.export.container import compose
from vllm_launchers.plan.export.kubernetes import kubernetes
from vllm_launchers.plan.export.quoting import (
    ExportError,
    label,
    systemd_assignment,
    systemd_word,
    yaml_document,
    yaml_text,
)
from vllm_launchers.plan.export.shell import config_yaml, shell
from vllm_launchers.plan.export.systemd import systemd_unit
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.engines import Engine, EngineKind

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30) | st.sampled_from(
    ["$HOME", "${A}", "$(rm -rf x)", "%h", "%%", "a b", 'say "x"', "it's", "\\n", "\\", "a\\", "#x", ";", "---", "- a",
     "null", "yes", "No", "0x10", "1_000", "1e5", "1:30", "2001-01-01", "~", "!x", "&x", "*x", "a: b", "a:", "[1]",
     "{x}", "é😀", "\u2028", "\x85", "\ufeff", "\x7f", "\x1b[31m", "a\nb", "a\r\nb", "\t", " ", "", "=", "<<", "`id`",
     '["a b", "$c"]']
)  # fmt: skip
FLAG_VALUES = WORDS | st.booleans() | st.integers(-5, 10**9) | st.floats(0, 1).map(lambda x: round(x, 3))
FLAGS = st.dictionaries(
    st.sampled_from(["served-model-name", "chat-template", "revision", "max-num-seqs", "enforce-eager", "seed",
                     "gpu-memory-utilization", "compilation-config.mode", "disable-log-stats", "root-path"]),
    FLAG_VALUES, max_size=6,
)  # fmt: skip
MODELS = WORDS.filter(lambda m: m.strip() != "" and not m.startswith(("-", "~", "./", "../")))


@st.composite
def plans(draw: Any) -> Plan:
    """Plans with arbitrary arguments that a process can have."""
    flags = draw(FLAGS)
    model = draw(MODELS)
    command = ("/opt/a dir/$x%h/vllm",) if draw(st.booleans()) else ("/usr/bin/vllm",)
    return Plan(
        preset=draw(st.sampled_from(["chatbot", "Über Chat 1"])),
        model=model,
        engine=Engine(EngineKind.VLLM, command, "0.33.0", "cuda", command[0]),
        host="127.0.0.1",
        port=8000,
        argv=(*command, "serve", model, "--host", "127.0.0.1", "--port", "8000", *flag_words(flags)),
        flags=flags,
        reasons={},
        environment=draw(st.dictionaries(st.sampled_from(["A", "VLLM_X", "NCCL_DEBUG"]), WORDS, max_size=2)),
        gpus=(0, 1),
    )


def expected_in_container(plan: Plan) -> list[str]:
    return [plan.model, "--host", "0.0.0.0", "--port", "8000", *flag_words(plan.flags)]


def words_of_a_shell(text: str) -> list[str]:
    """Arguments as a shell reads them, but without running anything: the output of ``printf`` is inserted here."""
    given = re.compile(r"\"\$\(printf '((?:\\[0-7]{3})+)'\)\"")
    return shlex.split(given.sub(lambda found: shlex.quote(of_octals(found[1])), text))


def of_octals(text: str) -> str:
    return bytes(int(octal, 8) for octal in text.split("\\")[1:]).decode()


@settings(deadline=None)
@given(plan=plans())
def test_shell_words_round_trip(plan: Plan) -> None:
    text = shell(plan)
    assert all(character.isprintable() or character in "\n\t" for character in text)
    words = words_of_a_shell(text.replace(" \\\n  ", " ").replace(" \\\n", " "))
    assert words[len(plan.environment) :] == list(plan.argv)
    assert words[: len(plan.environment)] == [f"{name}={value}" for name, value in plan.environment.items()]


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_real_shell_runs_exactly_these_words(plan: Plan) -> None:
    printing = ("/usr/bin/printf", "%s\\0")
    plan = msgspec.structs.replace(plan, argv=(*printing, *plan.argv[1:]))
    done = subprocess.run(["/bin/sh", "-c", shell(plan)], capture_output=True, check=True, timeout=30)
    assert done.stdout.decode().split("\0")[:-1] == list(plan.argv[2:])


def config_argv(text: str) -> list[str]:
    """How every vLLM release reads a config file: ``x: true`` is a switch, ``x: false`` is nothing (before 0.28)."""
    words: list[str] = []
    for key, value in yaml.safe_load(text).items():
        if isinstance(value, bool):
            words += [f"--{key}"] if value else []
        else:
            words += [f"--{key}", str(value)]
    return words


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_config_file_and_its_command_contain_all_flags(plan: Plan) -> None:
    text = config_yaml(plan)
    head, words = text.partition("model:")[0], config_argv(text)
    assert words[:6] == ["--model", plan.model, "--host", "127.0.0.1", "--port", "8000"]
    command = ansi_split(" ".join(line.removeprefix("# ") for line in head.splitlines()[1:]))
    config = command.index("--config")
    assert command[len(plan.environment) : config] == [*plan.engine.command, "serve"]
    sayable, besides = [], []
    for flag in (flag_words({name: value}) for name, value in plan.flags.items()):
        apart = len(flag) > 2 or (len(flag) == 1 and "=" in flag[0])
        (besides if apart else sayable).extend(flag)
    assert words[6:] == sayable
    assert command[config + 2 :] == besides


def ansi_split(command: str) -> list[str]:
    """Arguments as bash reads them from one line, including ``$'…'``."""
    script = f"printf '%s\\0' {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=30)
    return done.stdout.decode().split("\0")[:-1]


@settings(deadline=None)
@given(word=WORDS)
def test_yaml_scalars(word: str) -> None:
    assert yaml.safe_load(f"x: {yaml_text(word)}") == {"x": word}
    assert yaml.safe_load(f"- {yaml_text(word)}") == [word]
    assert "\n" not in yaml_text(word)


SCALARS = WORDS | st.integers() | st.booleans()
NESTED = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=8
)


@settings(deadline=None)
@given(document=st.dictionaries(WORDS, NESTED, min_size=1, max_size=3))
def test_yaml_documents(document: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_document(document)) == document


def test_text_of_several_lines_is_a_block() -> None:
    document = {"rules": [{"expr": "sum(\n  a > 0\n\n)", "for": "5m"}]}
    text = yaml_document(document)
    assert text == 'rules:\n  - expr: |-\n      sum(\n        a > 0\n      \n      )\n    for: "5m"\n'
    assert yaml.safe_load(text) == document


@pytest.mark.parametrize("text", ["a\n", "\na", " a\nb", "a\n\tb", "a\n\x85b", "a\r\nb", "a\n#b\n- c", "a \n b", "\n"])
def test_blocks_are_read_back_exactly(text: str) -> None:
    assert yaml.safe_load(yaml_document({"x": {"y": text}})) == {"x": {"y": text}}


@settings(deadline=None)
@given(plan=plans())
def test_compose_passes_exactly_these_words_to_the_container(plan: Plan) -> None:
    (service,) = yaml.safe_load(compose(plan))["services"].values()
    assert [interpolated(word) for word in service["command"]] == expected_in_container(plan)
    environment = {name: interpolated(value) for name, value in service["environment"].items()}
    assert environment.items() >= plan.environment.items()


def interpolated(text: str) -> str:
    """A text as Compose reads it: ``$$`` is a dollar, and a single one would be a variable."""
    assert not re.search(r"(?<!\$)\$(?:\$\$)*(?!\$)", text)
    return text.replace("$$", "$")


@settings(deadline=None)
@given(plan=plans())
def test_kubernetes_passes_exactly_these_words_to_the_container(plan: Plan) -> None:
    deployment = next(d for d in yaml.safe_load_all(kubernetes(plan)) if d["kind"] == "Deployment")
    inside = deployment["spec"]["template"]["spec"]["containers"][0]
    assert [interpolated(word) for word in inside["args"]] == expected_in_container(plan)
    environment = {variable["name"]: interpolated(variable["value"]) for variable in inside["env"]}
    assert environment.items() >= plan.environment.items()


def systemd_words(text: str) -> list[str]:
    """Arguments according to ``systemd.syntax(7)`` and ``systemd.service(5)``: quotes, C escapes, ``%%``."""
    words: list[str] = []
    for found in re.finditer(r'"((?:[^"\\]|\\.)*)"|([^\s"\\]+)', text, re.DOTALL):
        if found[2] is not None:
            words.append(found[2].replace("%%", "%"))
            continue
        raw = re.sub(
            r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)",
            lambda m: UNESCAPED.get(m[1]) or chr(int(m[1][1:], 16)),
            found[1],
        )
        words.append(raw.replace("%%", "%"))
    return words


UNESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"'}


@settings(deadline=None)
@given(plan=plans())
def test_systemd_starts_exactly_these_words(plan: Plan) -> None:
    unit = systemd_unit(plan, user=False).replace(" \\\n    ", " ")
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, *words = systemd_words(command)
    assert [program, *(word.replace("$$", "$") for word in words)] == list(plan.argv)
    environment = [systemd_words(line)[0] for line in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)]
    assert {f"{name}={value}" for name, value in plan.environment.items()} <= set(environment)


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("max-num-seqs", "max-num-seqs"),
        ("a b", '"a b"'),
        ("$HOME", '"$$HOME"'),
        ("100%", '"100%%"'),
        ("a\nb", '"a\\nb"'),
        ("", '""'),
        (";", '";"'),
        ("\x1b", '"\\x1b"'),
    ],
)
def test_systemd_words_as_written(word: str, written: str) -> None:
    assert systemd_word(word) == written


def test_dollar_is_kept_in_a_program_and_an_assignment() -> None:
    assert systemd_word("/a$b/vllm", program=True) == '"/a$b/vllm"'
    assert systemd_assignment("A", "$x") == '"A=$x"'


@settings(deadline=None)
@given(word=WORDS)
def test_word_in_a_comment_is_one_line_for_bash(word: str) -> None:
    assert line_word(word).isprintable()
    if not word.isprintable():
        assert line_word(word).startswith("$'")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("chatbot", "vllm-chatbot"),
        ("vllm", "vllm"),
        ("vllm-a", "vllm-a"),
        ("Über Chat!", "vllm-ber-chat"),
        ("--", "vllm"),
        ("x" * 99, "vllm-" + "x" * 45),
    ],
)
def test_labels(name: str, written: str) -> None:
    assert label(name) == written


@pytest.mark.parametrize("form", [config_yaml, compose, kubernetes, lambda plan: systemd_unit(plan, user=True)])
def test_non_utf8_bytes_are_refused_by_name(form: Callable[[Plan], str], make: Callable[..., Plan]) -> None:
    plan = make({"chat-template": "whole"})  # a plan itself refuses this
    argv = tuple("a\udcffb" if word == "whole" else word for word in plan.argv)
    with pytest.raises(ExportError, match="not UTF-8"):
        form(msgspec.structs.replace(plan, argv=argv, flags={**plan.flags, "chat-template": "a\udcffb"}))
