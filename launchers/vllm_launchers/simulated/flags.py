"""The command line of ``vllm serve``: its simulated part, with vLLM's own error messages and exit codes."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from vllm_launchers.simulated.settings import SIMULATED_VERSION
from vllm_launchers.vllm.flags.changes import UNITS, human_int
from vllm_launchers.vllm.model_folder import RANKS
from vllm_launchers.vllm.release_defaults import default_utilization

DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
"""The KV cache types that are modeled: two bytes or one per element."""
QUANTIZATIONS = (
    "awq", "auto_awq", "fp8", "fbgemm_fp8", "modelopt", "modelopt_fp4", "auto_gptq", "gptq", "gptq_marlin",
    "awq_marlin", "compressed-tensors", "experts_int8", "quark", "moe_wna16", "torchao", "inc", "mxfp4", "online",
    "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8",
)  # fmt: skip


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Flags of ``vllm serve`` 0.33 that are accepted and ignored, by how many values they take.


IGNORED_SWITCHES = _split(
    """
allow-credentials allow-deprecated-quantization async-scheduling cohere-is-reasoning-model cudagraph-metrics
data-parallel-external-lb data-parallel-hybrid-lb dcp-q-replicate disable-cascade-attn disable-chunked-mm-input
disable-custom-all-reduce disable-fastapi-docs disable-hybrid-kv-cache-manager disable-nccl-for-dp-synchronization
disable-sliding-window enable-auto-tool-choice enable-batch-sharded-sampling enable-cumem-allocator enable-dbo
enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel enable-fault-tolerance
enable-flash-late-interaction enable-flashinfer-autotune enable-force-include-usage enable-hc-sp
enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-logging-iteration-details
enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint enable-mfu-metrics
enable-mixed-moe-lora-format enable-mm-embeds enable-moe-shared-loras enable-nccl-comm-suspend enable-offline-docs
enable-per-request-metrics enable-prompt-embeds enable-request-id-headers enable-return-routed-experts
enable-scale-out enable-shm-tensor-arena enable-ssl-refresh enable-tokenizer-info-endpoint
enable-tower-connector-lora enable-trace-replay exclude-tools-when-tool-choice-none fail-on-environ-validation
fully-sharded-loras interleave-mm-strings jit-monitor-verbose kv-cache-metrics kv-sharing-fast-prefill
language-model-only log-error-stack long-prefill-token-threshold-adaptive mm-device-do-normalize mm-encoder-only
monokernel numa-bind ray-workers-use-nsight return-sampling-mask return-tokens-as-token-ids
scheduler-reserve-full-isl skip-mm-profiling skip-tokenizer-init sleep-mode-offload-cudagraph specialize-active-lora
swa-bounded-replay tokens-only trust-remote-code trust-request-chat-template trust-request-mm-kwargs use-fp64-gumbel
use-replayssm use-tqdm-on-load
"""
)
"""``--flag`` and ``--no-flag``."""

IGNORED_PRESENT = _split(
    """
aggregate-engine-logging data-parallel-multi-port-external-lb grpc headless
"""
)
"""``--flag`` alone."""

IGNORED_VALUES = _split(
    """
additional-config all2all-backend allowed-headers allowed-local-media-path allowed-methods allowed-origins
anthropic-disabled-thinking-effort api-server-count attention-backend attention-config aux-output-config
chat-template chat-template-content-format code-revision cohere-format compilation-config config config-format
convert cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-gb custom-histogram-buckets
data-parallel-address data-parallel-backend data-parallel-rank data-parallel-rpc-port data-parallel-size-local
data-parallel-start-rank data-parallel-supervisor-port dbo-decode-token-threshold dbo-prefill-token-threshold
dcp-comm-backend dcp-kv-cache-interleave-size decode-context-parallel-size default-chat-template-kwargs
default-mm-loras device-ids diffusion-config distributed-executor-backend distributed-timeout-seconds download-dir
dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dp-sync-interval
ec-manager-config ec-transfer-config elastic-ep-max-dp-size engram-config eplb-config expert-placement-strategy
fault-tolerance-config fingerprint-mode fingerprint-value gdn-prefill-backend generation-config grpc-port
h11-max-header-count h11-max-incomplete-event-size hf-config-path hf-overrides hf-token io-processor-plugin
ir-op-priority jit-monitor-mode kda-decode-backend kda-prefill-backend kernel-config kv-cache-metrics-sample
kv-events-config kv-offloading-backend kv-offloading-size kv-transfer-config limit-mm-per-prompt linear-backend
load-format log-config-file log-level logging-config logprobs-mode long-prefill-token-threshold lora-dtype
mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype
mamba-ssu-algorithm master-addr master-port max-cpu-loras max-cudagraph-capture-size max-log-len
max-lora-cls-labels max-num-active-seqs max-num-queued-reqs max-num-queued-tokens
max-num-scheduled-tokens max-parallel-loading-workers media-io-kwargs mm-encoder-attn-backend mm-encoder-attn-dtype
mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-tp-mode
mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type mm-processor-device
mm-processor-kwargs mm-shm-cache-max-object-size-mb mm-tensor-ipc model-class-overrides model-impl
model-loader-extra-config moe-backend nnodes node-rank offload-backend offload-group-size offload-num-in-group
offload-prefetch-step optimization-level otlp-traces-endpoint override-generation-config
per-request-spec-decode-metrics performance-mode pooler-config prefill-context-parallel-size
prefill-schedule-interval prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit profiler-config
pt-load-map-location quantization-config reasoning-config reasoning-effort-map reasoning-parser
reasoning-parser-plugin renderer-num-workers replayssm-buffer-len response-role revision root-path runner
safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduler-cls
scheduling-policy seed show-hidden-metrics-for-version sleep-mode-backend sparse-indexer-topk-backend spec-method
spec-model spec-tokens speculative-config sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs
ssl-ciphers stream-interval structured-outputs-config tokenizer tokenizer-mode tokenizer-revision
tool-call-parser tool-parser-plugin tool-server tool-strict-level ubatch-size uds video-pruning-method
video-pruning-rate watchdog-config watermark watermark-config weight-transfer-config worker-cls worker-extension-cls
"""
)
"""``--flag VALUE``."""

IGNORED_LISTS = _split(
    """
