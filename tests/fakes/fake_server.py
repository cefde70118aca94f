"""A fake server: /health, children, ignored signals and crashes on demand. Standard library only."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

CHILD = "import signal,sys,time\n{ignore}\nsys.stdout.write('child up\\n'); sys.stdout.flush()\ntime.sleep(600)"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ready-after", type=float, default=0.0)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--children", type=int, default=0)
    parser.add_argument("--children-ignore-term", action="store_true")
    parser.add_argument("--children-own-session", action="store_true")
    parser.add_argument("--ignore", default="", help="signals to ignore, as INT,TERM")
    parser.add_argument("--exit-after", type=float, default=None)
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument("--lines", type=int, default=0)
    parser.add_argument("--tick", type=float, default=0.0, help="print a numbered line this often")
    parser.add_argument("--quiet-file", default="", help="while this file exists, /health does not answer")
    parser.add_argument("--fail-once", default="", help="exit with code 5 unless this file exists, and make it")
    parser.add_argument("--print-env", default="")
    parser.add_argument(
        "--answers",
        default="{}",
        help='JSON: {"POST /v1/completions": [200, {…}]}; status 0: exit with 7; -1: no answer',
    )
    parser.add_argument("--prepared", default="", help="JSON: what it says on descriptor 3, and what it does then")
    parser.add_argument("--requests", default="", help="file that gets a JSON line per request but those for /health")
    return parser.parse_args()


def _health(port: int, quiet_file: str, answers: dict[str, tuple[int, object]], requests: str) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(16)
    held = []
    while True:
        connection, _ = listener.accept()
        with connection:
            head, _, body = connection.recv(4096).partition(b"\r\n\r\n")
            first, *headers = head.decode().split("\r\n")
            asked = " ".join(first.split()[:2])
            if requests and asked != "GET /health":
                with Path(requests).open("a") as file:
                    file.write(json.dumps({"asked": asked, "headers": headers, "body": body.decode()}) + "\n")
            if asked in answers:
                status, content = answers[asked]
                if not status:
                    os._exit(7)
                if status < 0:
                    held.append(connection.dup())
                    continue
                data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                connection.sendall(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            elif quiet_file and Path(quiet_file).exists():
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
            else:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def _prepare(script: list[dict[str, object]]) -> None:
    """Play the process that is prepared, then wait for "go" and play ``late`` steps.

    ``$NAME`` is replaced from its environment.
    """
    control = socket.socket(fileno=3)
    control.set_inheritable(False)
    for step in script:
        for what, value in step.items():
            _play(control, what, value)
    data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not data:
        os._exit(0)
    for step in script:
        if "late" in step:
            _play(control, "say", step["late"])
            os._exit(3)
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[0], 2)
    os.close(descriptors[0])
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    _play(control, "say", {"step": "started"})
    control.close()


def _play(control: socket.socket, what: str, value: object) -> None:
    """``say`` on the socket, ``print``, ``wait`` for a file, ``flood`` the output, ``exit`` or ``hang``."""
    if what == "say":
        control.sendall(json.dumps(value).encode() + b"\n")
    elif what == "print":
        print(value, flush=True)
    elif what == "flood":
        sys.stdout.write("x" * int(str(value)))
        sys.stdout.flush()
    elif what == "exit":
        os._exit(int(str(value)))
    while what == "wait" and not Path(str(value)).exists():
        time.sleep(0.02)
    while what in ("hang", "flood"):
        time.sleep(60)


def main() -> None:  # noqa: C901 (one branch per option)
    given = _arguments()
    if given.prepared:
        _prepare(json.loads(os.path.expandvars(given.prepared)))
    for name in filter(None, given.ignore.split(",")):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    if "TERM" not in given.ignore:
        signal.signal(signal.SIGTERM, lambda *_: (print("got SIGTERM", flush=True), os._exit(0)))
    if "INT" not in given.ignore:
        signal.signal(signal.SIGINT, lambda *_: (print("got SIGINT", flush=True), os._exit(0)))
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if given.children_ignore_term else ""
    if given.fail_once and not Path(given.fail_once).exists():
        Path(given.fail_once).touch()
        os._exit(5)
    for _ in range(given.children):
        subprocess.Popen(
            [sys.executable, "-S", "-c", CHILD.format(ignore=ignore)], start_new_session=given.children_own_session
        )
    if given.print_env:
        print(given.print_env, "=", len(os.environ.get(given.print_env, "")), "characters", flush=True)
    if given.lines:
        sys.stdout.write("".join(f"line {number}\n" for number in range(given.lines)))
        sys.stdout.flush()
    if not given.never_ready:
        answers = json.loads(given.answers)
        threading.Timer(given.ready_after, _health, (given.port, given.quiet_file, answers, given.requests)).start()
    if given.exit_after is not None:
        time.sleep(given.exit_after)
        print("fatal: made to fail", flush=True)
        os._exit(given.exit_code)
    number = 0
    while True:
        time.sleep(given.tick or 3600)
        sys.stdout.write(f"tick {number}\n")
        sys.stdout.flush()
        number += 1


if __name__ == "__main__":
    main()
