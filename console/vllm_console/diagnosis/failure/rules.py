"""How failures appear in a log: rules that map a line, or the functions of a traceback, to a cause. Pure."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from vllm_console.diagnosis.finding import Cause
from vllm_launchers.patterns import lazy_pattern


class Topic(StrEnum):
    """The exact problem, for causes that cover failures with different fixes."""

    NONE = ""
    LIBRARY_SYMBOL = "library symbol"
    RENDEZVOUS = "rendezvous"
    NODE_MISSING = "node missing"
    NODE_ADDRESS = "node address"
    MASTER_PORT = "master port"
    NOT_READY_IN_TIME = "not ready in time"
    PEER_GONE = "peer gone"
    PEER_UNREACHABLE = "peer unreachable"
    ATTENTION_BACKEND = "attention backend"
    BLOCK_SIZE = "block size"
    QUANTIZATION_CONFIG = "quantization config"
    NO_CHAT_TEMPLATE = "no chat template"
    NO_TOOL_PARSER = "no tool parser"
    KERNEL_CRASH = "kernel crash"
    NCCL_WARNING = "NCCL warning"
    MAIN_MEMORY = "main memory"
    DAMAGED_WEIGHTS = "damaged weights"
    ADAPTER = "adapter"
    OTHER_WEIGHTS = "other weights"
    UNQUANTIZED_WEIGHTS = "unquantized weights"
    MODEL_FILE = "model file"
    LISTEN_ADDRESS = "listen address"
    LISTEN_PORT = "listen port"
    SOCKET_FOLDER = "socket folder"
    CERTIFICATE = "certificate"
    NAMED_FILE = "named file"
    MIDDLEWARE = "middleware"
    ARCHITECTURE = "architecture"
    ADAPTER_LIST = "adapter list"
    RAY_MISSING = "Ray missing"
    RAY_CLUSTER = "Ray cluster"
    RAY_GPUS = "Ray GPUs"
    RAYLET_GONE = "raylet gone"
    CONFLICT = "conflict"


class FailureVerdict(msgspec.Struct, frozen=True):
    """What a line shows: the ``cause``; ``explanation`` is one sentence for users, or empty.

    ``confidence`` is from 0 to 1: how certainly the text alone implies this cause. ``also`` holds causes with similar
    lines.
    """

    cause: Cause
    explanation: str
    confidence: float = 0.95
    also: tuple[Cause, ...] = ()
    topic: Topic = Topic.NONE


class FailureRule(FailureVerdict, frozen=True, kw_only=True):
    """The verdict for lines that match ``pattern``."""

    pattern: re.Pattern[str]


_ENDED_OUTSIDE = "Ended by SIGTERM or SIGINT from outside, not by a failure."
_DAMAGED = "A weights file is damaged or incomplete, or is only a pointer of Git LFS."


def _rule(
    pattern: str, cause: Cause, explanation: str, confidence: float = 0.95, *also: Cause, topic: Topic = Topic.NONE
) -> FailureRule:
    return FailureRule(cause, explanation, confidence, also, topic, pattern=re.compile(pattern, re.IGNORECASE))


OUT_OF_MEMORY = lazy_pattern(
    r"(?:CUDA|HIP|XPU|Triton Error \[CUDA\]:)(?: (?:driver )?error:)? out of memory|OutOfMemoryError"
    r"|out of memory occurred when|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Cuda failure (?:\d+ )?'out of memory'",
    re.IGNORECASE,
)
"""The GPU's memory ran out; the traceback shows where."""

WEIGHTS_TOO_LARGE = FailureVerdict(Cause.WEIGHTS_DO_NOT_FIT, "The model's weights do not fit into the GPU's memory.")
GRAPHS_TOO_LARGE = FailureVerdict(Cause.OOM_GRAPH_CAPTURE, "The GPU ran out of memory during CUDA graph capture.")
OUT_OF_MEMORY_ELSEWHERE = FailureVerdict(Cause.OOM_RUNTIME, "The GPU ran out of memory while running the model.")
OUT_OF_MEMORY_INSIDE = FailureVerdict(
    Cause.OOM_RUNTIME,
    "The GPU ran out of memory while running the model; this part of the log does not show at which step.",
    0.7,
    (Cause.OOM_GRAPH_CAPTURE,),
)
OUT_OF_MEMORY_AT_ONCE = FailureVerdict(
    Cause.OOM_RUNTIME,
    "The GPU had no free memory for this process: another process holds it.",
    0.6,
    (Cause.FREE_MEMORY_BELOW_UTILIZATION,),
)

OUT_OF_MEMORY_UNPLACED = FailureVerdict(
    Cause.OOM_RUNTIME,
    "The GPU ran out of memory; this part of the log does not show at which step.",
    0.6,
    (Cause.WEIGHTS_DO_NOT_FIT, Cause.OOM_GRAPH_CAPTURE),
)

OUT_OF_MEMORY_PLACES = (
    (
        lazy_pattern(
            r", in (?:_?capture_model|_?capture_(?:cuda_?)?graphs?|_capture_cudagraphs|capture_full_graph"
            r"|capture_(?:end|begin)|_warmup_and_capture|profile_cudagraph_memory)$"
            r"|torch/cuda/graphs\.py\", line \d+, in (?!replay)|^\s*with (?:torch\.cuda\.graph|graph_capture)\("
            r"|\bself\.model_runner\.capture_model\("
        ),
        GRAPHS_TOO_LARGE,
    ),
    (
        lazy_pattern(
            r", in (?:load_model|load_weights|create_weights|_?initialize_model|process_weights_after_loading"
            r"|\w*weight_loader(?:_v\d)?|\w*weights_iterator)$"
            r"|model_executor/(?:models|layers)/\S+\.py\", line \d+, in (?:__init__|make_layers|<lambda>|get_layer)$"
        ),
        WEIGHTS_TOO_LARGE,
    ),
    (lazy_pattern(r", in (?:init_device|set_device)$"), OUT_OF_MEMORY_AT_ONCE),
    (
        lazy_pattern(
            r", in (?:profile_run|determine_available_memory|determine_num_available_blocks|execute_model"
            r"|sample_tokens|_preprocess|_prepare_inputs|initialize_kv_cache\w*|_allocate_kv_cache\w*"
            r"|compile_or_warm_up_model|kernel_warmup)$"
        ),
        OUT_OF_MEMORY_ELSEWHERE,
    ),
)
"""Lines of a traceback, and what running out of memory there means. The first match counts."""

