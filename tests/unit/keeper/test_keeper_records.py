"""Records on disk: whole, private, versioned; names, owners and locks."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.keeper import client, codec, errors, store
from vllm_launchers.keeper.ledger import Ledger, Notes
from vllm_launchers.keeper.records import (
    RECORD_VERSION,
    Exit,
    Generation,
    Hopeless,
    LaunchSpec,
    ProcessIdentity,
    RestartMode,
    RestartPolicy,
    ServerRecord,
    State,
)

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
    hopeless=st.lists(st.builds(Hopeless, pattern=texts, reason=texts), max_size=2).map(tuple),
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
    companion=words,
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
    companion=st.none() | identities,
    adopted=st.booleans(),
    next_attempt_at=st.none() | times,
    downtime_seconds=st.none() | times,
    log_inode=st.none() | counts,
    log_offset=counts,
    then=st.none() | specs,
)


def a_record(name="one", state=State.STOPPED):
    spec = LaunchSpec(("vllm", "serve"), "127.0.0.1", 8000)
    return ServerRecord(name, state, 1.0, 1.0, (Generation(1, spec, 1.0),))


def put(root, name, data):
    folder = store.prepare(root, name)
    (folder / "record.json").write_bytes(data)


@settings(max_examples=80, deadline=None)
@given(record=records)
def test_a_record_comes_back_as_it_was_written(record):
    assert codec.loads(codec.dumps(record)) == record


def test_a_record_is_ascii_for_whoever_else_reads_it():
    record = replace(a_record(), reason=os.fsdecode("schöner Pfad ".encode() + b"\xff"))
    assert codec.dumps(record).isascii()
    assert codec.loads(codec.dumps(record)) == record


def test_what_a_later_minor_version_adds_is_passed_over():
    raw = json.loads(codec.dumps(a_record()))
    raw["mood"] = "good"
    raw["generations"][0]["spec"]["nice"] = 5
    assert codec.loads(json.dumps(raw).encode()) == a_record()


def test_a_record_from_before_these_fields_is_read():
    raw = json.loads(codec.dumps(a_record()))
    del raw["then"], raw["unwritten"], raw["generations"][0]["spec"]["tls"]
    del raw["generations"][0]["spec"]["restart"]["hopeless"]
    assert codec.loads(json.dumps(raw).encode()) == a_record()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"state": "sleeping"}, "state is 'sleeping', expected one of starting"),
        ({"state_since": "now"}, "expected float at state_since, found str"),
        ({"generations": []}, "has no generations"),
        ({"generations": [{"number": 1}]}, r"lacks generations\[0\].spec"),
        ({"attempt": True}, "expected int at attempt, found bool"),
        ({"state_since": 10**400}, "expected seconds at state_since, found a number beyond all bounds"),
        ({"next_attempt_at": float("inf")}, "expected seconds at next_attempt_at"),
        ({"created_at": float("nan")}, "expected seconds at created_at"),
        ({"downtime_seconds": -1e300}, "expected seconds at downtime_seconds"),
        ({"server": 5}, "expected an object at server, found int"),
        ({"version": RECORD_VERSION + 1}, "newer vllm-console .* update vllm-console"),
    ],
)
def test_a_wrong_record_names_the_place(change, expected):
    raw = json.loads(codec.dumps(a_record())) | change
    with pytest.raises(errors.RecordError, match=expected):
        codec.loads(json.dumps(raw).encode())


def test_a_broken_record_is_a_problem_of_its_own_only(tmp_path):
    put(tmp_path, "good", codec.dumps(a_record("good")))
    put(tmp_path, "cut", codec.dumps(a_record("cut"))[:50])
    put(tmp_path, "newer", json.dumps({"version": 99}).encode())
    store.prepare(tmp_path, "beginning")
    found, problems = client.list_records(tmp_path)
    assert [record.name for record in found] == ["good"]
    assert len(problems) == 2
    assert "cut/record.json is not JSON" in problems[0]
    assert "newer/record.json was written by a newer vllm-console" in problems[1]
    assert client.adopt_orphans(tmp_path) == []


def test_readers_meet_whole_records_only(tmp_path):
    folder = store.prepare(tmp_path, "one")
    small, large = a_record(), replace(a_record(), reason="x" * 50_000)
    store.write_record(folder, small)
    done = threading.Event()

    def write():
        for turn in range(200):
            store.write_record(folder, large if turn % 2 else small)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        assert client.read(tmp_path, "one") in (small, large)
    thread.join()
    assert [path.name for path in folder.iterdir()] == ["record.json"]


def test_a_write_that_fails_leaves_the_old_record(tmp_path, monkeypatch):
    folder = store.prepare(tmp_path, "one")
    store.write_record(folder, a_record())

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.write_record(folder, replace(a_record(), reason="new"))
    assert client.read(tmp_path, "one") == a_record()
    assert [path.name for path in folder.iterdir()] == ["record.json"]


def test_a_record_that_cannot_be_made_into_json_changes_nothing(tmp_path):
    folder = store.prepare(tmp_path, "one")
    ledger = Ledger(folder, a_record(), Notes(folder))
    unheard_of = replace(a_record().current.spec, details={"x": object()})
    for insist in (True, False):
        with pytest.raises(TypeError, match="not JSON serializable"):
            ledger.change(insist=insist, then=unheard_of, reason="new")
        assert ledger.record == a_record()
    ledger.change(reason="newer")
    assert client.read(tmp_path, "one") == ledger.record == replace(a_record(), reason="newer")


def test_a_note_of_a_path_that_is_not_utf8_is_written(tmp_path):
    Notes(tmp_path)("/opt/ä/caf\udce9 cannot be run")
    assert "/opt/ä/caf\\udce9 cannot be run\n" in (tmp_path / "keeper.log").read_text()


def test_the_stamp_changes_with_the_record(tmp_path):
    folder = store.prepare(tmp_path, "one")
    assert client.stamp(tmp_path, "one") is None
    seen = set()
    for turn in range(3):
        store.write_record(folder, replace(a_record(), attempt=turn))
        seen.add(client.stamp(tmp_path, "one"))
    assert len(seen) == 3


def test_everything_is_its_users_alone(tmp_path):
    folder = store.prepare(tmp_path / "state", "one")
    store.write_record(folder, a_record())
    for path in (tmp_path / "state", tmp_path / "state" / "servers", folder):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (folder / "record.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", ".x", "x" * 64, "a b", "a\n", "ä"])
def test_names_that_could_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(errors.BadNameError, match="cannot be a server's name"):
        client.folder(tmp_path, name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder that is somebody else's")
def test_a_folder_of_somebody_else_is_refused(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    link = tmp_path / "link"
    link.symlink_to(theirs)
    for root in (theirs, link):
        with pytest.raises(errors.NotOursError, match="another user"):
            client.launch(root, "one", a_record().current.spec)
    assert list(theirs.iterdir()) == []


def test_a_broken_record_can_be_removed_and_a_newer_one_is_left_alone(tmp_path):
    put(tmp_path, "cut", b"{")
    put(tmp_path, "newer", json.dumps({"version": 99}).encode())
    client.remove(tmp_path, "cut")
    assert client.names(tmp_path) == ["newer"]
    with pytest.raises(errors.NewerRecordError, match="update vllm-console"):
        client.remove(tmp_path, "newer")
    assert client.names(tmp_path) == ["newer"]


def test_what_the_file_system_refuses_is_a_sentence(tmp_path):
    (tmp_path / "state").write_text("a file where a folder should be")
    with pytest.raises(errors.KeeperError, match="state is not a folder; move it away"):
        client.launch(tmp_path / "state", "one", a_record().current.spec)


def test_one_lock_for_one_folder_even_when_it_was_replaced(tmp_path):
    folder = store.prepare(tmp_path, "one")
    first = store.take_lock(folder)
    assert store.take_lock(folder, patience=0.0) is None
    assert store.lock_is_held(folder)
    (folder / "keeper.lock").unlink()
    second = store.take_lock(folder, patience=0.0)
    assert second is not None
    os.close(first)
    assert store.lock_is_held(folder)
    os.close(second)
    assert not store.lock_is_held(folder)


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    folder = store.prepare(tmp_path, "one")
    lock, real, calls = folder / "keeper.lock", fcntl.flock, []

    def flock(fd, operation):
        calls.append(fd)
        if len(calls) == 1:
            lock.unlink()
        real(fd, operation)

    monkeypatch.setattr(store.fcntl, "flock", flock)
    fd = store.take_lock(folder)
    assert os.path.samestat(os.fstat(fd), lock.stat())
    os.close(fd)


def test_where_records_live():
    assert str(store.default_root({"VLLMCONSOLE_STATE": "/x", "XDG_STATE_HOME": "/y"})) == "/x"
    assert str(store.default_root({"XDG_STATE_HOME": "/y"})) == "/y/vllm-console"
    assert store.default_root({"XDG_STATE_HOME": "relative"}).parts[-3:] == (".local", "state", "vllm-console")
