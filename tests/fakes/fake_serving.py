"""Implementation of `fake_server`.

Started about a thousand times, so it only imports what every server needs: argparse, json and pathlib each take longer
than starting Python.
"""

# ruff: noqa: PTH110, PTH123
from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

from fake_words import arguments

CHILD = "import signal,sys,time\n{ignore}\nsys.stdout.write('child up\\n'); sys.stdout.flush()\ntime.sleep(600)"

DEFAULTS: dict[str, object] = {
    "port": 0,
    "ready_after": 0.0,
    "never_ready": False,
    "children": 0,
    "children_ignore_term": False,
    "children_own_session": False,
    "ignore": "",  # signals to ignore, such as INT,TERM
    "exit_after": -1.0,
    "exit_code": 0,
    "lines": 0,
    "tick": 0.0,  # interval for printing a numbered line
    "quiet_file": "",  # while this file exists, /health does not answer
    "fail_once": "",  # exit with code 5 unless this file exists, and create it
    "print_env": "",
    "answers": "{}",  # JSON: {"POST /v1/completions": [200, {…}]}; status 0: exit with 7; -1: no answer
    "prepared": "",  # JSON: messages on descriptor 3, and what to do then
    "requests": "",  # file that receives a JSON line per request, except /health
}


def _health(port: int, quiet_file: str, answers: dict[str, tuple[int, object]], requests: str) -> None:
    if answers or requests:
        import json
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
                with open(requests, "a") as file:
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
            elif quiet_file and os.path.exists(quiet_file):
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
            else:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def _prepare(script: list[dict[str, object]]) -> None:
    """Play the prepared process, then wait for "go" and play ``late`` steps."""
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
    import ctypes

    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    _play(control, "say", {"step": "started"})
    control.close()


def _play(control: socket.socket, what: str, value: object) -> None:
    """Do one step: ``say`` on the socket, ``print``, ``wait`` for a file, ``flood`` the output, ``exit`` or
    ``hang``."""
    if what == "say":
        import json

        control.sendall(json.dumps(value).encode() + b"\n")
    elif what == "print":
        print(value, flush=True)
    elif what == "flood":
        sys.stdout.write("x" * int(str(value)))
        sys.stdout.flush()
    elif what == "exit":
        os._exit(int(str(value)))
    while what == "wait" and not os.path.exists(str(value)):
        time.sleep(0.02)
    while what in ("hang", "flood"):
        time.sleep(60)


def main() -> None:  # noqa: C901 (one branch per option)
    given = arguments(DEFAULTS, sys.argv[1:])
    if given.prepared:
        import json

        _prepare(json.loads(os.path.expandvars(given.prepared)))
    for name in filter(None, given.ignore.split(",")):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    if "TERM" not in given.ignore:
        signal.signal(signal.SIGTERM, lambda *_: (print("got SIGTERM", flush=True), os._exit(0)))
    if "INT" not in given.ignore:
        signal.signal(signal.SIGINT, lambda *_: (print("got SIGINT", flush=True), os._exit(0)))
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if given.children_ignore_term else ""
    if given.fail_once and not os.path.exists(given.fail_once):
        os.close(os.open(given.fail_once, os.O_CREAT))
        os._exit(5)
    for _ in range(given.children):
        import subprocess

        subprocess.Popen(
            [sys.executable, "-S", "-c", CHILD.format(ignore=ignore)], start_new_session=given.children_own_session
        )
    if given.print_env:
        print(given.print_env, "=", len(os.environ.get(given.print_env, "")), "characters", flush=True)
    if given.lines:
        sys.stdout.write("".join(f"line {number}\n" for number in range(given.lines)))
        sys.stdout.flush()
    if not given.never_ready:
        answers = {}
        if given.answers != DEFAULTS["answers"]:
            import json

            answers = json.loads(given.answers)
        threading.Timer(given.ready_after, _health, (given.port, given.quiet_file, answers, given.requests)).start()
    if given.exit_after >= 0:
        time.sleep(given.exit_after)
        print("fatal: made to fail", flush=True)
        os._exit(given.exit_code)
    number = 0
    while True:
        time.sleep(given.tick or 3600)
        sys.stdout.write(f"tick {number}\n")
        sys.stdout.flush()
        number += 1
