"""The words by which ``plan`` and ``start`` are told what to launch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vllm_console.fleet.api import UsageError


def add_request(parser: argparse.ArgumentParser, *, gpus: str) -> None:
    """Preset, model, engine, port, environment and GPUs; ``gpus`` says what is taken when they are not named."""
    parser.add_argument("preset", help="see 'vllm-console presets'")
    parser.add_argument("--model", help="another model than the preset's: a hub id or a folder")
    parser.add_argument("--engine", choices=["auto", "vllm", "simulated"], default="auto")
    parser.add_argument("--vllm", metavar="PATH", help="this vLLM: its executable, or its virtual environment")
    parser.add_argument("--port", type=int, help="port to bind (default: the first free one from 8000)")
    parser.add_argument("--gpus", metavar="auto|0,1|none", help=f"the best free set, or indices (default: {gpus})")
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="environment of the server")


def pairs_from(words: Sequence[str]) -> dict[str, str]:
    """What ``--env`` sets.

    Raises:
        UsageError: a word is no ``NAME=VALUE``.
    """
    return dict(_pair(word) for word in words)


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise UsageError(f"--env {word}: expected NAME=VALUE")
    return name, value


def gpus_from(text: str | None) -> tuple[int, ...]:
    """The indices that ``--gpus`` names; none for ``auto`` and ``none``.

    Raises:
        UsageError: it names anything else.
    """
    if not text or text in ("auto", "none"):
        return ()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise UsageError(f"--gpus {text}: expected auto, none, or indices with commas such as 0,1") from error
