"""``metrics SOURCE`` on valid and invalid pages."""

from __future__ import annotations

import http.server
import json
import threading
import time

import pytest

PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 5.0
vllm:num_preemptions_total{engine="1",model_name="m"} 6.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 50.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.2",model_name="m"} 100.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 100.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 100.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 11.0
"""

KEYS = {
    "requests_running", "requests_waiting", "kv_cache_usage", "preemptions_total", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "kv_cache_tokens", "ttft_seconds",
    "itl_seconds", "e2e_seconds", "queue_seconds", "prefill_seconds", "decode_seconds",
}  # fmt: skip


def test_engines_are_shown_separately_and_aggregated(program, tmp_path):
    page = tmp_path / "page.txt"
    page.write_text(PAGE)
    answer = program.json("metrics", str(page))
    assert set(answer) == KEYS | {"engines", "responses"}
    assert answer["requests_running"] == 7
    assert answer["kv_cache_usage"] == pytest.approx(0.5)
    assert answer["preemptions_total"] == 11
    assert answer["requests_waiting"] is None
    assert answer["ttft_seconds"] == {
        "count": 100, "sum": 11.0, "mean": 0.11,
        "p50": None, "p50_below": 0.1, "p50_above": None,  # the median is the upper bound of the first bucket
        "p90": pytest.approx(0.18), "p90_below": 0.2, "p90_above": 0.1,
        "p99": pytest.approx(0.198), "p99_below": 0.2, "p99_above": 0.1,
    }  # fmt: skip
    assert set(answer["engines"]) == {"0", "1"}
    assert set(answer["engines"]["1"]) == KEYS
    assert answer["engines"]["1"]["requests_running"] == 4
    assert answer["engines"]["1"]["ttft_seconds"] is None


def test_http_responses_are_shown(program, tmp_path):
    page = tmp_path / "page.txt"
    page.write_text(
        PAGE
        + "# TYPE http_requests_total counter\n"
        + 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1204.0\n'
        + 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 31.0\n'
    )
    answer = program("metrics", str(page))
    assert answer.returncode == 0, answer.stderr
    assert "responses                    1,204 ok, 31 refused, 0 failed\n" in answer.stdout
    assert program.json("metrics", str(page))["responses"]["ok"] == 1204


def test_histogram_without_observations_has_no_quantiles(program, tmp_path):
    page = tmp_path / "page.txt"
    page.write_text(PAGE.replace("} 50.0", "} 0.0").replace("} 100.0", "} 0.0").replace("} 11.0", "} 0.0"))
    answer = program("metrics", str(page))
    assert answer.returncode == 0, answer.stderr
    (line,) = (line for line in answer.stdout.splitlines() if line.startswith("TTFT"))
    assert line.split() == ["TTFT", "mean", "–", "p50", "–", "p90", "–", "p99", "–", "of", "0"]
    assert "2 engines                    0, 1\n" in answer.stdout


class Server(http.server.BaseHTTPRequestHandler):
    """Sends the invalid response named by the path."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        try:
            if self.path.startswith("/html"):
                self.wfile.write(b"<!DOCTYPE html><html><body>Welcome to nginx</body></html>")
            elif self.path.startswith("/big"):
                for _ in range(50):
                    self.wfile.write(b"x" * (1 << 20))
            elif self.path.startswith("/hang"):
                time.sleep(8)
        except OSError:
            pass

    def log_message(self, *_):
        pass


@pytest.fixture
def bad_server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("path", ["/html/metrics", "/empty/metrics", "/big/metrics", "/hang/metrics"])
def test_invalid_page_prints_one_line(program, bad_server, path):
    answer = program("metrics", bad_server + path, "--timeout", "2")
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    assert answer.stderr.startswith("vllm-console: ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "ftp://127.0.0.1/metrics", "HTTP://127.0.0.1:1/?x=1"])
def test_invalid_url_is_wrong_usage(program, url):
    answer = program("metrics", url)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"<html></html>", b"\x00\xff\xfe garbage", PAGE[:700].encode() + b"vllm:nu"])
def test_invalid_file_is_handled(program, tmp_path, content):
    page = tmp_path / "page"
    page.write_bytes(content)
    answer = program("metrics", str(page), "--json")
    assert "Traceback" not in answer.stderr
    if answer.returncode == 0:
        assert json.loads(answer.stdout)["requests_running"] == 7
    else:
        assert answer.returncode == 1
