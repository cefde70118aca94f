"""The flags of ``vllm serve`` 0.33 that the simulation accepts and does nothing with, by how many words they take."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SWITCHES = _words(
    """
allow-credentials allow-deprecated-quantization async-scheduling cohere-is-reasoning-model cudagraph-metrics
data-parallel-external-lb data-parallel-hybrid-lb dcp-q-replicate disable-cascade-attn disable-chunked-mm-input
disable-custom-all-reduce disable-fastapi-docs disable-hybrid-kv-cache-manager disable-nccl-for-dp-synchronization
disable-sliding-window enable-auto-tool-choice enable-batch-sharded-sampling enable-cumem-allocator enable-dbo
enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel enable-fault-tolerance
enable-flash-late-interaction enable-flashinfer-autotune enable-force-include-usage enable-hc-sp
enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-logging-iteration-details enable-lora
enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint enable-mfu-metrics
enable-mixed-moe-lora-format enable-mm-embeds enable-moe-shared-loras enable-nccl-comm-suspend enable-offline-docs
enable-per-request-metrics enable-prompt-embeds enable-request-id-headers enable-return-routed-experts
enable-scale-out enable-shm-tensor-arena enable-sleep-mode enable-ssl-refresh enable-tokenizer-info-endpoint
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

PRESENT = _words(
    """
aggregate-engine-logging data-parallel-multi-port-external-lb grpc headless
"""
)
"""``--flag`` alone."""

VALUES = _words(
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
mamba-ssu-algorithm master-addr master-port max-cpu-loras max-cudagraph-capture-size max-log-len max-logprobs
max-lora-cls-labels max-lora-rank max-loras max-num-active-seqs max-num-queued-reqs max-num-queued-tokens
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

LISTS = _words(
    """
allowed-media-domains collect-detailed-traces cpu-offload-params cudagraph-capture-sizes ignore-patterns
kv-cache-dtype-skip-layers logits-processors lora-modules lora-target-modules middleware numa-bind-cpus
numa-bind-nodes offload-params sleep-preserve-parameter-names
"""
)
"""``--flag VALUE…``."""

SHORT: dict[str, str] = {
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
"""Their second spellings."""
