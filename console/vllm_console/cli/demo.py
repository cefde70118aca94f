"""``vllm-console demo``: the console on two simulated servers under scenario traffic, on any machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_console.config import Config
from vllm_console.fleet.api import FleetError, UsageError
from vllm_console.fleet.model import Changes, LaunchRequest
from vllm_console.fleet.service import LocalFleet
from vllm_launchers.keeper import client
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.machine.gpu.host import Host


@dataclass(frozen=True, slots=True)
class DemoServer:
    """A simulated server of the demo and the traffic it gets."""

    name: str
    preset: str
    gpu: str
    place: int
    """The GPU of the recorded host that it is put on."""
    rate: float
    """Requests per second while it is calm."""
    changes: Changes


SERVERS = (
    DemoServer(
        "chat",
        "chatbot",
        "L40S",
        0,
        1.2,
        Changes(
            set={
                "gpu-memory-utilization": 0.31,
                "max-num-seqs": 96,
                "max-num-batched-tokens": 768,
                "kv-cache-dtype": "auto",
            }
        ),
    ),
    DemoServer("coder", "code-generation", "H100 80GB", 1, 0.25, Changes()),
)
"""``chat`` shares its GPU: in the rush its KV cache holds about half of the sequences that its flags let in, so that
halving them (``[``) ends the preemptions and FP8 (``v``) ends the queue too. ``coder`` has room and stays calm."""

HOST = Path("4xa6000")
"""The recorded host on whose GPUs they are shown: most machines that a demo runs on have none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the console into a file and end")
    parser.add_argument("--size", default="120x40", metavar="COLSxROWS", help="size of the picture (default 120x40)")
    parser.add_argument("--after", type=float, default=60, metavar="S", help="seconds of traffic before the picture")
    parser.add_argument("--keys", default="", metavar="K,K", help="keys pressed before the picture, e.g. e or n,down")


def run(args: argparse.Namespace) -> int:
    """Start both, show the console, stop both. Nothing of the demo stays behind."""
    if args.picture is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("the demo needs a terminal; for a picture of it use --picture FILE.svg")
    root = (args.state or client.default_root()) / "demo"
    _sweep(root)
    with _servers(root / str(os.getpid()), args.host_file) as fleet:
        if args.picture is not None:
            from vllm_console.ui.picture import take_picture

            take_picture(fleet, args.picture, args.size, args.after, [key for key in args.keys.split(",") if key])
            print(f"{args.picture} drawn")
            return 0
        from vllm_console.cli.console import show

        code = show(fleet, Config(), args, demo=True)
        print("The demo's two simulated servers are being stopped.")
        return code


@contextlib.contextmanager
def _servers(root: Path, host_file: Path | None) -> Iterator[LocalFleet]:
    """Both servers and their traffic, in a state folder of their own that is removed at the end.

    ``host_file`` is another recorded host to show them on.
    """
    fleet = LocalFleet(root, observe=False, charts=True, host_file=host_file or HOST)
    places = emptiest(fleet.snapshot().host) if host_file is not None else [server.place for server in SERVERS]
    traffic: list[subprocess.Popen[bytes]] = []
    try:
        for position, server in enumerate(SERVERS):
            view = fleet.start(
                LaunchRequest(
                    preset=server.preset,
                    engine="simulated",
                    name=server.name,
                    changes=server.changes,
                    environment={"SIMULATED_GPU": server.gpu},
                    gpus=(places[position % len(places)],) if places else (),
                )
            )
            words = [sys.executable, "-m", "vllm_console.cli.demo_traffic", view.url, server.preset]
            traffic.append(
                subprocess.Popen(
                    [*words, str(server.rate), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        yield fleet
    finally:
        fleet.close()
        for process in traffic:
            process.terminate()
        _end(root)
        for process in traffic:
            process.wait()


def emptiest(host: Host | None) -> list[int]:
    """The GPUs of a host that can be used whole, those with the most free memory first."""
    usable = [gpu for gpu in host.gpus if not gpu.lost and not gpu.mig_mode] if host is not None else []
    return [gpu.index for gpu in sorted(usable, key=lambda gpu: -(gpu.free_gib or 0.0))]


def _end(root: Path) -> None:
    """Stop every server below ``root`` and remove the folder."""
    names = client.names(root)
    for name in names:
        with contextlib.suppress(KeeperError):
            client.adopt_orphans(root)
            client.stop(root, name)
    deadline = time.monotonic() + 30
    for name in names:
        with contextlib.suppress(KeeperError):
            client.wait_for(root, name, lambda record: not record.state.alive, max(0.1, deadline - time.monotonic()))
    # A keeper writes its last words after its record says stopped.
    while any(client.keeper_alive(root, name) for name in names) and time.monotonic() < deadline:
        time.sleep(0.05)
    shutil.rmtree(root, ignore_errors=True)


def _sweep(root: Path) -> None:
    """End what a killed demo left behind: each demo's folder is named after the process that made it."""
    with contextlib.suppress(FileNotFoundError):
        for folder in root.iterdir():
            if folder.name.isdigit() and not _is_demo(int(folder.name)):
                try:
                    _end(folder)
                except (OSError, KeeperError) as error:
                    raise FleetError(f"{folder}: what an earlier demo left cannot be cleaned up: {error}") from error


def _is_demo(pid: int) -> bool:
    try:
        return b"demo" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
