"""A fake server with vLLM's process tree: API server, engine, workers (two by default). Standard library only.

As measured on vLLM: an API server ends, with code 0, when its engine has died, and an engine when a worker has; engine
and workers outlive an API server that was killed. Worse than vLLM: here a worker outlives its engine too.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path


def title(name: str) -> None:
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)


def rest() -> None:
    while True:
        time.sleep(600)


def worker(number: int, apart: bool) -> None:
    if apart:  # like Ray's workers: own session and own output
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):
            os.dup2(nothing, fd)
    title(f"VLLM::Worker_TP{number}")
    rest()


def fork(run: object, *words: object) -> int:
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        run(*words)  # type: ignore[operator]
        os._exit(0)
    return pid


def mapped(queue: Path) -> mmap.mmap:
    """A message queue, created if missing."""
    fd = os.open(queue, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, 4096)
        return mmap.mmap(fd, 4096)
    finally:
        os.close(fd)


def actor(queue: Path, stubborn: bool) -> None:
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    title("ray::RayWorkerProc")
    kept = mapped(queue)
    rest()
    kept.close()


def raylet(pids: Path, queues: list[Path]) -> None:
    """A raylet with a worker per queue. It has no parent and ends none of its workers."""
    title("raylet")
    workers = [fork(actor, queue, True) for queue in queues]
    written(pids, workers)
    rest()


def written(pids: Path, found: list[int]) -> None:
    partial = pids.with_suffix(".new")
    partial.write_text(" ".join(map(str, found)))
    partial.replace(pids)


def engine(pids: Path, apart: bool, count: int, queue: Path | None) -> None:
    title("VLLM::EngineCore")
    kept = mapped(queue) if queue is not None else None
    workers = [fork(worker, number, apart) for number in range(count)]
    written(pids, [os.getpid(), *workers])
    if workers:
        os.wait()
    else:
        rest()
    del kept


def health(port: int) -> None:
    listener = socket.create_server(("127.0.0.1", port))
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--pids", type=Path, required=True)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--queue", type=Path, help="shared memory that the engine maps")
    parser.add_argument("--raylet", type=Path, nargs="+", help="be a raylet: the queue of each worker")
    given = parser.parse_args()
    if given.raylet:
        raylet(given.pids, given.raylet)
    core = fork(engine, given.pids, given.apart, given.workers, given.queue)
    if given.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not given.never_ready:
        threading.Thread(target=health, args=(given.port,), daemon=True).start()
    os.waitpid(core, 0)
    print("EngineDeadError", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
