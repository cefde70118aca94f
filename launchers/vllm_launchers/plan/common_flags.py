"""What the most common flags of ``vllm serve`` mean, in our words, and flags as users type them.

An editor lists these flags first. Their types and valid values are in the flag table of a vLLM.
"""

from __future__ import annotations

import msgspec

from vllm_launchers.plan.findings import FlagError
from vllm_launchers.plan.flags import normalize, normalize_setting, parse_value, quoted
from vllm_launchers.presets.rules import FLAG_NAME, refused_flag
from vllm_launchers.vllm.flags.changes import FlagValue
from vllm_launchers.vllm.flags.flag_table import ValueKind
from vllm_launchers.vllm.flags.releases import assumed_table


class CommonFlag(msgspec.Struct, frozen=True):
    """One flag. ``derived`` says how vLLM derives its default. ``words`` are some values, where no table has them."""

    name: str
    meaning: str
    derived: str = ""
    words: tuple[str, ...] = ()


_f = CommonFlag

COMMON_FLAGS: tuple[CommonFlag, ...] = (
    # Memory and the KV cache
    _f("gpu-memory-utilization", "Fraction of each GPU's memory that vLLM may use; the rest stays free"),
    _f("max-model-len", "Maximum prompt plus output of one request, in tokens; 'auto': what fits", "the model's"),
    _f("kv-cache-dtype", "Number format of the KV cache; fp8 holds about twice the tokens"),
    _f("kv-cache-memory-bytes", "Size of the KV cache per GPU in bytes, instead of a fraction", "by utilization"),
    _f("enable-prefix-caching", "Keep and reuse the KV cache of shared prompt prefixes", "by model"),
    _f("prefix-caching-hash-algo", "Hash function that identifies prompt blocks in the prefix cache"),
    _f("block-size", "Tokens per block of the KV cache", "by backend"),
    _f("num-gpu-blocks-override", "Number of KV cache blocks, regardless of memory; for tests", "by memory"),
    _f("cpu-offload-gb", "GiB of weights per GPU kept in main memory: larger models, much slower"),
    _f("kv-offloading-size", "GiB of main memory for KV blocks evicted from the GPU", "off"),
    _f("disable-sliding-window", "Treat sliding-window attention as full attention"),
    # Scheduling
    _f("max-num-seqs", "Maximum number of running requests; more need more KV cache", "256 or 1024"),
    _f("max-num-batched-tokens", "Maximum tokens per step: higher prefills prompts sooner, lower keeps ITL even",
       "2048 or 8192"),
    _f("enable-chunked-prefill", "Prefill long prompts in chunks so that running requests don't stall", "by model"),
    _f("long-prefill-token-threshold", "Prompts longer than this count as long in chunked prefill"),
    _f("scheduling-policy", "Scheduling order: first come, first served, or by request priority"),
    _f("async-scheduling", "Schedule the next step while the GPU computes this one", "by model"),
    _f("stream-interval", "Send streamed output every N tokens"),
    _f("performance-mode", "Tune defaults towards latency or throughput"),
    # Model and weights
    _f("dtype", "Number format of weights and activations"),
    _f("quantization", "Quantization method of the weights; usually read from the checkpoint", "the checkpoint's"),
    _f("load-format", "Format in which weights are loaded; 'dummy' uses random ones"),
    _f("safetensors-load-strategy", "Read weights lazily, eagerly or ahead (network file systems)", "by file system"),
    _f("tokenizer", "Another tokenizer: a model id or a folder", "the model's"),
    _f("tokenizer-mode", "Tokenizer implementation"),
    _f("revision", "Branch, tag or commit of the model on the hub", "main"),
    _f("trust-remote-code", "Run Python code that comes with the model: only for sources you trust"),
    _f("download-dir", "Folder that models are downloaded to", "the hub's cache"),
    _f("hf-overrides", "Changes to the model's config.json"),
    _f("config-format", "Format of the model's config"),
    _f("model-impl", "vLLM's own model code or transformers'"),
    _f("runner", "What the model is used for"),
    _f("convert", "Convert a text model to one for embedding or classification"),
    _f("seed", "Random seed"),
    # Several GPUs
    _f("tensor-parallel-size", "GPUs to split each layer over; NVLink is recommended"),
    _f("pipeline-parallel-size", "Pipeline stages: groups of layers on different GPUs"),
    _f("data-parallel-size", "Replicas of the model behind one port"),
    _f("decode-context-parallel-size", "GPUs to split the KV cache of long contexts over"),
    _f("enable-expert-parallel", "Expert parallelism: distribute whole experts over the GPUs"),
    _f("distributed-executor-backend", "How to run worker processes", "by size"),
    _f("disable-custom-all-reduce", "Use only NCCL; fixes hangs on GPUs without peer access"),
    _f("api-server-count", "HTTP processes in front of the engine", "1 or by copies"),
    # Execution
    _f("enforce-eager", "No compilation, no CUDA graphs: faster start, slower decoding"),
    _f("optimization-level", "How much to compile: 0 starts fastest, 3 runs fastest"),
    _f("compilation-config", "Details of compilation and CUDA graphs", "by level"),
    _f("max-cudagraph-capture-size", "Largest batch that gets a CUDA graph", "by max-num-seqs"),
    _f("attention-backend", "Attention kernels to use", "by GPU"),
    _f("speculative-config", "Speculative decoding: {\"method\": …, \"num_speculative_tokens\": …}", "off"),
    _f("enable-sleep-mode", "Allow the engine to release its GPU memory on request"),
    # API
    _f("served-model-name", "Name that clients use for the model", "the model's"),
    _f("chat-template", "Jinja template of the chat format: a file or the text itself", "the model's"),
    _f("generation-config", "Where default sampling settings come from: auto, vllm or a folder"),
    _f("override-generation-config", "Default sampling settings, such as {\"temperature\": 0.2}"),
    _f("enable-auto-tool-choice", "Let the model decide to call tools; needs tool-call-parser"),
    _f("tool-call-parser", "Parser of tool calls in the model's output",
       "none", ("hermes", "llama3_json", "mistral", "qwen3_coder", "qwen3_xml", "deepseek_v3", "openai", "pythonic")),
    _f("reasoning-parser", "Parser that separates reasoning from the answer",
       "none", ("deepseek_r1", "qwen3", "openai_gptoss", "mistral", "glm45")),
    _f("structured-outputs-config", "Backend and settings of structured outputs (JSON, grammars)", "{}"),
    _f("max-logprobs", "Maximum log probabilities per request; -1: no limit"),
    _f("shutdown-timeout", "Seconds to finish running requests after a stop signal"),
    _f("root-path", "Path under which a proxy serves the API", "none"),
    _f("ssl-keyfile", "TLS: file with the private key", "none"),
    _f("ssl-certfile", "TLS: file with the certificate", "none"),
    # LoRA and images
    _f("enable-lora", "Serve LoRA adapters with the model", "off"),
    _f("max-loras", "Maximum adapters per batch"),
    _f("max-lora-rank", "Maximum rank of an adapter"),
    _f("lora-modules", "Adapters to load: NAME=PATH", "none"),
    _f("limit-mm-per-prompt", "Maximum images, videos, … per prompt, such as {\"image\": 2}"),
    _f("mm-processor-cache-gb", "GiB of main memory to cache preprocessed images"),
    # Log and metrics
    _f("disable-log-stats", "Disable metrics: this console would see nothing"),
    _f("enable-log-requests", "Log every request; at debug level, its prompt too"),
    _f("disable-uvicorn-access-log", "Don't log each HTTP request"),
    _f("disable-access-log-for-endpoints", "Paths that are not logged, such as /health,/metrics", "none"),
    _f("uvicorn-log-level", "Log level of the HTTP server"),
    _f("enable-server-load-tracking", "Report the number of running requests at /load"),
    _f("kv-cache-metrics", "Also report how long KV blocks live and stay idle"),
)  # fmt: skip

_BY_NAME = {flag.name: flag for flag in COMMON_FLAGS}


def common_flag(name: str) -> CommonFlag | None:
    """The table's entry for a flag, or None."""
    return _BY_NAME.get(name)


def flag_name(text: str) -> str:
    """Normalize a flag's name: ``--Max_Num_Seqs`` → ``max-num-seqs``, ``-tp`` → ``tensor-parallel-size``.

    Raises:
        FlagError: it is not a valid name, or has an option of its own.
    """
    name = normalize(text.strip().lower() if "." not in text else text)
    if refusal := refused_flag(name):
        raise FlagError(f"{name} can't be set here: {refusal}")
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
    return normalize_setting(name, parse_value(text.strip(), name=normalize(name)))


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
    spec = assumed_table().get(normalize(plain))
    if spec is not None and spec.kind is ValueKind.BOOL:
        return f"{plain}=true"
    words = (*spec.choices, *spec.words) if spec is not None else ()
    return f"{plain}={_EXAMPLES.get(normalize(plain), next(iter(words), '…'))}"
