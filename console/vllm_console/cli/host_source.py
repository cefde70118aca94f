"""Where GPU commands get their host from: this machine's driver, a recorded document, or a saved matrix."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from vllm_console.cli.fleet_access import check_state, settings_from, state_of
from vllm_console.cli.options import text_from
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.host.gpu.host import Host, HostError, has_driver, with_claims

FIRST_SAMPLE_SECONDS = 5.0
"""How long a command waits for a driver that is waking its GPUs or hangs, before it continues without it."""


def add_host(parser: argparse.ArgumentParser) -> None:
    """Add ``--host FILE``."""
    parser.add_argument(
        "--host",
        type=lambda text: Path(text_from(text)),
        metavar="FILE",
        help="recorded host to use instead of this machine: a file, or a shipped one such as 8xh100",
    )


def load_host(args: argparse.Namespace) -> Host:
    """The host selected on the command line.

    Raises:
        UsageError: the file cannot be read, or is not a host document.
    """
    check_state(args, settings_from(args))
    host = recorded_host(args)
    return _with_simulated(args, host) if host is not None else _claimed(args, this_host(args))


def _claimed(args: argparse.Namespace, host: Host) -> Host:
    """This machine with the claims on the shared board, if there is one and it is readable."""
    if not (folder := settings_from(args).board):
        return host
    from vllm_console.fleet.board import SharedBoard, gpu_claims

    return with_claims(host, gpu_claims(SharedBoard(Path(folder), watched=False, read_only=True).latest()))


def recorded_host(args: argparse.Namespace) -> Host | None:
    """The recorded host requested on the command line; None for this machine.

    Raises:
        UsageError: the file cannot be read, or is not a host document.
    """
    file = args.host if args.host is not None else args.host_file
    if file is None:
        return None
    from vllm_launchers.host.gpu.document import read_host

    return read_host(file)


def _with_simulated(args: argparse.Namespace, host: Host) -> Host:
    """A recorded host with this user's simulated servers on its GPUs, as in the console.

    Omits them if their records cannot be read.
    """
    from vllm_console.fleet.gpus import occupants, occupied
    from vllm_console.fleet.local import LocalFleet

    try:
        with contextlib.closing(LocalFleet(args.state, observe=False, gpus=False, read_only=True)) as fleet:
            servers = fleet.snapshot().servers
    except (OperationError, OSError):
        return host
    return occupied(host, occupants(host, servers))


def this_host(args: argparse.Namespace) -> Host:
    """This machine, with our servers' processes named. Without a driver, ``problem`` says so."""
    from vllm_launchers.host.gpu.monitor import read_once

    roots = server_pids(args)
    return read_once(lambda: roots)


@contextlib.contextmanager
def watched_gpus(args: argparse.Namespace) -> Iterator[Callable[[], Host] | None]:
    """Monitor this machine's GPUs in a thread. Yields a function for the latest host, or None without a driver."""
    if not has_driver():
        yield None
        return
    from vllm_launchers.host.gpu.monitor import GpuMonitor

    roots = server_pids(args)
    watch = GpuMonitor(lambda: roots, interval=0.25)
    watch.start()
    watch.wait(FIRST_SAMPLE_SECONDS)
    try:
        yield watch.latest
    finally:
        watch.close()


def server_pids(args: argparse.Namespace) -> Mapping[int, str]:
    """PIDs of our servers and their keepers, each with its server's name."""
    from vllm_console.fleet.gpus import roots
    from vllm_launchers.keeper import client
    from vllm_launchers.keeper.errors import KeeperError

    state = state_of(args)
    try:
        records, _ = client.list_records(state)
    except (KeeperError, OSError):
        return {}
    return roots(records, state)


def host_from_matrix(path: Path, gpu: str | None) -> Host:
    """The host described by a saved ``nvidia-smi topo -m``; ``-`` reads standard input.

    Raises:
        OperationError: the file cannot be read.
        UsageError: it contains no matrix, or the GPU is unknown.
    """
    from vllm_launchers.host.gpu.document import MOST_MATRIX, host_from_topo

    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(MOST_MATRIX + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MOST_MATRIX + 1)
    except (OSError, ValueError) as error:
        raise OperationError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return host_from_topo(data.decode("utf-8", "replace"), gpu, hostname=path.stem if str(path) != "-" else "")
    except HostError as error:
        raise UsageError(f"{path}: {error}") from error
