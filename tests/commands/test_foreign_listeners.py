"""Another user listens on the first address of ``localhost``, on the port of one of our servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.commands import ASK_SECONDS, PATIENCE

NOBODY = 65534
KEY = "sk-not-for-others-42"

RESOLVER = """
import socket
_found = socket.getaddrinfo
def getaddrinfo(host, *rest, **more):
    name = host.decode() if isinstance(host, bytes) else host
    found = _found(host, *rest, **more)
    if name != "localhost" or (rest[1:2] or [more.get("family", 0)])[0] == socket.AF_INET:
        return found
    return [(socket.AF_INET6, *one[1:4], ("::1", one[4][1], 0, 0)) for one in found] + found
socket.getaddrinfo = getaddrinfo
"""
"""Like a machine whose ``/etc/hosts`` has ``::1 localhost`` before ``127.0.0.1 localhost``."""

FOREIGN = """
import encodings.idna, http.server, os, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        print(self.command, self.path, self.headers.get("Authorization"), flush=True)
        body = b'# TYPE vllm:num_requests_running gauge\\nvllm:num_requests_running{engine="0",model_name="m"} 666.0\\n'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST = answer
    def log_message(self, *words):
        pass
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
os.setuid(int(sys.argv[2]))
server = Server(("::1", int(sys.argv[1])), Handler)
print("up", flush=True)
server.serve_forever()
"""


@pytest.fixture
def confused(program, tmp_path: Path):
    """Commands on a machine where ``localhost`` is ``::1`` first."""
    folder = tmp_path / "resolver"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(RESOLVER)
    program.env |= {"PYTHONPATH": str(folder), "VLLM_API_KEY": KEY}
    return program


@pytest.fixture
def foreign() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of another user that print the requests they receive."""
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")
def test_foreign_listener_on_other_address_of_localhost_is_ignored(confused, foreign) -> None:
    started = confused.json(
        "start", "batch", "--engine", "simulated", "--name", "mine", "--host", "localhost", "--wait"
    )
    assert started["state"] == "ready"
    words = [sys.executable, "-c", FOREIGN, str(started["port"]), str(NOBODY)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    foreign.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"

    sent = confused.json(
        "load", "mine", "--rate", "8", "--duration", "1", "--input-tokens", "20", "--output-tokens", "4"
    )
    assert (sent["completed"], sent["failed"]) == (8, 0)
    again = confused.json("restart", "mine", "--set", "max-num-seqs=32", "--wait")
    assert again["state"] == "ready"
    deadline = time.monotonic() + PATIENCE
    while (seen := confused.json("status", "mine")["metrics"]) is None:
        assert time.monotonic() < deadline, "no recorded history"
        time.sleep(ASK_SECONDS)
    assert seen["requests_running"] == 0, "not the 666 of the foreign process"

    url = f"http://localhost:{started['port']}"
    direct = confused.json(
        "load", url, "--rate", "4", "--duration", "0.5", "--input-tokens", "20", "--output-tokens", "2"
    )
    assert direct["completed"] == 2
    confused("stop", "mine")
    refused = confused("load", url, "--rate", "4", "--duration", "0.5")
    assert refused.returncode == 1
    assert f"answered by a process of another user (uid {NOBODY})" in refused.stderr
    process.kill()
    assert process.stdout.read() == "", "it received nothing"


def test_fleet_output_never_contains_api_key(confused) -> None:
    started = confused.json(
        "start", "batch", "--engine", "simulated", "--name", "mine", "--host", "localhost", "--wait"
    )
    assert KEY not in json.dumps(started)
