"""A stand-in for a server: /health, children, stubbornness and crashes on demand. Standard library only."""

from __future__ import annotations

import argparse
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
    return parser.parse_args()


def _health(port: int, quiet_file: str) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(16)
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            if quiet_file and Path(quiet_file).exists():
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
            else:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def main() -> None:
    given = _arguments()
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
        threading.Timer(given.ready_after, _health, (given.port, given.quiet_file)).start()
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