MODEL_RUNS = lazy_pattern(r", in (?:forward|_dummy_run|compute_logits|apply)$")
"""The model ran, in one of several steps; the rest of the log may show which."""

OUT_OF_MEMORY_STAGES = (
    (lazy_pattern(r"Graph capturing finished|init engine \(profile", re.IGNORECASE), OUT_OF_MEMORY_ELSEWHERE),
    (
        lazy_pattern(r"Capturing (?:CUDA ?graphs?|the model for CUDA graphs|cudagraphs)", re.IGNORECASE),
        GRAPHS_TOO_LARGE,
    ),
    (
        lazy_pattern(r"Loading (?:model )?weights took|Model loading took|model weights take|Memory profiling takes"),
        OUT_OF_MEMORY_ELSEWHERE,
    ),
    (lazy_pattern(r"Starting to load model|Loading (?:safetensors|pt) checkpoint shards"), WEIGHTS_TOO_LARGE),
)
"""The same, if the traceback does not show it, by the last of these lines before it."""

TOKENIZER_PLACES = lazy_pattern(
    r"(?:cached_)?get_(?:cached_)?tokenizer|init_tokenizer\w*|cached_tokenizer_from_config"
    r"|load_chat_template|resolve_chat_template|_?compile_jinja_template"
)
TOKENIZER_PLACE = FailureVerdict(Cause.TOKENIZER, "The tokenizer or chat template could not be loaded.", 0.7)
"""For unspecific exceptions that pass through one of these functions."""

_OTHER_WEIGHTS = "The weights files and config.json do not belong together: the weights have other shapes."
_MODEL_FILE = "A JSON file of the model is empty or damaged."

PLACES: tuple[tuple[re.Pattern[str], re.Pattern[str], FailureVerdict], ...] = (
    (
        lazy_pattern(r"create_server_socket"),
        lazy_pattern(r"Cannot assign requested address"),
        FailureVerdict(
            Cause.INVALID_FLAG_VALUE, "This machine does not have the address in --host.", topic=Topic.LISTEN_ADDRESS
        ),
    ),
    (
        lazy_pattern(r"create_server_socket"),
        lazy_pattern(r"gaierror"),
        FailureVerdict(
            Cause.INVALID_FLAG_VALUE, "The name in --host does not resolve to an address.", topic=Topic.LISTEN_ADDRESS
        ),
    ),
    (
        lazy_pattern(r"create_server_socket"),
        lazy_pattern(r"PermissionError"),
        FailureVerdict(
            Cause.INVALID_FLAG_VALUE,
            "The server may not listen on this port: ports below 1024 need a privilege.",
            topic=Topic.LISTEN_PORT,
        ),
    ),
    (
        lazy_pattern(r"create_server_socket"),
        lazy_pattern(r"port must be 0-65535"),
        FailureVerdict(Cause.INVALID_FLAG_VALUE, "--port is a number up to 65535.", topic=Topic.LISTEN_PORT),
    ),
    (
        lazy_pattern(r"load_config_file|_pull_args_from_config"),
        lazy_pattern(r"FileNotFoundError|PermissionError|IsADirectoryError"),
        FailureVerdict(
            Cause.INVALID_FLAG_VALUE, "The file in --config does not exist or can't be read.", topic=Topic.NAMED_FILE
        ),
    ),
    (
        lazy_pattern(r"init_entrypoints_middleware"),
        lazy_pattern(r"ModuleNotFoundError|AttributeError|ImportError"),
        FailureVerdict(
            Cause.INVALID_FLAG_VALUE, "The module in --middleware can't be imported by vLLM.", topic=Topic.MIDDLEWARE
        ),
    ),
    (
        lazy_pattern(r"get_rope|_get_rope\w*"),
        lazy_pattern(r"KeyError: '\w+'|Unknown RoPE scaling type"),
        FailureVerdict(
            Cause.OTHER,
            "The RoPE parameters of config.json or --hf-overrides are incomplete or unknown.",
            0.85,
            topic=Topic.MODEL_FILE,
        ),
    ),
    (
        lazy_pattern(r"create_server_unix_socket"),
        lazy_pattern(r"FileNotFoundError|PermissionError|NotADirectoryError|AF_UNIX path too long"),
        FailureVerdict(
            Cause.INVALID_FLAG_VALUE, "The socket in --uds can't be created at that path.", topic=Topic.SOCKET_FOLDER
        ),
    ),
    (
        lazy_pattern(r"create_ssl_context|load_cert_chain|load_verify_locations"),
        lazy_pattern(r"FileNotFoundError"),
        FailureVerdict(
            Cause.INVALID_FLAG_VALUE,
            "A file in --ssl-keyfile, --ssl-certfile or --ssl-ca-certs does not exist.",
            topic=Topic.CERTIFICATE,
        ),
    ),
    (
        lazy_pattern(r"create_ssl_context|load_cert_chain|load_verify_locations"),
        lazy_pattern(r"SSLError|PermissionError"),
        FailureVerdict(
            Cause.INVALID_FLAG_VALUE,
            "The TLS key or certificate can't be read: not PEM, encrypted, or not of the same pair.",
            topic=Topic.CERTIFICATE,
        ),
    ),
    (
        lazy_pattern(r"\w*weight_loader(?:_v\d)?|load_\w*weights?|_load_(?:module|param)"),
        lazy_pattern(
            r"AssertionError(?:: (?:Attempted|Tried) to load weights? .*)?$|The size of tensor a \(\d+\) must match"
            r"|exceeds dimension size \(\d+\)|shape '.*' is invalid for input of size"
        ),
        FailureVerdict(Cause.OTHER, _OTHER_WEIGHTS, 0.85, topic=Topic.OTHER_WEIGHTS),
    ),
    (
        lazy_pattern(r"parse_safetensors_file_metadata"),
        lazy_pattern(r"struct\.error|UnicodeDecodeError|JSONDecodeError"),
        FailureVerdict(Cause.OTHER, _DAMAGED, 0.85, topic=Topic.DAMAGED_WEIGHTS),
    ),
    (
        lazy_pattern(r"filter_duplicate_safetensors_files|get_safetensors_index\w*|_?load_weights_index"),
        lazy_pattern(r"JSONDecodeError|UnicodeDecodeError|KeyError: 'weight_map'"),
        FailureVerdict(
            Cause.OTHER,
            "The index of the weights files (.index.json) is empty or damaged.",
            0.85,
            topic=Topic.DAMAGED_WEIGHTS,
        ),
    ),
)
"""Functions in which an exception with such a line means this. The first match counts."""

