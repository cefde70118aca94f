"""Log stress: floods, killed keepers, rotation during reads, and bytes that must not reach a screen."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from vllm_console.logs.file import LogFile
from vllm_launchers.keeper import client, processes
from vllm_launchers.keeper.log_forwarder import LogForwarder, RotatingLog
from vllm_launchers.keeper.output import CHUNK, open_for_server
from vllm_launchers.keeper.records import LaunchSpec, State

SEED = 5
KILLS = 6
WRITER = """
import os, sys, time
lines, rate = int(sys.argv[1]), int(sys.argv[2])
began, number = time.monotonic(), 0
while number < lines:
    until = min(lines, number + max(1, rate // 100 if rate else 5000))
    data = b"".join(b"line %08d of a log\\n" % n for n in range(number, until))
    while data:
        data = data[os.write(1, data):]
    number = until
    if rate:
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
print("rate %d" % (lines / (time.monotonic() - began)), flush=True)
time.sleep(float(sys.argv[3]))
"""
NASTY = [
    b"\x1b]0;STOLEN-TITLE\x07after a title\n",
    b"\x1b[2J\x1b[5;7;46mcolours\x1b[0m and \x1b]52;c;U1RPTEVO\x07 a clipboard\n",
    b"\x1bPdcs\x1b\\ \x9b31m \xff\xfe\xc3( nul\x00nul [bold]markup[/bold] needle-a\n",
    b"".join(b"\rLoading shards: %3d%%|##   |" % share for share in range(101)) + b" tqdm-done\n",
    b"long " + b"x" * (10 << 20) + b"\n",
    b"0123456789" * 300 + b"\x1b[31m\n",
    b"Traceback (most recent call last):\n",
    b"torch.OutOfMemoryError: CUDA out of memory. \x1b[41mTried to allocate 2.00 GiB\n",
    b"the last line \x1b[6n\x07\x08\x0e needle-b\n",
]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"line (\d{8}) of a log\n", text)]


def ended_with_rate(bench) -> bool:
    return re.search(r"rate \d+\n$", bench.log()) is not None


def size_of(bench) -> int:
    """Total bytes of its log files; zero while a file is being renamed."""
    try:
        return sum(path.stat().st_size for path in bench.file("").glob("server.log*"))
    except FileNotFoundError:
        return 0


def ended(bench) -> bool:
    try:
        return "rate" in bench.file("server.log").read_text()
    except FileNotFoundError:
        return False


def flood(bench, lines, rate, stay=0.0, **fields):
    argv = (sys.executable, "-S", "-c", WRITER, str(lines), str(rate), str(stay))
    return LaunchSpec(argv, "127.0.0.1", 1, **{"log_bytes": 1 << 20, "log_files": 100, **fields})


def test_50k_lines_per_second_arrive_complete(bench):
    lines = 100_000
    bench.launch(flood(bench, lines, 50_000))
    bench.wait(State.FAILED)
    log = bench.log()
    assert numbers(log) == list(range(lines))
    rate = int(re.search(r"rate (\d+)", log)[1])
    assert rate > 40_000, "the writer was blocked, or this machine cannot write that fast"
    assert len(list(bench.file("").glob("server.log.*"))) >= 2, "the log was rotated"


def test_fast_writer_loses_no_lines(bench):
    lines = 1_000_000
    bench.launch(flood(bench, lines, 0))
    bench.wait(State.FAILED)
    assert numbers(bench.log()) == list(range(lines))


@pytest.mark.parametrize("rotating", [False, True])
def test_keeper_killed_under_flood_loses_and_duplicates_no_line(bench, wait_until, rotating):
    """Killed repeatedly while the server writes, with log rotation every few hundred lines."""
    lines = 120_000
    bounds = {"log_bytes": 40_000, "log_files": 200} if rotating else {}
    record, while_it_wrote = bench.launch(flood(bench, lines, 20_000, stay=600.0, **bounds)), 0
    for kill in range(KILLS):
        least = 23 * lines * kill // KILLS
        wait_until(lambda least=least: size_of(bench) > least, "the flood")
        bench.orphaned(record)
        while_it_wrote += not ended(bench)
        assert bench.adopt() == ["one"], "the server keeps writing meanwhile"
        record = bench.read()
    wait_until(lambda: ended(bench), "the writer's end")
    assert numbers(bench.log()) == list(range(lines))
    assert while_it_wrote, "on a busy machine, few of the kills come before the end"


@pytest.mark.parametrize("keeper", ["stopped", "killed"])
def test_server_without_keeper_is_not_blocked_and_output_is_kept(bench, wait_until, keeper):
    """Twenty times the capacity of a pipe and the server's exit, while no keeper runs."""
    lines = 1_000_000
    argv = (sys.executable, "-S", "-c", "import sys; open(sys.argv.pop(1)).readline()\n" + WRITER)
    start = bench.root / "start"
    os.mkfifo(start)
    words = (*argv, str(start), str(lines), "0", "0")
    record = bench.launch(LaunchSpec(words, "127.0.0.1", 1, log_bytes=1 << 20, log_files=100))
    processes.send(record.keeper, signal.SIGSTOP if keeper == "stopped" else signal.SIGKILL)
    start.write_text("go\n")
    server = record.server
    wait_until(lambda: (found := processes.stat(server.pid)) is None or not found.running, "the writer's end")
    if keeper == "stopped":
        processes.send(record.keeper, signal.SIGCONT)
    else:
        wait_until(lambda: not client.keeper_alive(bench.root, "one"), "the keeper's end")
        assert bench.adopt() == ["one"]
    bench.wait(State.FAILED)
    assert numbers(bench.log()) == list(range(lines))
    assert ended_with_rate(bench)


STEPS = [
    *itertools.product(("look", "write", "take out", "note"), ("before", "after")),
    ("write", "within"),
]  # fmt: skip


def kill_at_step(forwarder, step, moment):
    """Kill the forwarder's process at this step."""
    owner, name = {
        "look": (forwarder._output, "peek"),
        "write": (forwarder.log, "append"),
        "take out": (forwarder._output, "take"),
        "note": (forwarder.position, "write"),
    }[step]
    real = getattr(owner, name)

    def strike(*given):
        if moment == "within":
            real(given[0][: len(given[0]) // 2])
        elif moment == "after":
            real(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, strike)


def test_keeper_killed_mid_chunk_leaves_rest_for_next_keeper(tmp_path):
    """Each keeper finds more output in the pipe than the previous one, and a log file fills up on the way."""
    server, written = open_for_server(tmp_path), 0
    steps = [step for step in STEPS for _ in range(4)]
    random.Random(SEED).shuffle(steps)
    for step, moment in steps:
        for _ in range(2):
            os.write(server, b"".join(b"line %08d of a log\n" % (written + number) for number in range(350)))
            written += 350
            child = os.fork()
            if child == 0:
                try:
                    forwarder = LogForwarder(tmp_path, make_log(tmp_path), lambda event: None)
                    kill_at_step(forwarder, step, moment)
                    forwarder._forward()
                finally:
                    os._exit(1)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    forwarder = LogForwarder(tmp_path, make_log(tmp_path), lambda event: None)
    forwarder._forward()
    files = sorted(tmp_path.glob("server.log.*"), key=lambda path: -int(path.suffix[1:]))
    assert len(files) > 5
    text = "".join(path.read_text() for path in (*files, tmp_path / "server.log"))
    assert numbers(text) == list(range(written))
    assert text.count("\n") == written
    os.close(server)


def make_log(folder):
    return RotatingLog(folder / "server.log", 40_000, 100)


@pytest.mark.parametrize("piece", [CHUNK, 999])
def test_log_size_is_bounded_with_10_mb_line(tmp_path, piece):
    limit, files = 1 << 20, 3
    log, most = RotatingLog(tmp_path / "server.log", limit, files), 0
    data = b"short\n" * 100_000 + b"x" * (10 << 20) + b"\n" + (b"y" * 60_000 + b"\n") * 40
    for at in range(0, len(data), piece):
        log.append(data[at : at + piece])
        if at % (piece * 16) == 0:
            most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))
    log.close()
    assert most > limit * (files - 1), "the log came close to the bound"
    assert most <= limit * files
    assert all(path.stat().st_size <= limit for path in tmp_path.iterdir())
    whole = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir(), reverse=True) if path.suffix != ".log")
    assert data.endswith(whole + (tmp_path / "server.log").read_bytes())


