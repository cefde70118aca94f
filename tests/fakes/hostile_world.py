"""A home with hostile content everywhere: records, presets, a board, logs, servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fakes import fake_fleet
from fakes.hostile import EVIL, MARKUP, WORST, poisoned
from fakes.ports import free_port
from vllm_console.runs.store import RunHead, RunStore
from vllm_launchers import values
from vllm_launchers.host.board import utc
from vllm_launchers.host.gpu.document import encode_host, read_host
from vllm_launchers.keeper import wire
from vllm_launchers.keeper.records import Exit, Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack

SERVER = """
import http.server, os, sys
evil, kind = sys.argv[2], sys.argv[-1]
page = ('# TYPE vllm:num_requests_running gauge\\n' + ''.join(
    'vllm:%s{engine="%s",model_name="%s"} 3.0\\n' % (name, label, label)
    for name in ('num_requests_running', 'kv_cache_usage_perc')
    for label in ('0', evil.replace('\\\\', '\\\\\\\\').replace('"', '\\\\"').replace('\\n', '\\\\n'))
)).encode(errors='replace')

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.wfile.write(b'HTTP/1.1 %d %s\\r\\nX-A: %s\\r\\n' % (200 if kind == 'serve' else 500, odd, odd))
        self.wfile.write(b'Content-Type: text/plain\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(page))
        self.wfile.write(page)
    def log_message(self, *_):
        pass

odd = evil.encode(errors='replace').replace(b'\\n', b'').replace(b'\\r', b'')
http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), Handler).serve_forever()
"""
"""Looks like ``vllm serve``; with ``--kind fail`` it answers with errors."""
LOG = f"{WORST}\nERROR 11-20 11:54:00 [core.py:1] ValueError: {WORST}\ntorch.OutOfMemoryError: {WORST}\n"
AT = 1_790_000_000.0


class World:
    """The home, two foreign servers, and its ``environment``."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.state, self.config = home / "state/vllm-console", home / "config/vllm-console"
        self.board = home / "board"
        self.host, self.topology, self.log, self.page = (home / name for name in ("host", "topology", "log", "metrics"))
        self.environment = {
            **os.environ,
            "HOME": str(home),
            **{f"XDG_{name.upper()}_HOME": str(home / name) for name in ("state", "config", "cache")},
        }
        self.ports: list[int] = []
        self._servers: list[subprocess.Popen[bytes]] = []
        for folder in (self.state / "servers", self.config / "presets", self.board):
            folder.mkdir(parents=True, mode=0o700)
        self._settings()
        self._records()
        self._others()

    def close(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait()

    def _settings(self) -> None:
        self.board.chmod(0o1777)
        (self.config / "config.toml").write_text(f'board = "{self.board}"\nvllm = ["/{EVIL[:80].encode().hex()}"]\n')
        escaped = json.dumps(f"{MARKUP} $(touch pwned);`touch pwned`")
        presets = self.config / "presets"
        (presets / "mine.toml").write_text(
            f'extends = "chatbot"\ntitle = {escaped}\nsummary = {escaped}\nmodel = {escaped}\n'
            f"[flags]\nserved-model-name = {escaped}\n"
        )
        quoted = json.dumps(EVIL.replace("\U000e0041", ""))
        (presets / "worse.toml").write_text(f'extends = "chatbot"\nsummary = {quoted}\n{quoted} = 1\n')
        since, until = utc(time.time() - 60).isoformat(), utc(time.time() + 3600).isoformat()
        server = {"name": EVIL, "preset": EVIL, "model": EVIL, "engine": EVIL, "gpus": [0], "port": 1, "since": since}
        page = {"version": 1, "claims": [{"gpus": [0], "since": since, "until": until, "why": WORST}]}
        own = {"pid": os.getpid(), "start_time": int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])}
        (self.board / f"{os.getuid()}.json").write_text(json.dumps({**page, "servers": [{**server, **own}]}))
        (self.board / "\x1b]0;STOLEN\x07.json").write_text("{}")

    def _records(self) -> None:
        view = fake_fleet.chat(AT)
        asked = {"workload": view.workload, "objectives": view.objectives, "environment": {"A": "b"}}
        details = Details("chatbot", view.model, view.engine, view.flags, view.reasons, gpus=(0,), **asked)
        spec = LaunchSpec(("vllm", "serve", "m"), "127.0.0.1", 8000, {"A": "b"}, details=pack(details))
        ended = Exit(AT, 1, None, False, "it ended")
        record = ServerRecord(
            "evil", State.FAILED, AT, AT, (Generation(1, spec, AT, AT, AT, ended),), reason="a reason"
        )
        self._record("evil", wire.dumps(values.replace(poisoned(record, EVIL), name="evil")))
        self._record("broken", json.dumps({"name": WORST, "version": 1, "state": WORST, "generations": WORST}).encode())
        self._record("newer", json.dumps({"name": "newer", "version": 99, "state": WORST}).encode())
        head = RunHead(
            "k", "evil", 1, AT, "p", "m", "vllm", "0.33.0", flags={"a": "b"}, ended={"reason": "r"}, cause="c"
        )
        RunStore(self.state / "runs.sqlite").enter(
            [replace(poisoned(head, EVIL), key=str(n), generation=n) for n in (1, 2)]
        )
        finding = {"at": AT, "event": "began", "server": WORST, "code": WORST, "severity": "critical", "since": AT}
        (self.state / "findings.log").write_text(json.dumps({**finding, "symptom": WORST, "cause": WORST}) + "\n")
        self.log.write_bytes(LOG.encode(errors="surrogatepass"))
        self.host.write_text(json.dumps(encode_host(poisoned(read_host(Path("4xa6000")), EVIL))))
        self.topology.write_text(f"{EVIL}\tGPU0\tGPU1\nGPU0\tX\t{EVIL}\n")

    def _record(self, name: str, data: bytes) -> None:
        folder = self.state / "servers" / name
        folder.mkdir(mode=0o700)
        (folder / "record.json").write_bytes(data)
        (folder / "server.log").write_bytes(LOG.encode(errors="surrogatepass"))

    def _others(self) -> None:
        (self.home / "vllm").write_text(SERVER)
        for kind in ("serve", "fail"):
            self.ports.append(free_port())
            words = [sys.executable, "-S", str(self.home / "vllm"), "serve", EVIL.replace("\0", "")]
            self._servers.append(
                subprocess.Popen([*words, "--port", str(self.ports[-1]), "--kind", kind], stderr=subprocess.DEVNULL)
            )


def read_json(text: str) -> Any:
    """One JSON document in ASCII only, so it cannot contain escape codes."""
    assert text.isascii()
    assert "\x1b" not in text
    return json.loads(text)