NOT_THE_TOKENIZER = lazy_pattern(r"Import|Module|Connection|Timeout|Permission|HTTP|FileNotFound", re.IGNORECASE)
"""Exceptions that do not implicate the tokenizer itself."""

CONFIG_PLACES = lazy_pattern(
    r"create_(?:engine|model|\w+)_config\w*|validate_parsed_serve_args|from_cli_args|from_engine_args|__post_init__"
    r"|_verify_\w+|verify_\w+|_get_and_verify_\w+"
)
"""Functions in which vLLM validates its input."""

REFUSED = "vLLM does not accept this flag value."
RAYLET_ENDED = "Ray's own process on a node (the raylet) ended, and with it every worker there."

RULES: tuple[FailureRule, ...] = (
    # flags
    _rule(r"\berror: unrecognized arguments", Cause.UNKNOWN_FLAG, "This vLLM does not know the flag."),
    _rule(
        r"\b(?:Async)?EngineArgs(?:\.__init__\(\))? got an unexpected keyword argument",
        Cause.UNKNOWN_FLAG,
        "This vLLM does not know the flag.",
        0.8,
    ),
    _rule(
        r"\berror: argument|\berror: the following arguments|\berror: ambiguous option|\berror: expected",
        Cause.INVALID_FLAG_VALUE,
        REFUSED,
    ),
    _rule(
        r"max_model_len \(\d+\) is greater than the derived max_model_len",
        Cause.INVALID_FLAG_VALUE,
        "max-model-len exceeds the model's context length.",
    ),
    _rule(
        r"Unknown quantization method|does not match the quantization method specified in",
        Cause.INVALID_FLAG_VALUE,
        "vLLM does not accept this quantization value for this model.",
        0.9,
    ),
    _rule(
        r"(?:block_size|max_tokens_per_mm_item) \(\d+\) (?:must be <=|is larger than) max_num_batched_tokens"
        r"|max_num_seqs \(\d+\) exceeds available Mamba cache|long_prefill_token_threshold \(\d+\) cannot be greater"
        r"|must be divisible by dcp_size|data_parallel_size_local \(\d+\) must be <="
        r"|async scheduling is (?:currently )?(?:only|not) supported|Chunked prefill is required for mamba"
        r"|Value ?Error[:,] (?:Currently, )?async scheduling is not (?:yet )?compatible"
        r"|speculative decoding is not supported with async scheduling"
        r"|`fp8` quantization method no longer supports online"
        r"|LoRA rank \d+ is greater than max_lora_rank"
        r"|(?:Call to add_lora method failed|^RuntimeError): LoRA is not enabled"
        r"|Number of experts in the model must be greater than 0"
        r"|Pipeline parallelism is not supported for this model"
        r"|Non-MoE models do not support external data parallel mode"
        r"|num_speculative_tokens must be provided|`num_speculative_tokens` was not provided"
        r"|num_speculative_tokens was provided but without speculative model"
        r"|num_speculative_tokens:\d+ must be divisible by|Expected num_speculative_tokens to be greater",
        Cause.INVALID_FLAG_VALUE,
        "vLLM does not accept these values together, or with this model.",
        0.9,
        topic=Topic.CONFLICT,
    ),
    _rule(
        r"\berror: Invalid JSON format for --lora-modules|\berror: Invalid fields for --lora-modules",
        Cause.INVALID_FLAG_VALUE,
        "An adapter in --lora-modules is given as NAME=PATH or as JSON.",
        topic=Topic.ADAPTER_LIST,
    ),
    _rule(
        r"Could not load logging config\. File does not exist",
        Cause.INVALID_FLAG_VALUE,
        "The file in --log-config-file or VLLM_LOGGING_CONFIG_PATH does not exist.",
        topic=Topic.NAMED_FILE,
    ),
    _rule(
        r"max_num_batched_tokens \(\d+\) (?:is smaller than|must be greater)"
        r"|invalid (?:tool call|reasoning) parser|(?:Reasoning|Tool) parser '[^']*' not found"
        r"|^\w+: Error: --\S+ requires"
        r"|GPU memory utilization must be|Invalid kv_cache_dtype|model type \S+ does not support b?float16"
        r"|[Uu]nknown [\w ]+: '[^']*'\. Valid (?:options|values|choices) are"
        r"|Load format `[^`]*` is not supported|Unsupported connector type: "
        r"|Unknown (?:dtype: |kv cache dtype|load format|distributed executor)",
        Cause.INVALID_FLAG_VALUE,
        REFUSED,
        0.9,
    ),
    # memory
    _rule(
        r"No available memory for the cache blocks|Cannot auto-fit max_model_len",
        Cause.KV_CACHE_TOO_SMALL,
        "Weights and activations leave no memory for the KV cache.",
    ),
    _rule(
        r"To serve at least one request with the models?'?s? max(?:imum)? seq(?:uence)? len"
        r"|larger than the maximum number of tokens that can be stored in (?:the )?KV cache"
        r"|larger than the available KV cache memory",
        Cause.KV_CACHE_TOO_SMALL,
        "The KV cache can't hold even one request of max-model-len tokens.",
    ),
    _rule(
        r"Free memory on device .*is less than (?:the )?(?:desired GPU memory utilization|engine's budget)",
        Cause.FREE_MEMORY_BELOW_UTILIZATION,
        "Less GPU memory is free than gpu-memory-utilization asks for: other processes hold the rest.",
    ),
    _rule(
        r"Available memory on node .*is less than desired CPU memory utilization",
        Cause.FREE_MEMORY_BELOW_UTILIZATION,
        "Less main memory is free than gpu-memory-utilization asks for (on a CPU the flag applies to main memory).",
    ),
    _rule(
        r"Available memory on node .*is less than requested memory for kv",
        Cause.FREE_MEMORY_BELOW_UTILIZATION,
        "After the weights, less main memory is free than the KV cache needs.",
    ),
    _rule(
        r"Failed to load model - not enough GPU memory",
        Cause.WEIGHTS_DO_NOT_FIT,
        "The model's weights do not fit into the GPU's memory.",
    ),
    # modules built for other libraries; before everything that quotes them
    _rule(
        r"undefined symbol: (?:cu[A-Z]|nvml)\w+",
        Cause.DRIVER,
        "The installed driver is older than the CUDA that this build calls.",
        0.8,
    ),
    _rule(
        r"undefined symbol: |'_OpNamespace' '_\w+' object has no attribute|No module named 'vllm\._\w*C\w*'"
        r"|DLL load failed|symbol not found in flat namespace",
        Cause.OTHER,
        "A compiled module was built for another version of its libraries (mostly torch): the packages in this "
        "environment are incompatible. The GPU driver is not the cause.",
        0.9,
        topic=Topic.LIBRARY_SYMBOL,
    ),
    # Ray
    _rule(
        r"Failed to import Ray: |Using Ray backend requires installation of ray|Ray is not installed",
        Cause.OTHER,
        "vLLM is configured to use Ray, which is not installed in its environment.",
        topic=Topic.RAY_MISSING,
    ),
    _rule(
        r"current platform \S+ does not support ray",
        Cause.OTHER,
        "vLLM can't run workers with Ray on this platform.",
        topic=Topic.RAY_MISSING,
    ),
    _rule(
        r"Version mismatch: The cluster was started with",
        Cause.OTHER,
        "The Ray cluster runs another version of Ray or Python than this vLLM's environment.",
        topic=Topic.RAY_CLUSTER,
    ),
    _rule(
        r"Failed to connect to GCS\b|Failed to get cluster ID from GCS|Could not find any running Ray instance"
        r"|waiting for GCS to become available",
        Cause.OTHER,
        "The Ray cluster does not answer at the address that vLLM was given.",
        0.85,
        topic=Topic.RAY_CLUSTER,
    ),
    _rule(
        r"Cannot provide a placement group ",
        Cause.OTHER,
        "The Ray cluster had too few free GPUs for the workers; vLLM timed out waiting.",
        topic=Topic.RAY_GPUS,
    ),
    _rule(
        r"Raylet is terminated\. Termination is unexpected|\bNodeDiedError\b|raylet (?:has )?died\b"
        r"|The node .* died while running|node .*\bhas been marked dead because the detector",
        Cause.ENGINE_DIED,
        RAYLET_ENDED,
        0.9,
        topic=Topic.RAYLET_GONE,
    ),
    # files
    _rule(
        r"\bSafetensorError: |Error while deserializing header",
        Cause.OTHER,
        _DAMAGED,
        topic=Topic.DAMAGED_WEIGHTS,
    ),
    _rule(
        r"Weight files referenced in index but missing",
        Cause.MODEL_NOT_FOUND,
        "Some of the model's weights files are missing: their index names them.",
        topic=Topic.DAMAGED_WEIGHTS,
    ),
    _rule(
        r"Following weights were not initialized from\s+checkpoint",
        Cause.OTHER,
        "The weights files lack parameters of the model in config.json: a file is missing, or they do not belong "
        "together.",
        0.9,
        topic=Topic.OTHER_WEIGHTS,
    ),
    _rule(
        r"There is no module or parameter named '[^']*\.weight' .*(?:qweight|weight_packed)'",
        Cause.OTHER,
        "config.json (or --quantization) announces quantized weights, but the files hold unquantized ones.",
        0.9,
        topic=Topic.UNQUANTIZED_WEIGHTS,
    ),
    _rule(
        r"There is no module or parameter named '",
        Cause.OTHER,
        "The weights files hold parameters that the model in config.json does not have: they do not belong together.",
        0.85,
        topic=Topic.OTHER_WEIGHTS,
    ),
    _rule(
        r"It looks like the config file at '[^']*' is not a valid JSON file",
        Cause.OTHER,
        _MODEL_FILE,
        topic=Topic.MODEL_FILE,
    ),
    _rule(
        r"StrictDataclass\w*Error: |^Validation error for field '",
        Cause.OTHER,
        "config.json has a value of the wrong type.",
        0.9,
        topic=Topic.MODEL_FILE,
    ),
    _rule(
        r"Unrecognized model in .*Should have a `model_type` key",
        Cause.OTHER,
        "config.json does not name the model's type (model_type).",
        0.9,
        topic=Topic.MODEL_FILE,
    ),
    _rule(
        r"No such file or directory: '[^']*adapter_config\.json|No adapter found for |doesn't contain tensors"
        r"|is unsupported LoRA weight",
        Cause.OTHER,
        "A LoRA adapter's folder is missing or incomplete, or holds another kind of weights.",
        topic=Topic.ADAPTER,
    ),
    # the machine
    _rule(
        r"DefaultCPUAllocator: |^MemoryError\b|\[Errno 12\]|Cannot allocate memory|OutOfMemoryError: Task was killed"
        r"|oom_kill event|\boom-kill:|Out of memory: Killed process|\bOOMKilled\b|Memory cgroup out of memory"
        r"|node was low on resource: memory",
        Cause.OTHER,
        "The main memory of the machine, or of its container, ran out.",
        topic=Topic.MAIN_MEMORY,
    ),
    _rule(
        r"larger than the number of available GPUs|invalid device ordinal|exceeds the total number of available GPUs"
        r"|Current node has no GPU available",
        Cause.OTHER,
        "More GPUs requested than this server may use.",
    ),
    _rule(r"\[Errno 28\]|No space left on device|\(os error 28\)", Cause.DISK_FULL, "A disk (or /dev/shm) is full."),
    _rule(r"\[Errno 122\]|Disk quota exceeded", Cause.DISK_FULL, "The disk quota is used up."),
    _rule(
        r"The server socket has failed to listen on any local network address\. port: \d+.*EADDRINUSE",
        Cause.OTHER,
        "The ranks' rendezvous port is in use on this node; it is not the server's port.",
        topic=Topic.MASTER_PORT,
    ),
    _rule(
        r"Address already in use.*(?:ipc|tcp)://|EADDRINUSE|failed to listen on any local network address",
        Cause.OTHER,
        "An internal address of vLLM's processes is in use; it is not the server's port.",
    ),
    _rule(
        r"\[Errno (?:98|48)\].*address already in use|port is already allocated"
        r"|failed to bind (?:host )?port .*address already in use|listen tcp\S* \S+ bind: address already in use",
        Cause.PORT_IN_USE,
        "Another process already listens on the port.",
    ),
    _rule(
        r"Unable to find address for: \S|ZMQError: Cannot assign requested address|no socket interface found",
        Cause.NCCL,
        "This node does not have the configured interface or address for reaching the other ranks.",
        topic=Topic.NODE_ADDRESS,
    ),
    _rule(
        r"NCCL WARN .*(?:Cuda failure|Failed to CUDA|Error while creating shared memory"
        r"|Duplicate GPU detected|Call to \w+ failed)",
        Cause.NCCL,
        "The GPUs could not communicate over NCCL.",
        topic=Topic.NCCL_WARNING,
    ),
    _rule(
        r"NCCL error|\bnccl\w+Error\b|Watchdog caught collective operation timeout|DistBackendError.*NCCL",
        Cause.NCCL,
        "The GPUs could not communicate over NCCL.",
    ),
    _rule(
        r"Timed out after \d+ seconds waiting for clients|client socket has timed out after|DistStoreError"
        r"|wait timeout after \d+ ?ms, keys|(?:TCP client|\[c10d\]).* failed to connect"
        r"|DistNetworkError: .*(?:timed out|failed to connect|connection refused)"
        r"|Gloo connectFullMesh failed|\[gloo\].*(?:timed out|connect)|RuntimeError: Socket Timeout",
        Cause.NCCL,
        "The ranks did not connect in time: one is missing, or its address is unreachable.",
        0.7,
        topic=Topic.RENDEZVOUS,
    ),
    _rule(
        r"NVIDIA driver on your system is too old|Found no NVIDIA driver|CUDA driver version is insufficient"
        r"|Driver/library version mismatch|forward compatibility was attempted|unsupported display driver"
        r"|unsatisfied condition: cuda|PTX was compiled with an unsupported toolchain|cudaErrorInsufficientDriver"
        r"|NVIDIA-SMI has failed|system not yet initialized|couldn't communicate with the NVIDIA driver",
        Cause.DRIVER,
        "The GPU driver is incompatible with this CUDA version, or does not work.",
    ),
    _rule(
        r"Failed to infer device type|no CUDA-capable device|No (?:CUDA|HIP) GPUs are available|cudaGetDeviceCount"
        r"|CUDA unknown error|libcuda\w*\.so[.\d]*: cannot open|nvidia-container-cli: "
        r"|could not select device driver .*\[gpu\]|NVML(?:Error_|_ERROR_)?\w*(?:Driver|DRIVER|LIBRARY|Library)\w*",
        Cause.DRIVER,
        "vLLM can't use the GPU: driver, CUDA libraries and build are incompatible.",
        0.9,
    ),
    _rule(
        r"ImportError: .*(?:\.so[.\d]*: cannot open shared object|GLIBC)"
        r"|lib(?:cu|nv|nccl|torch|c10)\w*\.so[.\d]*: cannot open",
        Cause.DRIVER,
        "A library is missing or has the wrong version: vLLM, torch and CUDA are incompatible.",
        0.75,
    ),
    # the model on this GPU
    _rule(
        r"(?:Selected backend|No valid (?:\w+ )?attention backend|backend \S+ is not valid for).*"
        r"compute capability (?:\d\S* )?not supported",
        Cause.UNSUPPORTED_BY_GPU,
        "The attention backend does not support this GPU's compute capability.",
        0.9,
        topic=Topic.ATTENTION_BACKEND,
    ),
    _rule(
        r"No common block size for \d+",
        Cause.INVALID_FLAG_VALUE,
        "The attention backend does not support this block size.",
        topic=Topic.BLOCK_SIZE,
    ),
    _rule(
        r"Selected backend \S+ is not valid for\b|Invalid attention backend for|Unknown attention backend"
        r"|Backend \S+ must be registered",
        Cause.INVALID_FLAG_VALUE,
        "The selected attention backend does not support this model or these settings.",
        0.75,
        Cause.UNSUPPORTED_BY_GPU,
        topic=Topic.ATTENTION_BACKEND,
    ),
    _rule(
        r"No valid (?:\w+ )?attention backend found",
        Cause.UNSUPPORTED_BY_GPU,
        "No attention backend of this vLLM supports this model with these settings on this GPU.",
        0.8,
        Cause.INVALID_FLAG_VALUE,
        topic=Topic.ATTENTION_BACKEND,
    ),
    _rule(
        r"Cannot find the config file for \w+(?:$| \[type=)"
        r"|Cannot find any of \[.*\] in the model'?s quantization config"
        r"|Invalid quantization config|Unable to find (?:the )?quantization config",
        Cause.INVALID_FLAG_VALUE,
        "The model's files do not describe their quantization, or describe another method.",
        0.75,
        topic=Topic.QUANTIZATION_CONFIG,
    ),
    _rule(
        r"only \d-bit weight quantization is supported|Unsupported num_bits = |Unsupported (?:AWQ|GPTQ|Marlin)\b"
        r"|Marlin does not support (?:weight_bits|group_size)|(?:awq|gptq)\w* does not support (?:bits|group_size)",
        Cause.UNSUPPORTED_BY_GPU,
        "vLLM has no kernel for this quantization (bits, group size or zero points).",
        0.7,
        Cause.INVALID_FLAG_VALUE,
        topic=Topic.QUANTIZATION_CONFIG,
    ),
    _rule(
        r"Failed to find a kernel that can implement the \S+ (?:linear|MoE)",
        Cause.UNSUPPORTED_BY_GPU,
        "No kernel supports this checkpoint's quantization on this GPU with the shapes of each rank.",
        0.7,
        Cause.TP_NOT_DIVISOR,
        topic=Topic.QUANTIZATION_CONFIG,
    ),
    _rule(
        r"(?<!FA\d is )only supported on (?:GPUs|devices) with compute capability|compute capability \S+ is not"
        r"|not supported (?:for|on|by|in) (?:the |this |your )(?:current )?(?:GPU|architecture)\b"
        r"|Min(?:imum)? capability: |requires? (?:a )?(?:GPU )?(?:with )?compute capability"
        r"|only support(?:s|ed on)? (?:\w+ (?:and|or) )?(?:Turing|Ampere|Ada|Hopper|Blackwell)"
        r"|requires \.target sm_|not supported on CUDA arch"
        r"|requires? (?:a )?(?:\w+ or )?(?:Ampere|Ada|Hopper|Blackwell)\b.* GPU|requires (?:the |an? )?(?:SM|sm_?)\d\d"
        r"|kv-cache on this device|\bfp8e4nv\b|device capability \S+ is not supported"
        r"|compute capability of ?\d[\d.]* is not supported|minimum capability|needs (?:native )?(?:SM|sm_?)\d\d"
        r"|requires capability \d+, current compute\s+capability|Only types = .*device_capability ="
        r"|No operator found for `memory_efficient|requires device with capability"
        r"|FP8 .{0,40}not supported on .{0,60}(?:GPU|device|compute)|does not support FP8\b",
        Cause.UNSUPPORTED_BY_GPU,
        "This GPU does not support the model's number format or a kernel that it needs.",
        0.9,
    ),
    _rule(
        r"no kernel image is available|kernel image is invalid|invalid device function",
        Cause.UNSUPPORTED_BY_GPU,
        "This build has no kernel for this GPU.",
        0.8,
        Cause.DRIVER,
    ),
    _rule(
        r"is not supported for quantization method",
        Cause.UNSUPPORTED_BY_GPU,
        "The quantization kernels do not support this dtype.",
        0.7,
        Cause.INVALID_FLAG_VALUE,
    ),
    _rule(
        r"(?:is not|must be) divisible by (?:the )?(?:tensor|tp\b|tp_size|world_size)"
        r"|is not divisible by weight quantization block|is not divisible by\s+min_thread_[nk]"
        r"|too large tensor parallel size|(?:reducing|decrease) (?:the )?`?tensor[_ -]parallel",
        Cause.TP_NOT_DIVISOR,
        "The model can't be split over this many GPUs: tensor-parallel-size does not divide its shape.",
        0.9,
    ),
    # `divide` of vLLM's tensor parallelism gives no more detail
    _rule(
        r"^AssertionError: \d+ is not divisible by \d+$",
        Cause.TP_NOT_DIVISOR,
        "The model can't be split over this many GPUs: tensor-parallel-size does not divide its shape.",
        0.8,
    ),
    # the model's files
    _rule(
        r"(?<!private or )gated repo|GatedRepoError|Access to model .* is restricted|awaiting a review from the repo"
        r"|You must (?:be authenticated|have access to it)|LocalTokenNotFoundError"
        r"|Invalid (?:user token|credentials in Authorization header)",
        Cause.GATED,
        "The model's repository is gated: it needs a Hugging Face token with access.",
    ),
    _rule(
        r"custom code\b.* must be executed|(?:set the option|pass the argument) `?trust_remote_code"
        r"|setting `?trust_remote_code=True|using the `?--trust-remote-code",
        Cause.TRUST_REMOTE_CODE,
        "The model ships its own code, which runs only with trust-remote-code.",
        0.9,
    ),
    _rule(
        r"default chat template is no longer allowed",
        Cause.TOKENIZER,
        "The model has no chat template: chat requests are rejected (400).",
        0.9,
        topic=Topic.NO_CHAT_TEMPLATE,
    ),
    _rule(
        r"Can't load tokenizer|instantiate the backend tokenizer|Tokenizer class \S+ does not exist"
        r"|supplied chat template|chat template .*(?:not|looks like|must|invalid)|error while loading.*tokenizer"
        r"|untagged enum ModelWrapper|Tokenizer\w*'? (?:object )?has no attribute",
        Cause.TOKENIZER,
        "The tokenizer or chat template could not be loaded.",
        0.9,
    ),
    _rule(
        r"RepositoryNotFoundError|is not a valid model identifier",
        Cause.MODEL_NOT_FOUND,
        "Model not found: no such folder, not in the local cache, not on the Hub.",
        0.85,
        Cause.GATED,  # the hub hides private repositories from users without access
    ),
    _rule(
        r"Repo id must be (?:in the form|a string)"
        r"|Invalid repository ID or local directory|RevisionNotFoundError"
        r"|is not a valid git identifier|Can't load the configuration of|Incorrect path_or_model_id"
        r"|No supported config format found"
        r"|does not appear to have a file named (?:config|params|model|pytorch_model)\b"
        r"|No such file or directory: '[^']*(?:config\.json|\.safetensors|\.gguf)",
        Cause.MODEL_NOT_FOUND,
        "Model not found: no such folder, not in the local cache, not on the Hub.",
        0.9,
    ),
    _rule(
        r"Cannot find any model weights",
        Cause.MODEL_NOT_FOUND,
        "The model's folder has no weights that vLLM can load.",
        0.9,
        topic=Topic.DAMAGED_WEIGHTS,
    ),
    _rule(
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to .*huggingface|EntryNotFoundError"
        r"|huggingface\.co\b.*(?:Max retries exceeded|Failed to resolve|NameResolutionError)"
        r"|does not appear to have a file named",
        Cause.MODEL_NOT_FOUND,
        "The model's files are missing and could not be downloaded.",
        0.7,
    ),
    _rule(
        r"does not recognize this architecture|Model architectures .* (?:are|is) not supported",
        Cause.OTHER,
        "This vLLM (or its transformers) does not know the model's architecture; a newer one may.",
        0.9,
        topic=Topic.ARCHITECTURE,
    ),
    # external ends
    _rule(
        r"^KeyboardInterrupt: (?:\w+ )?terminated",  # vLLM raises it for both signals
        Cause.INTERRUPTED,
        _ENDED_OUTSIDE,
        0.85,
    ),
    _rule(r"^KeyboardInterrupt\b", Cause.INTERRUPTED, "The start was interrupted (SIGINT, as by ctrl+c).", 0.6),
    _rule(
        r"\bCANCELLED AT \S+(?: DUE TO| \*\*\*)|srun: Job step aborted",
        Cause.INTERRUPTED,
        "The batch system ended the server (time limit, preemption or scancel).",
        0.9,
    ),
    _rule(
        r"illegal memory access|device-side assert|misaligned address|CUDA error: unspecified launch failure"
        r"|uncorrectable ECC|Memory access fault by GPU|cudaErrorIllegalAddress|CUDA error: an illegal instruction"
        r"|Cuda failure (?:\d+ )?'an illegal|GPU is lost|fallen off the bus",
        Cause.OTHER,
        "A GPU kernel crashed: a bug in vLLM or the kernel, or a faulty GPU.",
        topic=Topic.KERNEL_CRASH,
    ),
)
"""Lines that name the cause by themselves; the first matching rule counts."""

