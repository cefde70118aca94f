"""Becoming a keeper: a session of its own, no terminal, deaf to hang-ups, and the one that orphans come to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
NAME = b"vllm-keeper"


def detach() -> int:
    """Leave the starter's session for good; returns the file mode mask that the server is to have.

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


def become_subreaper() -> bool:
    """Have orphaned descendants come to this process; False where the kernel refuses."""
    with contextlib.suppress(OSError, AttributeError):
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_SET_NAME, NAME, 0, 0, 0)
        return bool(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    return False
