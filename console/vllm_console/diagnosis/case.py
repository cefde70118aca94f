"""What a failed start's log tells of it besides the line that shows why: flags, version, figures of memory. Pure."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm_console.diagnosis.failure_line import SERVES, FailureLine
from vllm_console.telemetry.loglines import LogLine
from vllm_launchers.machine.modelfacts.names import split_name
from vllm_launchers.plan.budget.settings import decimal
from vllm_launchers.plan.errors import FlagError
from vllm_launchers.plan.flags import normalise, token_count
from vllm_launchers.plan.model import Flags
from vllm_launchers.presets.model import FlagValue

DEFAULT_UTILIZATION = 0.92
"""``gpu-memory-utilization`` from vLLM 0.20 on; 0.9 before."""

_ARGS = re.compile(r"non-default args: (?P<args>\{.*\})")
_VERSION = re.compile(
    r"vLLM (?:API )?server version (?P<version>\d+\.\d+[\w.+]*)|\bversion (?P<banner>\d+\.\d+\.\d+\S*)$"
)
_LENGTH = re.compile(r"Using max model len (?P<length>\d{1,12})\b")
_ENGINE = re.compile(
    r"Initializing an? (?:V[01] )?LLM engine \(v[^)]{1,60}\) with config: model='(?P<model>[^']{1,500})'"
)
_QUANTIZATION = re.compile(r", quantization=(?!None\b)(?P<method>[\w-]+)")
_MODEL = re.compile(r"'model(?:_tag)?': '(?P<model>[^']{1,500})'")
_BATCHED = re.compile(r"max_num_batched_tokens=(?P<tokens>\d{1,12})\b")
_KV_TAKEN = re.compile(r"GPU KV cache size: |# (?:GPU|cuda) blocks: ")
_WORDS = (" args: ", "version ", "max model len ", "max_num_batched_tokens=", "KV cache size: ", " blocks: ",
          " LLM engine ", "startup complete", "Avg prompt", " HTTP/")  # fmt: skip
"""One of these stands in every line that tells something: nearly all do not."""

_LONGEST_ARGS = 20_000


@dataclass(frozen=True, slots=True)
class Case:
    """A failure with what its remedies are worked out from.

    ``flags`` are those that the server was started with, as far as they are known; ``text`` is the line that shows the
    failure; ``max_model_len`` the context that was in force, in tokens, and ``batched_tokens`` the tokens of one step,
    where the log tells. ``quantization`` is the method that vLLM found for the weights of ``model``, empty where it
    found none or the log does not tell. ``kv_taken``: the KV cache had its memory already; ``served``: it was up.
    """

    failure: FailureLine
    flags: Flags = field(default_factory=dict)
    version: str | None = None
    max_model_len: int | None = None
    batched_tokens: int | None = None
    model: str = ""
    quantization: str = ""
    kv_taken: bool = False
    served: bool = False

    @property
    def text(self) -> str:
        """The line that shows the failure."""
        return self.failure.text

    def number(self, name: str, default: float) -> float:
        """A flag's value as a number, or the default where it is not set or is none."""
        value = decimal(self.flags.get(name))
        return default if value is None else value

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version, or None when the log does not say."""
        found = re.match(r"(\d+)\.(\d+)", self.version or "")
        return (int(found[1]), int(found[2])) if found else None

    @property
    def quantized(self) -> bool:
        """Whether its weights are quantized already: by the log, a flag or the model's name."""
        named = split_name(self.model.rstrip("/"))[1] is not None
        return bool(self.quantization) or "quantization" in self.flags or named

    @property
    def utilization(self) -> float:
        """The share of the GPU's memory that was asked for."""
        old = self.release is not None and self.release < (0, 20)
        return self.number("gpu-memory-utilization", 0.9 if old else DEFAULT_UTILIZATION)


def case_of(failure: FailureLine, lines: Iterable[LogLine], flags: Flags | None = None) -> Case:
    """Read the case from the log's lines; ``flags`` take the place of what the log says of them."""
    told: dict[str, FlagValue] = {}
    version: str | None = None
    length: int | None = None
    tokens: int | None = None
    model = method = ""
    taken = served = False
    for line in lines:
        if line.number > failure.number:
            break
        if not any(word in line.message for word in _WORDS):
            continue
        if found := _ARGS.search(line.message):
            told = _read_args(found["args"])
            length = tokens = None
            taken = served = False
            named = _MODEL.search(found["args"])
            model, method = named["model"] if named else "", ""
        elif found := _ENGINE.search(line.message):
            model, quantized = found["model"], _QUANTIZATION.search(line.message, found.end())
            method = quantized["method"] if quantized else ""
        elif found := _VERSION.search(line.message):
            version = found["version"] or found["banner"]
        elif found := _LENGTH.search(line.message):
            length = int(found["length"])
        elif found := _BATCHED.search(line.message):
            tokens = int(found["tokens"])
        elif _KV_TAKEN.search(line.message):
            taken = True
        elif SERVES.search(line.message):
            served = True
    known = flags if flags is not None else told
    length = length or token_count(known.get("max-model-len"))
    tokens = token_count(known.get("max-num-batched-tokens")) or tokens
    return Case(failure, known, version, length, tokens, model, method, taken, served)


def _read_args(text: str) -> dict[str, FlagValue]:
    """vLLM prints what it was given as a Python dictionary; values that are no plain values are left out."""
    if len(text) > _LONGEST_ARGS:
        return {}
    try:
        read = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return _read_pairs(text)
    return _plain_values(read) if isinstance(read, dict) else {}


def _read_pairs(text: str) -> dict[str, FlagValue]:
    """The numbers, words and truths among them, where one value is an object that cannot be read back."""
    read: dict[object, object] = {}
    for name, value in re.findall(r"'(\w+)': (-?\d+(?:\.\d+)?|'[^']*'|True|False)(?=[,}])", text):
        with contextlib.suppress(ValueError, SyntaxError):  # 007, '\x', more digits than Python reads
            read[name] = ast.literal_eval(value)
    return _plain_values(read)


def _plain_values(read: Mapping[object, object]) -> dict[str, FlagValue]:
    values: dict[str, FlagValue] = {}
    for name, value in read.items():
        if isinstance(name, str) and isinstance(value, bool | int | float | str):
            try:
                values[normalise(name)] = value
            except FlagError:
                continue
    return values
