"""The command line of ``vllm serve``: the simulated part, with vLLM's own error messages and exit codes."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from vllm_launchers.simulated.settings import REPORTED_VERSION
from vllm_launchers.vllm.flags.changes import UNITS, human_int
from vllm_launchers.vllm.flags.flag_table import ValueKind
from vllm_launchers.vllm.flags.releases import release_table
from vllm_launchers.vllm.model_folder import RANKS
from vllm_launchers.vllm.release_defaults import SIMULATED_VERSION, default_utilization

DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
"""The modeled KV cache types, with two bytes or one byte per element."""
QUANTIZATIONS = (
    "awq", "auto_awq", "fp8", "fbgemm_fp8", "modelopt", "modelopt_fp4", "auto_gptq", "gptq", "gptq_marlin",
    "awq_marlin", "compressed-tensors", "experts_int8", "quark", "moe_wna16", "torchao", "inc", "mxfp4", "online",
    "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8",
)  # fmt: skip


_MAIN_USAGE = "vllm [-h] [-v]\n            {serve}\n            ..."
_SERVE_USAGE = "vllm serve [model_tag] [options]"


def parse_human_int(text: str) -> int:
    """Parse ``4096``, ``4k`` (4000), ``4K`` (4096) or ``25.6k`` (25600). Raises ArgumentTypeError."""
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"invalid human_readable_int value: {text!r}")
    number, suffix = found.groups()
    if "." in number:
        if suffix not in "kmgt" or not suffix:
            raise argparse.ArgumentTypeError(f"Decimals are not allowed with binary suffixes like {suffix or 'none'}.")
        return int(float(number) * UNITS[suffix])
    return int(number) * UNITS.get(suffix, 1)


def human_int_or_auto(text: str) -> int:
    """Like :func:`parse_human_int`; ``auto`` is -1."""
    return -1 if text == "auto" else parse_human_int(text)


class _Noted(argparse.Action):
    """Accepts a flag that is not modeled and records that it was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse passes it
        namespace: argparse.Namespace,
        values: Any,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        namespace.ignored.append(option_string or self.option_strings[0])


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after the program's name. Exits with code 2 where vLLM does.

    The namespace also has ``ignored`` (given flags that are not modeled) and ``given`` (destinations and values of
    modeled flags that differ from their defaults).
    """
    main = argparse.ArgumentParser(prog="vllm", usage=_MAIN_USAGE)
    main.add_argument("-v", "--version", action="version", version=REPORTED_VERSION)
    commands = main.add_subparsers(dest="command", metavar="{serve}", required=True)
    serve = commands.add_parser(
        "serve",
        prog="vllm serve",
        usage=_SERVE_USAGE,
        description="A simulated engine that behaves like vLLM. No GPU is used.",
    )
    _add_modeled(serve)
    _add_ignored(serve)
    serve.set_defaults(ignored=[])
    args = main.parse_args(with_objects(normalize(argv)))
    args.model = args.model_tag or args.model
    defaults = vars(serve.parse_args([]))
    given = {key: value for key, value in vars(args).items() if key in defaults and value != defaults[key]}
    args.given = {key: value for key, value in given.items() if key != "ignored"}
    return args


def normalize(argv: Sequence[str]) -> list[str]:
    """Normalize long flags to hyphens, as vLLM's parser does: ``--max_num_seqs=4`` becomes ``--max-num-seqs=4``.

    Anything after a dot is a key of a JSON flag and stays unchanged.
    """
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flag, dot, key = name.partition(".")
            word = flag.replace("_", "-") + dot + key + equals + value
        words.append(word)
    return words


def with_objects(words: Sequence[str]) -> list[str]:
    """Combine flags that set single keys of a JSON flag into one JSON object, as vLLM's parser does.

    ``--compilation-config.mode 3 --compilation-config.pass_config.fuse_norm_quant=true`` becomes
    ``--compilation-config '{"mode": 3, "pass_config": {"fuse_norm_quant": true}}'``; a key with ``+`` adds to a list.
    """
    left: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, given = word.partition("=")
        text = given if equals else None
        if not name.startswith("-") or "." not in name or (text is None and (text := next(rest, None)) is None):
            left.append(word)
            continue
        flag, *path = name.removesuffix("+").split(".")
        value: Any = text.split(",") if name.endswith("+") else _read(text)
        for key in reversed(path):
            value = {key: value}
        _add(objects.setdefault(flag, {}), value)
    return [*left, *(word for flag, document in objects.items() for word in (flag, json.dumps(document)))]


def _read(text: str) -> Any:
    """A key's value: JSON, a number such as ``80g``, or a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        number = human_int(text)
        return text if number is None else number


def _add(document: dict[str, Any], more: dict[str, Any]) -> None:
    """Merge objects and join lists; for anything else the last value wins."""
    for key, value in more.items():
        old = document.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _add(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            old += value
        else:
            document[key] = value


def _add_modeled(parser: argparse.ArgumentParser) -> None:
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
    add("--max-logprobs", type=int, default=20)
    add("--shutdown-timeout", type=int, default=0)
    add("--dtype", choices=DTYPES, default="auto")
    add("--quantization", "-q", choices=QUANTIZATIONS, default=None)
    add("--enforce-eager", action=switch, default=False)
    add("--max-model-len", type=human_int_or_auto, default=None)
    add("--gpu-memory-utilization", "--device-memory-utilization", type=float, default=default_utilization())
    add("--kv-cache-memory-bytes", type=parse_human_int, default=None)
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    add("--block-size", type=int, default=None)
    add("--num-gpu-blocks-override", type=int, default=None)
    add("--enable-prefix-caching", action=switch, default=None)
    add("--enable-chunked-prefill", action=switch, default=None)
    add("--enable-sleep-mode", action=switch, default=False)
    add("--enable-lora", action=switch, default=False)
    add("--max-loras", type=int, default=1)
    add("--max-lora-rank", type=int, choices=RANKS, default=16)
    add("--max-num-seqs", type=parse_human_int, default=None)
    add("--max-num-batched-tokens", type=parse_human_int, default=None)
    add("--tensor-parallel-size", "-tp", type=int, default=1)
    add("--pipeline-parallel-size", "-pp", type=int, default=1)
    add("--data-parallel-size", "-dp", type=int, default=1)


def _add_ignored(parser: argparse.ArgumentParser) -> None:
    modeled = vars(parser.parse_args([]))
    table = release_table(SIMULATED_VERSION)
    assert table is not None
    for name, flag in table.flags.items():
        if name.replace("-", "_") in modeled:
            continue
        nargs = "+" if flag.many else 0 if flag.kind is ValueKind.BOOL else "?" if flag.bare else None
        spellings = [f"--{name}", *flag.aliases, *([f"--no-{name}"] if flag.negatable else [])]
        parser.add_argument(*spellings, action=_Noted, nargs=nargs, dest="unused", default=argparse.SUPPRESS)
