"""Which servers a chat on the screen refuses, and why."""

from __future__ import annotations

from types import ModuleType

import pytest
from msgspec.structs import replace

from vllm_console.cli.chat import _check
from vllm_launchers.errors import RefusedError


def test_remote_server_is_not_called_another_users(fakes: ModuleType) -> None:
    fleet = fakes.FakeFleet(
        lambda at: replace(fakes.chat(at), name="box/chat", ours=False, remote="box", remote_ours=True)
    )
    with pytest.raises(RefusedError, match="box/chat runs on box"):
        _check("box/chat", fleet, remote_allowed=False)
