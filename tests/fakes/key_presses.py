"""Time from a key press to its effect on the screen, in a real pseudo-terminal, under every fault.

`Scene` is a state folder with servers and faults around them; `press` repeatedly moves the cursor in the server table
and measures how many seconds each move took to appear.
"""

from __future__ import annotations

import contextlib
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FAKES = Path(__file__).parent
FROZEN_SECONDS = 20.0
"""Timeout for a key's effect, after which the screen counts as frozen."""
MARKED = re.compile(r"[│|]?[▸>]\W*(s\d\d) ")
"""The table row under the cursor."""
HANGING_NVML = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
static int hang(void) { close(open(getenv("NVML_ASKED"), O_WRONLY | O_CREAT, 0600)); for (;;) pause(); return 0; }
int nvmlInit_v2(void) { return hang(); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return hang(); }
"""
"""A driver library whose first call hangs forever; it creates the file named by ``NVML_ASKED``."""
METRICS = ("hangs", "garbage", "huge", "large", "drips", "halfway")
"""Faults of ``strange_server.py``."""


class Scene:
    """A state folder with servers, foreign servers, and consoles; all end with it."""

    def __init__(self, folder: Path, terminal_module: ModuleType) -> None:
        self.state = folder / "state" / "vllm-console"
        self.flag = folder / "stalled"
        self._folder = folder
        self._terminals = terminal_module
        self._processes: list[subprocess.Popen[str]] = []
        self._consoles: list[Any] = []

    def servers(self, count: int) -> subprocess.Popen[str]:
        """Start that many servers of this user with growing histories; returns the process that simulates them."""
        box = self._run([sys.executable, str(FAKES / "busy_box.py"), str(self.state), str(count)])
        assert box.stdout is not None
        assert box.stdout.readline() == "ready\n"
        return box

    @staticmethod
    def order(box: subprocess.Popen[str], words: str) -> None:
        """Send a command to the box and wait until it is executed."""
        assert box.stdin is not None
        assert box.stdout is not None
        box.stdin.write(words + "\n")
        box.stdin.flush()
        assert box.stdout.readline() == "done\n"

    def strange_server(self, kind: str) -> subprocess.Popen[str]:
        """A listening foreign server with that kind of metrics."""
        program = self._folder / kind / "vllm"
        program.parent.mkdir(exist_ok=True)
        program.unlink(missing_ok=True)
        program.symlink_to(FAKES / "strange_server.py")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = self._run([sys.executable, str(program), "serve", kind, "--host", "127.0.0.1", "--port", str(port)])
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        return server

    def console(self, *words: str, columns: int = 120, rows: int = 40, env: dict[str, str] | None = None) -> Any:
        """A console in a terminal, once it shows the first server."""
        around = {
            "HOME": str(self._folder),
            "XDG_STATE_HOME": str(self._folder / "state"),
            "XDG_CONFIG_HOME": str(self._folder / "config"),
            "XDG_CACHE_HOME": str(self._folder / "cache"),
        }
        program = [sys.executable, "-m", "vllm_console", *words]
        console = self._terminals.Terminal(program, columns, rows, around | (env or {}))
        self._consoles.append(console)
        console.wait_for(lambda text: "s00" in text and "KV cache" in text)
        return console

    def _run(self, words: Sequence[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        return process

    def close(self) -> None:
        self.flag.unlink(missing_ok=True)
        for console in self._consoles:
            console.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()


def press(console: Any, times: int, seed: int = 0, meanwhile: Callable[[], None] = lambda: None) -> list[float]:
    """Move the cursor down and up ``times`` times, at moments drawn from ``seed``; returns each move's delay in
    seconds.

    ``meanwhile`` is called repeatedly. If a move does not appear within `FROZEN_SECONDS`, it counts as that long, and
    the remaining moves are skipped.
    """
    chance = random.Random(seed)
    waits = []
    for turn in range(times + times % 2):  # the cursor ends where it began
        _rest(console, chance.uniform(0.02, 0.08), meanwhile)
        wanted = "s01" if turn % 2 == 0 else "s00"
        began = time.monotonic()
        console.press("j" if turn % 2 == 0 else "k")
        while (read_at := _read(console)) is None or _marked(console) != {wanted}:
            meanwhile()
            if time.monotonic() - began > FROZEN_SECONDS:
                return [*waits, FROZEN_SECONDS]
        waits.append(read_at - began)
    return waits


def _rest(console: Any, seconds: float, meanwhile: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _read(console)
        meanwhile()


def _read(console: Any) -> float | None:
    """Read briefly; returns the time of the read, or None if there was no output."""
    if not select.select([console.master], [], [], 0.01)[0]:
        return None
    now = time.monotonic()
    console.pump(0.0)
    return now


def _marked(console: Any) -> set[str]:
    """Names of the servers in the table rows with the cursor."""
    return {found[1] for line in console.text.splitlines() if (found := MARKED.match(line))}


def resizing(console: Any, every: float = 0.05) -> Callable[[], None]:
    """Keep making the terminal slightly larger and smaller, as often as the emulator can follow.

    The sizes are small because the emulator is slow: unread output in the terminal would count as the console's delay.
    """
    sizes = [(80, 24), (84, 25), (78, 23), (88, 26)]
    state = {"next": 0.0, "turn": 0}

    def resize() -> None:
        if time.monotonic() >= state["next"] and not select.select([console.master], [], [], 0)[0]:
            state["next"] = time.monotonic() + every
            state["turn"] += 1
            console.resize(*sizes[int(state["turn"]) % len(sizes)])

    return resize


@contextlib.contextmanager
def stalled(scene: Scene) -> Iterator[None]:
    """Stall the state folder's disk for a console opened with `stalling_environment`."""
    scene.flag.touch()
    try:
        yield
    finally:
        scene.flag.unlink(missing_ok=True)


def stalling_environment(scene: Scene, library: Path) -> dict[str, str]:
    """Environment of a console whose disk can be stalled (`stalled`)."""
    return {"LD_PRELOAD": str(library), "STALLING_FOLDER": str(scene.state), "STALLING_FLAG": str(scene.flag)}


def build_stalling(compiler: str, folder: Path) -> Path:
    return build(compiler, (FAKES / "stalling.c").read_text(), folder / "stalling.so")


def build(compiler: str, source: str, library: Path) -> Path:
    words = [compiler, "-x", "c", "-", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library)]
    subprocess.run([*words, "-ldl"], input=source.encode(), check=True, timeout=120)
    return library


def until(console: Any, condition: Callable[[], object]) -> None:
    """Read the console's output until a condition holds."""
    deadline = time.monotonic() + FROZEN_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true; the screen:\n{console.text}"
        _read(console)


def until_said(console: Any, process: subprocess.Popen[str], word: str) -> None:
    """Read the console's output until a process has printed a word."""
    pipe = process.stdout
    assert pipe is not None
    until(console, lambda: select.select([pipe], [], [], 0)[0])
    assert pipe.readline() == word + "\n"


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile of the values, rounded up to the next value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
