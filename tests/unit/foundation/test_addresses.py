"""Which address a server is asked at, and who can reach it."""

from __future__ import annotations

import pytest

from vllm_console.fleet.model import ServerView, State
from vllm_console.load.client import check_url
from vllm_launchers.addresses import base_url, is_loopback, is_wildcard, reachable


@pytest.mark.parametrize(
    ("host", "asked", "url"),
    [
        ("127.0.0.1", "127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "127.0.0.1", "http://127.0.0.1:8000"),
        ("", "127.0.0.1", "http://127.0.0.1:8000"),
        ("*", "127.0.0.1", "http://127.0.0.1:8000"),
        ("::", "::1", "http://[::1]:8000"),
        ("[::]", "::1", "http://[::1]:8000"),
        ("[fe80::7]", "fe80::7", "http://[fe80::7]:8000"),
        ("gpubox", "gpubox", "http://gpubox:8000"),
    ],
)
def test_a_server_is_asked_where_this_machine_reaches_it(host: str, asked: str, url: str) -> None:
    assert reachable(host) == asked
    assert base_url(host, 8000) == url
    assert is_wildcard(host) == (host in ("", "*", "0.0.0.0", "::", "[::]"))


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("192.168.1.5", False), ("gpubox", False), ("", False)],
)  # fmt: skip
def test_who_can_reach_an_address(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


def test_load_may_be_sent_to_a_server_of_this_machine_that_listens_on_all_addresses() -> None:
    server = ServerView(name="chat", state=State.READY, state_since=0.0, host="0.0.0.0", port=8000)
    assert check_url(server.url, allow_remote=False) == "http://127.0.0.1:8000"
