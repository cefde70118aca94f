"""Scraping a server: one clear sentence for everything that can go wrong, and never later than the deadline."""

from __future__ import annotations

import socket

import pytest

from vllm_console.metrics.scrape import ScrapeError, Scraper, scrape_once


def drip(pieces, server):
    for piece in pieces:
        yield piece
        if server.ending.wait(0.05):
            return


def endless(server, head=b""):
    yield head
    while not server.ending.is_set():
        yield b"a" * 65536


@pytest.fixture
def failure():
    def ask(url, **options):
        scraper = Scraper(url, **options)
        with pytest.raises(ScrapeError) as caught:
            scraper.sample(1.0)
        message = str(caught.value)
        assert "\n" not in message
        assert scraper.place in message
        assert message.endswith(".")
        return caught.value.kind

    return ask


def test_samples_use_one_kept_connection(server, body):
    scraper = Scraper(server.url)
    for number in range(5):
        server.serve_text(body(engines=[{"running": float(number)}]))
        assert scraper.sample(float(number)).engines["0"].requests_running == number
    assert (server.connections, server.requests) == (1, 5)
    scraper.close()


def test_closed_connection_is_reopened(server, body):
    text = body().encode()
    server.answer = lambda path: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text + b""
    scraper = Scraper(server.url)
    scraper.sample(1.0)
    scraper._connection.sock.shutdown(socket.SHUT_RDWR)
    assert scraper.sample(2.0).at == 2.0
    assert server.connections == 2


@pytest.mark.parametrize("suffix", ["", "/", "/metrics", "/metrics/", "/v1", "/v1/metrics"])
def test_base_url_or_metrics_url(server, body, suffix):
    asked = []
    text = body().encode()

    def answer(path):
        asked.append(path)
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text

    server.answer = answer
    assert scrape_once(server.url + suffix, 3.0).at == 3.0
    assert asked == ["/metrics"]


def test_closed_port_is_refused(failure):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert failure(f"http://127.0.0.1:{port}") == "refused"


def test_silent_server_times_out(server, failure):
    server.answer = lambda path: drip([b""] * 1000, server)
    assert failure(server.url, timeout=0.2) == "timeout"


def test_slowly_sent_header_times_out(server, failure):
    server.answer = lambda path: drip([b"H", b"T", b"T", b"P", b"/"] * 200, server)
    assert failure(server.url, timeout=0.3) == "timeout"


def test_slowly_sent_body_times_out(server, failure):
    server.answer = lambda path: drip([b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", *[b"x"] * 5000], server)
    assert failure(server.url, timeout=0.3) == "timeout"


def test_connection_never_accepted_times_out(failure):
    with socket.create_server(("127.0.0.1", 0), backlog=1) as deaf:
        assert failure(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout=0.2) == "timeout"


@pytest.mark.parametrize(
    ("text", "content_type", "kind"),
    [
        ("<!doctype html><html></html>", "text/plain", "html"),
        ("hello", "text/html; charset=utf-8", "html"),
        ("", "text/plain", "empty"),
        ("\n", "text/plain", "empty"),
        ("vllm:num_requests_running 1\nvllm:num_requ", "text/plain", "cut off"),
        (b"\xff\xfe\x00\x80garbage\n", "text/plain", "garbage"),
        ("no metrics at all\n", "text/plain", "garbage"),
    ],
)
def test_non_metrics_responses(server, failure, text, content_type, kind):
    server.serve_text(text, content_type)
    assert failure(server.url) == kind


def test_truncated_body(server, failure, body):
    server.answer = lambda path: iter([b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", body().encode()[:700]])
    assert failure(server.url) == "cut off"


def test_closed_connection_suggests_tls(server):
    server.answer = lambda path: iter([])
    with pytest.raises(ScrapeError, match=r"if it uses TLS, its address is https://127\.0\.0\.1:\d+\.$"):
        scrape_once(server.url, 0.0)


def test_truncated_chunked_body(server, failure):
    server.answer = lambda path: iter([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\nvllm:x 1\n"])
    assert failure(server.url) == "cut off"


def test_fifty_megabytes_are_refused_before_reading(server, failure):
    server.answer = lambda path: endless(server, b"HTTP/1.1 200 OK\r\nContent-Length: 52428800\r\n\r\n")
    assert failure(server.url) == "too large"


def test_endless_body_is_refused_at_the_limit(server, failure):
    server.answer = lambda path: endless(server, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    assert failure(server.url, timeout=20.0) == "too large"


@pytest.mark.parametrize(
    ("status", "kind"), [("404 Not Found", "status"), ("500 Oops", "status"), ("302 Found", "redirect")]
)
def test_other_statuses(server, failure, status, kind):
    server.serve_text("vllm:x 1\n", status=status)
    assert failure(server.url) == kind


def test_redirects_are_not_followed(server, failure):
    server.answer = lambda path: b"HTTP/1.1 307 Go\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    assert failure(server.url) == "redirect"
    assert server.requests == 1


def test_non_http_server(server, failure):
    server.answer = lambda path: iter([b"SSH-2.0-OpenSSH_9.6\r\n\r\n"])
    assert failure(server.url) == "garbage"


def test_scraper_recovers_after_an_error(server, failure, body):
    scraper = Scraper(server.url)
    server.serve_text("<html>", "text/html")
    with pytest.raises(ScrapeError):
        scraper.sample(1.0)
    server.serve_text(body())
    assert scraper.sample(2.0).model_name == "tiny"


@pytest.mark.parametrize(
    "url",
    ["ssh://127.0.0.1:1", "http://", "http://h:port", "http://a b:1", "http://[a:b]:1", "http://u:p@h", "h:8000"],
)
def test_invalid_addresses(url):
    with pytest.raises(ScrapeError) as caught:
        Scraper(url)
    assert caught.value.kind == "url"


def test_escape_codes_in_a_status_are_removed(server):
    server.answer = lambda path: b"HTTP/1.1 500 \x1b[31mred\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(ScrapeError) as caught:
        scrape_once(server.url, 1.0)
    assert "\x1b" not in str(caught.value)
