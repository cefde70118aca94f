"""A keeper's process: ``python -I -S __main__.py FOLDER LOCK_FD``, its order as JSON on standard input.

Started by `client` only, which has taken the folder's lock and hands it over open. Run as a file and without
``site``, so that it starts fast, stays small and depends on nothing that could change under it; everything it will
ever need is imported here and now, so that an update of the package does not reach a keeper that runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from vllm_launchers.keeper import codec, daemon, inherited, store
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.keeper import Keeper, failure
from vllm_launchers.keeper.lifecycle import Tuning
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.keeper.surroundings import Surroundings


def main(folder: Path, lock_fd: int) -> None:
    """Become the keeper of a folder; tells its starter on standard output how the beginning went."""
    os.set_inheritable(lock_fd, False)
    order = json.loads(sys.stdin.buffer.read())
    answer_fd = os.dup(1)
    umask = daemon.detach()
    _point_output_away()
    daemon.become_subreaper()
    try:
        keeper = _begin(order, folder, umask)
    except (KeeperError, OSError) as error:
        problem = error if isinstance(error, KeeperError) else KeeperError(f"the keeper cannot begin: {error}")
        _answer(answer_fd, failure(problem))
        return
    _answer(answer_fd, {"record": codec.to_plain(keeper.server.ledger.told())})
    del order
    keeper.run()


def _begin(order: Mapping[str, Any], folder: Path, umask: int) -> Keeper:
    secrets, tuning = order.get("secrets") or {}, codec.from_plain(Tuning, order.get("tuning") or {})
    environment = dict(os.environ)
    shell = inherited.written_down(environment, umask)
    around = Surroundings(folder, environment, umask, tuning)
    if order["do"] == "launch":
        now = time.time()
        generation = Generation(1, codec.from_plain(LaunchSpec, order["spec"]), started_at=now)
        record = ServerRecord(folder.name, State.STARTING, now, now, (generation,), inherited=shell)
        keeper = Keeper(around, record, secrets)
        keeper.server.start()
        return keeper
    record = store.read_record(folder)
    if order["do"] == "restart":
        keeper = Keeper(around, replace(record, inherited=shell), secrets)
        keeper.server.start_next(codec.from_plain(LaunchSpec, order["spec"]))
        return keeper
    if record.inherited is not None:  # not that of whichever console happens to start this keeper
        environment = inherited.brought_back(record.inherited, record.current.spec.secret_names, environment)
        around = Surroundings(folder, environment, record.inherited.umask, tuning)
    keeper = Keeper(around, record, secrets)
    keeper.server.adopt()
    return keeper


def _point_output_away() -> None:
    """Standard input and output to nothing; what Python itself complains about stays with ``keeper.log``."""
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
        return  # the starter went away; the keeper goes on
    finally:
        os.close(fd)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
