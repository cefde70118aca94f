"""``vllm-console bench NAME``: run ``vllm bench serve`` from a server's own vLLM with its preset's traffic."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.cli.load import MOST_SECONDS
from vllm_console.cli.load_target import Target, add_shape, find_target, shaped
from vllm_console.cli.options import add_json, count_from
from vllm_console.cli.ramp import confirm_load, only_one, rate_from
from vllm_console.cli.runs import keep
from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain
from vllm_launchers.errors import OperationError, RefusedError, UsageError
from vllm_launchers.plan.flags import served_name, token_count
from vllm_launchers.presets.model import Workload

if TYPE_CHECKING:
    from vllm_console.load.client import Lookup

RESULT_OPTIONS = ("--result-dir", "--result-filename", "--append-result")
OUTPUT_LINES = 12
"""Lines of the tool's output to show on failure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Run the 'vllm bench serve' of the server's own vLLM with the preset's mean lengths and prefix sharing, and "
        "keep the result with the run. Words after -- are passed on."
    )
    parser.add_argument("server", metavar="name", help="one of your servers, on real vLLM")
    parser.add_argument("--rate", type=rate_from, metavar="R", help="requests per second (default: all at once)")
    parser.add_argument(
        "--concurrency", type=count_from, metavar="N", help="at most N requests in flight (default: the preset's)"
    )
    parser.add_argument(
        "--requests", type=count_from, default=200, metavar="N", help="number of requests (default 200)"
    )
    add_shape(parser)
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--yes", action="store_true", help="proceed even if other clients use the server: their requests will wait"
    )
    add_json(parser)
    parser.add_argument("more", nargs="*", default=[], metavar="-- WORD", help="options passed to 'vllm bench serve'")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and keep its result. A signal that ends this command also ends the tool."""
    from vllm_console.cli.waiting import undone_at_end
    from vllm_console.runs.imports import ResultError, read_result

    target = find_target(args, "", others_allowed=False)
    server = target.server
    if server is None:
        raise RefusedError(
            "bench needs one of your servers: it uses that server's vLLM and keeps the result with its run"
        )
    if server.simulated or server.engine is None:
        raise OperationError(f"{server.name} runs the simulated engine, which has no benchmark; use 'ramp' or 'load'")
    check_words(args.more)
    check_access(target.url, target.lookup)
    confirm_load(args, target)
    with undone_at_end(lambda: None), tempfile.TemporaryDirectory() as folder, only_one(target, args.rate):
        result = Path(folder) / "result.json"
        _run_tool([*_words(args, target, server), *args.more], result, quiet=args.json)
        try:
            found = read_result(result)
        except ResultError as error:
            raise OperationError(
                f"'vllm bench serve' left no result: {str(error).removeprefix(f'{result}: ')}"
            ) from error
    keep(args, target.fleet, server.name, found)
    return 0 if found.steps[0]["completed"] else 1


def check_words(words: Sequence[str]) -> None:
    """Refuse options that redirect the tool's result, because the result is read here and kept with the run.

    Raises:
        UsageError: there is such an option.
    """
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in RESULT_OPTIONS:
            raise UsageError(f"{name} can't be passed on: the result is kept with the run, and --json prints it")


def check_access(url: str, lookup: Lookup | None = None) -> None:
    """Ask the server for its models first, since the tool would report a missing key as failed requests.

    Raises:
        OperationError: it does not respond, or rejects the API key.
    """
    from vllm_console.load import client

    async def ask() -> None:
        access = client.own_access()
        async with client.open_client(url, access, lookup) as http:
            await client.find_served_model(http, None, access)

    asyncio.run(ask())


def lengths(args: argparse.Namespace, workload: Workload, longest: int | None) -> tuple[int, int, int]:
    """The number of tokens of the shared prefix, the rest of the prompt, and the answer: the means of the workload.

    Raises:
        OperationError: the exact lengths requested do not fit.
    """
    from vllm_console.load.shape import fit_lengths, mean_length

    exact = (args.input_tokens or 1) + (args.output_tokens or 1)
    if longest is not None and exact > longest and (args.input_tokens or args.output_tokens):
        raise OperationError(
            f"{exact:,} tokens do not fit: prompt and answer together can have {longest:,} tokens in the server's "
            "context, after what 'vllm bench serve' adds to prompts"
        )
    prompt = args.input_tokens or round(mean_length(workload.input_tokens_p95))
    output = args.output_tokens or round(mean_length(workload.output_tokens_p95))
    prompt, output = fit_lengths(max(1, prompt), max(1, output), longest)
    prefix = min(prompt - 1, round(prompt * workload.prefix_reuse))
    return prefix, prompt - prefix, output


def _words(args: argparse.Namespace, target: Target, server: ServerView) -> list[str]:
    """The command line, with lengths that fit the server's context."""
    served = served_name(server.flags, server.model)
    longest = token_count(server.flags.get("max-model-len"))
    fits = longest - max(16, longest // 16) if longest else None  # its prompts are text, which may have more tokens
    prefix, prompt, output = lengths(args, shaped(args, target.workload), fits)
    command = server.engine.command if server.engine is not None else ()
    words = [*command, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"]
    words += ["--base-url", server.url, "--model", server.model, "--served-model-name", served, "--ignore-eos"]
    words += ["--dataset-name", "random", "--random-input-len", str(prompt), "--random-prefix-len", str(prefix)]
    words += ["--random-output-len", str(output), "--num-prompts", str(args.requests), "--seed", str(args.seed)]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99", "--disable-tqdm"]
    words += ["--request-rate", f"{args.rate:g}"] if args.rate else []
    return [*words, "--max-concurrency", str(args.concurrency or target.workload.concurrency)]


def _run_tool(words: list[str], result: Path, *, quiet: bool) -> None:
    """Run the tool and print its figures, unless ``quiet`` is set.

    Raises:
        OperationError: it cannot be run, or fails.
    """
    key = os.environ.get("VLLM_API_KEY")
    environment = os.environ | ({"OPENAI_API_KEY": key} if key else {})
    words = [*words, "--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
    print(f"{plain(' '.join(words[:3]))} …", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            timeout=MOST_SECONDS,
            check=False,
        )
    except OSError as error:
        raise OperationError(f"{words[0]} can't be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise OperationError("'vllm bench serve' was stopped after a day") from error
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        raise OperationError(f"'vllm bench serve' failed: {plain(reason(lines), 1500)}")
    if not quiet:
        print("\n".join(plain(line) for line in lines if "===" in line or ":  " in line))


def reason(lines: list[str]) -> str:
    """Why the tool failed: the last line if it names an error, otherwise the last lines."""
    if lines and re.search(r"(?:^|\W)(?:error|\w+Error)\b", lines[-1]):
        return lines[-1]
    return " / ".join(lines[-OUTPUT_LINES:])
