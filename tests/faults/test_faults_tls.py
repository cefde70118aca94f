"""A server with a certificate that it made itself is seen ready, and its metrics are read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import pytest

from vllm_console.telemetry.scrape import ScrapeError, Scraper
from vllm_launchers.addresses import base_url
from vllm_launchers.keeper import prober
from vllm_launchers.keeper.records import LaunchSpec, State


@pytest.fixture
def certificate(tmp_path):
    """Certificate and key, signed by themselves and made out to another name."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    made, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=gpubox.example"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    return str(made), str(key)


def test_a_server_with_tls_becomes_ready_and_is_measured(bench, port, certificate, monkeypatch):
    monkeypatch.setenv("SIMULATED_STARTUP_SECONDS", "0")
    made, key = certificate
    argv = (sys.executable, "-m", "vllm_launchers.simulated", "serve", "facebook/opt-125m", "--port", str(port))
    argv += ("--host", "127.0.0.1", "--ssl-certfile", made, "--ssl-keyfile", key)
    bench.launch(LaunchSpec(argv, "127.0.0.1", port, tls=True))
    bench.wait(State.READY)

    scraper = Scraper(base_url("127.0.0.1", port, tls=True))
    for _ in range(2):  # the second over the same connection
        assert scraper.sample(time.time()) is not None
    scraper.close()
    assert prober.probe("127.0.0.1", port) != "", "plain HTTP is no answer"
    with pytest.raises(ScrapeError):
        Scraper(base_url("127.0.0.1", port)).health()
    bench.stop()
    assert bench.wait(State.STOPPED).exit.requested


def test_a_keeper_loads_tls_only_for_a_server_that_speaks_it(bench):
    plain = bench.ready(bench.spec())
    mapped = open(f"/proc/{plain.keeper.pid}/maps").read()  # noqa: PTH123, SIM115
    assert "_ssl" not in mapped
    assert "libssl" not in mapped
