"""A keeper's process: ``python -I -S __main__.py FOLDER LOCK_FD``, its request as JSON on standard input.

Started only by `client`, which has taken the folder's lock and passes it on open; or as ``--prepare SOCKET_FD`` by
`prepared_launch`, which has none yet. Run as a file and without ``site``,
so that it starts fast, stays small and depends on nothing that could change under it. Everything it will ever need is
imported at the start, so that an update of the package does not affect a running keeper.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from vllm_launchers.keeper import folders, prepared_launch, processes, wire
from vllm_launchers.keeper.context import KeeperContext, Tuning, inherited_from, restored_environment
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.files import KEEPER_LOG
from vllm_launchers.keeper.keeper import Keeper, failure
from vllm_launchers.keeper.prepared_launch import Held
from vllm_launchers.keeper.records import Generation, Inherited, LaunchSpec, Recording, ServerRecord, State
from vllm_launchers.private import open_file, open_standard_streams
from vllm_launchers.values import replace

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def main(folder: Path, lock_fd: int) -> None:
    """Become the keeper of a folder; report to the starter on standard output whether that worked."""
    open_standard_streams()
    os.set_inheritable(lock_fd, False)
    request = json.loads(sys.stdin.buffer.read())
    answer_fd = os.dup(1)
    umask = _detach()
    _redirect_output()
    _become_subreaper()
    _keep(request, folder, lock_fd, umask, answer_fd, None)


def prepare(socket_fd: int) -> None:
    """Prepare a server's first process, and become its keeper if it is launched."""
    open_standard_streams()
    control = socket.socket(fileno=socket_fd)
    os.set_inheritable(socket_fd, False)
    umask = _detach()
    _redirect_output()
    _become_subreaper()
    if (held := prepared_launch.hold(control, umask)) is None:
        return
    folder = held.context.folder
    with contextlib.suppress(OSError):
        notes = open_file(folder / KEEPER_LOG, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        os.dup2(notes, 2)
        os.close(notes)
    answer_fd = os.dup(socket_fd)
    control.close()
    _keep(held.request, folder, held.lock, umask, answer_fd, held)


def _keep(request: Mapping[str, Any], folder: Path, lock: int, umask: int, answer_fd: int, held: Held | None) -> None:
    try:
        keeper = _begin(request, folder, lock, umask, held)
    except (KeeperError, OSError) as error:
        problem = error if isinstance(error, KeeperError) else KeeperError(f"the keeper can't start: {error}")
        _answer(answer_fd, failure(problem))
        return
    _answer(answer_fd, {"record": wire.to_plain(keeper.supervisor.record_writer.reported())})
    del request, held
    keeper.run()


def _begin(request: Mapping[str, Any], folder: Path, lock: int, umask: int, held: Held | None) -> Keeper:
    secrets, tuning = request.get("secrets") or {}, wire.from_plain(Tuning, request.get("tuning") or {})
    environment = dict(os.environ)
    shell = inherited_from(environment, umask)
    context = KeeperContext(folder, environment, umask, tuning)
    events = held.events if held is not None else None
    if request["do"] == "launch":
        raw = request.get("recording")
        recording = wire.from_plain(Recording, raw) if raw else None
        record = _new_record(folder.name, request["spec"], recording, shell)
        keeper = Keeper(context, record, secrets, lock, events)
        if held is not None:
            keeper.supervisor.have_prepared(held.process, record.current.spec)
        keeper.supervisor.start(recording)
        return keeper
    record = folders.read_record(folder)
    if request["do"] == "restart":
        spec = wire.from_plain(LaunchSpec, request["spec"])
        keeper = Keeper(context, replace(record, inherited=shell), secrets, lock, events)
        if held is not None:
            keeper.supervisor.have_prepared(held.process, spec)
        keeper.supervisor.start_next(spec)
        return keeper
    if record.inherited is not None:  # not the environment of the console that happens to start this keeper
        environment = restored_environment(record.inherited, record.current.spec.secret_names, environment)
        context = KeeperContext(folder, environment, record.inherited.umask, tuning)
    keeper = Keeper(context, record, secrets, lock)
    keeper.supervisor.adopt()
    return keeper


def _new_record(name: str, spec: object, recording: Recording | None, shell: Inherited) -> ServerRecord:
    """The record of a server that is launched for the first time."""
    now = time.time()
    earlier = recording.generations if recording is not None else ()
    began = earlier[0].started_at if earlier else recording.started_at if recording is not None else now
    generation = Generation(len(earlier) + 1, wire.from_plain(LaunchSpec, spec), started_at=now)
    return ServerRecord(name, State.STARTING, now, began, (*earlier, generation), inherited=shell)


def _detach() -> int:
    """Leave the starter's session for good; returns the file mode mask for the server.

    Two forks: the first child leads a session without a terminal, the second can never get one.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    return os.umask(0o077)


def _become_subreaper() -> None:
    """Have orphaned descendants re-parented to this process, where the kernel allows it."""
    with contextlib.suppress(OSError, AttributeError):
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_SET_NAME, processes.KEEPER_TITLE.encode(), 0, 0, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _redirect_output() -> None:
    """Standard input and output to ``/dev/null``; Python's own errors still go to ``keeper.log``."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)


def _answer(fd: int, message: Mapping[str, Any]) -> None:
    try:
        data = json.dumps(message).encode()
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return  # the starter is gone; the keeper goes on
    finally:
        os.close(fd)


if __name__ == "__main__":
    if sys.argv[1] == prepared_launch.PREPARE:
        prepare(int(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
