"""``vllm-console demo``: the console on two simulated servers under scenario traffic, on any machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.cli import demo_recording as recording
from vllm_console.cli.console import need_screen, show
from vllm_console.cli.demo_servers import SERVERS, WINDOW_SECONDS, DemoServer
from vllm_console.cli.fleet_access import state_of
from vllm_console.cli.options import DAY, duration_type
from vllm_console.cli.picture_options import add_picture_arguments, check_picture_options, write_picture
from vllm_console.fleet.local import LocalFleet
from vllm_console.settings import Config
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.keeper import client, folders
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.records import State
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.vllm.flags.changes import Changes

if TYPE_CHECKING:
    from vllm_console.ui.terminal.cast import Cast


READY_SECONDS = 20.0
"""How long to wait for servers to be ready before the console opens."""

HOST = Path(__file__).with_name("demo_host.json")
"""The recorded host whose GPUs the servers appear on, since most machines that run a demo have none: a workstation with
two RTX 3090. Another user's notebook holds 15.9 GiB of one."""

PRESETS = Path(__file__).with_name("demo_presets")
"""The demo's own presets, which take the place of the user's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_picture_arguments(parser)
    parser.add_argument(
        "--after",
        type=duration_type(0, DAY),
        default=0.0,
        metavar="DURATION",
        help="how long to send traffic before the picture",
    )
    parser.add_argument("--hints", action="store_true", help="show the hints, even if they were hidden before")
    parser.add_argument("--record", type=Path, metavar="FILE.cast", help="record the screen as an asciicast")


def run(args: argparse.Namespace) -> int:
    """Start both servers, show the console, stop both. Nothing of the demo remains."""
    if args.picture is None:
        need_screen("the demo needs a terminal; --picture FILE saves a picture instead")
    if args.picture is not None:
        if args.record is not None:
            raise UsageError("--record and --picture can't be combined: --picture opens no console to record")
        check_picture_options(args)
    else:
        if args.record is not None and not args.record.absolute().parent.is_dir():
            raise UsageError(f"--record {args.record}: the folder {args.record.absolute().parent} does not exist")
        print("Starting the demo's two simulated servers…", flush=True)
    root = state_of(args) / "demo"
    _sweep(root)
    with _servers(root / str(os.getpid()), args.host_file) as fleet:
        if args.picture is not None:
            hints = _hints(root, again=True) if args.hints else None
            return write_picture(fleet, args, demo=True, hints=hints, after=args.after)
        _drop_typed()
        with _cast(args.record) as cast:
            code = show(fleet, Config(), args, demo=True, cast=cast, hints=_hints(root, again=args.hints))
        print("Stopping the demo's two simulated servers…")
        return code


def _drop_typed() -> None:
    """Discard the keys pressed while the servers started, which would otherwise act on a screen nobody has seen."""
    if sys.stdin.isatty():
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _hints(root: Path, *, again: bool) -> Path | None:
    """The marker file for hidden hints; None if it exists, unless ``again``."""
    hidden = root / "hints-hidden"
    return hidden if again or not hidden.exists() else None


@contextlib.contextmanager
def _cast(path: Path | None) -> Iterator[Cast | None]:
    """The requested recording; prints its path, or why it is incomplete.

    Raises:
        UsageError: the file can't be written.
    """
    if path is None:
        yield None
        return
    from vllm_console.ui.terminal.cast import Cast

    columns, rows = os.get_terminal_size()
    try:
        cast = Cast(path, columns, rows, "vllm-console demo")
    except OSError as error:
        raise UsageError(f"--record {path}: can't be written: {error.strerror}") from error
    try:
        yield cast
    finally:
        cast.close()
        print(cast.trouble or f"{path.absolute()} recorded")


@contextlib.contextmanager
def _servers(root: Path, host_file: Path | None) -> Iterator[LocalFleet]:
    """Both servers and their traffic, in a state folder of their own that is removed at the end.

    ``host_file`` is another recorded host to show them on.
    """
    fleet = LocalFleet(
        root,
        observe=False,
        interactive=True,
        host_file=host_file or HOST,
        own_presets=PRESETS,
        leftovers=False,
        window_seconds=WINDOW_SECONDS,
    )
    places = emptiest(fleet.snapshot().host) if host_file is not None else [server.place for server in SERVERS]
    recorded = recording.read()
    traffic: list[subprocess.Popen[bytes]] = []
    resumed: dict[str, float] = {}
    try:
        for position, server in enumerate(SERVERS):
            place = places[position % len(places)] if places else None
            runs = runs_of(server, fleet.snapshot().host, place)
            past = recorded[server.name]
            fits = [plan.flags for plan in map(fleet.plan, runs)] == [run.flags for run in past.runs]
            if fits:
                now = time.time()
                view = fleet.resume(server.name, runs, partial(recording.enter, past, now=now))
                resumed[server.name] = now
            else:  # the recording does not apply to other GPUs
                view = fleet.start(runs[-1])
            words = [sys.executable, "-m", "vllm_console.cli.demo_servers", view.url, server.name, str(os.getpid())]
            traffic.append(
                subprocess.Popen(
                    [*words, str(past.in_flight if fits else 0)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        if len(resumed) == len(SERVERS) and host_file is None:
            recording.enter_gpus(recorded, fleet.snapshot().servers, HOST, root, time.time())
        _enter_records(root, {name: (recorded[name], ended) for name, ended in resumed.items()})
        fleet.history.judge_past()  # otherwise the first comparison waits for it
        _wait_until_ready(root)
        yield fleet
    finally:
        fleet.close()
        for process in traffic:
            process.terminate()
        _end(root)
        for process in traffic:
            process.wait()


def _enter_records(root: Path, resumed: Mapping[str, tuple[recording.RecordedServer, float]]) -> None:
    """Enter the probe records and run windows of the servers that continue from the recording.

    ``resumed`` has each server's recording and when it ended.
    """
    if not resumed:
        return
    probes = recording.read_probes()
    for name, (past, ended) in resumed.items():
        folder = folders.server_folder(root, name)
        recording.enter_probes(probes[name], folder, ended)
        recording.enter_windows(past, root, folder, client.read(root, name), ended)


def _wait_until_ready(root: Path) -> None:
    """Wait for the servers that continue from the recording; the others visibly load."""
    deadline = time.monotonic() + READY_SECONDS
    for name in client.names(root):
        if client.read(root, name).current.spec.environment.get("SIMULATED_TOTALS"):
            with contextlib.suppress(KeeperError):
                left = max(0.1, deadline - time.monotonic())
                client.wait_for(root, name, lambda record: record.state is not State.STARTING, left)


def runs_of(server: DemoServer, host: Host | None, place: int | None) -> list[LaunchRequest]:
    """A server's runs up to the current one, as launched on that GPU."""
    changes = _changes(server, host, place)
    present = LaunchRequest(
        preset=server.preset,
        model=server.model,
        engine="simulated",
        name=server.name,
        changes=changes,
        gpus=(place,) if place is not None else (),
    )
    if server.earlier is None:
        return [present]
    return [replace(present, changes=replace(changes, set={**changes.set, **server.earlier.set})), present]


