"""What is recorded for an attached endpoint, step by step, without a separate process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.endpoint import FakeEndpoint, certificate, document, metrics
from vllm_console import attached
from vllm_console.attached import Endpoint, api_key_of, endpoint_of, first_record, name_for
from vllm_console.attached_recorder import LONGEST_PAUSE_SECONDS, MIXED, NO_ENGINE, EndpointRecording
from vllm_console.fleet import attached_servers
from vllm_console.fleet.snapshot import ServerView
from vllm_console.history.store import HISTORY, HistoryReader
from vllm_console.metrics.scrape import Scraper, verifying
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import ServerRecord, State


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    endpoint = FakeEndpoint()
    yield endpoint
    endpoint.close()


def recording(state: Path, endpoint: Endpoint, key: str = "", timeout: float = 1.0) -> EndpointRecording:
    """The recording of an endpoint that was just attached."""
    folder = attached.attached_folder(state, "far")
    folder.mkdir(parents=True)
    record = first_record("far", endpoint, time.time())
    folders.write_record(folder, record)
    tls = verifying(endpoint.ca) if endpoint.address.tls else None
    return EndpointRecording(state, record, endpoint, Scraper(endpoint.url, timeout, key=key, tls=tls))


def recorded(state: Path) -> tuple[ServerRecord, Endpoint]:
    return attached.read_endpoint(attached.attached_folder(state, "far"))


def test_metrics_model_and_version_are_recorded_with_get_only(tmp_path: Path, fake: FakeEndpoint) -> None:
    one = recording(tmp_path, Endpoint(fake.url, "FAR_KEY", keyed=True), key="k-1")
    assert one.step() == 1.0
    one.close()
    record, endpoint = recorded(tmp_path)
    assert (record.state, record.current.number, endpoint.notice) == (State.READY, 1, "")
    assert record.current.spec.details["model"] == "far-model"
    assert record.current.spec.details["engine"]["version"] == "0.32.0"
    assert {asked[0] for asked in fake.asked} == {"GET"}
    assert {asked[2] for asked in fake.asked} == {"Bearer k-1"}
    latest = HistoryReader(attached.attached_folder(tmp_path, "far") / HISTORY).latest()
    assert latest is not None
    assert latest.sample.engines["0"].kv_cache_usage == 0.25
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"k-1" not in kept


def test_remote_restart_starts_another_run(tmp_path: Path, fake: FakeEndpoint) -> None:
    one = recording(tmp_path, Endpoint(fake.url))
    one.step()
    fake.answers["/metrics"] = metrics(2, started=2000.0)
    one.step()
    one.close()
    record, _ = recorded(tmp_path)
    assert [run.number for run in record.generations] == [1, 2]
    assert record.generations[0].ended_at is not None


def test_restart_while_not_recording_starts_another_run(tmp_path: Path, fake: FakeEndpoint) -> None:
    recording(tmp_path, Endpoint(fake.url, started="900.0")).step()
    assert recorded(tmp_path)[0].current.number == 2


@pytest.mark.parametrize("started", [True, False])
def test_metrics_of_several_servers_at_one_address_are_not_mixed(
    tmp_path: Path, fake: FakeEndpoint, started: bool
) -> None:
    one = recording(tmp_path, Endpoint(fake.url))
    for turn in range(8):
        fake.answers["/metrics"] = metrics((90, 5)[turn % 2], (1.0, 2.0)[turn % 2] if started else None)
        one.step()
    record, endpoint = recorded(tmp_path)
    assert endpoint.notice == MIXED
    assert record.state is State.READY
    runs = record.current.number
    one.step()
    assert recorded(tmp_path)[0].current.number == runs, "no run is made up of every answer"


def test_router_without_engine_metrics_is_only_known_to_answer(tmp_path: Path, fake: FakeEndpoint) -> None:
    one = recording(tmp_path, Endpoint(fake.url))
    fake.answers["/metrics"] = (200, b'vllm:num_requests_running{server="http://10.0.0.1"} 4\n', {})
    assert one.step() > 1.0
    assert recorded(tmp_path)[1].notice == NO_ENGINE
    del fake.answers["/metrics"]
    one.step()
    record, endpoint = recorded(tmp_path)
    assert record.state is State.READY
    assert "no metrics page" in endpoint.notice
    assert record.current.spec.details["model"] == "far-model"
    one.close()
    assert not (attached.attached_folder(tmp_path, "far") / HISTORY).exists() or (
        HistoryReader(attached.attached_folder(tmp_path, "far") / HISTORY).latest() is None
    )


def test_missing_endpoint_is_retried_with_backoff_and_found_again(tmp_path: Path) -> None:
    fake = FakeEndpoint()
    one = recording(tmp_path, Endpoint(fake.url))
    one.step()
    port = int(fake.url.rpartition(":")[2])
    fake.close()
    one._scraper.close()
    pauses = [one.step() for _ in range(8)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    record, _ = recorded(tmp_path)
    assert record.state is State.UNRESPONSIVE
    assert f"127.0.0.1:{port} refused the connection" in record.reason


def test_redirect_is_reported_and_not_followed(tmp_path: Path, fake: FakeEndpoint) -> None:
    other = FakeEndpoint()
    away: tuple[int, bytes, dict[str, str]] = (307, b"", {"Location": f"{other.url}/login?token=t0ken"})
    fake.answers = {"/metrics": away, "/v1/models": away}
    recording(tmp_path, Endpoint(fake.url, "FAR_KEY", keyed=True), key="k-1").step()
    record, _ = recorded(tmp_path)
    assert record.state is State.UNRESPONSIVE
    assert f"HTTP 307 to {other.url}/login" in record.reason
    assert "t0ken" not in record.reason
    assert other.asked == []
    other.close()


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        (Endpoint("", "FAR_KEY", keyed=True), "refuses the API key in FAR_KEY"),
        (Endpoint("", "FAR_KEY"), "FAR_KEY was not set"),
        (Endpoint(""), "attach it again with --key-env VAR"),
    ],
)
def test_missing_or_wrong_key_is_named_by_its_variable(
    tmp_path: Path, fake: FakeEndpoint, endpoint: Endpoint, reason: str
) -> None:
    refused = document({"error": "Unauthorized"}, 401)
    fake.answers = {"/metrics": refused, "/v1/models": refused}
    one = Endpoint(fake.url, endpoint.key_env, keyed=endpoint.keyed)
    recording(tmp_path, one, key="k-1" if endpoint.keyed else "").step()
    assert reason in recorded(tmp_path)[0].reason


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_certificate_is_verified_on_this_machine_too(tmp_path: Path) -> None:
    made, key = certificate(tmp_path)
    fake = FakeEndpoint((made, key))
    recording(tmp_path / "a", Endpoint(fake.url)).step()
    record, _ = recorded(tmp_path / "a")
    assert record.state is State.UNRESPONSIVE
    assert "certificate that is not trusted" in record.reason
    assert "--ca FILE" in record.reason
    assert fake.asked == []
    recording(tmp_path / "b", Endpoint(fake.url, ca=str(made))).step()
    assert recorded(tmp_path / "b")[0].state is State.READY
    fake.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_refused_certificate_names_the_reason_and_the_fix(tmp_path: Path) -> None:
    made, key = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other, other_key = certificate(tmp_path / "other", "192.0.2.1")
    fake, misnamed = FakeEndpoint((made, key)), FakeEndpoint((other, other_key))
    recording(tmp_path / "a", Endpoint(fake.url, ca=str(other))).step()
    reason = recorded(tmp_path / "a")[0].reason
    assert f"{other} has no certificate that signed it" in reason
    assert "--ca" not in reason, "it was given"
    recording(tmp_path / "b", Endpoint(misnamed.url, ca=str(other))).step()
    reason = recorded(tmp_path / "b")[0].reason
    assert reason.endswith("certificate is not valid for '127.0.0.1'.")
    assert "--ca" not in reason, "no CA helps"
    fake.close()
    misnamed.close()


def test_hostile_answers_become_plain_text(tmp_path: Path, fake: FakeEndpoint) -> None:
    fake.answers["/version"] = document({"version": "0.\x1b[31m1[bold]"})
    status, page, kind = metrics(1, started=None, model="m\x1b]0;x\x07")
    fake.answers["/metrics"] = status, page + b"process_start_time_seconds " + b"9" * 100_000 + b"\n", kind
    recording(tmp_path, Endpoint(fake.url)).step()
    details = str(recorded(tmp_path)[0].current.spec.details)
    assert "\x1b" not in details
    assert len(details) < 5_000


def test_record_with_an_invalid_url_is_not_that_of_an_endpoint() -> None:
    assert endpoint_of(first_record("far", Endpoint("http://h:8000"), 1.0)) == Endpoint("http://h:8000")
    assert endpoint_of(first_record("far", Endpoint("http://h:x"), 1.0)) is None


def test_names_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_for("https://gpu-box.example") == "gpu-box.example-443"
    assert folders.NAME.fullmatch(name_for("http://[fe80::1]:8000"))
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    assert api_key_of(Endpoint("http://h")) == "", "the key of other servers is not sent"
    monkeypatch.setenv("FAR_KEY", "a\nb")
    with pytest.raises(UsageError, match="FAR_KEY has characters"):
        api_key_of(Endpoint("http://h", "FAR_KEY"))


@pytest.mark.parametrize(
    ("bound", "host", "may"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "::1", False),
        ("0.0.0.0", "::1", False),
        ("::1", "127.0.0.1", False),
        ("::1", "::1", True),
        ("::", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.2", True),
        ("localhost", "127.0.0.1", True),
        ("localhost", "::1", False),
        ("[::1]", "localhost", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("127.0.0.2", "localhost", False),
        ("10.0.0.5", "127.0.0.1", False),
        ("10.0.0.5", "localhost", False),
    ],
)
def test_own_server_is_recognized_by_the_address_that_it_binds(
    tmp_path: Path, bound: str, host: str, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_servers, "start_recorder", lambda *_: None)
    endpoints = attached_servers.AttachedServers(tmp_path, interactive=False, read_only=False)
    url = f"http://[{host}]:8000" if ":" in host else f"http://{host}:8000"
    own = {8000: ServerView("chat", State.READY, 1.0, ours=True, host=bound, port=8000)}
    if may:
        with pytest.raises(OperationError, match="is chat, one of your own servers"):
            endpoints.attach(url, "v", "", "", own)
    else:
        assert endpoints.attach(url, "v", "", "", own) == "v"


def test_endpoint_is_recognized_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_servers, "start_recorder", lambda *_: None)
    folder = attached.attached_folder(tmp_path, "far")
    folder.mkdir(parents=True)
    (folder / folders.LOCK).touch()
    folders.write_record(folder, first_record("far", Endpoint("https://h:443"), time.time()))
    endpoints = attached_servers.AttachedServers(tmp_path, interactive=False, read_only=False)
    assert endpoints.attach("https://h", None, "", "", {}) == "far"
    assert recorded(tmp_path)[1].url == "https://h"
