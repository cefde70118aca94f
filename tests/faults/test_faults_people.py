"""A machine with several users: foreign servers are shown and never touched, and board entries can't be forged.
Processes and files of another user are real, so most tests run only as root."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_launchers.host.board import Announced, BoardPage, Claim, change_page, dump, read_board, utc
from vllm_launchers.keeper import processes

FAKES = Path(__file__).parents[1] / "fakes"
NOBODY = 65534
SEED = 20_260
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE = 1, 2, 19

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two people")


def see_less() -> None:
    """Run in the child before exec: drops root's view of other users' processes."""
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


class Program:
    """Runs one command, or many in one interpreter under `watched_program`."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._run(["-m", "vllm_console", *words])

    def each(self, watched: Path, lines: list[list[str]]) -> list[dict[str, Any]]:
        done = self._run([str(FAKES / "watched_program.py"), str(watched), "--each"], json.dumps(lines))
        assert done.returncode == 0, done.stderr
        answers: list[dict[str, Any]] = json.loads(done.stdout)
        return answers

    def _run(self, words: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], env=self._env, input=given, capture_output=True, text=True, timeout=120,
            check=False, preexec_fn=see_less if os.geteuid() == 0 else None,
        )  # fmt: skip


@pytest.fixture
def program(tmp_path):
    """``vllm-console`` as a user who cannot inspect other users' processes."""
    (tmp_path / "config" / "vllm-console").mkdir(parents=True)
    board = tmp_path / "board"
    board.mkdir()
    board.chmod(0o1777)
    (tmp_path / "config" / "vllm-console" / "config.toml").write_text(f'board = "{board}"\n')
    folders = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("STATE", "CONFIG", "CACHE")}

    env = {**os.environ, **folders, "ADMIN": ""}
    return Program(env)


@pytest.fixture
def theirs(tmp_path, port, wait_until):
    """Two servers of user ``nobody``: one with a visible port, one with vLLM's process title."""
    requests = tmp_path / "requests"
    script = tmp_path / "vllm"
    shutil.copy(FAKES / "recording_vllm.py", script)
    env = {**os.environ, "RECORDED": str(requests), "BECOME": str(NOBODY)}
    plain = subprocess.Popen([sys.executable, str(script), "serve", "tiny", "--port", str(port)], env=env)
    titled = subprocess.Popen(["VLLM::APIServer", str(script)], executable=sys.executable, env=env)
    try:
        wait_until(lambda: all(Path(f"/proc/{p.pid}").stat().st_uid == NOBODY for p in (plain, titled)), "another user")
        yield plain, titled
    finally:
        for process in (plain, titled):
            process.kill()
            process.wait()


@as_root
def test_servers_of_other_users_are_shown_but_all_verbs_refused(program, theirs, tmp_path, port):
    plain, titled = theirs
    look = f"import os; os.readlink('/proc/{plain.pid}/fd/0')"
    hidden = subprocess.run([sys.executable, "-c", look], capture_output=True, preexec_fn=see_less, check=False)
    assert b"PermissionError" in hidden.stderr, "its descriptors must be unreadable"
    before = [processes.identity_of(processes.table()[process.pid]) for process in theirs]
    answer = program("list", "--json")
    found = {server["pid"]: server for server in json.loads(answer.stdout)}
    assert found[plain.pid]["name"] == f"vllm@{port}"
    assert (found[plain.pid]["owner"], found[plain.pid]["ours"]) == ("nobody", False)
    assert (found[plain.pid]["model"], found[plain.pid]["state"]) == ("tiny", "ready")
    assert found[plain.pid]["metrics"]["requests_running"] == 3
    dark = found[titled.pid]
    assert (dark["owner"], dark["port"], dark["model"], dark["metrics"]) == ("nobody", None, None, None)
    table = program("list").stdout
    rows = {line.split()[0]: line for line in table.splitlines() if line.startswith("vllm@")}
    assert [rows[found[one.pid]["name"]].split()[1] for one in theirs] == ["nobody"] * 2
    row = rows[f"vllm@pid-{titled.pid}"]
    assert "running (unchecked)" in row
    verbs = (["stop"], ["restart"], ["restart", "--preset", "batch"], ["remove"], ["load"])
    names = (f"vllm@{port}", f"vllm@pid-{titled.pid}")
    lines = [[words[0], name, *words[1:]] for name in names for words in verbs]
    lines += [["load", f"http://localhost:{port}"], ["load", f"http://127.0.0.1:{port}/v1"]]
    for line, refused in zip(lines, program.each(tmp_path / "watched", lines), strict=True):
        assert refused["code"] == 4, (line, refused)
        assert "by nobody outside this console" in refused["err"] or "is a server of nobody" in refused["err"]
    assert (tmp_path / "watched").read_text() == "", "no signal sent, no process started"
    assert all(processes.alive(process) for process in before)
    # Programs of other tests that run as nobody at the same time ask this server, their own, for its version.
    assert set((tmp_path / "requests").read_text().splitlines()) <= {"GET /metrics", "GET /version"}


