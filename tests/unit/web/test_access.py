"""One browser gets in once, with the link; no other host name and no other page is accepted."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from vllm_console.web.server import COOKIE, PageAccess, names_this_machine, same_origin


def token_of(access: PageAccess) -> str:
    return parse_qs(urlsplit(access.link(8321)).query)["token"][0]


def test_token_is_exchanged_once():
    access = PageAccess()
    token = token_of(access)
    assert not access.admits({COOKIE: token})
    assert access.exchange("") is None
    assert access.exchange("\udcff") is None, "invalid text is not a token"
    assert access.exchange(token[:-1]) is None
    cookie = access.exchange(token)
    assert cookie
    assert access.admits({COOKIE: cookie})
    assert access.exchange(token) is None


@pytest.mark.parametrize(
    "cookies", [{}, {COOKIE: ""}, {COOKIE: "é"}, {COOKIE: "\udcff"}, {COOKIE: "x" * 43}, {"other": "x"}]
)
def test_any_other_cookie_is_refused(cookies):
    access = PageAccess()
    assert not access.admits(cookies)
    access.exchange(token_of(access))
    assert not access.admits(cookies)


def test_link_is_on_loopback_and_unique():
    links = {PageAccess().link(8321) for _ in range(10)}
    assert len(links) == 10
    assert all(link.startswith("http://127.0.0.1:8321/") for link in links)


@pytest.mark.parametrize("host", ["127.0.0.1:8321", "localhost:9000", "LOCALHOST", "[::1]:80"])
def test_local_host_names(host):
    assert names_this_machine(host)
    assert same_origin(f"http://{host}", host)


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1.evil.example:8321", "localhost.evil.example", "127.0.0.1:8321@evil.example",
     "127.0.0.1:8321\n", "127.1", "0.0.0.0:8321", "localhost:", "localhost:८३२१"],
)  # fmt: skip
def test_foreign_host_names(host):
    assert not names_this_machine(host)


@pytest.mark.parametrize(
    "origin",
    ["null", "", "http://evil.example", "https://127.0.0.1:8321", "http://127.0.0.1:8000", "http://localhost:8321"],
)
def test_other_origins(origin):
    assert not same_origin(origin, "127.0.0.1:8321")