DAMAGED_WEIGHTS = FailureVerdict(Cause.OTHER, _DAMAGED, 0.85, topic=Topic.DAMAGED_WEIGHTS)
"""For running out of memory while reading the header of a weights file: a pointer's text is read as a huge length."""

INTERNAL_ADDRESS = FailureVerdict(
    Cause.OTHER, "An internal address of vLLM's processes is in use; it is not the server's port."
)

STOPPED = FailureVerdict(Cause.INTERRUPTED, _ENDED_OUTSIDE, 0.85)
"""For lines that show an external stop: see `STOPS`."""

STOPS = (
    r"\[shutdown\] API server: shutdown triggered|EngineCore: trigger received signal=SIG(?:TERM|INT)"
    r"|\*\*\* SIGTERM received|[Rr]eceived (?:exit )?(?:signal )?(?:SIGTERM|SIGINT)\b|[Rr]eceived signal:? (?:15|2)\b"
    r"|SIG(?:TERM|INT) received|[Cc]aught SIG(?:TERM|INT)|KeyboardInterrupt: (?:\w+ )?terminated"
    r"|^Stopp(?:ing|ed) \S+\.service\b|^Stopping .*\.{3}$|Gracefully stopping\.\.\.|^Shutting down$"
    r"|Shutting down FastAPI HTTP server|Stopping container|CANCELLED AT "
)
"""An external stop. uvicorn also logs a shutdown when its own engine has failed, but only afterwards."""

