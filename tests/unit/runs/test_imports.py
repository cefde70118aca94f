"""Results of other tools: real, shortened files of ``vllm bench serve`` 0.32 and guidellm 0.8.1, and others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_console.runs.imports import ResultError, measurement, read_result

RESULTS = Path(__file__).parent / "results"


def test_result_of_vllm_bench_serve():
    found = read_result(RESULTS / "vllm-bench-serve-0.32.json")
    (step,) = found.steps
    assert found.kind == "vllm bench serve"
    assert (step["rate"], step["sent"], step["completed"], step["failed"]) == (4.0, 20, 20, 0)
    assert step["ttft_seconds"]["p99"] == pytest.approx(0.0717, abs=1e-4)
    assert step["itl_seconds"]["p50"] == pytest.approx(0.0302, abs=1e-4)
    assert step["e2e_seconds"]["mean"] == pytest.approx(0.5071, abs=1e-4)
    assert step["tokens_per_second"] == pytest.approx(57.96, abs=0.01)
    assert step["kv_cache_usage"] is step["ok"] is None


def test_result_of_guidellm():
    found = read_result(RESULTS / "guidellm-0.8.1.json")
    (step,) = found.steps
    assert found.kind == "guidellm"
    assert found.at == pytest.approx(1795437112.18, abs=0.01)
    assert (step["rate"], step["sent"], step["completed"], step["failed"]) == (4.0, 12, 12, 0)
    assert step["ttft_seconds"]["p50"] == pytest.approx(0.6428, abs=1e-4)
    assert step["itl_seconds"]["mean"] == pytest.approx(0.0597, abs=1e-4)
    assert step["itl_seconds"]["p99"] is None, "its percentiles are of the requests' means"
    assert step["e2e_seconds"]["p99"] == pytest.approx(2.0718, abs=1e-4)


def test_all_requests_at_once_have_the_measured_rate():
    document = json.loads((RESULTS / "vllm-bench-serve-0.32.json").read_text())
    found = measurement(document | {"request_rate": "inf", "p50_ttft_ms": None, "date": "?"}, 5.0)
    assert found.steps[0]["rate"] == pytest.approx(3.62, abs=0.01)
    assert found.steps[0]["ttft_seconds"]["p50"] == pytest.approx(0.0545, abs=1e-4), "the median"
    assert found.at == 5.0


def test_tool_faster_than_requested_has_the_measured_rate():
    document = json.loads((RESULTS / "guidellm-0.8.1.json").read_text())
    document["benchmarks"][0]["metrics"]["requests_per_second"]["successful"]["mean"] = 72.3
    assert measurement(document, 5.0).steps[0]["rate"] == 72.3
    document["benchmarks"][0]["metrics"]["requests_per_second"]["successful"]["mean"] = 5.0
    assert measurement(document, 5.0).steps[0]["rate"] == 4.0, "as much as random arrivals of 12 requests differ"


@pytest.mark.parametrize("name", ["vllm-bench-serve-0.32.json", "guidellm-0.8.1.json"])
def test_result_without_an_answered_request_is_refused(tmp_path, name):
    document = json.loads((RESULTS / name).read_text())
    if "benchmarks" in document:
        document["benchmarks"][0]["metrics"]["request_totals"] |= {"successful": 0, "errored": 12}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document | {"completed": 0}))
    with pytest.raises(ResultError, match="none of its requests was answered"):
        read_result(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -5, 10**400, 1e300, True, [1]])
def test_impossible_values_are_unknown(tmp_path, number):
    path = tmp_path / "result.json"
    document = json.loads((RESULTS / "vllm-bench-serve-0.32.json").read_text())
    path.write_text(json.dumps(document | {"p99_ttft_ms": number, "output_throughput": number}))
    (step,) = read_result(path).steps
    assert step["ttft_seconds"]["p99"] is step["tokens_per_second"] is None
    assert step["completed"] == 20
    path.write_text(json.dumps(document | {"completed": number}))
    with pytest.raises(ResultError, match="not a known result format"):
        read_result(path)


def test_appended_results_are_one_step_each(tmp_path):
    """As ``vllm bench serve --append-result`` writes them: one JSON document per line."""
    document = json.loads((RESULTS / "vllm-bench-serve-0.32.json").read_text())
    path = tmp_path / "result.json"
    path.write_text("".join(json.dumps(document | {"request_rate": rate}) + "\n" for rate in (4.0, 8.0)))
    found = read_result(path)
    assert found.kind == "vllm bench serve"
    assert [step["rate"] for step in found.steps] == [4.0, 8.0]
    path.write_text(json.dumps(document) + "\n" + "{}\n")
    with pytest.raises(ResultError, match="not a known result format"):
        read_result(path)
    path.write_text(json.dumps(document) + "\n" + '{"half": ')
    with pytest.raises(ResultError, match="not a JSON file"):
        read_result(path)


def test_result_with_too_many_benchmarks_is_refused(tmp_path):
    document = json.loads((RESULTS / "guidellm-0.8.1.json").read_text())
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document | {"benchmarks": document["benchmarks"] * 201}))
    with pytest.raises(ResultError, match=r"has 201 benchmarks, and at most 200"):
        read_result(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "not a known result format"),
        ('{"benchmarks": [{"metrics": 3}, null]}', "not a known result format"),
        ("[1]", "not a known result format"),
        ("# README", "not a JSON file"),
        (None, "can't be read"),
    ],
)
def test_any_other_file_is_one_sentence(tmp_path, text, why):
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ResultError, match=why) as raised:
        read_result(path)
    assert "\n" not in str(raised.value)
