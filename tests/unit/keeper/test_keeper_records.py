"""Records on disk: complete, private, versioned; names, owners and locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.keeper import client, errors, folders, wire
from vllm_launchers.keeper.record_writer import NOTES_BYTES, Notes, RecordWriter
from vllm_launchers.keeper.records import (
    RECORD_VERSION,
    Exit,
    Generation,
    LaunchSpec,
    NotRetryable,
    ProcessIdentity,
    RestartMode,
    RestartPolicy,
    ServerRecord,
    State,
)
from vllm_launchers.launch.server_records import ServerRecords
from vllm_launchers.values import replace

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.binary(max_size=20).map(os.fsdecode)
times = st.floats(0, 4e9)
counts = st.integers(0, 1 << 40)
words = st.lists(texts, max_size=4).map(tuple)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
identities = st.builds(ProcessIdentity, pid=counts, start_time=counts, boot_id=texts)
policies = st.builds(
    RestartPolicy,
    mode=st.sampled_from(RestartMode),
    limit=counts,
    backoff_seconds=times,
    backoff_cap_seconds=times,
    not_retryable=st.lists(st.builds(NotRetryable, pattern=texts, reason=texts), max_size=2).map(tuple),
)
specs = st.builds(
    LaunchSpec,
    argv=words,
    host=texts,
    port=counts,
    environment=st.dictionaries(texts, texts, max_size=3),
    secret_names=words,
    cwd=texts,
    restart=policies,
    drain_seconds=times,
    sidecar=words,
    tls=st.booleans(),
    details=st.dictionaries(texts, plain, max_size=3),
)
exits = st.builds(
    Exit, at=times, code=st.none() | counts, signal=st.none() | texts, requested=st.booleans(), reason=texts
)
generations = st.builds(
    Generation,
    number=counts,
    spec=specs,
    started_at=times,
    ready_at=st.none() | times,
    ended_at=st.none() | times,
    exit=st.none() | exits,
)
records = st.builds(
    ServerRecord,
    name=texts,
    state=st.sampled_from(State),
    state_since=times,
    created_at=times,
    generations=st.lists(generations, min_size=1, max_size=3).map(tuple),
    attempt=counts,
    reason=texts,
    server=st.none() | identities,
    keeper=st.none() | identities,
    sidecar=st.none() | identities,
    adopted=st.booleans(),
    next_attempt_at=st.none() | times,
    downtime_seconds=st.none() | times,
    log_inode=st.none() | counts,
    log_offset=counts,
    next_spec=st.none() | specs,
)


def a_record(name="one", state=State.STOPPED):
    spec = LaunchSpec(("vllm", "serve"), "127.0.0.1", 8000)
    return ServerRecord(name, state, 1.0, 1.0, (Generation(1, spec, 1.0),))


def put(root, name, data):
    folder = folders.prepare(root, name)
    (folder / "record.json").write_bytes(data)


@settings(max_examples=80, deadline=None)
@given(record=records)
def test_record_round_trips(record):
    assert wire.loads(wire.dumps(record)) == record


def test_record_is_ascii():
    record = replace(a_record(), reason=os.fsdecode("schöner Pfad ".encode() + b"\xff"))
    assert wire.dumps(record).isascii()
    assert wire.loads(wire.dumps(record)) == record


def test_unknown_fields_are_ignored():
    raw = json.loads(wire.dumps(a_record()))
    raw["mood"] = "good"
    raw["generations"][0]["spec"]["nice"] = 5
    assert wire.loads(json.dumps(raw).encode()) == a_record()


def test_record_without_optional_fields_is_read():
    raw = json.loads(wire.dumps(a_record()))
    del raw["next_spec"], raw["unwritten"], raw["generations"][0]["spec"]["tls"]
    del raw["generations"][0]["spec"]["restart"]["not_retryable"]
    assert wire.loads(json.dumps(raw).encode()) == a_record()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"state": "sleeping"}, "state is 'sleeping', expected one of starting"),
        ({"state_since": "now"}, "expected float at state_since, found str"),
        ({"generations": []}, "has no generations"),
        ({"generations": [{"number": 1}]}, r"lacks generations\[0\].spec"),
        ({"attempt": True}, "expected int at attempt, found bool"),
        ({"state_since": 10**400}, "expected seconds at state_since, found a number out of range"),
        ({"next_attempt_at": float("inf")}, "expected seconds at next_attempt_at"),
        ({"created_at": float("nan")}, "expected seconds at created_at"),
        ({"downtime_seconds": -1e300}, "expected seconds at downtime_seconds"),
        ({"server": 5}, "expected an object at server, found int"),
        ({"version": RECORD_VERSION + 1}, "newer vllm-console .* update vllm-console"),
    ],
)
def test_invalid_record_names_the_place(change, expected):
    raw = json.loads(wire.dumps(a_record())) | change
    with pytest.raises(errors.RecordError, match=expected):
        wire.loads(json.dumps(raw).encode())


def test_damaged_record_affects_only_itself(tmp_path):
    put(tmp_path, "good", wire.dumps(a_record("good")))
    put(tmp_path, "cut", wire.dumps(a_record("cut"))[:50])
    put(tmp_path, "newer", json.dumps({"version": 99}).encode())
    folders.prepare(tmp_path, "beginning")
    (folders.prepare(tmp_path, "folded") / "record.json").mkdir()
    os.mkfifo(folders.prepare(tmp_path, "piped") / "record.json")
    found, problems = client.list_records(tmp_path)
    assert [record.name for record in found] == ["good"]
    assert len(problems) == 4
    assert all("record.json: it is not a regular file" in problem for problem in problems[1::2])
    problems = problems[::2]
    assert "cut/record.json is not JSON" in problems[0]
    assert "newer/record.json was written by a newer vllm-console" in problems[1]
    assert client.adopt_orphans(tmp_path) == []


def test_readers_see_only_complete_records(tmp_path):
    folder = folders.prepare(tmp_path, "one")
    small, large = a_record(), replace(a_record(), reason="x" * 50_000)
    folders.write_record(folder, small)
    done = threading.Event()

    def write():
        for turn in range(200):
            folders.write_record(folder, large if turn % 2 else small)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        assert client.read(tmp_path, "one") in (small, large)
    thread.join()
    assert [path.name for path in folder.iterdir()] == ["record.json"]


def test_failed_write_keeps_the_old_record(tmp_path, monkeypatch):
    folder = folders.prepare(tmp_path, "one")
    folders.write_record(folder, a_record())

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folders.write_record(folder, replace(a_record(), reason="new"))
    assert client.read(tmp_path, "one") == a_record()
    assert [path.name for path in folder.iterdir()] == ["record.json"]


def test_unserializable_record_changes_nothing(tmp_path):
    folder = folders.prepare(tmp_path, "one")
    record_writer = RecordWriter(folder, a_record(), Notes(folder))
    unheard_of = replace(a_record().current.spec, details={"x": object()})
    for insist in (True, False):
        with pytest.raises(TypeError, match="not JSON serializable"):
            record_writer.change(insist=insist, next_spec=unheard_of, reason="new")
        assert record_writer.record == a_record()
    record_writer.change(reason="newer")
    assert client.read(tmp_path, "one") == record_writer.record == replace(a_record(), reason="newer")


def test_file_system_without_locks_is_a_keepers_error(tmp_path, monkeypatch):
    put(tmp_path, "one", wire.dumps(a_record()))

    def none(_fd, _how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", none)
    records, problems = ServerRecords(tmp_path).read()
    assert not records
    assert "No locks available" in problems[0]


def test_cancel_reports_a_keeper_that_cannot_be_reached(tmp_path):
    put(tmp_path, "one", wire.dumps(a_record()))
    lock = folders.take_lock(folders.server_folder(tmp_path, "one"))
    with pytest.raises(errors.KeeperError, match="its keeper could not be reached; nothing was canceled"):
        client.cancel(tmp_path, "one")
    os.close(lock)
    with pytest.raises(errors.NotPreparingError, match="no restart is being prepared"):
        client.cancel(tmp_path, "one")


def test_note_with_a_non_utf8_path_is_written(tmp_path):
    Notes(tmp_path)("/opt/ä/caf\udce9 cannot be run")
    assert "/opt/ä/caf\\udce9 cannot be run\n" in (tmp_path / "keeper.log").read_text()


def test_notes_are_bounded_including_pythons_own_output(tmp_path):
    """As in a keeper, standard error goes to the notes file."""
    program = """
