"""Valid names and values of flags in a preset. One table for the loader and for the JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.presets.model import MAX_TOKENS
from vllm_launchers.secrets import SECRET_FLAGS, holds_secret, is_secret_flag

FLAG_NAME_PATTERN = r"^[a-z][a-z0-9]*(-[a-z0-9]+)*(\.[A-Za-z0-9_.-]+\+?)?$"
"""vLLM's flags are words joined by ``-``; a dotted suffix (``compilation-config.mode``) sets one key of a JSON flag.

A suffix that ends with ``+`` (``compilation-config.custom_ops+``) adds to the key's list."""

ENVIRONMENT_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
_TOKENS = r"[0-9]{1,18}[kKmMgGtT]?|[0-9]{1,18}\.[0-9]{1,18}[kmgt]"
"""A count as vLLM parses it: ``4k`` is 4,000, ``4K`` 4,096 and ``1.5k`` 1,500; there is no ``1.5K``."""

FLAG_NAME = lazy_pattern(FLAG_NAME_PATTERN)
ENVIRONMENT_NAME = lazy_pattern(ENVIRONMENT_NAME_PATTERN)
TOKENS = lazy_pattern(rf"^({_TOKENS})$")
LENGTH = lazy_pattern(rf"^(auto|-1|{_TOKENS})$")
"""For ``max-model-len`` only."""

MANAGED_FLAGS: Mapping[str, str] = {
    "model": "set the model with 'model' in a preset, or with --model on the command line",
    "host": "the address is chosen at launch, with --host, and is 127.0.0.1 by default",
    "port": "the port is chosen at launch, with --port, and is the first free one from 8000 by default",
    "uds": "servers are watched over TCP, so they can't listen on a Unix socket",
}
"""Flags that the program sets itself, and where to choose their values instead."""

SECRET_ON_A_COMMAND_LINE = (
    "every user of this machine can read a key or a password there; "
    "write the flag into a file that only you can read, and name that file with the flag 'config'"
)
"""vLLM also reads flags from a YAML file."""


class FlagRule(msgspec.Struct, frozen=True):
    """The valid values of a known flag. Bounds are inclusive unless ``above`` is set."""

    kind: type[bool] | type[int] | type[float] | type[str]
    description: str
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    also: re.Pattern[str] | None = None
    """Text values that are also valid."""

    @property
    def expected(self) -> str:
        """A description of the expected values."""
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "text"
        noun = "a whole number" if self.kind is int else "a number"
        if self.above is not None:
            noun += f" above {self.above:g}"
        if self.minimum is not None:
            noun += f" of {self.minimum:g} or more"
        if self.maximum is not None:
            noun += f", {self.maximum:g} at most" if self.maximum < 1_000_000 else ""
        if self.also is None:
            return noun
        return f"{noun}, or a length such as {'16k, 16K or auto' if self.also is LENGTH else '16k or 16K'}"

    def allows(self, value: object) -> bool:
        """Whether vLLM can accept the value."""
        if isinstance(value, str):
            return self.kind is str or (self.also is not None and self.also.fullmatch(value) is not None)
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if not isinstance(value, int if self.kind is int else (int, float)):
            return False
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )

    def schema(self) -> dict[str, Any]:
        """The rule as JSON Schema of the flag's value."""
        name = {bool: "boolean", int: "integer", float: "number", str: "string"}[self.kind]
        rule: dict[str, Any] = {"type": name}
        bounds = (("minimum", self.minimum), ("exclusiveMinimum", self.above), ("maximum", self.maximum))
        rule |= {key: int(bound) if bound == int(bound) else bound for key, bound in bounds if bound is not None}
        return {"anyOf": [rule, {"type": "string", "pattern": self.also.pattern}]} if self.also else rule


def _count(description: str) -> FlagRule:
    return FlagRule(int, description, minimum=1, maximum=MAX_TOKENS)


FLAG_RULES: Mapping[str, FlagRule] = {
    "gpu-memory-utilization": FlagRule(
        float, "fraction of the GPU's memory that vLLM uses in total, above 0 and at most 1", above=0, maximum=1
    ),
    "max-model-len": FlagRule(
        int, "maximum length of prompt plus output, in tokens", minimum=1, maximum=MAX_TOKENS, also=LENGTH
    ),
    "max-num-seqs": _count("maximum number of requests that run at the same time"),
    "max-num-batched-tokens": FlagRule(
        int, "maximum number of tokens computed in one step", minimum=1, maximum=MAX_TOKENS, also=TOKENS
    ),
    "enable-prefix-caching": FlagRule(bool, "reuse the KV cache of prompts with a common prefix"),
    "enable-chunked-prefill": FlagRule(bool, "prefill long prompts in chunks between decode steps"),
    "enforce-eager": FlagRule(bool, "no CUDA graphs and no compilation: quicker start, slower tokens"),
    "kv-cache-dtype": FlagRule(str, "number format of the KV cache: auto, fp8, …"),
    "quantization": FlagRule(str, "only if the checkpoint does not specify it"),
    "dtype": FlagRule(str, "number format of weights and activations: auto, bfloat16, …"),
    "tensor-parallel-size": _count("GPUs that share each layer; a divisor of the attention heads"),
    "pipeline-parallel-size": _count("pipeline stages: groups of GPUs that hold consecutive layers"),
    "data-parallel-size": _count("replicas of the model behind one address"),
    "block-size": _count("tokens per block of the KV cache"),
    "num-gpu-blocks-override": _count("blocks of the KV cache, instead of what fits"),
    "seed": FlagRule(int, "seed of the random numbers"),
    "swap-space": FlagRule(float, "GiB of memory for swapped requests (vLLM before 0.18)", minimum=0),
}
"""Flags whose values are checked before a launch. All others are passed on unchanged."""


def refused_flag(name: str) -> str | None:
    """Why a flag of that name is not allowed in a preset or among changes, or None. ``name`` is normalized."""
    if name in SECRET_FLAGS:
        return (
            f"every user of this machine can read it on the command line; export {SECRET_FLAGS[name]} instead, and "
            "the server inherits it"
        )
    return SECRET_ON_A_COMMAND_LINE if is_secret_flag(name) else MANAGED_FLAGS.get(name)


def refused_value(value: object) -> str | None:
    """Why a flag cannot have that value, or None: it contains a key or a password, which is not repeated here."""
    return SECRET_ON_A_COMMAND_LINE if isinstance(value, str) and holds_secret(value) else None