def test_follow_across_rotation_loses_and_duplicates_no_line(bench, wait_until):
    """``logs -f`` of the real program into a pipe, over about ten rotations."""
    lines = 60_000
    bench.launch(flood(bench, 0, 0, stay=60))
    wait_until(lambda: "rate" in bench.log(), "the first line")
    words = [sys.executable, "-m", "vllm_console", "logs", "one", "-f"]
    env = {**os.environ, "VLLMCONSOLE_STATE": str(bench.root), "PYTHONUNBUFFERED": "1"}
    follower = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert follower.stdout.readline().startswith("rate")
        output = os.open(bench.file("server.output"), os.O_WRONLY | os.O_APPEND)
        sender = subprocess.Popen([sys.executable, "-S", "-c", WRITER, str(lines), "30000", "0"], stdout=output)
        os.close(output)
        got = []
        for line in follower.stdout:
            if line.startswith("rate"):
                break
            got.append(line)
        assert sender.wait() == 0
    finally:
        follower.send_signal(signal.SIGINT)
        follower.wait(60)
        follower.stdout.close()
    assert numbers("".join(got)) == list(range(lines))
    assert bench.file("server.log.1").exists()


def test_log_continues_after_truncation_and_removal(tmp_path):
    path = tmp_path / "server.log"
    log, reader = RotatingLog(path, 1 << 20, 3), LogFile(path)
    log.append(b"one\ntwo\n")
    assert [line.text for line in reader.poll()] == ["one", "two"]
    os.truncate(path, 0)
    assert reader.poll() == []
    log.append(b"three\n")
    assert path.read_bytes() == b"three\n", "no NUL bytes where the old text was"
    assert [line.text for line in reader.poll()] == ["three"]
    path.unlink()
    log.append(b"four\n" * 250_000)  # the next rotation creates the file again
    log.append(b"five\n")
    assert path.exists()
    assert reader.tail(1)[-1].text == "five"
    log.close()


