"""A server has exactly one keeper, even if its lock or files are deleted or replaced."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from vllm_launchers.keeper import client, errors, folder_claim, folders, processes, wire
from vllm_launchers.keeper.records import State
from vllm_launchers.values import replace

LOCK_FIRST = """
import os, sys
from pathlib import Path
for number in range(3):
    os.close(number)
from vllm_launchers.private import open_standard_streams
if sys.argv[2] == "opened":
    open_standard_streams()
from vllm_launchers.keeper import client, wire
from vllm_launchers.keeper.records import LaunchSpec
import json
client.launch(Path(sys.argv[1]), "one", wire.from_plain(LaunchSpec, json.loads(sys.argv[3])))
"""


def keepers(bench):
    return folder_claim.keepers_of(bench.file(""))


@pytest.mark.parametrize("streams", ["opened", "closed"])
def test_keeper_holds_lock_with_all_standard_streams_closed(bench, streams):
    """Otherwise the lock would get descriptor 0, 1 or 2, which a child's streams replace."""
    spec = json.dumps(wire.to_plain(bench.spec()))
    subprocess.run([sys.executable, "-c", LOCK_FIRST, str(bench.root), streams, spec], check=True, close_fds=False)
    record = bench.wait(State.READY)
    assert folders.lock_is_held(bench.file(""))
    assert not bench.adopt()
    assert [one.pid for one in keepers(bench)] == [record.keeper.pid]


def test_command_opens_closed_standard_streams(bench):
    code = "import os, sys; [os.close(n) for n in range(3)]; from vllm_console.cli.main import main; main(['list'])"
    code += "; open(sys.argv[1], 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    env = {**os.environ, "VLLMCONSOLE_STATE": str(bench.root / "state")}
    subprocess.run([sys.executable, "-c", code, str(bench.root / "fds")], check=True, env=env)
    assert (bench.root / "fds").read_text() == "/dev/null /dev/null /dev/null"


def test_deleted_lock_is_recreated_without_adoption(bench, wait_until):
    record = bench.ready(bench.spec())
    lock = bench.file("keeper.lock")
    for _ in range(2):
        lock.unlink()
        assert client.keeper_alive(bench.root, "one")
        assert bench.adopt() == []
        with pytest.raises(errors.StillAliveError):
            client.remove(bench.root, "one")
    wait_until(lambda: folders.lock_is_held(bench.file("")), "the lock")
    assert bench.read().keeper == record.keeper
    assert [one.pid for one in keepers(bench)] == [record.keeper.pid]
    assert "keeper.lock was deleted; restored" in bench.file("keeper.log").read_text()
    assert bench.stopped().exit.requested


def test_one_keeper_per_server_without_working_locks(bench, monkeypatch):
    record = bench.ready(bench.spec())
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert not folders.lock_is_held(bench.file(""))
    assert client.keeper_alive(bench.root, "one")
    for _ in range(20):
        assert bench.adopt() == []
        assert not client.adopt(bench.root, client.read(bench.root, "one"))
    assert [one.pid for one in keepers(bench)] == [record.keeper.pid]
    bench.stopped()
    assert not processes.alive(record.server)


ANOTHER = """
import os, sys, time
open("/proc/self/comm", "w").write("vllm-keeper")
os.open(sys.argv[1], os.O_RDWR)
print("ready", flush=True)
time.sleep(600)
"""


def test_keeper_yields_server_owned_by_another_keeper(bench, wait_until):
    """If there are two keepers, the record decides which one owns the server."""
    first = bench.ready(bench.spec())
    words = [sys.executable, "-S", "-c", ANOTHER, str(bench.file("server.output"))]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"ready\n"
            theirs = replace(first, keeper=processes.identity(other.pid))
            folders.write_record(bench.file(""), theirs)
            wait_until(lambda: not processes.alive(first.keeper), "its end")
            assert "this one ends" in bench.file("keeper.log").read_text()
            assert bench.read() == theirs
            assert processes.alive(first.server)
            assert bench.adopt() == [], "there is one"
        finally:
            other.kill()
    bench.let_go()
    assert bench.adopt() == ["one"]
    bench.stopped()


@pytest.mark.parametrize("content", [b"{broken", b"", b"\xff\x00", b"[]", b'{"name": "one"}'])
def test_keeper_restores_overwritten_record(bench, wait_until, content):
    """Until it is restored, the error says so; afterwards the server can be stopped as usual."""
    record = bench.ready(bench.spec())
    os.kill(record.keeper.pid, signal.SIGSTOP)
    bench.file("record.json").write_bytes(content)
    with pytest.raises(errors.RecordError, match=r"; its keeper writes it again within seconds$"):
        bench.stop()
    os.kill(record.keeper.pid, signal.SIGCONT)
    wait_until(lambda: "record.json was overwritten; restored" in bench.file("keeper.log").read_text(), "the note")
    again = bench.read()
    assert (again.server, again.keeper) == (record.server, record.keeper)
    assert bench.stopped().exit.requested


def test_broken_record_without_keeper_reports_remedy(bench):
    bench.orphaned(bench.ready(bench.spec()))
    before = bench.file("record.json").read_bytes()
    bench.file("record.json").write_bytes(b"{broken")
    folder = bench.file("")
    ends = f"'vllm-console --state {bench.root} leftovers --remove'"
    expected = f"no keeper: end its remaining processes with {ends}, then delete {folder}$"
    with pytest.raises(errors.RecordError, match=expected):
        bench.stop()
    bench.file("record.json").write_bytes(before)
    bench.adopt()
    bench.stopped()


@pytest.mark.parametrize("file", ["keeper.sock", "record.json", "server.log", "log.position"])
def test_keeper_restores_deleted_file(bench, wait_until, file):
    record = bench.ready(bench.spec("--tick", "0.05"))
    bench.file(file).unlink()
    wait_until(bench.file(file).exists, file)
    wait_until(lambda: f"{file} was deleted; restored" in bench.file("keeper.log").read_text(), "the note")
    again = bench.read()
    assert (again.server, again.keeper, again.state) == (record.server, record.keeper, State.READY)
    bench.until(lambda _: "tick" in bench.log())
    bench.restart(bench.spec())
    bench.wait(State.READY, generation=2)
    bench.stopped()


def test_symlink_replacing_deleted_log_is_not_followed(bench, tmp_path, wait_until):
    bench.ready(bench.spec("--tick", "0.02"))
    precious = tmp_path / "precious"
    precious.write_text("mine")
    bench.file("server.log").unlink()
    bench.file("server.log").symlink_to(precious)
    bench.file("keeper.sock").unlink()
    wait_until(bench.file("keeper.sock").exists, "a look at the files")
    bench.stopped()
    assert precious.read_text() == "mine"