OWN_STOPS = r"\[shutdown\] Process manager: send sigterm|MPClient: engine core exited unexpectedly"
"""vLLM ends its own processes after one of them failed; signals mentioned after that came from vLLM itself."""

NODES: tuple[FailureRule, ...] = (
    _rule(
        r"\bnode \d+ (?:and node \d+ have different |has no |runs a vllm-console|was started for|has joined already)"
        r"|, node 0 has |there is no node \d+",
        Cause.NODES_DIFFER,
        "The nodes of this server differ, which vLLM does not detect, so it was not launched.",
    ),
    _rule(
        r"did not (?:join|answer)|can't wait for the other nodes",
        Cause.NCCL,
        "Not all nodes of this server were started in time, or they can't reach each other: vLLM was not launched.",
        topic=Topic.NODE_MISSING,
    ),
    _rule(
        r"is gone: the connection to its keeper ended \((?:connection timed out|no route to host|network)",
        Cause.ENGINE_DIED,
        "The machine of another node, or the network to it, stopped answering, and a node can't continue alone.",
        topic=Topic.PEER_UNREACHABLE,
    ),
    _rule(
        r"is gone|link to the other nodes",
        Cause.ENGINE_DIED,
        "Another node of this server is gone, and the others can't continue without it: its own log shows why.",
        topic=Topic.PEER_GONE,
    ),
    _rule(r"raylet died \(pid ", Cause.ENGINE_DIED, RAYLET_ENDED, 0.9, topic=Topic.RAYLET_GONE),
)
"""Log lines of a keeper about other nodes or Ray (`NODE_MARK`): why the server ended."""

