"""The environment of a soak: a separate home, eight servers, foreign processes and files, and the program."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.commands import run_command
from fakes.ports import free_port
from soak.journal import DONE, REFUSED, UNSURE, Journal, Order
from soak.schedule import SERVERS, TREES
from vllm_launchers.keeper import client, errors, processes
from vllm_launchers.keeper.records import ProcessIdentity, ServerRecord
from vllm_launchers.procfs import PROC, pids

HERE = Path(__file__).parent
SCRIPT_FILE = HERE / "program.py"
PROGRAM = (sys.executable, "-P", str(SCRIPT_FILE))
"""``-P``, because modules in the same folder may shadow others."""
COMMAND_SECONDS = 1200.0
"""Timeout of every command on an overloaded machine. The longest command waits up to 300 s itself."""
SCRIPT = """#!{python}
import sys
sys.path.insert(0, {tests!r})
if not sys.argv:
    from vllm.entrypoints.cli.main import main
from soak.engine import main
sys.exit(main())
"""
REFUSALS = ("already exists", "is being started", "was just started", "is not stopped", "has not ended yet",
            "no previous generation", "not ready", "port_taken")  # fmt: skip
"""Reasons printed with exit code 1 when nothing was done."""
REPORTING = ("check", "doctor")
"""Commands whose output and exit code report problems: on a busy machine, objectives are missed."""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Ours:
    """A process of the soak: its command line, and its server if it belongs to one (keepers do not)."""

    words: str
    server: str


@dataclass
class World:
    """Everything that a soak acts on. Call `open`, and always `close`."""

    home: Path
    journal: Journal
    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in SERVERS})
    canaries: dict[str, str] = field(
        default_factory=lambda: {n: f"cAnArY{secrets.token_hex(16)}" for n in ("VLLM_API_KEY", "HF_TOKEN")}
    )
    marker: str = field(default_factory=lambda: secrets.token_hex(8))
    others: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    things: dict[Path, str] = field(default_factory=dict)
    """The user's own files and their content."""

    @property
    def state(self) -> Path:
        return self.home / "state" / "vllm-console"

    @property
    def notes(self) -> Path:
        """Where process trees record their actions."""
        return self.home / "notes"

    @property
    def env(self) -> dict[str, str]:
        """The environment of every command and console."""
        folders = {f"XDG_{name.upper()}_HOME": str(self.home / name) for name in ("state", "config", "cache", "data")}
        own = {"HOME": str(self.home), "SIMULATED_STARTUP_SECONDS": "1", "SOAK_NOTES": str(self.notes)}
        around = {name: value for name, value in os.environ.items() if name != "VLLMCONSOLE_STATE"}
        return {**around, **folders, **own, **self.canaries, "SOAK_RUN": self.marker}

    def open(self) -> None:
        """Create the home and the foreign processes and files, and start all servers."""
        self.notes.mkdir(parents=True)
        script = self.home / "vllm"
        script.write_text(SCRIPT.format(python=sys.executable, tests=str(HERE.parent)))
        script.chmod(0o755)
        self._create_files()
        self._start_others()
        with ThreadPoolExecutor(3) as pool:
            for name, said in zip(SERVERS, pool.map(self.start, SERVERS), strict=True):
                self.journal.say(f"start {name}: exit {said.code} {said.err.strip()[-200:]}")

    def _create_files(self) -> None:
        models, shared = self.home / "models", Path("/dev/shm", f"mine-{self.marker}")
        for path in (models / "weights.safetensors", models / "servers" / "alpha" / "record.json", shared):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(secrets.token_bytes(2000))
        for path in (*(path for path in models.rglob("*") if path.is_file()), shared):
            self.things[path] = digest(path)

    def _start_others(self) -> None:
        """Start a foreign server, and a simulated engine that looks like ours; no keeper started either."""
        place = self.home / "others" / "vllm"
        place.parent.mkdir()
        place.write_text((HERE.parent / "fakes" / "recording_vllm.py").read_text())
        env = {name: value for name, value in os.environ.items() if name != "SOAK_RUN"}
        env |= {"RECORDED": str(self.home / "bystander"), "NOTE_SIGNALS": "1", "SIMULATED_STARTUP_SECONDS": "0"}
        lookalike = [sys.executable, str(place), "serve", "tiny", "--port", str(free_port())]
        same = [
            sys.executable,
            "-m",
            "vllm_launchers.simulated",
            "serve",
            "Qwen/Qwen3-8B-AWQ",
            "--port",
            str(free_port()),
        ]
        for name, words in (("look-alike", lookalike), ("same command", same)):
            self.others[name] = subprocess.Popen(
                words,
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60.0
        while not (self.home / "bystander").exists() or not (self.home / "bystander").read_text():
            assert time.monotonic() < deadline, "the look-alike never became ready"
            time.sleep(0.1)

    # -- the program -----------------------------------------------------------------------------------------------

    def command(self, *words: str) -> Said:
        """Run ``vllm-console``; forbidden output is recorded as a violation."""
        try:
            done = run_command(words, self.env, timeout=COMMAND_SECONDS, program=[str(SCRIPT_FILE)])
        except subprocess.TimeoutExpired:
            self.journal.blame(f"'{' '.join(words)}' did not end within {COMMAND_SECONDS:g} s")
            return Said(-signal.SIGKILL, "", "")
        said = Said(done.returncode, done.stdout, done.stderr)
        self.look_at(" ".join(words), said.out + said.err)
        if said.code not in range(5):
            self.journal.blame(f"'{' '.join(words)}' ended with {said.code}: {said.err[-500:]}")
        if said.code and not said.err.strip() and words[0] not in REPORTING:
            self.journal.blame(f"'{' '.join(words)}' failed and said nothing")
        if "--json" in words and said.code == 0:
            try:
                json.loads(said.out)
            except ValueError as error:
                self.journal.blame(f"'{' '.join(words)}' printed no JSON ({error}): {said.out[:200]}")
        return said

    def look_at(self, what: str, text: str) -> None:
        """Record a violation for secrets in the program's output."""
        for sign in ("Traceback (most recent", "internal error"):
            if sign in text:
                self.journal.blame(f"{what}: {text[text.index(sign) :][:1500]}")
        for name, value in self.canaries.items():
            if value in text:
                self.journal.blame(f"{what}: told {name}")

    def order(self, server: str, wanted: str, *words: str) -> Said:
        """Run a command that changes a server; its possible results are recorded."""
        began = time.time()
        said = self.command(*words)
        outcome = DONE
        if said.code:
            refused = said.code in (2, 3, 4) or any(sign in said.err for sign in REFUSALS)
            outcome = REFUSED if refused else UNSURE
        self.journal.order(Order(server, frozenset({wanted}), began, time.time(), outcome))
        return said

    def start(self, server: str, preset: str = "chatbot") -> Said:
        """Start one of the eight with its fixed settings: half have vLLM's process tree, every second one restarts."""
        engine = ("--vllm", str(self.home / "vllm")) if server in TREES else ("--engine", "simulated")
        policy = "on-failure" if SERVERS.index(server) % 2 else "never"
        place = ("--port", str(self.ports[server]), "--restart", policy)
        return self.order(server, "running", "start", preset, *engine, "--name", server, *place, "--force", "--json")

    # -- processes -------------------------------------------------------------------------------------------------

    def record(self, server: str) -> ServerRecord | None:
        """Its record, None if missing. An unreadable record is a violation."""
        try:
            return client.read(self.state, server)
        except errors.NoSuchServerError:
            return None
        except errors.KeeperError as error:
            self.journal.blame(f"{server}: {error}")
            return None

    def parts(self, server: str) -> dict[str, ProcessIdentity]:
        """Current processes of a server: keeper, api and recorder from its record, engine and worker by title."""
        record = self.record(server)
        if record is None:
            return {}
        found = {"keeper": record.keeper, "api": record.server, "recorder": record.sidecar}
        if record.server is not None:
            for one in processes.table().values():
                if one.session == record.server.pid and one.pid != one.session:
                    title = Path(PROC, str(one.pid), "comm")
                    with contextlib.suppress(OSError):
                        name = {"VLLM::EngineCor": "engine", "VLLM::Worker": "worker"}.get(title.read_text().strip())
                        if name is not None:
                            found[name] = processes.identity_of(one)
        return {part: who for part, who in found.items() if who is not None and processes.alive(who)}

    def ours(self) -> dict[int, Ours]:
        """All processes started by this soak's commands, by pid, without foreign ones."""
        mark, found = f"SOAK_RUN={self.marker}".encode(), {}
        for pid in pids():
            with contextlib.suppress(OSError):
                around = Path(PROC, str(pid), "environ").read_bytes().split(b"\0")
                if mark not in around:
                    continue
                words = Path(PROC, str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[pid] = Ours(words, self._server(words))
        return found

    def _server(self, words: str) -> str:
        """The server of a process, found by its port, or for a recorder by its output file."""
        found = re.search(r" serve .*--port (\d+)| .*/servers/(\w+)/history", words)
        if found is None or "program.py" in words:
            return ""
        return found[2] or next((name for name, port in self.ports.items() if str(port) == found[1]), "")

    def close(self) -> None:
        """End everything left over; only leftovers of a failed soak are killed."""
        deadline = time.monotonic() + 30.0
        while (left := self.ours()) and time.monotonic() < deadline:  # a killed process may just have started another
            for who in filter(None, map(processes.identity, left)):
                processes.send(who, signal.SIGKILL)
            time.sleep(0.1)
        for process in self.others.values():
            process.kill()
            process.wait()
        for path in (*self.things, *(Path("/dev/shm", note.name) for note in self.notes.glob("psm_*"))):
            path.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """A digest of a file; empty if missing."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def read_json(text: str) -> Any:
    return json.loads(text)
