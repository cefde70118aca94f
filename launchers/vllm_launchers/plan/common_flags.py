"""The most common flags of ``vllm serve`` (0.33), so that an editor can explain, complete, and check them.

Other flags are allowed, too: this table only decides whether a value is valid for a flag that it contains. Defaults are
vLLM's; "by model" and the like where vLLM derives them.
"""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from enum import StrEnum

import msgspec

from vllm_launchers.plan.findings import FlagError
from vllm_launchers.plan.flags import normalise, normalise_setting, parse_value, quoted, token_count
from vllm_launchers.presets.rules import FLAG_NAME, refused_flag
from vllm_launchers.vllm.flags.changes import FlagValue
from vllm_launchers.vllm.release_defaults import default_utilization


class FlagKind(StrEnum):
    """The type of a flag's value."""

    BOOL = "on or off"
    INT = "whole number"
    LENGTH = "number of tokens"
    BYTES = "number of bytes"
    FLOAT = "number"
    SHARE = "share between 0 and 1"
    TEXT = "text"
    JSON = "JSON object"


class CommonFlag(msgspec.Struct, frozen=True):
    """One flag. ``choices`` are all values that vLLM accepts, unless ``open_choices`` is set."""

    name: str
    kind: FlagKind
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    open_choices: bool = False
    minimum: float | None = None


def _f(
    name: str, kind: FlagKind, default: str, meaning: str, choices: str = "", *, low: float | None = None
) -> CommonFlag:
    """A row of the table. Choices that end in ``…`` are incomplete."""
    words = choices.split()
    return CommonFlag(name, kind, default, meaning, tuple(w for w in words if w != "…"), "…" in words, low)


_B, _I, _L, _Y, _N, _S, _T, _J = FlagKind