def page_of(board: Path, uid: int, text: bytes, *, owner: int | None = None, mode: int = 0o644) -> Path:
    """Write a board page as another user."""
    path = board / f"{uid}.json"
    path.write_bytes(text)
    path.chmod(mode)
    os.chown(path, owner if owner is not None else uid, -1)
    return path


def claims(*entries: dict[str, object]) -> bytes:
    return json.dumps({"version": 1, "claims": list(entries), "servers": []}).encode()


@as_root
def test_hostile_board_entries_cannot_impersonate_users(tmp_path):
    board, now = tmp_path / "board", time.time()
    board.mkdir()
    good = {
        "gpus": [2],
        "since": utc(now).isoformat(),
        "until": utc(now + 3600).isoformat(),
        "why": "training \x1b[31m[bold]\n\x07run",
    }
    page_of(board, NOBODY, claims(good))
    page_of(board, 2001, claims(good), owner=2002)
    (board / "2003.json").symlink_to(board / f"{NOBODY}.json")
    os.link(board / "2001.json", board / "2002.json")
    page_of(board, 2004, b"x" * 300_000)
    page_of(board, 2005, b"[" * 200_000)
    page_of(board, 2006, b'{"version": 1, "claims": [1, {"gpus": ["2"]}, {"gpus": [' + b"9" * 5000 + b"]}]}")
    page_of(board, 2007, claims({**good, "since": utc(now + 7200).isoformat(), "until": utc(now + 9000).isoformat()}))
    page_of(board, 2008, claims({**good, "until": utc(now + 30 * 86_400).isoformat()}))
    page_of(board, 2009, claims({**good, "until": utc(now - 1).isoformat()}))
    page_of(board, 2010, json.dumps({"version": 2}).encode())
    page_of(board, 2011, b"\xff\xfe\x00")
    os.mkfifo(board / "2012.json")
    (board / "2013.json").mkdir()
    page_of(board, 2014, claims({**good, "gpus": [True]}, {**good, "gpus": [-1]}, {**good, "until": "18:00"}))
    (board / "anna.json").write_text("{}")
    found = read_board(board, now)
    assert [(one.uid, one.user, one.gpus) for one in found.claims] == [(NOBODY, "nobody", (2,))]
    assert "\x1b" not in found.claims[0].why
    assert "\n" not in found.claims[0].why
    reported = "\n".join(found.notices)
    for name in (
        "2001",
        "2002",
        "2003",
        "2004",
        "2005",
        "2006",
        "2007",
        "2008",
        "2010",
        "2011",
        "2012",
        "2013",
        "2014",
    ):
        assert f"{name}.json" in reported, name
    assert "2009" not in reported, "an expired claim is ignored and not an error"
    assert "belongs to uid 2002" in reported
    assert "anna.json is not a valid board page" in reported


@as_root
def test_gpu_claimed_by_another_user_is_refused_with_owner_and_expiry(program, tmp_path):
    board, now = tmp_path / "board", time.time()
    # Claims are ordered by second: theirs must be the earlier one.
    since, until = now - 60, now + 7200
    page_of(board, NOBODY, dump(BoardPage((Claim((0, 2), since, until, "training"),))))
    change_page(board, lambda _: BoardPage((Claim((1,), float(int(now)), until, "mine"),)), now)
    till = time.strftime("%H:%M", time.localtime(int(until)))
    host = ["--host", "4xa6000"]
    lines = [
        ["claim", "0", "--until", "1h"],
        ["release", "2"],
        [*host, "claim", "1", "--until", "1h"],
        ["board", "--json"],
        ["gpus", "--free", "1", *host],
        ["gpus", "--free", "2", *host],
        [*host, "plan", "chatbot", "--engine", "simulated", "--gpus", "2", "--json"],
    ]
    refused, theirs, elsewhere, board_now, one, two, plan = program.each(tmp_path / "watched", lines)
    assert (refused["code"], theirs["code"], elsewhere["code"]) == (4, 4, 4)
    assert "GPU 0 is claimed until" in refused["err"]
    assert "GPUs of a recorded host can't be claimed" in elsewhere["err"]
    assert f"{till} by nobody: training" in refused["err"]
    assert [(one["user"], one["gpus"], one["mine"]) for one in json.loads(board_now["out"])["claims"]] == [
        ("nobody", [0, 2], False),
        ("root", [1], True),
    ]
    # The claims are of this machine's GPUs, not of the recorded host's.
    assert (one["out"].strip(), two["out"].strip()) == ("1", "2,3")
    assert "nobody" not in plan["out"]
    assert (board / f"{NOBODY}.json").read_bytes() == dump(BoardPage((Claim((0, 2), since, until, "training"),)))
    released = program("release")
    assert released.returncode == 0
    assert not (board / "0.json").exists(), "an empty page is deleted"


