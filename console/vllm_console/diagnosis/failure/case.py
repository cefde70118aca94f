"""Facts in a failed start's log besides the line that shows the failure: flags, version, memory figures. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping

import msgspec

from vllm_console.diagnosis.failure.failure_line import SERVES, FailureLine
from vllm_console.logs.vllm_lines import LogLine
from vllm_launchers.engine_model.gpu_models import find_model
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.attention import Fp8Cache, fp8_cache_support
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.memory_flags import decimal
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.plan.flags import normalize, token_count
from vllm_launchers.python_source import parse_literal
from vllm_launchers.vllm.flags.changes import Flags, FlagValue
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, split_quantization
from vllm_launchers.vllm.modelfacts.known import known_facts
from vllm_launchers.vllm.release_defaults import Release, default_utilization, parse_release

_ARGS = lazy_pattern(r"non-default args: (?P<args>\{.*\})")
_VERSION = lazy_pattern(
    r"vLLM (?:API )?server version (?P<version>\d+\.\d+[\w.+]*)|\bversion (?P<banner>\d+\.\d+\.\d+\S*)$"
)
_LENGTH = lazy_pattern(r"Using max model len (?P<length>\d{1,12})\b")
_ENGINE = lazy_pattern(
    r"Initializing an? (?:V[01] )?LLM engine \(v[^)]{1,60}\) with config: model='(?P<model>[^']{1,500})'"
)
_QUANTIZATION = lazy_pattern(r", quantization=(?!None\b)(?P<method>[\w-]+)")
_MODEL = lazy_pattern(r"'model(?:_tag)?': '(?P<model>[^']{1,500})'")
_BATCHED = lazy_pattern(r"max_num_batched_tokens=(?P<tokens>\d{1,12})\b")
_CHECKPOINT = lazy_pattern(r"Checkpoint size: (?P<gib>\d{1,6}(?:\.\d{1,4})?) GiB")
_KV_TAKEN = lazy_pattern(r"GPU KV cache size: |# (?:GPU|cuda) blocks: ")
_CAPABILITY = lazy_pattern(
    r"has compute capability (?P<dotted>\d{1,2}\.\d)|\(compute capability (?P<named>\d{1,2}\.\d)\)"
    r"|[Cc]urrent (?:compute )? ?capability(?: is|:) (?P<plain>\d{2,3})\b"
)
_GPU_NAME = lazy_pattern(
    r"device_name=(?P<file>NVIDIA_[\w-]{1,60}?)(?:,|\.json)|GPU \d+: (?P<listed>NVIDIA [\w -]{1,60})"
)
_MLA = lazy_pattern(r"\buse_mla=True\b|\bUsing (?:\w+ )?\S*MLA\S* (?:attention )?backend")
"""Where vLLM names the model's attention: when it selects a backend or cannot."""
_EXPERTS = lazy_pattern(r"(?:gate's and up's|down's) weight|expert|moe", re.IGNORECASE)
_NAMED_EXPERTS = lazy_pattern(r"moe|mixtral|-A\d{1,3}(?:\.\d)?B\b", re.IGNORECASE)
_NO_FP8 = "does not have native support for FP8"
_WHOLE_ITEMS = "Forcing --disable_chunked_mm_input"
_WORDS = (" args: ", "version ", "max model len ", "max_num_batched_tokens=", "KV cache size: ", " blocks: ",
          " LLM engine ", "startup complete", "Avg prompt", " HTTP/", "capability", "device_name=", ": NVIDIA ",
          _NO_FP8, _WHOLE_ITEMS, "Checkpoint size: ")  # fmt: skip
"""Every line with a fact contains one of these; nearly all other lines contain none."""

_LONGEST_ARGS = 20_000