REFUSED_REQUESTS: tuple[FailureRule, ...] = (
    _rule(
        r"default chat template is no longer allowed|(?:must|need to) provide a chat template"
        r"|tokenizer\.chat_template is not set|does not have a (?:default )?chat template"
        r"|no chat template (?:is )?(?:defined|found|set)",
        Cause.TOKENIZER,
        "The model has no chat template: the server runs, but rejects chat requests (400).",
        0.9,
        topic=Topic.NO_CHAT_TEMPLATE,
    ),
    _rule(
        r"tool choice requires --enable-auto-tool-choice",
        Cause.OTHER,
        "The server runs, but rejects requests with tools (400): it was started without a tool parser.",
        0.9,
        topic=Topic.NO_TOOL_PARSER,
    ),
)
"""What a healthy server answers to request after request because of how it was started."""

DEATHS: tuple[FailureRule, ...] = (
    _rule(
        r"Failed core proc\(s\): \{'[^}]*: -(?:15|2)\}|died unexpectedly \(exit code: -(?:15|2)\)"
        r"|Worker \w+ pid \d+ died, exit code: -(?:15|2)\b",
        Cause.INTERRUPTED,
        "An engine process was ended from outside (SIGTERM or SIGINT).",
        0.7,
    ),
    _rule(
        r"Timed out waiting for (?:new )?engine",
        Cause.ENGINE_DIED,
        "The engine was not ready before the API server's timeout.",
        0.75,
        topic=Topic.NOT_READY_IN_TIME,
    ),
    _rule(
        r"Connection closed by peer|Connection reset by peer|DistNetworkError: (?:failed to recv|failed to send)"
        r"|recvValue failed|Broken pipe.*TCPStore",
        Cause.ENGINE_DIED,
        "Another rank died; its log shows why.",
        0.7,
        topic=Topic.PEER_GONE,
    ),
    _rule(
        r"Failed core proc\(s\): \{'[^}]*: -9\}|died unexpectedly \(exit code: -9\)|died, exit code: -9\b",
        Cause.ENGINE_DIED,
        "An engine process was killed (SIGKILL), often by the kernel's out-of-memory killer.",
        0.75,
    ),
    _rule(r"Failed core proc\(s\): \{'[^}]*-\d+\}", Cause.ENGINE_DIED,
          "The engine's process was ended by a signal.", 0.75),
    _rule(r"RPC call to \w+ timed out", Cause.ENGINE_DIED, "A worker did not answer the engine in time.", 0.7),
    _rule(r"(?:Worker proc|RayWorkerProc) .*died unexpectedly|Worker \w+ pid \d+ died, exit code"
          r"|(?:Actor|RayActor)DiedError|WorkerCrashedError"
          r"|A worker died or was killed while executing", Cause.ENGINE_DIED,
          "A worker process died and logged no reason.", 0.6),
    _rule(r"Engine core proc(?:ess)? .*died unexpectedly|Process \S+ \(PID: \d+\) died with exit code"
          r"|EngineDeadError|Engine loop (?:has|is) (?:died|dead)",
          Cause.ENGINE_DIED, "The engine process died and logged no reason.", 0.6),
    _rule(r"Fatal Python error|Segmentation fault|Segfault encountered|terminate called|Bus error|core dumped"
          r"|ChildProcessError: worker died",
          Cause.ENGINE_DIED, "The process crashed outside of Python.", 0.6),
)  # fmt: skip
"""Lines that report a death without its reason; used if no better line is found."""

