"""Real vLLM and the simulated engine give equal responses to the same requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from fakes.api_table import CONTEXT, TABLE, WARM_UP, differences, send

if TYPE_CHECKING:
    from conftest import RealServer
else:
    RealServer = Any

pytestmark = pytest.mark.real

DEADLINE = 120.0
CALLS = Path(__file__).with_name("openai_calls.py")


@pytest.fixture(scope="module")
def real(shared_server: RealServer) -> RealServer:
    return shared_server


@pytest.fixture(scope="module")
def simulated(
    tiny_model: Path, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    port = free_port()
    flags = ["--served-model-name", "tiny", "--max-model-len", str(CONTEXT), "--block-size", "32"]
    argv = [sys.executable, "-m", "vllm_launchers.simulated", "serve", str(tiny_model), "--host", "127.0.0.1"]
    log = tmp_path_factory.mktemp("simulated") / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*argv, "--port", str(port), *flags, "--num-gpu-blocks-override", "40"],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SIMULATED_STARTUP_SECONDS": "0", "SIMULATED_SPEED": "5"},
        )
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + DEADLINE
    while not _healthy(url):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    yield url
    process.terminate()
    process.wait(DEADLINE)


TRIES = 3
"""If a stop string happens to match the first character, the response has no text and therefore other fields."""


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_all_requests_get_equal_responses(real: RealServer, simulated: str) -> None:
    found: dict[str, list[str]] = {}
    with httpx.Client(trust_env=False, timeout=120) as client:
        for url in (real.url, simulated):
            send(client, url, WARM_UP)
        for case in TABLE:
            for _ in range(TRIES if isinstance(case.body, dict) and case.body.get("stop") else 1):
                problems = differences(case, send(client, real.url, case), send(client, simulated, case))
                if not problems:
                    break
            else:
                found[case.name] = problems
    refused = sum(not case.modelled for case in TABLE)
    print(f"alike: {len(TABLE) - len(found)} of {len(TABLE)}, {refused} of them refused by the simulated engine")
    assert not found, json.dumps(found, indent=1, ensure_ascii=False)


def test_openai_client_sees_no_difference(
    real: RealServer, simulated: str, real_environment: Mapping[str, str]
) -> None:
    def calls(url: str) -> list[str]:
        done = subprocess.run(
            [real_environment["python"], str(CALLS), url], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout.splitlines()

    expected, found = calls(real.url), calls(simulated)
    print(f"openai client: {sum(a == b for a, b in zip(expected, found, strict=True))} of {len(expected)} alike")
    assert found == expected
