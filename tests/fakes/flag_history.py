"""When flags of vLLM were removed, from the recorded flag tables of its releases."""

from __future__ import annotations

from vllm_launchers.vllm.flags import releases


def last_release(name: str) -> str | None:
    """The last release with a removed flag; None for a current flag or one that never existed."""
    history = releases._data()["flags"].get(name)
    return releases.RELEASES[history[-1][0] - 1] if history and history[-1][1] is None else None
