"""Errors between a console and its keepers. Each message is one sentence for users."""

from __future__ import annotations

from pathlib import Path

from vllm_launchers.errors import NotFoundError, OperationError, RefusedError, UsageError
from vllm_launchers.keeper.files import KEEPER_LOG


class KeeperError(OperationError):
    """Something could not be done; the message says what, where, and what to do."""


class BadNameError(KeeperError, UsageError):
    """A server name that is not a valid folder name, or too long."""


class NoSuchServerError(KeeperError, NotFoundError):
    """There is no record of a server with that name."""


class NameTakenError(KeeperError):
    """A server with that name exists already, or is being started."""


class NotOursError(KeeperError):
    """A folder or process that belongs to another user."""


class ElsewhereError(KeeperError, RefusedError):
    """A server that runs on another machine or in another container, and can be controlled only there."""


class SecretMissingError(KeeperError):
    """A secret that the server needs is neither given nor in the environment."""


class SilentError(KeeperError):
    """A keeper lives but does not answer in time."""

    @classmethod
    def starting(cls, folder: Path, seconds: float) -> SilentError:
        """For a new keeper of ``folder`` that runs but has not answered within ``seconds``."""
        log = folder / KEEPER_LOG
        return cls(f"the keeper of {folder.name} has not answered within {seconds:g}s and may still start; see {log}")


class NotPreparingError(KeeperError):
    """There is no restart in preparation that could be canceled."""


class CannotSleepError(KeeperError):
    """A server that can't go to sleep or wake up in its current state."""


class StillAliveError(KeeperError, RefusedError):
    """The request requires a server that has ended."""


class RecordError(KeeperError):
    """A record that can't be read: broken, incomplete, or written by a newer version."""


class NewerRecordError(RecordError):
    """A record that a newer version wrote, which this one must not interpret."""


class UnwrittenError(KeeperError):
    """A record can't be written (disk full, quota, read-only), and the request must not be executed without it.

    ``errno`` is the system's error; 0 for one that a keeper has reported to a console.
    """

    def __init__(self, text: str, errno: int = 0) -> None:
        super().__init__(text)
        self.errno = errno


class WaitTimeoutError(KeeperError):
    """A server did not reach the awaited state in time."""
