"""The address at which a server is contacted, and who can reach it."""

from __future__ import annotations

import pytest

from vllm_console.fleet.snapshot import ServerView
from vllm_console.load.client import check_url
from vllm_launchers.addresses import base_url, format_exposure, is_loopback, is_wildcard, reachable, server_url
from vllm_launchers.errors import UsageError
from vllm_launchers.keeper.records import State


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
def test_server_is_contacted_at_a_reachable_address(host: str, asked: str, url: str) -> None:
    assert reachable(host) == asked
    assert base_url(host, 8000) == url
    assert is_wildcard(host) == (host in ("", "*", "0.0.0.0", "::", "[::]"))


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("192.168.1.5", False), ("gpubox", False), ("", False)],
)  # fmt: skip
def test_loopback_addresses(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


def test_load_may_be_sent_to_a_local_server_on_all_addresses() -> None:
    server = ServerView(name="chat", state=State.READY, state_since=0.0, host="0.0.0.0", port=8000)
    assert check_url(server.url, allow_remote=False) == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost", "LOCALHOST.", "::ffff:127.0.0.1"]
)
def test_loopback_server_needs_no_key(host: str) -> None:
    assert format_exposure(host, False) == format_exposure(host, None) == format_exposure(host, True) == ""


@pytest.mark.parametrize(
    ("host", "where"),
    [
        ("0.0.0.0", "all addresses (0.0.0.0)"),
        ("::", "all addresses (::)"),
        ("[::]", "all addresses ([::])"),
        ("", "all addresses"),
        ("192.168.1.5", "192.168.1.5"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("::ffff:192.168.1.5", "::ffff:192.168.1.5"),
        ("gpubox", "gpubox"),
        ("localhost.evil.example", "localhost.evil.example"),
    ],
)
def test_every_other_address_without_a_key_is_a_warning(host: str, where: str) -> None:
    assert (
        format_exposure(host, False) == f"it listens on {where} without an API key: anyone who can reach it can use it"
    )
    assert format_exposure(host, None).startswith(f"it listens on {where}, no API key seen")
    assert format_exposure(host, True) == ""


@pytest.mark.parametrize(
    ("url", "base", "port"),
    [
        ("http://h:8000/", "http://h:8000", 8000),
        ("http://h:80", "http://h", 80),
        ("https://H/v1/", "https://h", 443),
        ("http://[::1]:8000/metrics", "http://[::1]:8000", 8000),
        ("http://h:8000/v1/metrics", "http://h:8000", 8000),
        ("https://gate/Team/llama/v1", "https://gate/Team/llama", 443),
        ("http://gate/@cf/llama/v1", "http://gate/@cf/llama", 80),
    ],
)
def test_server_urls(url: str, base: str, port: int) -> None:
    server = server_url(url)
    assert (server.base, server.port) == (base, port)
    assert server_url(base) == server
    assert check_url(url, allow_remote=True) == base


@pytest.mark.parametrize(
    "url",
    ["", "h:8000", "ftp://h", "http://", "http://u:s3cret@h", "http://u:s3cret@h:x", "http://u:s3cret@[h", "http://a b",
     "http://h?key=1", "http://h#1", "http://h:x", "http://h:0", "http://h:99999", "http://h\x1b",
     "http://h:8000/日"],
)  # fmt: skip
def test_invalid_server_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_url(url, allow_remote=True)
    assert "s3cret" not in str(refused.value)
    assert "\x1b" not in str(refused.value)
