"""A fake server with vLLM's process tree: API server, engine, workers (two by default). Standard library only.

As measured on vLLM: the API server exits with code 0 when its engine dies, and the engine when a worker dies; engine
and workers outlive a killed API server. Worse than vLLM: here a worker also outlives its engine.

Like `fake_serving`, it only imports what every tree needs.
"""

# ruff: noqa: PTH105, PTH123

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
import time

from fake_words import arguments

DEFAULTS: dict[str, object] = {
    "port": 0,
    "pids": "",  # file that receives the pids of engine and workers
    "never_ready": False,
    "stubborn": False,
    "apart": False,
    "workers": 2,
    "queue": "",  # shared memory that the engine maps
    "raylet": "",  # act as a raylet: each worker's queue, separated by colons
}


def title(name: str) -> None:
    with open("/proc/self/comm", "w") as file:
        file.write(name)


def rest() -> None:
    while True:
        time.sleep(600)


def worker(number: int, apart: bool) -> None:
    if apart:  # like Ray's workers: separate session and output
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


def mapped(queue: str) -> mmap.mmap:
    """Map a message queue, created if missing."""
    fd = os.open(queue, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, 4096)
        return mmap.mmap(fd, 4096)
    finally:
        os.close(fd)


def actor(queue: str, stubborn: bool) -> None:
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    title("ray::RayWorkerProc")
    kept = mapped(queue)
    rest()
    kept.close()


def raylet(pids: str, queues: list[str]) -> None:
    """A raylet with a worker per queue. It has no parent, and ends none of its workers."""
    title("raylet")
    workers = [fork(actor, queue, True) for queue in queues]
    written(pids, workers)
    rest()


def written(pids: str, found: list[int]) -> None:
    partial = f"{pids}.new"
    with open(partial, "w") as file:
        file.write(" ".join(map(str, found)))
    os.replace(partial, pids)


def engine(pids: str, apart: bool, count: int, queue: str) -> None:
    title("VLLM::EngineCore")
    kept = mapped(queue) if queue else None
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
    given = arguments(DEFAULTS, sys.argv[1:])
    if given.raylet:
        raylet(given.pids, given.raylet.split(":"))
    core = fork(engine, given.pids, given.apart, given.workers, given.queue)
    if given.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not given.never_ready:
        threading.Thread(target=health, args=(given.port,), daemon=True).start()
    os.waitpid(core, 0)
    print("EngineDeadError", flush=True)
    sys.stdout.flush()
    os._exit(0)
