"""A server with a self-signed certificate becomes ready and its metrics are read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from functools import partial

import pytest

from fakes.keeper_bench import PATIENCE
from vllm_console.fleet.judge import OneToken
from vllm_console.fleet.other_servers import ObservedWatch
from vllm_console.load.client import LoadError
from vllm_console.load.run import run_load_sync
from vllm_console.metrics.scrape import ScrapeError, Scraper
from vllm_launchers.addresses import base_url
from vllm_launchers.host.processes import ObservedServer
from vllm_launchers.keeper import health
from vllm_launchers.keeper.records import LaunchSpec, State
from vllm_launchers.keeper.records import State as FleetState
from vllm_launchers.keeper.server_client import ServerClient
from vllm_launchers.listeners import Owner
from vllm_launchers.presets.model import Workload


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate for another name, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    made, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=gpubox.example"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    return str(made), str(key)


def test_tls_server_becomes_ready_and_is_measured(bench, port, certificate, monkeypatch):
    monkeypatch.setenv("SIMULATED_STARTUP_SECONDS", "0")
    made, key = certificate
    argv = (sys.executable, "-m", "vllm_launchers.simulated", "serve", "facebook/opt-125m", "--port", str(port))
    argv += ("--host", "127.0.0.1", "--ssl-certfile", made, "--ssl-keyfile", key)
    bench.launch(LaunchSpec(argv, "127.0.0.1", port, tls=True))
    bench.wait(State.READY)

    server = bench.read().server
    owner = Owner(server.pid, server.start_time)
    scraper = Scraper(base_url("127.0.0.1", port, tls=True))
    for _ in range(2):  # the second over the same connection
        assert scraper.sample(time.time()) is not None
    scraper.close()
    assert health.check(owner, "127.0.0.1", port) != "", "plain HTTP fails"
    with pytest.raises(ScrapeError):
        Scraper(base_url("127.0.0.1", port)).sample(time.time())

    asked, unheard = OneToken(), OneToken()
    for request, tls in ((asked, True), (unheard, False)):
        request.ask(ServerClient(owner, "127.0.0.1", port, tls=tls), "facebook/opt-125m")
        request.wait(PATIENCE)
    assert (asked.silent_seconds, asked.refused) == (0.0, "")
    assert (unheard.silent_seconds, unheard.refused[:21]) == (None, "it could not be sent:"), "no hang, and not healthy"

    work = Workload(10, 2, 0.0, 1)
    sent = run_load_sync(f"https://0.0.0.0:{port}", None, work, 5, 0.2, lookup=partial(owner.listener, port))
    assert sent.completed == sent.sent == 1, "recognized as our own server regardless of address and certificate"
    with pytest.raises(LoadError, match="not this machine"):
        run_load_sync(f"https://0.0.0.0:{port}", None, work, 5, 0.2)

    others = ObservedServer(server.pid, server.start_time, "anna", (*argv[2:],), port, "127.0.0.1", None)
    watch = ObservedWatch(others, 0.1)
    assert watch.sampled.wait(PATIENCE)
    assert watch.view(None, ()).state is FleetState.READY
    watch.close()
    bench.stop()
    assert bench.wait(State.STOPPED).exit.requested


def test_keeper_loads_ssl_only_for_tls_servers(bench):
    plain = bench.ready(bench.spec())
    mapped = open(f"/proc/{plain.keeper.pid}/maps").read()  # noqa: PTH123, SIM115
    assert "_ssl" not in mapped
    assert "libssl" not in mapped