import os, sys
from pathlib import Path
from vllm_launchers.keeper.record_writer import Notes
folder = Path(sys.argv[1])
os.dup2(os.open(folder / "keeper.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
note = Notes(folder)
note("x" * 10_000_000)
for number in range(200):
    os.write(2, b"Exception ignored in a thread" * 1000)
    note.bound() if number % 2 else note(f"note {number}")
os.write(2, b"the end\\n")
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["keeper.log", "keeper.log.1"]
    assert all((tmp_path / name).stat().st_size < 2 * NOTES_BYTES for name in files)
    assert "the end" in (tmp_path / "keeper.log").read_text(), "standard error goes to the notes file"


def test_stamp_changes_with_the_record(tmp_path):
    folder = folders.prepare(tmp_path, "one")
    assert client.stamp(tmp_path, "one") is None
    seen = set()
    for turn in range(3):
        folders.write_record(folder, replace(a_record(), attempt=turn))
        seen.add(client.stamp(tmp_path, "one"))
    assert len(seen) == 3


def test_files_are_private_to_the_user(tmp_path):
    folder = folders.prepare(tmp_path / "state", "one")
    folders.write_record(folder, a_record())
    for path in (tmp_path / "state", tmp_path / "state" / "servers", folder):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (folder / "record.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", ".x", "x" * 64, "a b", "a\n", "ä"])
def test_names_that_escape_the_folder_are_refused(tmp_path, name):
    with pytest.raises(errors.BadNameError, match="invalid server name"):
        folders.server_folder(tmp_path, name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder that is somebody else's")
def test_folder_of_another_user_is_refused(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    link = tmp_path / "link"
    link.symlink_to(theirs)
    for root in (theirs, link):
        with pytest.raises(errors.NotOursError, match="another user"):
            client.launch(root, "one", a_record().current.spec)
    assert list(theirs.iterdir()) == []


def test_damaged_record_is_removable_and_a_newer_one_is_kept(tmp_path):
    put(tmp_path, "cut", b"{")
    put(tmp_path, "newer", json.dumps({"version": 99}).encode())
    client.remove(tmp_path, "cut")
    assert client.names(tmp_path) == ["newer"]
    with pytest.raises(errors.NewerRecordError, match="update vllm-console"):
        client.remove(tmp_path, "newer")
    assert client.names(tmp_path) == ["newer"]


def test_file_system_errors_are_one_sentence(tmp_path):
    (tmp_path / "state").write_text("a file where a folder should be")
    with pytest.raises(errors.KeeperError, match="state is not a folder; move it away"):
        client.launch(tmp_path / "state", "one", a_record().current.spec)


def test_one_lock_per_folder_even_if_replaced(tmp_path):
    folder = folders.prepare(tmp_path, "one")
    first = folders.take_lock(folder)
    assert folders.take_lock(folder, timeout=0.0) is None
    assert folders.lock_is_held(folder)
    (folder / "keeper.lock").unlink()
    second = folders.take_lock(folder, timeout=0.0)
    assert second is not None
    os.close(first)
    assert folders.lock_is_held(folder)
    os.close(second)
    assert not folders.lock_is_held(folder)


def test_lock_on_a_removed_file_does_not_count(tmp_path, monkeypatch):
    folder = folders.prepare(tmp_path, "one")
    lock, real, calls = folder / "keeper.lock", fcntl.flock, []

    def flock(fd, operation):
        calls.append(fd)
        if len(calls) == 1:
            lock.unlink()
        real(fd, operation)

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    fd = folders.take_lock(folder)
    assert os.path.samestat(os.fstat(fd), lock.stat())
    os.close(fd)


def test_state_folder_location():
    assert str(folders.default_root({"VLLMCONSOLE_STATE": "/x", "XDG_STATE_HOME": "/y"})) == "/x"
    assert str(folders.default_root({"XDG_STATE_HOME": "/y"})) == "/y/vllm-console"
    assert folders.default_root({"XDG_STATE_HOME": "relative"}).parts[-3:] == (".local", "state", "vllm-console")
