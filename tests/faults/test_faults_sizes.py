"""Inputs of 100 MB and endless responses: each ends in an error message, using less memory than the input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import huge_inputs
from fakes.hostile_http import KINDS, STUCK, THEN, HostileServer

SIZE = 100 << 20
TESTS = Path(__file__).parents[1]


def run(*words: str) -> dict[str, str]:
    """Run the readers in a process with limited memory."""
    env = {**os.environ, "PYTHONPATH": str(TESTS), "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, huge_inputs.__file__, *words], env=env, capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    results: dict[str, str] = json.loads(done.stdout)
    return results


def test_100_mb_inputs_end_in_an_error_message(tmp_path: Path) -> None:
    for kind, head, again in (("deep", b"", b"["), ("flat", b'{"a": [1', b",1\n")):
        at = tmp_path / kind
        (at / "board").mkdir(parents=True)
        huge = at / "huge"
        with huge.open("wb") as file:
            file.write(head)
            for _ in range(100):
                file.write(again * ((1 << 20) // len(again)))
            file.truncate(SIZE)
        for name in ("huge.toml", "record.json", "members.json", "findings.log", "config.json", "reports.json"):
            (at / name).hardlink_to(huge)
        for path, size in ((at / "board" / f"{os.getuid()}.json", SIZE), (at / "huge.log", 4 * SIZE)):
            with path.open("wb") as file:
                file.truncate(size)
    assert huge_inputs.ROOM < SIZE
    results = run(str(tmp_path))
    assert len(results) == 30
    assert {name: text for name, text in results.items() if text.startswith("fault")} == {}
    for name, text in results.items():
        assert len(text) < 1000
        reader = name.split(",")[0]
        if reader in ("members", "findings", "reports", "log", "keeper's request"):
            assert text.startswith("read: "), (name, text)
        elif reader in ("presets", "board"):
            assert "larger than" in text, (name, text)
        else:
            assert text.startswith("sentence: "), (name, text)
    assert "hung up, []" in results["keeper's request, deep"]


@pytest.fixture
def server() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.close()


def test_any_http_response_is_handled_within_the_time_limit(server: HostileServer) -> None:
    """Floods and slow drips of headers, bodies and trailers, wrong lengths, decompression bombs, redirects."""
    results = run("--http", str(server.port))
    assert len(results) == 2 * len(KINDS) + len(THEN)
    assert {name: text for name, text in results.items() if "fault: " in text} == {}
    for kind in KINDS:
        assert "sentence: " in results[f"scrape {kind}"], (kind, results)
        assert results[f"load {kind}"].startswith("sentence: "), (kind, results)
        assert f"/{kind}/metrics" in server.asked
        if kind in STUCK:
            assert "did not answer" in results[f"scrape {kind}"], (kind, results)
    assert "does not respond with valid HTTP" in results["scrape trailers"], "a flood is not read to its end"
    for kind in THEN:
        assert results[f"load then-{kind}"].startswith("read: "), (kind, results)
        assert "\n0 of " in results[f"load then-{kind}"], (kind, results)
        assert f"/then-{kind}/v1/completions" in server.asked
    assert "redirects /metrics" in results["scrape redirect"]
    assert "redirects /metrics" in results["scrape file"]
    assert "MiB: vLLM's metrics page is never that large" in results["scrape long"]
    assert not server.went_elsewhere()
