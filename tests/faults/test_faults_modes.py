"""For any umask and any existing permissions, the program's files are private to its user."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fakes.ports import free_port
from fakes.terminal import Terminal
from vllm_console.cli.main import main
from vllm_launchers import private

MASKS = (0o000, 0o077, 0o777)
LIFE = """
import json, os, sys
os.umask(int(sys.argv[1]))
from vllm_console.cli.main import main
from vllm_console.alerts.notifier import FindingsLog
from vllm_console.crash_report import write_report
from vllm_launchers.keeper.folders import default_root
codes = []
for words in json.loads(sys.argv[2]):
    if words == ["crash"]:
        print(write_report(RuntimeError("on purpose"), words), file=sys.stderr)
        log = FindingsLog(default_root())
        assert log.mine()
        log.append({"code": "found"})
        log.close()
        continue
    sys.argv[1:] = words
    codes.append([words[0], main(words)])
print(json.dumps(codes), file=sys.stderr)
"""
CONSOLE = "import os, sys; os.umask(int(sys.argv.pop(1))); from vllm_console.cli.main import main; sys.exit(main([]))"
BEFORE = (
    ["start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait", "--timeout", "120"],
    ["load", "chat", "--duration", "0.3", "--rate", "5", "--input-tokens", "20", "--output-tokens", "4"],
    ["restart", "chat", "--set", "max-num-seqs=64", "--wait", "--timeout", "120"],
    ["check", "chat"],
    ["claim", "0", "--until", "1h"],
    ["runs"],
    ["crash"],
)
AFTER = (["stop", "chat"], ["release"])


class Life:
    """A home folder in which everything is created under one umask."""

    def __init__(self, home: Path, mask: int) -> None:
        self.home, self.mask, self.port = home, mask, free_port()
        self.state, self.board = home / "local" / "state" / "vllm-console", home / "board"
        self.board.mkdir(parents=True)
        self.board.chmod(0o1777)
        (home / "config" / "vllm-console").mkdir(parents=True)
        (home / "config" / "vllm-console" / "config.toml").write_text(f'board = "{self.board}"\n')
        self.env = {
            **os.environ,
            "HOME": str(home),
            "SIMULATED_STARTUP_SECONDS": "0",
            "XDG_STATE_HOME": str(home / "local" / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_CACHE_HOME": str(home / "new" / "cache"),
        }
        self.said = ""

    def run(self, lines: tuple[list[str], ...]) -> None:
        words = [sys.executable, "-c", LIFE, str(self.mask), json.dumps(lines)]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=240, check=False)
        self.said += done.stderr
        assert done.returncode == 0, done.stderr

    def look(self) -> None:
        """Open the console and close it once its table is shown."""
        own = {name: value for name, value in self.env.items() if os.environ.get(name) != value}
        words = [sys.executable, "-c", CONSOLE, str(self.mask)]
        terminal = Terminal(words, 100, 30, own)
        try:
            terminal.wait_for("ready")
            terminal.press("q")
            terminal.process.wait(60)
        finally:
            terminal.close()

    def modes(self) -> dict[str, int]:
        """Mode of every file created in the home, by relative path."""
        found = {}
        for top in (self.home / "local", self.home / "new"):
            for path in (top, *top.rglob("*")):
                with contextlib.suppress(FileNotFoundError):  # a new record that is about to replace the old one
                    if not path.is_symlink():
                        found[str(path.relative_to(self.home))] = path.lstat().st_mode
        return found

    def live(self) -> tuple[dict[str, int], dict[str, int]]:
        try:
            self.run((["start", *BEFORE[0][1:], "--port", str(self.port)], *BEFORE[1:]))
            self.look()
            alive = self.modes()
        finally:
            self.run(AFTER)
        return alive, self.modes()


@pytest.fixture(scope="module")
def lives(tmp_path_factory) -> Iterator[dict[int, tuple[Life, dict[str, int], dict[str, int]]]]:
    """A full server lifecycle under each umask, in parallel."""
    made = [Life(tmp_path_factory.mktemp(f"mask-{mask:o}"), mask) for mask in MASKS]
    with ThreadPoolExecutor(len(made)) as pool:
        yield {life.mask: (life, *seen) for life, seen in zip(made, pool.map(Life.live, made), strict=True)}


@pytest.mark.parametrize("mask", MASKS)
def test_file_modes_do_not_depend_on_umask(lives, mask):
    life, alive, over = lives[mask]
    made = "local/state/vllm-console"
    server = f"{made}/servers/chat"
    for name in (
        "record.json",
        "keeper.lock",
        "keeper.sock",
        "keeper.log",
        "server.output",
        "server.log",
        "members.json",
    ):
        assert f"{server}/{name}" in alive, "the lifecycle left no such file"
    for name in (f"{server}/history.sqlite", f"{server}/history.sqlite.lock", f"{server}/sidecar.log"):
        assert name in alive
    for name in ("runs.sqlite", "launch.lock", "findings.lock", "findings.log", "start-times.json"):
        assert f"{made}/{name}" in alive, name
    assert any(name.startswith(f"{made}/crashes/crash-") for name in alive)
    for name, mode in {**alive, **over}.items():
        wanted = 0o700 if stat.S_ISDIR(mode) else 0o600
        assert stat.S_IMODE(mode) == wanted, f"{name} is {stat.S_IMODE(mode):04o}"
    assert "open to other users" not in life.said, "no permission had to be fixed on the way"
    lock = life.board / f".{os.getuid()}.lock"
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600, "the lock of the user's page belongs to the user"


def test_server_files_use_umask_of_launch(lives):
    """The umask is inherited: the user decides on the mode of files that vLLM writes."""
    for mask, (life, _, _) in lives.items():
        record = json.loads((life.state / "servers" / "chat" / "record.json").read_text())
        assert record["inherited"]["umask"] == mask


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    """A state folder left open by a backup or a careless ``chmod -R``."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "state" / "vllm-console"
    server = folder / "servers" / "chat"
    server.mkdir(parents=True)
    history = folder / "removed" / "old@1-2" / "history.sqlite"
    history.parent.mkdir(parents=True)
    own = (folder / "runs.sqlite", folder / "findings.log", server / "server.log", server / "keeper.log", history)
    for path in own:
        path.write_bytes(b"")
    (server / "elsewhere").symlink_to("/etc/passwd")
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)
    return folder