COMMON_FLAGS: tuple[CommonFlag, ...] = (
    # Memory and the KV cache
    _f("gpu-memory-utilization", _S, f"{default_utilization()}",
       "Fraction of each GPU's memory that vLLM may use; the rest stays free"),
    _f("max-model-len", _L, "the model's", "Maximum prompt plus output of one request, in tokens; 'auto': what fits",
       low=1),
    _f("kv-cache-dtype", _T, "auto", "Number format of the KV cache; fp8 holds about twice the tokens",
       "auto bfloat16 float16 fp8 fp8_e4m3 fp8_e5m2 fp8_inc fp8_ds_mla nvfp4 …"),
    _f("kv-cache-memory-bytes", _Y, "by utilization", "Size of the KV cache per GPU in bytes, instead of a "
                                                      "fraction", low=1),
    _f("enable-prefix-caching", _B, "by model", "Keep and reuse the KV cache of shared prompt prefixes"),
    _f("prefix-caching-hash-algo", _T, "sha256", "Hash function that identifies prompt blocks in the prefix cache",
       "sha256 sha256_cbor xxhash xxhash_cbor"),
    _f("block-size", _I, "by backend", "Tokens per block of the KV cache", low=1),
    _f("num-gpu-blocks-override", _I, "by memory", "Number of KV cache blocks, regardless of memory; for tests",
       low=1),
    _f("cpu-offload-gb", _N, "0", "GiB of weights per GPU kept in main memory: larger models, much slower", low=0),
    _f("kv-offloading-size", _N, "off", "GiB of main memory for KV blocks evicted from the GPU", low=0),
    _f("disable-sliding-window", _B, "off", "Treat sliding-window attention as full attention"),
    # Scheduling
    _f("max-num-seqs", _I, "256 or 1024", "Maximum number of running requests; more need more KV cache", low=1),
    _f("max-num-batched-tokens", _L, "2048 or 8192", "Maximum tokens per step: higher prefills prompts sooner, "
                                                     "lower keeps ITL even", low=1),
    _f("enable-chunked-prefill", _B, "by model", "Prefill long prompts in chunks so that running requests don't stall"),
    _f("long-prefill-token-threshold", _I, "0", "Prompts longer than this count as long in chunked prefill", low=0),
    _f("scheduling-policy", _T, "fcfs", "Scheduling order: first come, first served, or by request priority",
       "fcfs priority"),
    _f("async-scheduling", _B, "by model", "Schedule the next step while the GPU computes this one"),
    _f("stream-interval", _I, "1", "Send streamed output every N tokens", low=1),
    _f("performance-mode", _T, "balanced", "Tune defaults towards latency or throughput",
       "balanced interactivity throughput"),
    # Model and weights
    _f("dtype", _T, "auto", "Number format of weights and activations", "auto bfloat16 float16 float32 half float"),
    _f("quantization", _T, "the checkpoint's", "Quantization method of the weights; usually read from the checkpoint",
       "awq awq_marlin gptq gptq_marlin fp8 compressed-tensors modelopt modelopt_fp4 mxfp4 mxfp8 torchao quark …"),
    _f("load-format", _T, "auto", "Format in which weights are loaded; 'dummy' uses random ones",
       "auto safetensors hf pt dummy mistral npcache fastsafetensors runai_streamer sharded_state tensorizer …"),
    _f("safetensors-load-strategy", _T, "by file system", "Read weights lazily, eagerly or ahead (network file "
                                                          "systems)",
       "lazy eager prefetch torchao"),
    _f("tokenizer", _T, "the model's", "Another tokenizer: a model id or a folder"),
    _f("tokenizer-mode", _T, "auto", "Tokenizer implementation", "auto hf mistral deepseek_v32 …"),
    _f("revision", _T, "main", "Branch, tag or commit of the model on the hub"),
    _f("trust-remote-code", _B, "off", "Run Python code that comes with the model: only for sources you trust"),
    _f("download-dir", _T, "the hub's cache", "Folder that models are downloaded to"),
    _f("hf-overrides", _J, "{}", "Changes to the model's config.json"),
    _f("config-format", _T, "auto", "Format of the model's config", "auto hf mistral …"),
    _f("model-impl", _T, "auto", "vLLM's own model code or transformers'", "auto vllm transformers terratorch …"),
    _f("runner", _T, "auto", "What the model is used for", "auto generate pooling draft"),
    _f("convert", _T, "auto", "Convert a text model to one for embedding or classification",
       "auto none embed classify"),
    _f("seed", _I, "0", "Random seed"),
    # Several GPUs
    _f("tensor-parallel-size", _I, "1", "GPUs to split each layer over; NVLink is recommended", low=1),
    _f("pipeline-parallel-size", _I, "1", "Pipeline stages: groups of layers on different GPUs", low=1),
    _f("data-parallel-size", _I, "1", "Replicas of the model behind one port", low=1),
    _f("decode-context-parallel-size", _I, "1", "GPUs to split the KV cache of long contexts over", low=1),
    _f("enable-expert-parallel", _B, "off", "Expert parallelism: distribute whole experts over the GPUs"),
    _f("distributed-executor-backend", _T, "by size", "How to run worker processes", "mp ray uni external_launcher …"),
    _f("disable-custom-all-reduce", _B, "off", "Use only NCCL; fixes hangs on GPUs without peer access"),
    _f("api-server-count", _I, "1 or by copies", "HTTP processes in front of the engine", low=1),
    # Execution
    _f("enforce-eager", _B, "off", "No compilation, no CUDA graphs: faster start, slower decoding"),
    _f("optimization-level", _I, "2", "How much to compile: 0 starts fastest, 3 runs fastest", "0 1 2 3"),
    _f("compilation-config", _J, "by level", "Details of compilation and CUDA graphs"),
    _f("max-cudagraph-capture-size", _I, "by max-num-seqs", "Largest batch that gets a CUDA graph", low=1),
    _f("attention-backend", _T, "by GPU", "Attention kernels to use",
       "FLASH_ATTN FLASHINFER TRITON_ATTN FLEX_ATTENTION FLASHMLA CUTLASS_MLA TRITON_MLA ROCM_ATTN CPU_ATTN …"),
    _f("speculative-config", _J, "off", "Speculative decoding: {\"method\": …, \"num_speculative_tokens\": …}"),
    _f("enable-sleep-mode", _B, "off", "Allow the engine to release its GPU memory on request"),
    # API
    _f("served-model-name", _T, "the model's", "Name that clients use for the model"),
    _f("chat-template", _T, "the model's", "Jinja template of the chat format: a file or the text itself"),
    _f("generation-config", _T, "auto", "Where default sampling settings come from: auto, vllm or a folder"),
    _f("override-generation-config", _J, "{}", "Default sampling settings, such as {\"temperature\": 0.2}"),
    _f("enable-auto-tool-choice", _B, "off", "Let the model decide to call tools; needs tool-call-parser"),
    _f("tool-call-parser", _T, "none", "Parser of tool calls in the model's output",
       "hermes llama3_json mistral qwen3_coder qwen3_xml deepseek_v3 openai pythonic …"),
    _f("reasoning-parser", _T, "none", "Parser that separates reasoning from the answer",
       "deepseek_r1 qwen3 openai_gptoss mistral glm45 …"),
    _f("structured-outputs-config", _J, "{}", "Backend and settings of structured outputs (JSON, grammars)"),
    _f("max-logprobs", _I, "20", "Maximum log probabilities per request; -1: no limit", low=-1),
    _f("shutdown-timeout", _I, "0", "Seconds to finish running requests after a stop signal", low=0),
    _f("root-path", _T, "none", "Path under which a proxy serves the API"),
    _f("ssl-keyfile", _T, "none", "TLS: file with the private key"),
    _f("ssl-certfile", _T, "none", "TLS: file with the certificate"),
    # LoRA and images
    _f("enable-lora", _B, "off", "Serve LoRA adapters with the model"),
    _f("max-loras", _I, "1", "Maximum adapters per batch", low=1),
    _f("max-lora-rank", _I, "16", "Maximum rank of an adapter", "1 8 16 32 64 128 256 320 512"),
    _f("lora-modules", _T, "none", "Adapters to load: NAME=PATH"),
    _f("limit-mm-per-prompt", _J, "by model", "Maximum images, videos, … per prompt, such as {\"image\": 2}"),
    _f("mm-processor-cache-gb", _N, "4", "GiB of main memory to cache preprocessed images", low=0),
    # Log and metrics
    _f("disable-log-stats", _B, "off", "Disable metrics: this console would see nothing"),
    _f("enable-log-requests", _B, "off", "Log every request; at debug level, its prompt too"),
    _f("disable-uvicorn-access-log", _B, "off", "Don't log each HTTP request"),
    _f("disable-access-log-for-endpoints", _T, "none", "Paths that are not logged, such as /health,/metrics"),
    _f("uvicorn-log-level", _T, "info", "Log level of the HTTP server", "trace debug info warning error critical"),
    _f("enable-server-load-tracking", _B, "off", "Report the number of running requests at /load"),
    _f("kv-cache-metrics", _B, "off", "Also report how long KV blocks live and stay idle"),
)  # fmt: skip

