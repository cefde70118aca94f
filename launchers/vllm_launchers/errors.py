"""Errors that abort a requested operation. Each message is one clear sentence for users."""

from __future__ import annotations


class OperationError(Exception):
    """Something could not be done. The first line is one clear sentence; ``exit_code`` is the command's exit code.

    Packages derive their own errors from this class; commands and screens report these as they are.
    """

    exit_code = 1


class UsageError(OperationError):
    """The request is invalid."""

    exit_code = 2


class NotFoundError(OperationError):
    """No server or preset has that name."""

    exit_code = 3


class RefusedError(OperationError):
    """The server belongs to another user, or the console is read-only."""

    exit_code = 4
