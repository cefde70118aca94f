"""Waits for the end of a server that is not this keeper's child."""

from __future__ import annotations

import contextlib
import os
import select
import threading

from vllm_launchers.keeper import processes
from vllm_launchers.keeper.events import AdoptedEnded, Post
from vllm_launchers.keeper.records import ProcessIdentity


def watch(process: ProcessIdentity, epoch: int, post: Post) -> None:
    """Post `AdoptedEnded` when it has ended. Where the kernel has no pidfds, the owner's own looks must do."""
    with contextlib.suppress(OSError):
        pidfd = processes.open_pidfd(process)
        if pidfd is not None:
            threading.Thread(target=_wait, args=(pidfd, epoch, post), name="watch", daemon=True).start()


def _wait(pidfd: int, epoch: int, post: Post) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    os.close(pidfd)
    post(AdoptedEnded(epoch))
