"""Where commands about GPUs get their host from: this machine's driver, a recorded document, a saved matrix."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from vllm_console.cli.common import check_state, settings
from vllm_console.fleet.api import FleetError, UsageError
from vllm_launchers.machine.gpu.errors import HostError
from vllm_launchers.machine.gpu.host import Host

FIRST_LOOK_SECONDS = 5.0
"""So long a command waits for a driver that wakes its GPUs, or hangs, before it goes on without."""


def add_host(parser: argparse.ArgumentParser) -> None:
    """``--host FILE``."""
    parser.add_argument(
        "--host",
        type=Path,
        metavar="FILE",
        help="a recorded host document in place of this machine, or the name of one that comes along, e.g. 8xh100",
    )


def load_host(args: argparse.Namespace) -> Host:
    """The host that the command line asks for.

    Raises:
        UsageError: the file cannot be read, or is no host document.
    """
    check_state(args, settings(args))
    return _claimed(args, _host(args))


def _claimed(args: argparse.Namespace, host: Host) -> Host:
    """The host with what people claim of its GPUs on the shared board, where there is one and it can be read."""
    if not (folder := settings(args).board):
        return host
    from vllm_console.fleet.board import SharedBoard, gpu_claims
    from vllm_launchers.machine.gpu.host import with_claims

    return with_claims(host, gpu_claims(SharedBoard(Path(folder), watched=False, read_only=True).latest()))


def _host(args: argparse.Namespace) -> Host:
    file = args.host if args.host is not None else args.host_file
    if file is None:
        return this_host(args)
    from vllm_launchers.machine.gpu.document import read_host

    try:
        return read_host(file)
    except HostError as error:
        raise UsageError(str(error)) from error


def this_host(args: argparse.Namespace) -> Host:
    """This machine, processes of our servers named. Without a driver it says so in ``problem``."""
    from vllm_launchers.machine.gpu.watch import read_once

    roots = server_pids(args)
    return read_once(lambda: roots)


@contextlib.contextmanager
def watched_gpus(args: argparse.Namespace) -> Iterator[Callable[[], Host] | None]:
    """Looks at this machine's GPUs from a thread: gives what tells the newest look, or None where no driver is."""
    import ctypes

    from vllm_console.fleet.gpus import DRIVER_LIBRARY

    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        yield None
        return
    from vllm_launchers.machine.gpu.watch import GpuWatch

    roots = server_pids(args)
    watch = GpuWatch(lambda: roots, interval=0.25)
    watch.start()
    watch.wait(FIRST_LOOK_SECONDS)
    try:
        yield lambda: watch.latest().host
    finally:
        watch.close()


def server_pids(args: argparse.Namespace) -> Mapping[int, str]:
    """Pids of our servers and of their keepers, each with its server's name."""
    from vllm_console.fleet.gpus import roots
    from vllm_launchers.keeper import client
    from vllm_launchers.keeper.errors import KeeperError

    try:
        records, _ = client.list_records(args.state or client.default_root())
    except (KeeperError, OSError):
        return {}
    return roots(records)


def host_from_matrix(path: Path, gpu: str | None) -> Host:
    """The host that a saved ``nvidia-smi topo -m`` describes; ``-`` reads standard input.

    Raises:
        FleetError: the file cannot be read.
        UsageError: it holds no matrix, or the GPU is not known.
    """
    from vllm_launchers.machine.gpu.topo_text import MOST_BYTES, host_from_topo

    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise FleetError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return host_from_topo(data.decode("utf-8", "replace"), gpu, hostname=path.stem if str(path) != "-" else "")
    except HostError as error:
        raise UsageError(f"{path}: {error}") from error
