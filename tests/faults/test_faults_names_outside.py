"""The program with hostile input everywhere: text and JSON of every command, and a real terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import hostile
from fakes.hostile_world import World, read_json

STATUS = ["status", "evil", "--json"]
FAKES = Path(__file__).parents[1] / "fakes"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


def read_commands(world: World) -> list[list[str]]:
    """Every read-only command, on all hostile data."""
    serving, failing = world.ports
    host, evil = ("--host", str(world.host)), "evil\x1b]0;STOLEN\x07\u202e\udcff"
    found = [
        *(["list"], ["status", "evil"], ["status", f"vllm@{serving}"], ["status", f"vllm@{failing}"], ["logs", "evil"]),
        *(["presets"], ["presets", "mine"], ["presets", evil], ["engines"], ["board"], ["doctor"], ["leftovers"]),
        *(
            ["host", *host],
            ["topology", *host],
            ["gpus", "--free", "1", *host],
            ["gpus", "--free", "1", "--uuid", *host],
        ),
        *(["runs"], ["runs", evil], ["compare", "1", "2"], ["compare", evil], ["check", "evil"], ["check", evil]),
        *(["plan", "mine", *host], ["plan", "worse"], ["plan", "mine", "--model", evil, "--set", f"revision={evil}"]),
        *(["metrics", f"http://127.0.0.1:{serving}"], ["metrics", f"http://127.0.0.1:{failing}"], ["metrics", evil]),
        *(["diagnose", str(world.log)], ["diagnose", evil], ["load", f"http://127.0.0.1:{failing}"], ["load", evil]),
        *(["export", "prometheus", "evil"], ["export", "grafana", "evil"], ["export", "prometheus", evil]),
        *(["restart", f"vllm@{serving}"], ["stop", evil], ["remove", evil], ["start", "mine", "--vllm", evil]),
        *(["claim", evil, "--until", evil], ["release", evil], ["watch"], ["status", "newer"], ["status", "broken"]),
        *(["host", "--host", evil], [evil], ["list", f"--{evil}"], ["--config", evil, "list"]),
    ]
    unspoken = (evil, "--config", "watch")
    spoken = [[*words, "--json"] for words in found if words[0] not in unspoken and f"--{evil}" not in words]
    exports = [["plan", "mine", "--vllm-version", "0.33.0", "--set", f"revision={hostile.SHELL}", "--export", form]
               for form in ("shell", "config", "systemd", "systemd-user", "compose", "kubernetes")]  # fmt: skip
    return [*found, *spoken, *exports, ["metrics", str(world.page)], ["topology", "--host", str(world.topology)]]


def run_each(world: World, lines: list[list[str]]) -> list[dict[str, Any]]:
    """Run the command lines in sequence in one interpreter."""
    done = subprocess.run(
        [sys.executable, str(FAKES / "watched_program.py"), str(world.home / "watched"), "--each"],
        env=world.environment, input=json.dumps(lines), capture_output=True, text=True, timeout=400, check=False,
        cwd=world.home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def test_every_command_shows_hostile_names_as_plain_text(world: World) -> None:
    lines = read_commands(world)
    answers = run_each(world, lines)
    marked = 0
    for words, answer in zip(lines, answers, strict=True):
        text = answer["out"] + answer["err"]
        assert text, words
        assert "internal error" not in text, (words, text)
        for line in text.split("\n"):
            assert line.replace("\t", " ").isprintable(), (words, line)
        assert "\u0301" * 5 not in text, words
        if "--json" in words and answer["out"] and words[0] != "watch":
            read_json(answer["out"])
        marked += hostile.MARK in text
    by = {" ".join(words): answer["out"] + answer["err"] for words, answer in zip(lines, answers, strict=True)}
    server = world.ports[0]
    for wanted in (
        *(
            "status evil",
            f"status vllm@{server}",
            "logs evil",
            "presets mine",
            "board",
            "runs",
            "plan mine",
            "compare 1 2",
        ),
        *(f"metrics http://127.0.0.1:{world.ports[1]}", f"diagnose {world.log}", f"host --host {world.host}"),
    ):
        assert any(hostile.MARK in text for name, text in by.items() if name.startswith(wanted)), (wanted, by)
    assert marked > 30
    output = next(answer["out"] for words, answer in zip(lines, answers, strict=True) if words[:3] == STATUS)
    assert read_json(output)["argv"][0] == f"{hostile.EVIL}vllm", "JSON contains the full text"
    assert not list(world.home.rglob("pwned")), "no name was executed"


def test_external_escape_codes_never_reach_the_terminal(world: World, terminal_module: Any) -> None:
    """The console in a real terminal: its raw bytes, and the restored screen at the end."""
    words = [sys.executable, "-m", "vllm_console", "--host", str(world.host), "--refresh", "0.3"]
    console = terminal_module.Terminal(words, 120, 40, world.environment)
    try:
        console.wait_for("evil")
        console.wait_for(f"vllm@{world.ports[0]}")
        for keys, shown in (
            ("d", "Command"), ("l", "n older"), ("D", "GPUs · recorded host"), ("n", "mine"),
            ("C", "Claim GPUs on the shared board"),
        ):  # fmt: skip
            console.press(keys)
            console.wait_for(shown)
            console.wait_for(lambda text: hostile.MARK in text)
            console.press("\x1b")
            # A key sent right after escape would be parsed as another key.
            console.wait_for(lambda text, gone=shown: gone not in text and "Servers" in text)
        console.press("6")
        console.wait_for(hostile.MARK)
        console.press("q")
        assert console.wait_end() == 0
        assert console.restored()
    finally:
        console.close()
    assert hostile.STOLEN not in console.screen.title + console.screen.icon_name
    assert len(console.raw) > 10_000
    assert not (found := re.findall(hostile.HARM, bytes(console.raw))), found
