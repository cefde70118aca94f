"""A fake ``vllm serve`` that records every request and can run as another user.

``python .../vllm serve MODEL --port N``, or titled ``VLLM::APIServer`` without arguments. With ``NOTE_SIGNALS`` in its
environment it also records every signal that it receives, and only ends by signals that can't be caught.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="tiny",engine="0"} 3
"""
PR_SET_DUMPABLE = 4


# Opened before switching to another user.
RECORDED = os.open(os.environ["RECORDED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def value(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


class Recording(BaseHTTPRequestHandler):
    def answer(self) -> None:
        os.write(RECORDED, f"{self.command} {self.path}\n".encode())
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = METRICS if self.path == "/metrics" else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = answer  # noqa: N815 - names of http.server

    def log_message(self, *_: object) -> None:
        """No output: the log must not change."""


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client may be killed before the response; that must not appear in the log."""


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(value("--port", "0"))), Recording)
    if uid := int(os.environ.get("BECOME", "0")):
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise /proc would show root as its owner
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if "NOTE_SIGNALS" in os.environ:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # caused by a response whose client is gone
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGPIPE}:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, lambda n, _: os.write(RECORDED, f"signal {n}\n".encode()))
        os.write(RECORDED, b"ready\n")
    server.serve_forever()
