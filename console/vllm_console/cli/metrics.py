"""``vllm-console metrics SOURCE``: one look at a /metrics page, whatever vLLM version it comes from."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from vllm_console.cli.common import Document, add_json, print_json
from vllm_console.fleet.api import FleetError
from vllm_console.telemetry.model import Sample
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("source", help="a URL such as http://127.0.0.1:8000, or a file that holds a /metrics page")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="how long to wait for a URL")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read and print it."""
    from vllm_console.telemetry.document import metrics_document

    document = metrics_document(read_sample(args.source, args.timeout))
    if args.json:
        print_json(document)
        return 0
    for key, value in document.items():
        if key != "engines":
            print(f"{key:<28} {_show(value)}")
    print(f"{'engines':<28} {', '.join(map(plain, document['engines'])) or '–'}")
    return 0


def read_sample(source: str, timeout: float) -> Sample:
    """A sample from a URL or a file.

    Raises:
        FleetError: it cannot be had, or holds no vLLM metrics.
    """
    from vllm_console.telemetry.parse import NotMetricsError, parse
    from vllm_console.telemetry.scrape import BODY_LIMIT, ScrapeError, scrape_once

    try:
        if "://" in source:
            return scrape_once(source, time.time(), timeout)
        with Path(source).open("rb") as file:
            body = file.read(BODY_LIMIT + 1)
        if len(body) > BODY_LIMIT:
            raise FleetError(f"{source}: larger than {BODY_LIMIT >> 20} MiB; that is no /metrics page")
        return parse(body.decode("utf-8"), time.time())
    except ScrapeError as error:
        raise FleetError(str(error)) from error
    except (NotMetricsError, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, NotMetricsError) else "it is not text"
        raise FleetError(f"{source}: holds no /metrics page: {reason}") from error
    except OSError as error:
        raise FleetError(f"{source}: cannot be read: {error.strerror}") from error


def _show(value: Document | float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict):
        parts = (f"{key} {number:.4g}" for key, number in value.items() if number is not None)
        return "  ".join(parts)
    return f"{value:g}"
