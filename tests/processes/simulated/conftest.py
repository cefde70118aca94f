"""Simulated servers as real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from fakes.simulated_servers import DEADLINE, launch, launcher_in, quantile, server, until

__all__ = ["launch", "launcher_in", "patient_requests", "quantile", "server", "until"]


@pytest.fixture(scope="module", autouse=True)
def patient_requests() -> Iterator[None]:
    """Requests without their own timeout may take as long as a busy machine needs, instead of five seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for step in ("connect", "read", "write", "pool"):
            patch.setattr(DEFAULT_TIMEOUT_CONFIG, step, DEADLINE)
        yield
