"""A simulated vLLM with vLLM's process tree: API server (the simulated engine), engine, worker.

As measured on vLLM: the API server exits with code 0 when its engine dies, the engine exits when its worker dies, and
both outlive a killed API server. Shared memory is only removed in an orderly shutdown. On SIGUSR1, the worker writes
numbered lines to the log, and notes below ``SOAK_NOTES`` how many it has written. Shared memory is noted there as well.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import signal
import sys
import threading
from pathlib import Path

LINES = 4000
TEXT = "0123456789abcdef" * 6
PIECE = 32
"""Lines per write: less than 4096 bytes, so that writes are atomic."""
FORMAT = "flood {worker} {number:08d} {text}\n"


def main() -> int:
    """Act as ``vllm``, with ``sys.argv`` as its command line."""
    if sys.argv[1:2] != ["serve"]:
        print("0.33.0")
        return 0
    notes = Path(os.environ["SOAK_NOTES"])
    engine = _fork(_engine, notes)
    _print_secrets()
    ending = threading.Event()
    threading.Thread(target=_end_with, args=(engine, ending), daemon=True).start()
    from vllm_launchers.simulated.__main__ import main as serve

    try:
        return serve(sys.argv[1:])
    finally:
        ending.set()
        os.kill(engine, signal.SIGTERM)


def _print_secrets() -> None:
    """Print the arguments like some servers do: no secret may reach the log."""
    print("INFO non-default args:", {"api_key": [os.environ.get("VLLM_API_KEY")]}, flush=True)


def _end_with(engine: int, ending: threading.Event) -> None:
    os.waitpid(engine, 0)
    if not ending.is_set():
        os.write(1, b"vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n")
        os._exit(0)


def _fork(run: object, *words: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run(*words)  # type: ignore[operator]
        finally:
            os._exit(0)
    return pid


def _title(name: str) -> None:
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)


def _engine(notes: Path) -> None:
    _title("VLLM::EngineCor")
    path = Path("/dev/shm", f"psm_{secrets.token_hex(4)}")
    (notes / path.name).touch()
    with path.open("xb+") as file:
        file.truncate(1 << 16)
        shared = mmap.mmap(file.fileno(), 1 << 16)

    def end(*_: object) -> None:
        path.unlink(missing_ok=True)
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    worker = _fork(_worker, notes)
    os.waitpid(worker, 0)
    shared.close()
    end()


def _worker(notes: Path) -> None:
    _title("VLLM::Worker")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name, written, port = secrets.token_hex(4), 0, sys.argv[sys.argv.index("--port") + 1]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    count, new = notes / f"flood-{name}", notes / f".flood-{name}"
    while True:
        signal.sigwait({signal.SIGUSR1})
        for first in range(written, written + LINES, PIECE):
            lines = (FORMAT.format(worker=name, number=n, text=TEXT) for n in range(first, first + PIECE))
            os.write(1, "".join(lines).encode())
        written += LINES
        new.write_text(f"{port} {written}")
        new.replace(count)
