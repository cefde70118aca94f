"""A server with the part of the Hugging Face Hub API that downloads need, without Xet.

It supports range requests, so that interrupted downloads resume. A test can make it lie (``corrupt``,
``claimed_bytes``), hold a file back (``hold_after``) or require a license (``gated``).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """``models``: the content of each file by model."""

    models: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    hold_after: int | None = None
    """Bytes of a large file after which sending pauses until `released` is set."""
    released: threading.Event = field(default_factory=threading.Event)
    held: threading.Event = field(default_factory=threading.Event)
    corrupt: bool = False
    claimed_bytes: int | None = None
    ranges: list[str] = field(default_factory=list)
    got: list[str] = field(default_factory=list)

    def __enter__(self) -> FakeHub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def sibling(self, name: str, content: bytes) -> dict[str, Any]:
        """A file as the API lists it."""
        found: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_hash(content)}
        if is_large(name):
            size = self.claimed_bytes or len(content)
            found |= {"size": size, "lfs": {"sha256": sha256(content), "size": size, "pointerSize": 130}}
        return found


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:  # noqa: C901 - the requests of a hub, one after the other
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            parts = urlsplit(self.path)
            if parts.path == "/api/models":
                words = parse_qs(parts.query).get("search", [""])[0].lower().split()
                found = [name for name in hub.models if all(word in name.lower() for word in words)]
                self._json(200, [{"id": name, "modelId": name, "downloads": 7, "tags": []} for name in found])
            elif match := re.fullmatch(r"/api/models/(.+?)(?:/revision/([^/]+))?", parts.path):
                self._about(match[1], match[2] or "main")
            elif match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", parts.path):
                self._file(match[1], match[3], body=body)
            else:
                self._json(404, {})

        def _about(self, model: str, revision: str) -> None:
            if model not in hub.models:
                self._json(404, {"error": "Repository not found"}, code="RepoNotFound")
            elif revision not in ("main", COMMIT):
                self._json(404, {"error": "no such revision"}, code="RevisionNotFound")
            else:
                siblings = [hub.sibling(*one) for one in hub.models[model].items()]
                self._json(200, {"id": model, "modelId": model, "sha": COMMIT, "tags": [], "siblings": siblings})

        def _file(self, model: str, name: str, *, body: bool) -> None:
            content = hub.models.get(model, {}).get(name)
            if content is None:
                self._json(404, {"error": "not found"}, code="EntryNotFound")
                return
            if model in hub.gated:
                self._json(403, {"error": "gated"}, code="GatedRepo")
                return
            sent = bytes(len(content)) if hub.corrupt and is_large(name) else content
            start = 0
            status = 200
            if (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) and body:
                start, status = int(asked[1]), 206
                hub.ranges.append(f"{name} {start}")
            self.send_response(status)
            etag = sha256(content) if is_large(name) else git_hash(content)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if is_large(name):
                self.send_header("X-Linked-Etag", f'"{etag}"')
                self.send_header("X-Linked-Size", str(len(content)))
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            if not body:
                return
            hub.got.append(name)
            if hub.hold_after is not None and is_large(name) and not hub.released.is_set():
                self.wfile.write(sent[start : hub.hold_after])
                self.wfile.flush()
                hub.held.set()
                hub.released.wait(60)
                self.close_connection = True
                return
            self.wfile.write(sent[start:])

        def _json(self, status: int, document: object, code: str = "") -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    return Handler
