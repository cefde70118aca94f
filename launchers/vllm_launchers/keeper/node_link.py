"""The link between the keepers of a multi-node server: nodes are compared before the launch and end together.

vLLM compares nothing between its nodes, and does not end one when another is gone (measured on 0.32: the rest keeps
running, ``/health`` answers 200, exit codes are 0). So each node's keeper holds one TCP connection to that of node 0,
which listens on its master address, on the port after the master port:

1. Each other node connects and sends one line: its rank and its fingerprint (versions, hashes, flags). Node 0 answers
   ``wait``, or ``refuse`` with the reason; a refused node may be started again as long as node 0 waits.
2. When all have joined, node 0 stops listening and sends ``go``: only now does each keeper start its vLLM.
3. Node 0 sends ``ready`` once it has completed a request, which requires all nodes.
4. A node that ends sends ``end``. If a connection closes without it, or the kernel's keepalive finds it dead after 14
   seconds, the node is gone. Node 0 passes that on to the others: ``rank`` is the node that ended, and ``named`` marks
   that the reason ``why`` is a sentence about that node.

Messages are lines of JSON with a maximum length; nothing in them is executed, and none contains a secret. The link is
no stronger than vLLM's own master port, which has no password either: both belong on a private network. A stranger who
connects while node 0 waits can read one difference and take a node's place, but no more; afterwards nobody can connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from vllm_launchers.keeper.lifecycle import HelperFailed, NodeNews, NodeStep, Post
from vllm_launchers.keeper.records import NodeSpec

PROTOCOL = 1
LONGEST_LINE = 64 * 1024
MOST_WAITING = 16
"""Maximum number of connections that have not yet identified themselves."""
HELLO_SECONDS = 5.0
CONNECT_SECONDS = 2.0
POLL_SECONDS = 0.5
SEND_SECONDS = 2
LONGEST_TEXT = 300
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))
HASHED = "sha256:"


def fingerprint_difference(ours: Mapping[str, str], theirs: Mapping[str, str], our_rank: int, their_rank: int) -> str:
    """How another node's fingerprint differs from ours, as clauses; empty if it does not. Names at most three
    differences.

    Values that are unknown (empty) on either side are not compared.
    """
    us, them = f"node {our_rank}", f"node {their_rank}"
    found = []
    for label in dict.fromkeys((*ours, *theirs)):
        our, their = ours.get(label), theirs.get(label)
        if our == their or our == "" or their == "":
            continue
        if (our or "").startswith(HASHED) and (their or "").startswith(HASHED):
            found.append(f"{them} and {us} have different {label.removesuffix('s')}s")
        else:
            found.append(f"{them} has {_with(label, their)}, {us} has {_with(label, our)}")
    rest = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return _clean("; ".join(found[:3]) + rest)


def _with(label: str, value: str | None) -> str:
    return f"no {label}" if value is None else f"{label} {value}".strip()


def _clean(text: object) -> str:
    """Text from another machine, made safe for display: no control characters, and short."""
    return "".join(c if c.isprintable() else "?" for c in str(text))[:LONGEST_TEXT]


class NodeLink(threading.Thread):
    """This node's end of the link. Posts `NodeNews`, but nothing after `close`."""

    def __init__(self, node: NodeSpec, epoch: int, post: Post) -> None:
        super().__init__(name="nodes", daemon=True)
        self._node, self._epoch, self._post = node, epoch, post
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._peers: dict[int, _Connection] = {}
        """By rank: on node 0, all others; on the others, only node 0."""
        self._let_in = False
        """Whether node 0 has accepted this node and waits for the others."""

    def ready(self) -> None:
        """Tell the others that a request was completed."""
        self._send_all({"do": "ready"})

    def close(self, why: str, *, requested: bool) -> None:
        """End this node's part: tell the others, who then end, too."""
        if not self._closed.is_set():
            self._send_all({"do": "end", "why": why, "requested": requested, "rank": self._node.rank})
            self._closed.set()
            with self._lock:
                for peer in self._peers.values():
                    peer.shut()

    def run(self) -> None:
        """Wait for the others, then watch them."""
        try:
            joined = self._gather() if self._node.rank == 0 else self._join()
            if joined:
                self._news(NodeStep.JOINED)
                self._watch()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: without the link the server must not run on
            self._post(HelperFailed("nodes", repr(error)))
            self._news(NodeStep.ENDED, f"the link to the other nodes failed: {error!r}")
        finally:
            with self._lock:
                for peer in self._peers.values():
                    peer.socket.close()

    def _news(self, step: NodeStep, message: str = "", *, requested: bool = False) -> None:
        if not self._closed.is_set():
            self._post(NodeNews(self._epoch, step, message, requested))

    def _send_all(self, message: Mapping[str, Any], but: int | None = None) -> None:
        with self._lock:
            for rank, peer in self._peers.items():
                if rank != but:
                    peer.send(message)

    @property
    def _missing(self) -> str:
        ranks = [str(rank) for rank in range(1, self._node.count) if rank not in self._peers]
        return f"node{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"

    # -- node 0 ----------------------------------------------------------------------------------------------------

    def _gather(self) -> bool:
        """Wait for all others; returns whether all joined."""
        node = self._node
        try:
            family = socket.getaddrinfo(node.master, node.port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((node.master, node.port), family=family, backlog=MOST_WAITING)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
            self._news(NodeStep.MISSING, f"can't wait for the other nodes on {node.master} port {node.port}: {why}")
            return False
        deadline, refused = time.monotonic() + node.seconds, ""
        waiting: list[_Connection] = []
        with listener:
            listener.setblocking(False)
            self._news(NodeStep.WAITING, self._waits())
            while len(self._peers) < node.count - 1:
                if self._closed.is_set():
                    break
                if time.monotonic() > deadline:
                    text = f"{self._missing} did not join within {node.seconds:g}s"
                    self._news(NodeStep.MISSING, f"{text}; {refused}" if refused else text)
                    break
                _wait([listener, *(one.socket for one in (*waiting, *self._peers.values()))])
                refused = self._welcome(listener, waiting) or refused
                self._drop_lost()
        for one in waiting:
            one.socket.close()
        if len(self._peers) < node.count - 1 or self._closed.is_set():
            return False
        self._send_all({"do": "go"})
        return True

    def _waits(self) -> str:
        return f"waiting for {self._missing} on {self._node.master} port {self._node.port}"

    def _welcome(self, listener: socket.socket, waiting: list[_Connection]) -> str:
        """Accept connections and identify waiting ones; returns why a node was refused."""
        refused = ""
        with contextlib.suppress(OSError):
            accepted, _ = listener.accept()
            if len(waiting) < MOST_WAITING:
                waiting.append(_Connection(accepted))
            else:
                accepted.close()
        for one in list(waiting):
            hello = one.line()
            if hello is None and not one.over and time.monotonic() - one.since < HELLO_SECONDS:
                continue
            waiting.remove(one)
            rank, why = self._judged(hello) if hello is not None else (0, "")
            why = _clean(why)
            if rank and not why:
                one.send({"do": "wait"})
                with self._lock:
                    self._peers[rank] = one
                if len(self._peers) < self._node.count - 1:
                    self._news(NodeStep.WAITING, self._waits())
                continue
            if why:
                refused = why
                one.send({"do": "refuse", "why": why})
                self._news(NodeStep.WAITING, f"{why}; {self._waits()}")
            one.socket.close()
        return refused

    def _judged(self, hello: Mapping[str, Any]) -> tuple[int, str]:
        """The rank of a node that wants to join, and why it can't; 0 for a peer that speaks another protocol."""
        rank, count, theirs = hello.get("rank"), hello.get("count"), hello.get("fingerprint")
        if "vllm-console" not in hello or not isinstance(rank, int) or not isinstance(theirs, dict):
            return 0, ""
        node = self._node
        if hello["vllm-console"] != PROTOCOL:
            return rank, (
                f"node {rank} runs a vllm-console with a different protocol: install the same version on all nodes"
            )
        if count != node.count:
            return rank, f"node {rank} was started for {_clean(count)} nodes, node 0 for {node.count}"
        if not 0 < rank < node.count:
            return rank, f"there is no node {rank} of {node.count} to wait for"
        if rank in self._peers:
            return rank, f"node {rank} has joined already, from {self._peers[rank].peer}"
        reported = {str(label): str(value) for label, value in theirs.items()}
        return rank, fingerprint_difference(node.fingerprint, reported, 0, rank)

    def _drop_lost(self) -> None:
        """Remove nodes that left while others are still awaited."""
        for rank, peer in list(self._peers.items()):
            if peer.line() is not None or peer.over:
                with self._lock:
                    self._peers.pop(rank).socket.close()
                self._news(NodeStep.WAITING, f"node {rank} disconnected; {self._waits()}")

    # -- the others ------------------------------------------------------------------------------------------------

    def _join(self) -> bool:
        """Join node 0; returns whether all nodes joined."""
        node, deadline = self._node, time.monotonic() + self._node.seconds
        self._news(NodeStep.WAITING, f"waiting for node 0 on {node.master} port {node.port}")
        problem = ""
        while time.monotonic() < deadline and not self._closed.is_set():
            try:
                plain = socket.create_connection((node.master, node.port), timeout=CONNECT_SECONDS)
            except OSError as error:
                problem = (error.strerror or str(error)).lower()
                self._closed.wait(POLL_SECONDS)
                continue
            connection = _Connection(plain)
            connection.send({
                "vllm-console": PROTOCOL, "rank": node.rank, "count": node.count,
                "fingerprint": dict(node.fingerprint),
            })  # fmt: skip
            answer = self._heard(connection, deadline)
            if answer is not None:
                return answer
            connection.socket.close()
            if connection.over:
                problem, self._let_in = "it closed the connection", False
            self._closed.wait(POLL_SECONDS)
        where = f"on {node.master} port {node.port}"
        text = f"node 0 did not answer {where} within {node.seconds:g}s ({problem or 'no answer'})"
        if self._let_in:
            text = f"the other nodes did not join node 0 {where} within {node.seconds:g}s"
        self._news(NodeStep.MISSING, text)
        return False

    def _heard(self, connection: _Connection, deadline: float) -> bool | None:
        """Handle node 0's answers; returns whether all nodes joined, or None if there was no valid answer."""
        self._let_in = False
        while time.monotonic() < deadline and not self._closed.is_set():
            _wait([connection.socket])
            answer = connection.line()
            if answer is None:
                if connection.over:
                    return None
                if not self._let_in and time.monotonic() - connection.since > HELLO_SECONDS:
                    return None
                continue
            match answer.get("do"):
                case "refuse":
                    self._news(NodeStep.DIFFERS, _clean(answer.get("why", "")))
                    return False
                case "wait":
                    self._let_in = True
                    others = "" if self._node.count == 2 else "; waiting for the other nodes"
                    self._news(NodeStep.WAITING, f"node 0 has answered{others}")
                case "go":
                    with self._lock:
                        self._peers[0] = connection
                    return True
                case "end":
                    connection.over = True
                    return None
        return None

    # -- all -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.is_set():
            _wait([peer.socket for peer in self._peers.values()], None)
            for rank, peer in self._peers.items():
                while (message := peer.line()) is not None:
                    if self._obeyed(message, rank):
                        return
                if peer.over:
                    text = f"node {rank} is gone: the connection to its keeper ended ({peer.why})"
                    self._send_all(
                        {"do": "end", "why": text, "requested": False, "rank": rank, "named": True}, but=rank
                    )
                    self._news(NodeStep.ENDED, text)
                    return

    def _obeyed(self, message: Mapping[str, Any], rank: int) -> bool:
        """Act on a message; returns whether it ends this node."""
        if message.get("do") == "ready" and rank == 0:
            self._news(NodeStep.READY)
        if message.get("do") != "end":
            return False
        requested, why = message.get("requested") is True, _clean(message.get("why", ""))
        ended = message.get("rank")
        ended = ended if isinstance(ended, int) and 0 <= ended < self._node.count else rank
        if message.get("named") is not True:
            why = f"node {ended} was stopped by a request on that node" if requested else f"node {ended} is gone: {why}"
        order = {"do": "end", "why": why, "requested": requested, "rank": ended, "named": True}
        self._send_all(order, but=rank)
        self._news(NodeStep.ENDED, why, requested=requested)
        return True


class _Connection:
    """A connection that is read line by line without blocking."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self.since = connected, time.monotonic()
        self.over, self.why = False, "closed"
        self._data = bytearray()
        self._sending = threading.Lock()
        try:
            self.peer = str(connected.getpeername()[0])
        except OSError:
            self.peer = "an unknown address"
        connected.settimeout(None)  # with a timeout, recv would block, too
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a line. A broken connection is noticed when it is read."""
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def line(self) -> dict[str, Any] | None:
        """The next complete line, if there is one; sets ``over`` once none can arrive or the peer breaks the rules."""
        while b"\n" not in self._data and not self.over:
            try:
                chunk = self.socket.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                self.over, self.why = True, (error.strerror or str(error)).lower()
                return None
            self.over = not chunk
            self._data += chunk
            if len(self._data) > LONGEST_LINE:
                self.over, self.why = True, "its message is too long"
                self._data.clear()
        if b"\n" not in self._data:
            return None
        raw, _, rest = bytes(self._data).partition(b"\n")
        self._data = bytearray(rest)
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self.over, self.why = True, "it uses a different protocol"
            return None
        return found

    def shut(self) -> None:
        """Shut down the connection, which wakes up its reader."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def _wait(sockets: list[socket.socket], seconds: float | None = POLL_SECONDS) -> None:
    """Wait until there is something to read, at most ``seconds``; None waits forever."""
    poller = select.poll()
    for one in sockets:
        poller.register(one, select.POLLIN)
    poller.poll(None if seconds is None else seconds * 1000)