def too_open(folder: Path) -> list[str]:
    paths = [folder, *folder.rglob("*")]
    return [str(path) for path in paths if not path.is_symlink() and path.stat().st_mode & 0o077]


def test_open_permissions_are_fixed_at_startup_and_reported_once(state, capsys):
    assert len(too_open(state)) == 10, "the fault"
    passwd = Path("/etc/passwd").stat()
    assert main(["list", "--ours", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == []
    assert said.err == f"vllm-console: {state} was open to other users; fixed, now private\n"
    assert too_open(state) == []
    assert Path("/etc/passwd").stat() == passwd, "symlinks are not followed"
    assert main(["list", "--ours", "--json"]) == 0
    assert capsys.readouterr().err == ""
    (state / "servers" / "chat" / "server.log").chmod(0o640)
    assert main(["runs"]) == 0
    assert f"{state}/servers/chat/server.log was open to other users; fixed" in capsys.readouterr().err


def test_read_only_console_reports_open_permissions_only(state, capsys):
    before = too_open(state)
    for words in (["--read-only", "list", "--ours", "--json"], ["--read-only", "board"]):
        main(words)
        said = capsys.readouterr()
        assert f"{state}: open to other users (not changed while read-only)" in said.err
        assert f"chmod -R go= {state}" in said.err
    assert too_open(state) == before
    main(["doctor", "--json"])
    problems = [problem["what"] for problem in json.loads(capsys.readouterr().out)["problems"]]
    assert any("is open to other users" in problem for problem in problems)
    assert too_open(state) == before, "doctor changes nothing"


def test_console_shows_open_permissions_on_screen(state):
    (state / "servers" / "chat").rename(state / "gone")
    (state / "gone" / "elsewhere").unlink()
    for path in sorted((state / "gone").rglob("*")):
        path.unlink()
    (state / "gone").rmdir()
    terminal = Terminal([sys.executable, "-m", "vllm_console"], 120, 30, dict(os.environ))
    try:
        terminal.wait_for("fixed, now private")
        assert too_open(state) == []
    finally:
        terminal.close()


def test_shared_folder_is_reported_and_keeps_its_permissions(state, capsys):
    (state / "thesis.tex").write_text("mine")
    assert main(["list", "--ours"]) == 0
    said = capsys.readouterr().err
    assert f"Other users can access {state} (mode 0777). It was left unchanged because" in said
    assert "it also contains 'thesis.tex', which is not part of vllm-console" in said
    assert stat.S_IMODE(state.stat().st_mode) == 0o777
    assert (state / "thesis.tex").stat().st_mode & 0o077, "the folder's mode is not changed"
    assert too_open(state / "servers") == [], "our own files are still fixed"
    (state / "thesis.tex").unlink()
    state.chmod(0o1777)
    assert main(["list", "--ours"]) == 0
    assert "a shared folder" in capsys.readouterr().err
    assert stat.S_IMODE(state.stat().st_mode) == 0o1777


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two people")
def test_files_of_other_users_are_refused_and_unchanged(state, tmp_path, capsys):
    strange = state / "servers" / "strange"
    strange.mkdir(mode=0o755)
    os.chown(strange, 65534, -1)
    assert private.check(state, fix=True)[0].startswith(f"{strange} belongs to another user (uid 65534)")
    assert stat.S_IMODE(strange.stat().st_mode) == 0o755
    link = tmp_path / "link"
    link.symlink_to(state)
    os.chown(link, 65534, -1, follow_symlinks=False)
    before = sorted(map(str, state.rglob("*")))
    assert main(["--state", str(link), "start", "chatbot", "--engine", "simulated"]) == 1
    assert "is a link that another user made" in capsys.readouterr().err
    state.chmod(0o755)
    os.chown(state, 65534, -1)
    for words in (["list", "--ours"], ["start", "chatbot", "--engine", "simulated"], ["runs"]):
        main(["--state", str(state), *words])
        assert f"{state} belongs to another user (uid 65534)" in capsys.readouterr().err
    assert stat.S_IMODE(state.stat().st_mode) == 0o755
    assert sorted(map(str, state.rglob("*"))) == before, "nothing was written there, although root could"


def test_sampling_32_servers_is_cheap(tmp_path):
    for server in range(32):
        folder = tmp_path / "servers" / f"s{server}"
        private.make_folder(folder)
        for name in range(14):
            os.close(private.open_file(folder / f"f{name}", os.O_RDWR))
    private.make_folder(tmp_path / "crashes")
    tmp_path.chmod(0o700)
    best = min(_cpu(lambda: private.check(tmp_path, fix=True)) for _ in range(5))
    assert best < 0.05
    assert private.check(tmp_path, fix=True) == []


def _cpu(act) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def test_umask_without_owner_rights_does_not_lock_user_out(tmp_path):
    """In a separate process, because a umask applies to all threads."""
    code = (
        "import os, sys; from pathlib import Path; from vllm_launchers import private; os.umask(0o777);"
        "folder = Path(sys.argv[1]); private.make_folder(folder);"
        "os.close(private.open_file(folder / 'one', os.O_WRONLY)); (folder / 'one').write_text('again')"
    )
    mine = tmp_path / "a" / "b"
    subprocess.run([sys.executable, "-c", code, str(mine)], check=True)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (mine.parent, mine, mine / "one")] == [0o700, 0o700, 0o600]
    with contextlib.suppress(OSError):
        private.make_folder(mine / "one" / "deeper")
    with pytest.raises(FileExistsError):
        private.make_folder(mine / "one")
