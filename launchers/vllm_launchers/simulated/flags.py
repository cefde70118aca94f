"""The command line of ``vllm serve``: as far as simulated, refused in the same words and with the same codes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from vllm_launchers.simulated import ignored_flags
from vllm_launchers.simulated.settings import SIMULATED_VERSION

DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
"""The KV cache types that are modelled: two bytes or one per element."""
QUANTIZATIONS = (
    "awq", "auto_awq", "fp8", "fbgemm_fp8", "modelopt", "modelopt_fp4", "auto_gptq", "gptq", "gptq_marlin",
    "awq_marlin", "compressed-tensors", "experts_int8", "quark", "moe_wna16", "torchao", "inc", "mxfp4", "online",
    "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8",
)  # fmt: skip

_SCALES = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAIN_USAGE = "vllm [-h] [-v]\n            {serve}\n            ..."
_SERVE_USAGE = "vllm serve [model_tag] [options]"


def human_int(text: str) -> int:
    """Read ``4096``, ``4k`` (4000), ``4K`` (4096) or ``25.6k`` (25600). Raises ArgumentTypeError."""
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"invalid human_readable_int value: {text!r}")
    number, suffix = found.groups()
    if "." in number:
        if suffix not in "kmgt" or not suffix:
            raise argparse.ArgumentTypeError(f"Decimals are not allowed with binary suffixes like {suffix or 'none'}.")
        return int(float(number) * _SCALES[suffix])
    return int(number) * _SCALES.get(suffix, 1)


def human_int_or_auto(text: str) -> int:
    """As :func:`human_int`; ``auto`` is -1."""
    return -1 if text == "auto" else human_int(text)


class _Noted(argparse.Action):
    """Takes a flag that is not modelled and notes that it was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse calls it so
        namespace: argparse.Namespace,
        values: Any,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        namespace.ignored.append(option_string or self.option_strings[0])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the words after the program's name. Ends the process with code 2 where vLLM does.

    The namespace also has ``ignored``, the flags given that are not modelled, and ``given``, the destinations of all
    modelled flags that differ from their defaults.
    """
    main = argparse.ArgumentParser(prog="vllm", usage=_MAIN_USAGE)
    main.add_argument("-v", "--version", action="version", version=SIMULATED_VERSION)
    commands = main.add_subparsers(dest="command", metavar="{serve}", required=True)
    serve = commands.add_parser(
        "serve",
        prog="vllm serve",
        usage=_SERVE_USAGE,
        description="A simulated engine that speaks as vLLM does. No GPU is used.",
    )
    _add_modelled(serve)
    _add_ignored(serve)
    serve.set_defaults(ignored=[])
    args = main.parse_args(normalize(argv))
    args.model = args.model_tag or args.model
    defaults = vars(serve.parse_args([]))
    given = {key: value for key, value in vars(args).items() if key in defaults and value != defaults[key]}
    args.given = {key: value for key, value in given.items() if key != "ignored"}
    return args


def normalize(argv: Sequence[str]) -> list[str]:
    """Spell long flags with ``-``, as vLLM's parser does: ``--max_num_seqs=4`` becomes ``--max-num-seqs=4``."""
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        words.append(word)
    return words


def _add_modelled(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    switch = argparse.BooleanOptionalAction
    add("model_tag", nargs="?", default=None)
    add("--model", default="Qwen/Qwen3-0.6B")
    add("--host", default=None)
    add("--port", type=int, default=8000)
    add("--api-key", nargs="+", default=None)
    add("--served-model-name", nargs="+", default=None)
    add("--ssl-certfile", default=None)
    add("--ssl-keyfile", default=None)
    add("--uvicorn-log-level", choices=("critical", "debug", "error", "info", "trace", "warning"), default="info")
    add("--disable-uvicorn-access-log", action=switch, default=False)
    add("--disable-access-log-for-endpoints", default=None)
    add("--enable-server-load-tracking", action=switch, default=False)
    add("--enable-prompt-tokens-details", action=switch, default=False)
    add("--enable-log-requests", action=switch, default=False)
    add("--disable-log-stats", action="store_true")
    add("--shutdown-timeout", type=int, default=0)
    add("--dtype", choices=DTYPES, default="auto")
    add("--quantization", "-q", choices=QUANTIZATIONS, default=None)
    add("--enforce-eager", action=switch, default=False)
    add("--max-model-len", type=human_int_or_auto, default=None)
    add("--gpu-memory-utilization", "--device-memory-utilization", type=float, default=0.92)
    add("--kv-cache-memory-bytes", type=human_int, default=None)
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    add("--block-size", type=int, default=None)
    add("--num-gpu-blocks-override", type=int, default=None)
    add("--enable-prefix-caching", action=switch, default=None)
    add("--enable-chunked-prefill", action=switch, default=None)
    add("--max-num-seqs", type=human_int, default=None)
    add("--max-num-batched-tokens", type=human_int, default=None)
    add("--tensor-parallel-size", "-tp", type=int, default=1)
    add("--pipeline-parallel-size", "-pp", type=int, default=1)
    add("--data-parallel-size", "-dp", type=int, default=1)


def _add_ignored(parser: argparse.ArgumentParser) -> None:
    for name in ignored_flags.SWITCHES:
        _note(parser, name, nargs=0)
        parser.add_argument(f"--no-{name}", action=_Noted, nargs=0, dest="unused")
    for name in ignored_flags.PRESENT:
        _note(parser, name, nargs=0)
    for name in ignored_flags.VALUES:
        _note(parser, name)
    for name in ignored_flags.LISTS:
        _note(parser, name, nargs="+")


def _note(parser: argparse.ArgumentParser, name: str, nargs: int | str | None = None) -> None:
    spellings = [f"--{name}"]
    if name in ignored_flags.SHORT:
        spellings.append(ignored_flags.SHORT[name])
    parser.add_argument(*spellings, action=_Noted, nargs=nargs, dest="unused", default=argparse.SUPPRESS)