def hostile_server(bench, wait_until):
    """A failed server whose log contains everything that must not reach a screen."""
    (bench.root / "nasty").write_bytes(b"".join(NASTY))
    source = "import sys; d = open(sys.argv[1], 'rb').read(); sys.stdout.buffer.write(d); sys.exit(1)"
    argv = (sys.executable, "-S", "-c", source, str(bench.root / "nasty"))
    bench.launch(LaunchSpec(argv, "127.0.0.1", 1))
    bench.wait(State.FAILED)
    assert bench.file("server.log").read_bytes() == b"".join(NASTY), "the file has every byte"


def test_log_escape_codes_never_reach_the_terminal(bench, wait_until, terminal_module):
    hostile_server(bench, wait_until)
    env = {"VLLMCONSOLE_STATE": str(bench.root)}
    for words in (("logs", "one"), ("status", "one"), ("diagnose", str(bench.file("server.log"))), ("list",)):
        terminal = terminal_module.Terminal([sys.executable, "-m", "vllm_console", *words], 120, 40, env)
        try:
            terminal.wait_end()
        finally:
            terminal.close()
        assert b"\x1b" not in terminal.raw, words
        assert not set(terminal.raw) - set(range(32, 256)) - set(b"\r\n"), words
        if words[0] == "logs":
            text = bytes(terminal.raw).decode()
            assert "after a title" in text
            assert "100%|##   | tqdm-done" in text
            assert "  0%|" not in text
            assert "cut: a line of 10 MiB" in text
    assert b"STOLEN" not in terminal.raw


def test_screen_stays_intact_with_hostile_log(bench, wait_until, terminal_module):
    hostile_server(bench, wait_until)
    env = {"VLLMCONSOLE_STATE": str(bench.root)}
    console = terminal_module.Terminal([sys.executable, "-m", "vllm_console"], 120, 40, env)
    try:
        console.wait_for("needle-b")
        console.press("l")
        console.wait_for("Log · one")
        console.wait_for("the last line")
        console.press("/")
        console.wait_for("search text;")
        console.press("needle-a\r")
        console.wait_for("search: needle-a")
        console.wait_for("nulnul [bold]markup[/bold] needle-a")
        console.press("\x1b")
        console.wait_for(lambda text: "search: needle-a" not in text)
        console.press("\x1b")
        console.wait_for("Servers")
        console.press("q")
        assert console.wait_end() == 0
        assert console.restored()
    finally:
        console.close()
    for stolen in (b"STOLEN", b"\x1b]0;", b"\x1b]52", b"\x1b[5;7;46m", b"\x1b[6n", b"\x1bP", b"U1RPTEVO", b"\x00"):
        assert stolen not in console.raw


def test_huge_log_line_does_not_block_other_threads(tmp_path):
    """A line of megabytes is truncated before it is searched; otherwise the UI thread would block."""
    path = tmp_path / "server.log"
    evil = [b"A=" * (2 << 20), b"\x1b[" * (2 << 20), b"hf_" * (1 << 20), b' File "' * (1 << 20), b"\r" * (4 << 20)]
    path.write_bytes(b"\n".join(evil) + b"\nlast\n")
    gaps, ended = [0.0], threading.Event()

    def tick():
        last = time.monotonic()
        while not ended.is_set():
            time.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    watch = threading.Thread(target=tick)
    began = time.monotonic()
    watch.start()
    try:
        from vllm_launchers.secrets import redact

        log = LogFile(path, clean=redact)
        assert log.tail(10)[-1].text == "last"
        found = log.search("nowhere", log.end, backwards=True)
        while not found.done:
            found = log.search("nowhere", found.next_offset, backwards=True)
    finally:
        ended.set()
        watch.join()
    assert max(gaps) < max(0.5 * (time.monotonic() - began), 20 * sorted(gaps)[len(gaps) // 2] + 0.2)
