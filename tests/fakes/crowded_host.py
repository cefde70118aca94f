"""Recorded hosts on which servers and users hold GPU memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_launchers.host.gpu.document import RECORDED

Held = tuple[str, float]
"""A server of this user (``editor``) or another user (``@anna``), and the GiB that it holds."""


def crowded_host(file: Path, name: str, held: Mapping[int, Sequence[Held]]) -> Path:
    """Write the recorded host ``name`` to ``file``, with these holders on its GPUs."""
    document = json.loads((RECORDED / f"{name}.json").read_text())
    for index, holders in held.items():
        gpu = document["gpus"][index]
        for who, gib in holders:
            server, user = (None, who[1:]) if who.startswith("@") else (who, "me")
            gpu["used_by"].append({"pid": 4_000_000, "user": user, "gib": gib, "server": server, "command": "python"})
            gpu["free_gib"] -= gib
            gpu["used_gib"] += gib
    file.write_text(json.dumps(document))
    return file
