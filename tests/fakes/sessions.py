"""Processes of a session, whose id is the pid of the server that a keeper started."""

from __future__ import annotations

import os

import psutil


def processes_of(session: int) -> list[psutil.Process]:
    """The live processes of a server's session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.Error):
            continue
    return found