class Case(msgspec.Struct, frozen=True):
    """A failure and the facts from which its fixes are derived.

    ``flags`` are the server's flags as far as they are known; ``text`` is the line that shows the failure;
    ``max_model_len`` the effective context length, in tokens, and ``batched_tokens`` the tokens per step, if the log
    has them. ``quantization`` is the method that vLLM found for the weights of ``model``, empty if none or unknown.
    ``gpu`` is the GPU model, empty if unknown. ``kv_taken`` means that the KV cache was already allocated; ``served``
    that the server was up. ``checkpoint_gib`` is the size of the weight files, if the log has it. ``mla`` means that
    the model is known to use multi-head latent attention. ``environment`` holds the server's known variables.
    ``whole_mm_items`` means that vLLM computes each image and video in one step.
    """

    failure: FailureLine
    flags: Flags = msgspec.field(default_factory=dict)
    version: str | None = None
    max_model_len: int | None = None
    batched_tokens: int | None = None
    model: str = ""
    quantization: str = ""
    kv_taken: bool = False
    served: bool = False
    gpu: str = ""
    checkpoint_gib: float | None = None
    mla: bool = False
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    whole_mm_items: bool = False

    @property
    def fp8_cache(self) -> Fp8Cache:
        """Whether this vLLM supports an FP8 KV cache on the GPU it ran on."""
        return fp8_cache_support(self.flags, self.environment, self.release, self.capability, mla=self.mla)

    @property
    def text(self) -> str:
        """The line that shows the failure."""
        return self.failure.text

    def number(self, name: str, default: float) -> float:
        """A flag's value as a number, or the default if it is not set or not a number."""
        value = decimal(self.flags.get(name))
        return default if value is None else value

    @property
    def capability(self) -> float | None:
        """The compute capability of the GPU, None if unknown."""
        model = find_model(self.gpu) if self.gpu else None
        found = re.search(r"\d{1,2}\.\d$", model.compute_capability if model is not None else self.gpu)
        return float(found[0]) if found else None

    @property
    def shape(self) -> GpuShape | None:
        """The GPU it ran on, if its model is known."""
        model = find_model(self.gpu) if self.gpu else None
        return GpuShape(model.name, model.memory_gib) if model is not None else None

    @property
    def release(self) -> Release | None:
        """The release of vLLM, or None if the log does not show it."""
        return parse_release(self.version or "")

    @property
    def facts(self) -> ModelFacts | None:
        """What is known about a model of this name."""
        return known_facts(self.model.rstrip("/"))

    @property
    def quantized(self) -> bool:
        """Whether its weights are already quantized, according to the log, a flag or the model's name."""
        return "quantization" in self.flags or self.stored_quantized

    @property
    def stored_quantized(self) -> bool:
        """Whether its weight files are quantized, according to the log or the model's name."""
        known = self.facts
        named = known.quantization if known is not None else split_quantization(self.model.rstrip("/"))[1]
        return bool(self.quantization) or named is not None

    @property
    def has_experts(self) -> bool:
        """Whether it is known to be a mixture of experts, from the failure's line or the model's name."""
        known = self.facts
        named = _EXPERTS.search(self.text) or _NAMED_EXPERTS.search(self.model)
        return bool(named if known is None else known.experts)

    @property
    def utilization(self) -> float:
        """The requested fraction of the GPU's memory."""
        return self.number("gpu-memory-utilization", default_utilization(self.release))


def case_of(  # noqa: C901 (one branch per kind of fact)
    failure: FailureLine,
    lines: Iterable[LogLine],
    flags: Flags | None = None,
    gpu: str = "",
    *,
    mla: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Case:
    """Read the case from the log's lines. ``flags`` override those in the log."""
    given: dict[str, FlagValue] = {}
    version: str | None = None
    length: int | None = None
    tokens: int | None = None
    model = method = ""
    taken = served = False
    checkpoint: float | None = None
    latent, whole_items = mla, False
    for line in lines:
        if line.number > failure.number:
            break
        latent = latent or _MLA.search(line.message) is not None
        if not any(word in line.message for word in _WORDS):
            continue
        if found := _ARGS.search(line.message):
            given = _read_args(found["args"])
            length = tokens = None
            taken = served = whole_items = False
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
        elif _WHOLE_ITEMS in line.message:
            whole_items = True
        elif found := _CHECKPOINT.search(line.message):
            checkpoint = float(found["gib"])
        gpu = gpu or _gpu_named(line.message)
    known = flags if flags is not None else given
    length = length or token_count(known.get("max-model-len"))
    tokens = token_count(known.get("max-num-batched-tokens")) or tokens
    return Case(
        failure, known, version, length, tokens, model, method, taken, served, gpu, checkpoint, latent,
        environment or {}, whole_items,
    )  # fmt: skip


def _gpu_named(message: str) -> str:
    """The GPU as named in a line, or ``compute capability 8.6`` if the line has only that; otherwise empty."""
    if found := _GPU_NAME.search(message):
        return (found["file"] or found["listed"]).replace("_", " ").replace("-", " ").strip()
    if found := _CAPABILITY.search(message):
        plain = found["plain"]
        return f"compute capability {found['dotted'] or found['named'] or f'{plain[:-1]}.{plain[-1]}'}"
    return "compute capability 8.0" if _NO_FP8 in message else ""  # Ampere or older; in any case before 8.9


def _read_args(text: str) -> dict[str, FlagValue]:
    """Parse the arguments that vLLM prints as a Python dictionary; values that are not plain values are left out."""
    if len(text) > _LONGEST_ARGS:
        return {}
    try:
        read = parse_literal(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return _read_pairs(text)
    return _plain_values(read) if isinstance(read, dict) else {}


def _read_pairs(text: str) -> dict[str, FlagValue]:
    """The numbers, strings and booleans, for arguments with an object that cannot be parsed."""
    read: dict[object, object] = {}
    for name, value in re.findall(r"'(\w+)': (-?\d+(?:\.\d+)?|'[^']*'|True|False)(?=[,}])", text):
        with contextlib.suppress(ValueError, SyntaxError):  # 007, '\x', more digits than Python reads
            read[name] = parse_literal(value)
    return _plain_values(read)


def _is_json(value: object) -> bool:
    """Whether it consists of JSON types; a Python dictionary may also hold sets, bytes or keys of other types."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def _plain_values(read: Mapping[object, object]) -> dict[str, FlagValue]:
    values: dict[str, FlagValue] = {}
    for name, value in read.items():
        given = json.dumps(value) if isinstance(value, dict) and _is_json(value) else value
        if isinstance(name, str) and isinstance(given, bool | int | float | str):
            try:
                values[normalize(name)] = given
            except FlagError:
                continue
    return values
