"""Somebody else's vLLM server, as far as anybody can see: ``python .../vllm serve MODEL --port N``.

It writes down below ``NOTES`` every signal that reaches it and every request that it gets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="tiny",engine="0"} 3
"""
NOTES = os.open(os.environ["BYSTANDER_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


class Answer(BaseHTTPRequestHandler):
    def answer(self) -> None:
        os.write(NOTES, f"{self.command} {self.path}\n".encode())
        body = METRICS if self.path == "/metrics" else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = answer  # noqa: N815 - names of http.server

    def log_message(self, *_: object) -> None:
        """Nothing on standard output."""


def main() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, lambda n, _: os.write(NOTES, f"signal {n}\n".encode()))
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer)
    os.write(NOTES, b"ready\n")
    server.serve_forever()


if __name__ == "__main__":
    main()
