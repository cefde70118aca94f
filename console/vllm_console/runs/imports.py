"""Reads the JSON results of ``vllm bench serve`` and ``guidellm`` as measurements. Pure except for `read_result`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_console.runs.measurement import Measurement
from vllm_console.text import plain
from vllm_launchers.errors import OperationError
from vllm_launchers.private import open_regular

LARGEST_RESULT = 512 << 20
"""Large because guidellm writes every request into its file."""

MOST_STEPS = 200
LARGEST = 1e12
"""Larger numbers are not plausible measurements."""

NONE_ANSWERED = "none of its requests was answered, so it has no figures"

BENCH, GUIDELLM = "vllm bench serve", "guidellm"


class ResultError(OperationError):
    """A file that is not a known result. The message is one sentence."""


def read_result(path: Path) -> Measurement:
    """Read the measurement in a file.

    Raises:
        ResultError: it cannot be read, is not JSON, or not the result of a known tool.
    """
    try:
        with open_regular(path) as file:
            data = file.read(LARGEST_RESULT + 1)
            changed_at = path.stat().st_mtime
    except OSError as error:
        raise ResultError(f"{path} can't be read: {error.strerror}") from error
    if len(data) > LARGEST_RESULT:
        raise ResultError(f"{path} is larger than {LARGEST_RESULT >> 20} MiB, too large for a benchmark result")
    try:
        documents = _documents(data)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path} is not a JSON file: {plain(str(error), 200)}") from error
    try:
        found = measurement(documents[0], changed_at) if len(documents) == 1 else _appended(documents, changed_at)
    except ResultError as error:
        raise ResultError(f"{path}: {error}") from error
    if found is None:
        raise ResultError(
            f"{path} is not a known result format: expected the JSON file of 'vllm bench serve --save-result' or of "
            "'guidellm'"
        )
    return found


def _documents(data: bytes) -> list[object]:
    """The JSON document of a file, or those of its lines: ``vllm bench serve --append-result`` writes one per run.

    Raises:
        ValueError: it is neither.
    """
    try:
        return [json.loads(data)]  # accepts NaN and Infinity, which Python tools write
    except ValueError:
        lines = data.splitlines()
        if len(lines) < 2 or not lines[0].rstrip().endswith(b"}"):
            raise
        return [json.loads(line) for line in lines if line.strip()]


def _appended(documents: Sequence[object], changed_at: float) -> Measurement | None:
    """The measurement of several results of ``vllm bench serve``, one step each; None if one is something else.

    Raises:
        ResultError: there are too many, or no request of one was answered.
    """
    if len(documents) > MOST_STEPS:
        raise ResultError(f"it has {len(documents):,} benchmarks, and at most {MOST_STEPS} are kept with a run")
    found = [measurement(document, changed_at) for document in documents]
    known = [one for one in found if one is not None and one.kind == BENCH]
    if len(known) < len(found):
        return None
    return Measurement(BENCH, max(one.at for one in known), tuple(step for one in known for step in one.steps))


def measurement(document: object, changed_at: float) -> Measurement | None:
    """Convert a result to a measurement; None if unknown. ``changed_at`` (Unix seconds) is used if the result has no
    time.

    Raises:
        ResultError: it has too many benchmarks, or none of its requests was answered.
    """
    if not isinstance(document, dict):
        return None
    if "request_throughput" in document and "completed" in document:
        return _bench(document, changed_at)
    if isinstance(document.get("benchmarks"), list):
        steps = [step for one in document["benchmarks"] if (step := _guidellm(one)) is not None]
        ends = [at for one in document["benchmarks"] if (at := _number(one, "end_time")) is not None]
        if len(steps) > MOST_STEPS:
            raise ResultError(f"it has {len(steps):,} benchmarks, and at most {MOST_STEPS} are kept with a run")
        if steps and not any(step["completed"] for step in steps):
            raise ResultError(NONE_ANSWERED)
        if steps:
            return Measurement(GUIDELLM, max(ends, default=changed_at), tuple(steps))
    return None


def _bench(document: Mapping[str, Any], changed_at: float) -> Measurement | None:
    """Convert a ``vllm bench serve`` result: latencies in milliseconds; a rate of ``inf`` sends all at once, so the
    measured rate is used.

    None without a rate or a number of answered requests.

    Raises:
        ResultError: no request was answered.
    """
    completed, sent = _number(document, "completed"), _number(document, "num_prompts")
    if completed == 0:
        raise ResultError(NONE_ANSWERED)
    rate = _rate(_number(document, "request_rate"), _number(document, "request_throughput"), completed)
    failed = _number(document, "failed")
    if failed is None and sent is not None:
        failed = sent - (completed or 0.0)
    latencies = [{name: _milliseconds(document, f"{name}_{key}_ms") for name in _PARTS} for key in _BENCH_LATENCIES]
    step = _step(rate, (sent, completed, failed), latencies, _number(document, "output_throughput"))
    if rate is None or completed is None:
        return None
    try:
        at = time.mktime(time.strptime(str(document.get("date")), "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        at = changed_at
    goodput = _number(document, "request_goodput")
    return Measurement(BENCH, at, (step,), goodput=goodput)


def _rate(asked: float | None, measured: float | None, completed: float | None) -> float | None:
    """The requested rate; the measured one if none was requested, or if the tool sent much faster than requested.

    With random arrivals, the rate of N requests deviates by about 1/√N.
    """
    if asked is None or (measured is not None and measured > asked * (1 + 4 / math.sqrt(max(completed or 0.0, 1.0)))):
        return measured
    return asked


_BENCH_LATENCIES = ("ttft", "itl", "e2el")
_PARTS = ("mean", "p50", "p90", "p99")


def _milliseconds(document: Mapping[str, Any], key: str) -> float | None:
    """A latency in seconds; the median is used if the 50th percentile is missing."""
    value = _number(document, key)
    if value is None and key.startswith("p50"):
        value = _number(document, key.replace("p50", "median", 1))
    return None if value is None else value / 1000


def _guidellm(benchmark: object) -> dict[str, Any] | None:
    """Convert a ``guidellm`` benchmark: TTFT and ITL of successful requests in milliseconds, total latency in seconds.

    Its ITL percentiles are those of per-request means, which hide long gaps, so the percentiles of gaps are unknown.
    """
    metrics = benchmark.get("metrics") if isinstance(benchmark, dict) else None
    if not isinstance(metrics, dict):
        return None
    totals = _part(metrics, "request_totals")
    completed, failed, unfinished = (_number(totals, name) or 0.0 for name in ("successful", "errored", "incomplete"))
    strategy = _part(_part(benchmark, "config"), "strategy")
    measured = _number(_successful(metrics, "requests_per_second"), "mean")
    return _step(
        _rate(_number(strategy, "rate"), measured, completed),
        (completed + failed + unfinished, completed, failed),
        [
            _distribution(_successful(metrics, "time_to_first_token_ms"), 1000),
            _distribution(_successful(metrics, "inter_token_latency_ms"), 1000) | dict.fromkeys(_PARTS[1:]),
            _distribution(_successful(metrics, "request_latency"), 1),
        ],
        _number(_successful(metrics, "output_tokens_per_second"), "mean"),
    )


def _part(document: object, name: str) -> Mapping[str, Any]:
    found = document.get(name) if isinstance(document, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _successful(metrics: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return _part(_part(metrics, name), "successful")


def _distribution(found: Mapping[str, Any], per_second: float) -> dict[str, float | None]:
    percentiles = _part(found, "percentiles")
    known = {"mean": _number(found, "mean"), **{name: _number(percentiles, name) for name in _PARTS[1:]}}
    return {name: None if value is None else value / per_second for name, value in known.items()}


def _number(document: object, name: str) -> float | None:
    """A plausible measured number, possibly written as text; None if there is none."""
    value = document.get(name) if isinstance(document, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number <= LARGEST else None


def _step(
    rate: float | None,
    counts: tuple[float | None, float | None, float | None],
    latencies: Sequence[Mapping[str, float | None]],
    tokens_per_second: float | None,
) -> dict[str, Any]:
    """A step in the form of a ramp's: sent, completed and failed; TTFT, ITL and e2e. Unreported fields are null."""
    sent, completed, failed = counts
    ttft, itl, e2e = latencies
    return {
        "rate": rate,
        "sent": _whole(sent),
        "completed": _whole(completed),
        "failed": _whole(failed),
        "ttft_seconds": dict(ttft),
        "itl_seconds": dict(itl),
        "e2e_seconds": dict(e2e),
        "tokens_per_second": tokens_per_second,
        "kv_cache_usage": None,
        "preemptions": None,
        "waiting": None,
        "attained": None,
        "ok": None,
    }


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None else None
