"""Processes of a server are killed in any order: nothing is left, or leftovers are listed and can be ended."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fakes.keeper_bench import FAKE
from vllm_console.doctor import examine
from vllm_console.fleet import leftovers as left_behind
from vllm_launchers.host import shared_memory
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.keeper import client, errors, folders, orphans, process_group, processes, wire
from vllm_launchers.keeper.records import State
from vllm_launchers.values import replace

TREE = FAKE.with_name("fake_tree.py")
SECONDS = 30.0
LIMIT_SECONDS = 120.0
"""Timeout. A machine that is not overloaded needs less than ten seconds."""
PARTS = ("api", "engine", "worker0", "worker1")
BESIDE = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
MOMENTS = ("starting", "serving", "stopping")


def orders():
    """Moment, number of workers, and the processes to kill in order.

    Of API server, engine, worker and keeper: with two workers, every ordered selection of one or two at every moment,
    and of three or four at one moment each; with one worker, of one or two at one moment each. The recorder is combined
    with the keeper and with the API server at every moment.
    """
    four = ("api", "engine", "worker0", "keeper")
    few = [order for length in (1, 2) for order in itertools.permutations(four, length)]
    many = [order for length in (3, 4) for order in itertools.permutations(four, length)]
    found = [(moment, 2, order) for order in few for moment in MOMENTS]
    turns = itertools.cycle(MOMENTS)
    found += [(next(turns), 2, order) for order in many]
    found += [(next(turns), 1, order) for order in few]
    for pair in (("recorder", "keeper"), ("recorder", "api")):
        found += [(moment, 2, order) for order in itertools.permutations(pair) for moment in MOMENTS]
    return found


class Server:
    """One server of four processes in its own state folder, with its keeper and a bystander process."""

    def __init__(self, bench, *options, recorded=True, terminate=1.5):
        self.bench = bench
        self.pids = bench.root / "pids"
        spec = bench.spec()
        argv = (sys.executable, "-S", str(TREE), "--port", str(spec.port), "--pids", str(self.pids), *options)
        bench.launch(replace(spec, argv=argv, sidecar=BESIDE if recorded else ()), terminate=terminate)
        record = bench.until(lambda record: self.pids.exists() and bool(record.sidecar) is recorded)
        tree = [processes.identity(int(pid)) for pid in self.pids.read_text().split()]
        self.who = dict(zip(PARTS, (record.server, *tree), strict=False))
        self.parts = list(self.who.values())
        self.who["keeper"] = record.keeper
        if recorded:
            self.who["recorder"] = record.sidecar
        bench.seen.update(self.who.values())

    def kill(self, order):
        """Kill the processes in order; returns those that were still alive when killed."""
        killed = []
        for name in order:
            if processes.send(self.who[name], signal.SIGKILL):
                killed.append(name)
                wait(lambda name=name: not processes.alive(self.who[name]), f"the death of the {name}")
        return killed

    def gone(self):
        return not any(processes.alive(process) for process in self.who.values() if process is not self.who["keeper"])


def wait(condition, what):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {LIMIT_SECONDS:g} s"
        time.sleep(0.02)


@pytest.fixture
def another(bench):
    """More benches, each with its own root folder."""
    made = []

    def make():
        made.append(type(bench)(Path(tempfile.mkdtemp(prefix="keeper-test-"))))
        return made[-1]

    yield make
    for one in made:
        one.close()


def play(bench, moment, workers, order):
    options = {"starting": ["--never-ready"], "serving": [], "stopping": ["--stubborn"]}[moment]
    # The keeper stops slowly, so the test kills the processes itself.
    server = Server(bench, *options, "--workers", str(workers), recorded="recorder" in order, terminate=SECONDS)
    assert len(server.parts) == 2 + workers
    if moment != "starting":
        bench.wait(State.READY)
    if moment == "stopping":
        bench.stop()
    killed = server.kill(order)
    assert killed[0] == order[0], "the fault did not happen"
    if "keeper" in killed:  # its threads hold the lock slightly longer than its pid exists
        wait(lambda: not client.keeper_alive(bench.root, "one"), "the end of a keeper's lock")

    def seen(ended):
        """Refresh like a console; another refresh may briefly hold the lock of a dead keeper."""
        bench.adopt()
        return ended()

    if moment == "stopping" or set(killed) & set(PARTS):
        wait(lambda: seen(server.gone), f"the end of all of a server, {moment}, after SIGKILL to {killed}")
        bench.until(lambda record: seen(lambda: not record.state.alive))
    else:
        assert all(map(processes.alive, server.parts)), "killing a keeper or recorder does not end the server"
        wait(lambda: seen(lambda: client.keeper_alive(bench.root, "one")), "a keeper")
        bench.stop()
        wait(server.gone, "the end that was asked for")
    return killed


def test_no_process_is_left_after_kills_in_any_order(another):
    plays = orders()
    with ThreadPoolExecutor(8) as pool:
        killed = list(pool.map(lambda one: play(another(), *one), plays))
    assert len(killed) == 3 * 16 + 48 + 16 + 12
    assert {name for one in killed for name in one} == {"api", "engine", "worker0", "keeper", "recorder"}
    whole = sum(tuple(one) == order for one, (_, _, order) in zip(killed, plays, strict=True))
    assert whole > 40, "in the others one death caused another before its turn"


def test_workers_with_own_session_and_output_are_tracked(bench):
    server = Server(bench, "--apart")
    bench.wait(State.READY)
    wait(lambda: len(process_group.recorded(bench.file("")).members) == 4, "the keeper's look")
    assert server.kill(["keeper", "engine"]) == ["keeper", "engine"]
    wait(lambda: not client.keeper_alive(bench.root, "one"), "the end of a keeper's lock")
    wait(lambda: not processes.alive(server.who["api"]), "the end of the API server")
    assert processes.alive(server.who["worker0"])
    bench.adopt()
    wait(server.gone, "the end of workers that hold nothing of the server's")


def test_server_survives_kill_of_launching_console(bench):
    code = (
        "import sys, time; from pathlib import Path; from vllm_launchers.keeper import client, wire;"
        "from vllm_launchers.keeper.records import LaunchSpec; import json;"
        "client.launch(Path(sys.argv[1]), 'one', wire.from_plain(LaunchSpec, json.loads(sys.argv[2])));"
        "print('up', flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", code, str(bench.root), json.dumps(wire.to_plain(bench.spec("--children", "2")))]
    console = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert console.stdout.readline() == b"up\n"
    os.killpg(console.pid, signal.SIGKILL)
    assert console.wait() == -signal.SIGKILL
    console.stdout.close()
    ready = bench.wait(State.READY)
    assert client.keeper_alive(bench.root, "one")
    assert bench.adopt() == []
    bench.stopped()
    assert not processes.alive(ready.server)


def test_orphans_of_deleted_folder_are_listed_and_can_be_ended(bench):
    server = Server(bench)
    bench.wait(State.READY)
    assert server.kill(["keeper"]) == ["keeper"]
    shutil.rmtree(folders.server_folder(bench.root, "one"))
    assert bench.adopt() == []
    found = left_behind.find_leftovers(bench.root)
    assert {one.process for one in found.processes} == {*server.parts, server.who["recorder"]}
    assert all("was deleted" in one.why for one in found.processes)
    assert "5 processes" in left_behind.format_leftovers(found)
    folder = folders.server_folder(bench.root, "one")
    assert left_behind.find_lost(bench.root) == left_behind.lost_servers(found.processes) == [folder.resolve()]
    assert left_behind.format_lost([folder]).startswith("The folder of one was deleted while it ran: it may")
    document = examine(bench.root, bench.root / "config", (), Host())
    (problem,) = [one for one in document["problems"] if "folder of one" in one["what"]]
    assert "leftovers" in problem["do"]
    elsewhere = orphans.find(bench.root / "another")
    assert elsewhere.found == ()
    assert sum(str(bench.root) in sentence for sentence in elsewhere.spared) == 5, "listed, with where to look"
    removed = left_behind.remove_leftovers(bench.root, msgspec.structs.replace(found, files=()))
    assert {one.process for one in removed.processes} == {*server.parts, server.who["recorder"]}
    assert removed.problems == ()
    assert server.gone()


def test_server_with_broken_record_is_not_removed_while_running(bench):
    server = Server(bench)
    bench.wait(State.READY)
    assert orphans.find(bench.root).found == (), "it has a keeper"
    server.kill(["keeper"])
    assert orphans.find(bench.root).found == (), "it is adopted on the next refresh"
    bench.file("record.json").write_text("{")
    with pytest.raises(errors.StillAliveError, match=str(server.who["api"].pid)):
        client.remove(bench.root, "one")
    found = orphans.find(bench.root).found
    assert {one.process for one in found} == {*server.parts, server.who["recorder"]}
    gone, problems = orphans.end(found, bench.root)
    assert (len(gone), problems) == (5, [])
    client.remove(bench.root, "one")
    assert client.names(bench.root) == []


def test_only_current_orphans_are_ended(bench):
    server = Server(bench)
    bench.wait(State.READY)
    server.kill(["keeper"])
    bench.file("record.json").rename(bench.file("record.old"))
    found = orphans.find(bench.root).found
    assert len(found) == 5
    bench.file("record.old").rename(bench.file("record.json"))
    wait(lambda: not client.keeper_alive(bench.root, "one"), "the end of a keeper's lock")
    assert bench.adopt() == ["one"]
    gone, problems = orphans.end(found, bench.root)
    assert gone == []
    assert all("has a keeper again" in problem for problem in problems)
    assert all(map(processes.alive, server.parts))


def test_leftovers_of_earlier_generation_are_found_in_active_folder(bench):
    """As when two keepers ran one server: processes of the other keeper belong to no record."""
    bench.ready(bench.spec("--children", "2"))
    output = os.open(bench.file("server.output"), os.O_RDWR | os.O_APPEND)
    left = subprocess.Popen(["sleep", "600"], stdout=output, stderr=output, start_new_session=True)
    os.close(output)
    try:
        bench.until(lambda _: bench.log().count("child up") == 2)  # processes that end earlier print nothing
        bench.restart(bench.spec("--children", "2"))
        bench.wait(State.READY, generation=2)
        bench.until(lambda _: bench.log().count("child up") == 4)
        found = orphans.find(bench.root).found
        assert [one.process.pid for one in found] == [left.pid]
        assert "older than the current server one" in found[0].why
        gone, problems = orphans.end(found, bench.root)
        assert (list(gone), problems) == (list(found), [])
    finally:
        left.kill()
        left.wait()
    record = bench.read()
    bench.orphaned(record)
    assert bench.adopt() == ["one"]
    assert orphans.find(bench.root).found == (), "neither are processes of an adopted server"
    assert processes.alive(record.server)


# -- files in /dev/shm -------------------------------------------------------------------------------------------------

MAKE = """
import os, sys, time
from multiprocessing import shared_memory, resource_tracker, get_context
memory = shared_memory.SharedMemory(create=True, size=1 << 16)
semaphore = get_context("spawn").Lock()
print(memory.name, semaphore._semlock.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def shared():
    """A process with shared memory and a semaphore, and the names of both files."""
    process = subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE, text=True, start_new_session=True)
    names = [name.strip("/").removeprefix("dev/shm/") for name in process.stdout.readline().split()]
    names = [names[0], f"sem.{names[1]}"]
    paths = [Path("/dev/shm", name) for name in names]
    assert all(path.exists() for path in paths), paths
    yield process, paths
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdout.close()
    for path in paths:
        path.unlink(missing_ok=True)


