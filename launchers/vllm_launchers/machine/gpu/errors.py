"""What can go wrong with GPUs and host documents; every text is one sentence for people."""

from __future__ import annotations


class HostError(Exception):
    """A host document or a saved matrix that cannot be used."""


class DriverError(Exception):
    """The NVIDIA driver cannot be asked at all: none is there, no permission, versions differ."""


NO_DRIVER = "no NVIDIA driver was found on this machine; GPUs are not shown (servers work as far as they can without)"
