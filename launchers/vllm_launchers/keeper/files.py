"""Names of the files in a server's folder that several modules use.

Without imports: the recorder needs them and has to stay small.
"""

from __future__ import annotations

RECORD = "record.json"
LOCK = "keeper.lock"
LOG = "server.log"
KEEPER_LOG = "keeper.log"
OUTPUT = "server.output"
"""The file that a server writes its output to."""
MOST_UNREAD = 256 << 20
"""How many bytes of unread output are kept while no keeper reads (it is stopped, or dead without a successor). Beyond
that, the oldest are dropped."""
NODES_JOINED = "all nodes have joined and are equal"
"""What the keeper of a node writes into its log before it starts vLLM, whose lines show no start of a headless node."""

NODE_MARK = "vllm-console: "
"""Begins a line that a keeper adds to a server's log: what happened to the other nodes of the same server,
or to Ray."""
SIDECAR_LOG = "sidecar.log"
