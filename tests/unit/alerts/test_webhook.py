"""A webhook on loopback that accepts, refuses, hangs or fails."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vllm_console.alerts import notifier
from vllm_console.alerts.notifier import MOST_WAITING, TRIES, Notifier, Webhook
from vllm_console.diagnosis.finding import Finding, Severity
from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.settings import Alerts
from vllm_launchers.keeper.records import State

SECRET = "Bearer very-secret-token"


class Receiver:
    """Stores its requests and returns the next of ``answers``; the last one repeats."""

    def __init__(self) -> None:
        self.answers = [204]
        self.asked: list[tuple[dict[str, str], dict[str, object]]] = []
        self.changed = threading.Condition()
        self.open = threading.Event()
        self.open.set()
        self.url = ""

    def until(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, 10)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with found.changed:
                status = found.answers.pop(0) if len(found.answers) > 1 else found.answers[0]
                headers = {name.lower(): value for name, value in self.headers.items()}
                found.asked.append((headers, body))
                found.changed.notify_all()
            found.open.wait(20)
            self.send_response(status)
            self.send_header("Location", f"{found.url}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield found
    found.open.set()
    server.shutdown()
    server.server_close()


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "FIRST_WAIT_SECONDS", 0.001)


def hook(receiver: Receiver) -> Webhook:
    return Webhook(f"{receiver.url}/private/path", {"Authorization": SECRET})


def test_documents_arrive_in_order_with_the_header(receiver: Receiver) -> None:
    webhook = hook(receiver)
    for number in range(3):
        webhook.send({"number": number})
    webhook.close(10)
    assert [body["number"] for _, body in receiver.asked] == [0, 1, 2]
    headers, _ = receiver.asked[0]
    assert headers["authorization"] == SECRET
    assert headers["content-type"] == "application/json"
    assert webhook.trouble == ""


def test_failed_delivery_is_retried(receiver: Receiver) -> None:
    receiver.answers = [500, 429, 200]
    webhook = hook(receiver)
    webhook.send({"number": 1})
    webhook.close(10)
    assert len(receiver.asked) == 3
    assert webhook.trouble == ""


def test_delivery_gives_up_and_continues_with_the_next(receiver: Receiver) -> None:
    receiver.answers = [500] * TRIES + [200]
    webhook = hook(receiver)
    webhook.send({"number": 1})
    until(lambda: webhook.trouble)
    assert webhook.trouble == "the webhook at 127.0.0.1 answered 500: message lost"
    webhook.send({"number": 2})
    receiver.until(TRIES + 1)
    until(lambda: not webhook.trouble)
    webhook.close()


def test_unexpected_error_is_reported_and_the_next_message_is_sent(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    webhook = hook(receiver)
    with monkeypatch.context() as patched:
        patched.setattr(Webhook, "_post", run)
        webhook.send({"number": 1})
        until(lambda: webhook.trouble)
    assert webhook.trouble == "the webhook at 127.0.0.1 can't be reached (RuntimeError): message lost"
    webhook.send({"number": 2})
    receiver.until(1)
    until(lambda: not webhook.trouble)
    webhook.close()


@pytest.mark.parametrize("status", [301, 307, 400, 404])
def test_permanent_errors_and_redirects_are_not_retried(receiver: Receiver, status: int) -> None:
    receiver.answers = [status]
    webhook = hook(receiver)
    webhook.send({"number": 1})
    webhook.close(10)
    assert len(receiver.asked) == 1
    assert f"answered {status}" in webhook.trouble


def test_hanging_webhook_times_out_and_blocks_nothing(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver.open.clear()
    monkeypatch.setattr(notifier, "DEADLINE_SECONDS", 0.1)
    webhook = hook(receiver)
    webhook.send({"number": 1})
    receiver.until(2)
    until(lambda: webhook.trouble)
    assert "did not answer within 0.1s" in webhook.trouble
    webhook.close(0.0)


def test_unreachable_webhook_is_reported_without_path_or_secret() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    webhook = Webhook(f"http://127.0.0.1:{port}/private/path", {"Authorization": SECRET})
    webhook.send({"number": 1})
    until(lambda: webhook.trouble)
    assert "the webhook at 127.0.0.1 can't be reached" in webhook.trouble
    assert "private" not in webhook.trouble
    assert "secret" not in webhook.trouble
    webhook.close()


def test_queue_is_bounded_and_drops_the_oldest(receiver: Receiver) -> None:
    receiver.open.clear()
    webhook = hook(receiver)
    webhook.send({"number": 0})
    receiver.until(1)
    for number in range(1, MOST_WAITING + 11):
        webhook.send({"number": number})
    assert "messages lost" in webhook.trouble
    receiver.open.set()
    webhook.close(20)
    assert [body["number"] for _, body in receiver.asked] == [0, *range(11, MOST_WAITING + 11)]


def test_nothing_is_accepted_after_close(receiver: Receiver) -> None:
    webhook = hook(receiver)
    webhook.close()
    webhook.send({"number": 1})
    assert receiver.asked == []


def test_webhook_gets_the_finding_and_logs_contain_no_secret(receiver: Receiver, tmp_path: Path) -> None:
    wanted = Alerts(webhook=receiver.url, webhook_header="X-Key", webhook_header_env="HOOK_KEY")
    notifier = Notifier(tmp_path, wanted, environ={"HOOK_KEY": SECRET})
    finding = Finding("preempting", Severity.CRITICAL, 1000.0, "18 preemptions/min.", "Full.")
    server = ServerView("chat", State.READY, 0.0, preset="chatbot", findings=(finding,))
    notifier.update(FleetSnapshot(2000.0, "gpubox", (server,)))
    receiver.until(1)
    notifier.close()
    headers, body = receiver.asked[0]
    assert headers["x-key"] == SECRET
    assert body["text"] == "gpubox: chat: preempting: 18 preemptions/min."
    assert (body["event"], body["host"], body["server"], body["code"]) == ("began", "gpubox", "chat", "preempting")
    assert body["severity"] == "critical"
    assert all(SECRET not in path.read_text() for path in tmp_path.iterdir())