_BY_NAME = {flag.name: flag for flag in COMMON_FLAGS}
_TRUE, _FALSE = ("true", "on", "yes"), ("false", "off", "no")


def common_flag(name: str) -> CommonFlag | None:
    """The table's entry for a flag, or None."""
    return _BY_NAME.get(name)


def flag_name(text: str) -> str:
    """Normalize a flag's name: ``--Max_Num_Seqs`` → ``max-num-seqs``, ``-tp`` → ``tensor-parallel-size``.

    Raises:
        FlagError: it is not a valid name, or has an option of its own.
    """
    name = normalise(text.strip().lower() if "." not in text else text)
    if refusal := refused_flag(name):
        raise FlagError(f"{name} cannot be set here: {refusal}")
    return name


def parse_set(word: str) -> tuple[str, FlagValue]:
    """Read ``flag=value`` as given to ``--set``.

    Raises:
        FlagError: it has another form, or the flag cannot be set this way.
    """
    name, equals, text = word.partition("=")
    if not equals or not text.strip():
        hint = " (to drop a flag of the preset: --unset FLAG)" if equals else ""
        raise FlagError(f"--set {quoted(word)}: expected FLAG=VALUE, such as {_example(name.strip())}{hint}")
    return normalise_setting(name, parse_value(text.strip(), name=normalise(name)))