allowed-media-domains collect-detailed-traces cpu-offload-params cudagraph-capture-sizes ignore-patterns
kv-cache-dtype-skip-layers logits-processors lora-modules lora-target-modules middleware numa-bind-cpus
numa-bind-nodes offload-params sleep-preserve-parameter-names
"""
)
"""``--flag VALUE…``."""

IGNORED_SHORT: dict[str, str] = {
    "api-server-count": "-asc",
    "attention-config": "-ac",
    "compilation-config": "-cc",
    "data-parallel-address": "-dpa",
    "data-parallel-backend": "-dpb",
    "data-parallel-external-lb": "-dpe",
    "data-parallel-hybrid-lb": "-dph",
    "data-parallel-multi-port-external-lb": "-dpm",
    "data-parallel-rank": "-dpn",
    "data-parallel-rpc-port": "-dpp",
    "data-parallel-size-local": "-dpl",
    "data-parallel-start-rank": "-dpr",
    "decode-context-parallel-size": "-dcp",
    "diffusion-config": "-dc",
    "enable-expert-parallel": "-ep",
    "nnodes": "-n",
    "node-rank": "-r",
    "prefill-context-parallel-size": "-pcp",
    "speculative-config": "-sc",
}
"""Their alternative spellings."""

_MAIN_USAGE = "vllm [-h] [-v]\n            {serve}\n            ..."
_SERVE_USAGE = "vllm serve [model_tag] [options]"


def parse_human_int(text: str) -> int:
    """Read ``4096``, ``4k`` (4000), ``4K`` (4096) or ``25.6k`` (25600). Raises ArgumentTypeError."""
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
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse calls it so
        namespace: argparse.Namespace,
        values: Any,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        namespace.ignored.append(option_string or self.option_strings[0])


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after the program's name. Ends the process with code 2 where vLLM does.

    The namespace also has ``ignored``, the flags given that are not modeled, and ``given``, the destinations of all
    modeled flags that differ from their defaults.
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
    """Normalize long flags to ``-``, as vLLM's parser does: ``--max_num_seqs=4`` becomes ``--max-num-seqs=4``.

    What follows a dot is a key of a JSON flag, and stays.
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
    """One JSON object for each flag whose keys are set by themselves, as vLLM's parser makes it.

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
    """A key's value: JSON, a number such as ``80g``, or text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        number = human_int(text)
        return text if number is None else number


def _add(document: dict[str, Any], more: dict[str, Any]) -> None:
    """Objects are merged and lists joined; of all else the last one counts."""
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
    for name in IGNORED_SWITCHES:
        _note(parser, name, nargs=0)
        parser.add_argument(f"--no-{name}", action=_Noted, nargs=0, dest="unused")
    for name in IGNORED_PRESENT:
        _note(parser, name, nargs=0)
    for name in IGNORED_VALUES:
        _note(parser, name)
    for name in IGNORED_LISTS:
        _note(parser, name, nargs="+")


def _note(parser: argparse.ArgumentParser, name: str, nargs: int | str | None = None) -> None:
    spellings = [f"--{name}"]
    if name in IGNORED_SHORT:
        spellings.append(IGNORED_SHORT[name])
    parser.add_argument(*spellings, action=_Noted, nargs=nargs, dest="unused", default=argparse.SUPPRESS)