def test_board_without_sticky_bit_is_read_but_not_written(program, tmp_path):
    board = tmp_path / "board"
    board.chmod(0o777)
    refused = program("claim", "0", "--until", "1h")
    assert refused.returncode == 1
    assert "is not safe" in refused.stderr
    assert "chmod 1777" in refused.stderr
    shown = program("board")
    assert shown.returncode == 0
    assert "is not safe" in shown.stderr
    assert list(board.iterdir()) == []
    board.rmdir()
    gone = program("board")
    assert gone.returncode == 1
    assert "there is no such board" in gone.stderr


def test_board_page_stays_intact_under_kills_and_concurrent_writes(tmp_path):
    dice, now = random.Random(SEED), time.time()
    uid = os.getuid()
    me = Claim((0,), float(int(now)), float(int(now)) + 3600, "first")
    change_page(tmp_path, lambda page: BoardPage((me,)), now)
    kills = 0
    for _ in range(15):
        child = os.fork()
        if child == 0:
            while True:
                text = "x" * dice.randrange(200)
                change_page(tmp_path, lambda page, text=text: BoardPage((me, Claim((1,), now, now + 60, text))), now)
        time.sleep(dice.uniform(0.002, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
        found = read_board(tmp_path, now)
        assert found.notices == ()
        assert me.gpus in [one.gpus for one in found.claims]
    assert kills == 15
    children = []
    for number in range(2, 8):
        child = os.fork()
        if child == 0:
            new = Claim((number,), now, now + 60)
            change_page(tmp_path, lambda page, new=new: BoardPage((*page.claims, new)), now)
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    found = read_board(tmp_path, now)
    assert {index for one in found.claims for index in one.gpus} >= {0, *range(2, 8)}
    later = change_page(tmp_path, lambda page: page, now + 120)
    assert [one.gpus for one in later.claims] == [(0,)], "expired claims are removed at the next write"
    assert (tmp_path / f"{uid}.json").stat().st_mode & 0o777 == 0o644


def test_server_is_on_board_only_while_its_process_lives(tmp_path):
    now, uid = time.time(), os.getuid()
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(99)"], stdout=-1)
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    found = processes.identity_of(processes.table()[sleeper.pid])
    real = Announced("chat", "chatbot", "tiny", "", (0,), 8000, float(int(now)), found.pid, found.start_time)
    reused = Announced("old", "chatbot", "tiny", "", (1,), 8001, float(int(now)), found.pid, found.start_time - 1)
    (tmp_path / f"{uid}.json").write_bytes(dump(BoardPage((), (real, reused))))
    assert [one.name for one in read_board(tmp_path, now).servers] == ["chat"]
    sleeper.kill()
    sleeper.wait()
    assert read_board(tmp_path, now).servers == ()


def test_server_is_announced_until_stopped(program, port, tmp_path):
    started = program("start", "chatbot", "--engine", "simulated", "--name", "chat", "--port", str(port), "--wait")
    assert started.returncode == 0, started.stderr
    try:
        servers = json.loads(program("board", "--json").stdout)["servers"]
        assert [(one["name"], one["preset"], one["mine"], one["seen"]) for one in servers] == [
            ("chat", "chatbot", True, True)
        ]
    finally:
        assert program("stop", "chat").returncode == 0
    assert json.loads(program("board", "--json").stdout)["servers"] == []
    assert not (tmp_path / "board" / f"{os.getuid()}.json").exists()
