"""Names of the files in a server's folder that several modules use.

No imports: the recorder needs these names and must stay small.
"""

from __future__ import annotations

RECORD = "record.json"
LOCK = "keeper.lock"
LOG = "server.log"
KEEPER_LOG = "keeper.log"
OUTPUT = "server.output"
"""The file that a server writes its output to."""
MOST_UNREAD = 256 << 20
"""Maximum bytes of unread output to keep while no keeper reads (stopped, or dead without a successor). Beyond that, the
oldest bytes are dropped."""
NODES_JOINED = "all nodes have joined and are equal"
"""Written to a node's log before vLLM starts, because vLLM's own lines do not show the start of a headless node."""

NODE_MARK = "vllm-console: "
"""Prefix of a line that a keeper adds to a server's log about its other nodes or Ray."""
SIDECAR_LOG = "sidecar.log"