_ENDS = ("SystemExit", "CancelledError", "BrokenPipeError", "ConnectionResetError", "EOFError", "GeneratorExit",
         "RayActorError")  # fmt: skip

AFTERMATH = lazy_pattern(
    "|".join(rf"^(?:\w+\.)*{name}\b" for name in _ENDS)
    + r"|^RuntimeError: cancelled$|[Gg]ot fatal signal from worker"
    + r"|Engine core initialization failed|See (?:root cause|stack trace)"
    r"|Engine(?:Core)? (?:failed to start|encountered)"
    r"|EngineDeadError|EngineGenerateError|WorkerProc (?:initialization failed|hit an exception|failed to start)"
    r"|Worker failed with error|Failed core proc|Timed out waiting for engine|output_handler failed"
    r"|Did not receive response from front-end|Exception in worker \w+ while processing"
    r"|died unexpectedly|RuntimeError: Executor failed|shutting down|Shutdown|Application (?:shutdown|startup)",
    re.IGNORECASE,
)
"""What other processes log after one of them has failed."""

ENDS_A_SERVER = frozenset(
    {Cause.OOM_RUNTIME, Cause.OOM_GRAPH_CAPTURE, Cause.NCCL, Cause.DISK_FULL, Cause.DRIVER, Cause.INTERRUPTED}
)
"""Causes that end a serving server; any other exception concerns a single request."""
