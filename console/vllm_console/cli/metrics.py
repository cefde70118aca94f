"""``vllm-console metrics SOURCE``: a single scrape of a /metrics page, from any vLLM version."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from vllm_console.cli.options import add_json, timeout_from
from vllm_console.cli.output import Document, print_json
from vllm_console.metrics.quantile import PARTS, Quantile, text_of
from vllm_console.metrics.sample import Sample
from vllm_console.text import UNKNOWN, percent, plain, seconds
from vllm_launchers.addresses import server_url
from vllm_launchers.errors import OperationError
from vllm_launchers.units import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("source", help="a URL such as http://127.0.0.1:8000, or a saved /metrics page")
    parser.add_argument(
        "--timeout", type=timeout_from, default=5.0, metavar="DURATION", help="how long to wait (default 5s)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read and print the page."""
    from vllm_console.metrics.window import metrics_document

    document = metrics_document(read_sample(args.source, args.timeout))
    if args.json:
        print_json(document)
        return 0
    for key, value in document.items():
        if key != "engines":
            print(f"{_title(key):<28} {_show(key, value)}")
    engines = document["engines"]
    print(f"{counted(len(engines), 'engine'):<28} {', '.join(map(plain, engines)) or UNKNOWN}")
    return 0


def read_sample(source: str, timeout: float) -> Sample:
    """A sample from a URL or a file.

    Raises:
        UsageError: it is not a server's URL.
        OperationError: it cannot be read, or has no vLLM metrics.
    """
    from vllm_console.metrics.parse import NotMetricsError, parse_metrics
    from vllm_console.metrics.scrape import BODY_LIMIT, scrape_once

    try:
        if "://" in source:
            return scrape_once(server_url(source).base, time.time(), timeout)
        with Path(source).open("rb") as file:
            body = file.read(BODY_LIMIT + 1)
        if len(body) > BODY_LIMIT:
            raise OperationError(f"{source}: larger than {BODY_LIMIT >> 20} MiB, not a /metrics page")
        return parse_metrics(body.decode("utf-8"), time.time())
    except (NotMetricsError, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, NotMetricsError) else "not text"
        raise OperationError(f"{source}: not a /metrics page: {reason}") from error
    except OSError as error:
        raise OperationError(f"{source}: can't be read: {error.strerror}") from error


def _title(key: str) -> str:
    """A document key for display: ``TTFT``, ``preemptions total``."""
    name = key.removesuffix("_seconds")
    return name.upper() if name in ("ttft", "itl") else name.replace("_", " ").replace("kv ", "KV ")


def _show(key: str, value: Document | float | None) -> str:
    """A value for display: a figure, the responses by kind, or a histogram since the server started."""
    if value is None:
        return UNKNOWN
    if isinstance(value, dict) and key == "responses":
        return ", ".join(f"{number:,} {kind}" for kind, number in value.items() if number is not None)
    if isinstance(value, dict):
        parts = [f"{name} {_quantile(value, name):<7}" for name, _ in PARTS]
        return f"mean {seconds(value['mean']):<7} {' '.join(parts)} of {value['count']:,}"
    return percent(value, 1) if key == "kv_cache_usage" else f"{value:,}"


def _quantile(value: Document, name: str) -> str:
    """A quantile for display; unknown without observations."""
    low, high = value[f"{name}_above"], value[f"{name}_below"]
    if value[name] is None and low is None and high is None:
        return UNKNOWN
    return text_of(Quantile(value[name] or 0.0, low or 0.0, high))