_EXAMPLES = {
    "max-num-seqs": "128",
    "max-num-batched-tokens": "8192",
    "max-model-len": "8192",
    "gpu-memory-utilization": "0.9",
    "tensor-parallel-size": "2",
}


def _example(name: str) -> str:
    """An example of how to set this flag (``max-num-seqs=128``), or another one if the name is invalid."""
    plain = name.lstrip("-")
    if not FLAG_NAME.fullmatch(plain):
        return "max-num-seqs=128"
    flag = _BY_NAME.get(normalise(plain))
    if flag is not None and flag.kind is FlagKind.BOOL:
        return f"{plain}=true"
    value = _EXAMPLES.get(normalise(plain), flag.choices[0] if flag is not None and flag.choices else "…")
    return f"{plain}={value}"


def name_warning(name: str) -> str:
    """A warning if a flag is not a common one, with the closest match; else empty."""
    if name.partition(".")[0] in _BY_NAME:
        return ""
    near = get_close_matches(name, _BY_NAME, 1, 0.75)
    if near:
        return f"{name} is unknown here; did you mean {near[0]}?"
    return f"{name} is unknown here; vLLM will reject it unless it knows it"


def parse_flag_value(name: str, text: str) -> FlagValue:
    """Parse text as a value of the flag's type; for an unknown flag, as the most likely type.

    Raises:
        FlagError: the value has the wrong type, is out of range, or is not one of the choices.
    """
    flag, text = _BY_NAME.get(name), text.strip()
    if flag is None:
        return _guess(name, text)
    if not text:
        raise FlagError(f"{name} needs a value: {flag.kind.value}")
    if flag.choices and not flag.open_choices and text not in flag.choices:
        near = get_close_matches(text, flag.choices, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(flag.choices)}"
        raise FlagError(f"{name} cannot be '{text}': {hint}")
    value = _convert(flag, text)
    number = token_count(value) if isinstance(value, str) else value
    if flag.minimum is not None and number is not None and number < flag.minimum:
        raise FlagError(f"{name} must be at least {flag.minimum:g}, not {text}")
    return value


def _convert(flag: CommonFlag, text: str) -> FlagValue:  # noqa: C901 (one branch per type)
    match flag.kind:
        case FlagKind.BOOL:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
        case FlagKind.INT:
            if re.fullmatch(r"-?\d{1,18}", text):
                return int(text)
        case FlagKind.LENGTH | FlagKind.BYTES:
            if re.fullmatch(r"[0-9]{1,18}", text):
                return int(text)
            if token_count(text) is not None or (flag.name == "max-model-len" and text in ("auto", "-1")):
                return text
        case FlagKind.FLOAT | FlagKind.SHARE:
            return _number(flag, text)
        case FlagKind.JSON:
            return _json(flag, text)
        case FlagKind.TEXT:
            return text
    example = {
        FlagKind.BOOL: "on or off",
        FlagKind.LENGTH: "a number of tokens such as 8192 or 8K",
        FlagKind.BYTES: "a number of bytes such as 4000000000 or 4G",
    }
    raise FlagError(f"{flag.name} must be {example.get(flag.kind, 'a ' + flag.kind.value)}, not '{text}'")


def _number(flag: CommonFlag, text: str) -> float:
    if not re.fullmatch(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d{1,2})?", text):
        raise FlagError(f"{flag.name} must be a {flag.kind.value}, not '{text}'")
    value = float(text)
    if flag.kind is FlagKind.SHARE and not 0 < value <= 1:
        raise FlagError(f"{flag.name} must be above 0 and at most 1, not {text}")
    return value


def _json(flag: CommonFlag, text: str) -> str:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FlagError(f"{flag.name} must be a JSON object: {error}") from None
    if not isinstance(document, dict):
        raise FlagError(f"{flag.name} must be a JSON object such as {{\"key\": 1}}, not '{text}'")
    return text


def _guess(name: str, text: str) -> FlagValue:
    if text.lower() in ("", *_TRUE):
        return True
    return False if text.lower() in _FALSE else parse_value(text, name=name)
