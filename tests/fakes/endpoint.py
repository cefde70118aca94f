"""A fake HTTP endpoint of a remote vLLM: responses are configurable, requests are recorded."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = tuple[int, bytes, dict[str, str]]


def metrics(tokens: float, started: float | None = 1000.0, model: str = "far-model") -> Answer:
    """A metrics page after that many tokens; ``started`` is the start time of its process."""
    label = f'{{engine="0",model_name="{model}"}}'
    lines = [
        f"vllm:num_requests_running{label} 1",
        f"vllm:num_requests_waiting{label} 0",
        f"vllm:kv_cache_usage_perc{label} 0.25",
        f"vllm:prompt_tokens_total{label} {tokens}",
        f"vllm:generation_tokens_total{label} {tokens}",
        *([f"process_start_time_seconds {started}"] if started is not None else []),
    ]
    return 200, ("\n".join(lines) + "\n").encode(), {"Content-Type": "text/plain"}


def document(content: object, status: int = 200) -> Answer:
    return status, json.dumps(content).encode(), {"Content-Type": "application/json"}


MODELS = document({"object": "list", "data": [{"id": "far-model"}]})


class FakeEndpoint:
    """``answers`` maps a path to a response or a function returning one; other paths are not found."""

    def __init__(self, tls: tuple[Path, Path] | None = None) -> None:
        self.answers: dict[str, Answer | Callable[[], Answer]] = {
            "/metrics": metrics(5),
            "/version": document({"version": "0.32.0"}),
            "/v1/models": MODELS,
        }
        self.asked: list[tuple[str, str, str | None]] = []
        """Method, path and authorization of each request."""
        self.count = threading.Condition()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with fake.count:
                    fake.asked.append((self.command, self.path, self.headers.get("Authorization")))
                    fake.count.notify_all()
                found = fake.answers.get(self.path, (404, b"", {}))
                status, body, headers = found() if callable(found) else found
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*map(str, tls))
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def wait(self, more: int) -> None:
        """Wait for that many more requests."""
        with self.count:
            wanted = len(self.asked) + more
            assert self.count.wait_for(lambda: len(self.asked) >= wanted, 60)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def certificate(folder: Path, name: str = "127.0.0.1") -> tuple[Path, Path]:
    """A self-signed certificate for an address, and its key."""
    made, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    words += ["-addext", f"subjectAltName=IP:{name}", "-keyout", str(key), "-out", str(made)]
    subprocess.run(words, check=True, capture_output=True)
    return made, key
