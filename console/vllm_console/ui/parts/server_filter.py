"""The server filter."""

from __future__ import annotations

import re

from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_launchers.keeper.records import State
from vllm_launchers.patterns import lazy_pattern

_GPU = lazy_pattern(r"\bgpu[ :]+(?=\d)")


def matches(text: str, server: ServerView, snapshot: FleetSnapshot) -> bool:
    """Whether each word of a filter matches a server's name, model, preset, state, owner, host, port or GPUs.

    ``sim`` matches simulated engines, whose names the table marks with it. A GPU is written as ``gpu0``, ``gpu 0`` or
    by its name. An unreachable machine always matches, since its servers are unknown.
    """
    words = _GPU.sub("gpu", text.casefold()).split()
    if not words or (server.machine and server.state is State.UNRESPONSIVE):
        return True
    host, on = snapshot.host, snapshot.gpus_of(server)
    gpus = [gpu for gpu in (host.gpus if host is not None else ()) if gpu.index in on]
    facts = [server.marked_name, server.model, server.preset, server.state_text, server.owner, server.where]
    facts += ["you"] if server.ours else []
    facts += [*(f"gpu{index}" for index in server.gpus), *(gpu.name or "" for gpu in gpus)]
    facts += [f":{server.port}"] if server.port else []
    known = [fact.casefold() for fact in facts]
    return all(any(_holds(fact, word) for fact in known) for word in words)


def _holds(fact: str, word: str) -> bool:
    """Whether a fact matches a word; ``gpu1`` does not match ``gpu10``."""
    return fact == word if re.fullmatch(r"gpu\d+", word) and fact.startswith("gpu") else word in fact