def offered(paths, *, later=120.0, whole_machine=True, recorded=None):
    found = shared_memory.find(recorded, now=time.time() + later, whole_machine=whole_machine)
    return [file for file in found.found if Path(file.path) in paths], found


def test_shared_memory_is_offered_only_when_unused(shared):
    process, paths = shared
    assert offered(paths)[0] == [], "mapped: the semaphore has another name in the mapping"
    os.killpg(process.pid, signal.SIGKILL)  # including Python's resource tracker, which would remove them
    process.wait()
    wait(lambda: len(offered(paths)[0]) == 2, "both files")
    assert offered(paths, later=0.0)[0] == [], "created less than a minute ago"
    files, found = offered(paths)
    with paths[0].open("rb"):
        again = shared_memory.find(now=time.time() + 120.0, whole_machine=True)
        gone, problems = shared_memory.remove([file for file in files if file.path == str(paths[0])], again)
        assert gone == []
        assert "in use again" in problems[0]
    gone, problems = shared_memory.remove(files, found)
    assert (len(gone), problems) == (2, [])
    assert not any(path.exists() for path in paths)


def test_container_offers_only_shared_memory_seen_by_keeper(shared):
    process, paths = shared
    inode = paths[0].stat().st_ino
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait(lambda: len(offered(paths)[0]) == 2, "both files")
    files, found = offered(paths, whole_machine=False)
    assert files == []
    assert any("outside this container" in sentence for sentence in found.spared)
    files, _ = offered(paths, whole_machine=False, later=0.0, recorded={paths[0].name: inode})
    assert [file.path for file in files] == [str(paths[0])]
    assert "its keeper saw it" in files[0].why
    assert offered(paths, whole_machine=False, recorded={paths[0].name: inode + 1})[0] == []


def test_foreign_files_links_and_other_names_are_never_offered(shared):
    process, paths = shared
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait(lambda: len(offered(paths)[0]) == 2, "both files")
    strange = [Path("/dev/shm", name) for name in (f"psm_{os.getpid():08x}", f"mine-{os.getpid()}", "psm_notours1")]
    try:
        strange[0].symlink_to(paths[0])
        strange[1].touch()
        strange[2].touch()
        assert offered(strange)[0] == []
        if os.geteuid() == 0:
            os.chown(paths[0], 65534, 65534)
            assert [file.path for file in offered(paths)[0]] == [str(paths[1])]
    finally:
        for path in strange:
            path.unlink(missing_ok=True)


def test_copied_member_list_claims_no_process(bench):
    server = Server(bench)
    bench.wait(State.READY)
    home = bench.file("")
    wait(lambda: len(process_group.recorded(home).members) == 4, "the keeper's look")
    copy = folders.prepare(bench.root, "copy")
    shutil.copy(home / "members.json", copy)
    (copy / "server.output").touch(0o600)
    assert process_group.recorded(copy).members == frozenset()
    assert all(map(processes.alive, server.parts))