def _changes(server: DemoServer, host: Host | None, place: int | None) -> Changes:
    """A server's flags, with its memory as a share of the GPU that it is placed on."""
    gpu = host.gpu(place) if host is not None and place is not None else None
    if server.gib is None or gpu is None or not gpu.memory_gib:
        return server.changes
    share = min(MOST_SHARE, round(server.gib / gpu.memory_gib, 2))
    return replace(server.changes, set={**server.changes.set, "gpu-memory-utilization": share})


MOST_SHARE = 0.9


def emptiest(host: Host | None) -> list[int]:
    """The fully usable GPUs of a host, those with the most free memory first."""
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
    # A keeper still writes after its record says stopped.
    while any(client.keeper_alive(root, name) for name in names) and time.monotonic() < deadline:
        time.sleep(0.05)
    shutil.rmtree(root, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Clean up after killed demos. Each demo's folder is named after its process ID."""
    with contextlib.suppress(FileNotFoundError):
        for folder in root.iterdir():
            if folder.name.isdigit() and not _is_demo(int(folder.name)) and not _is_elsewhere(folder):
                try:
                    _end(folder)
                except (OSError, KeeperError) as error:
                    raise OperationError(f"{folder}: can't clean up after an earlier demo: {error}") from error


def _is_elsewhere(root: Path) -> bool:
    """Whether it belongs to a demo on another machine or in another container that shares this folder."""
    return any(client.elsewhere(root, record) for record in client.list_records(root)[0])


def _is_demo(pid: int) -> bool:
    try:
        return b"demo" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
