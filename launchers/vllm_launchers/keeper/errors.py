"""What can go wrong between a console and its keepers. Each message is one sentence for people."""

from __future__ import annotations


class KeeperError(Exception):
    """Something could not be done; the message says what, where, and what to do."""


class BadNameError(KeeperError):
    """A server name that could not be a folder's name, or that is too long."""


class NoSuchServerError(KeeperError):
    """There is no record of a server of that name."""


class NameTakenError(KeeperError):
    """A server of that name is there already, or is being started at this moment."""


class NotOursError(KeeperError):
    """A folder or a process that belongs to somebody else."""


class SecretMissingError(KeeperError):
    """A secret that the server needs is neither given nor in the environment."""


class SilentError(KeeperError):
    """A keeper lives and does not answer in time."""


class StillAliveError(KeeperError):
    """What was asked is possible only for a server that has ended."""


class RecordError(KeeperError):
    """A record that cannot be read: broken, incomplete, or written by a newer version."""


class NewerRecordError(RecordError):
    """A record that a newer version wrote: what it says is not for this one to judge."""


class UnwrittenError(KeeperError):
    """A record cannot be written (disk full, quota, read-only), and what was asked must not be done without."""


class WaitTimeoutError(KeeperError):
    """A server did not get to the awaited state in time."""
