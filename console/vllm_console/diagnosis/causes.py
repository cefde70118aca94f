"""What kills vLLM servers, and how it reads in a log: causes, and rules that name them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why a server failed. `OTHER` where none of the names is surely right."""

    WEIGHTS_DO_NOT_FIT = "weights_do_not_fit"
    KV_CACHE_TOO_SMALL = "kv_cache_too_small_for_max_model_len"
    FREE_MEMORY_BELOW_UTILIZATION = "free_memory_below_utilization"
    OOM_RUNTIME = "cuda_oom_runtime"
    OOM_GRAPH_CAPTURE = "cuda_oom_graph_capture"
    PORT_IN_USE = "port_in_use"
    MODEL_NOT_FOUND = "model_not_found"
    GATED = "gated_or_no_hf_token"
    UNKNOWN_FLAG = "unknown_flag"
    INVALID_FLAG_VALUE = "invalid_flag_value"
    TP_NOT_DIVISOR = "tp_not_divisor_of_heads"
    UNSUPPORTED_BY_GPU = "unsupported_quantization_or_dtype_for_gpu"
    NCCL = "nccl_failure"
    ENGINE_DIED = "engine_core_died"
    TRUST_REMOTE_CODE = "trust_remote_code_needed"
    TOKENIZER = "tokenizer_or_chat_template"
    DRIVER = "driver_or_cuda_mismatch"
    DISK_FULL = "disk_full"
    INTERRUPTED = "interrupted"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Rule:
    """A line that matches ``pattern`` shows ``cause``; ``explanation`` is one sentence for people, or empty."""

    pattern: re.Pattern[str]
    cause: Cause
    explanation: str


def _rule(pattern: str, cause: Cause, explanation: str) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), cause, explanation)


OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP|XPU|Triton Error \[CUDA\]:)(?: (?:driver )?error:)? out of memory|OutOfMemoryError"
    r"|out of memory occurred when|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""The GPU's memory ran out; where it did, the traceback tells."""

OUT_OF_MEMORY_PLACES = (
    (
        re.compile(r"capture_model|capture_graph|capture_end|cuda_?graph|_warmup_and_capture", re.IGNORECASE),
        Rule(OUT_OF_MEMORY, Cause.OOM_GRAPH_CAPTURE, "The GPU ran out of memory while CUDA graphs were captured."),
    ),
    (
        re.compile(r"load_model|load_weights|create_weights|initialize_model|process_weights_after_loading"),
        Rule(OUT_OF_MEMORY, Cause.WEIGHTS_DO_NOT_FIT, "The model's weights do not fit into the GPU's memory."),
    ),
)
"""A function in the traceback, and what running out of memory there means. The first that is found counts."""

OUT_OF_MEMORY_ELSEWHERE = Rule(OUT_OF_MEMORY, Cause.OOM_RUNTIME, "The GPU ran out of memory while the model was run.")

RULES: tuple[Rule, ...] = (
    # flags
    _rule(r"\berror: unrecognized arguments", Cause.UNKNOWN_FLAG, "This vLLM does not know the flag."),
    _rule(
        r"\berror: (?:argument|the following arguments|ambiguous option|expected)",
        Cause.INVALID_FLAG_VALUE,
        "vLLM does not take this value for the flag.",
    ),
    _rule(
        r"max_model_len \(\d+\) is greater than the derived max_model_len",
        Cause.INVALID_FLAG_VALUE,
        "max-model-len is longer than the model's own context.",
    ),
    _rule(
        r"Unknown quantization method|does not match the quantization method specified in",
        Cause.INVALID_FLAG_VALUE,
        "vLLM does not take this value for the flag quantization with this model.",
    ),
    # memory
    _rule(
        r"No available memory for the cache blocks",
        Cause.KV_CACHE_TOO_SMALL,
        "Weights and activations leave no memory for the KV cache.",
    ),
    _rule(
        r"To serve at least one request with the models?'?s? max(?:imum)? seq(?:uence)? len"
        r"|larger than the maximum number of tokens that can be stored in (?:the )?KV cache"
        r"|larger than the available KV cache memory",
        Cause.KV_CACHE_TOO_SMALL,
        "The KV cache cannot hold even one request of max-model-len tokens.",
    ),
    _rule(
        r"Free memory on device .*is less than desired GPU memory utilization",
        Cause.FREE_MEMORY_BELOW_UTILIZATION,
        "Less GPU memory is free than gpu-memory-utilization asks for: other processes hold the rest.",
    ),
    _rule(
        r"Failed to load model - not enough GPU memory",
        Cause.WEIGHTS_DO_NOT_FIT,
        "The model's weights do not fit into the GPU's memory.",
    ),
    # the machine
    _rule(
        r"DefaultCPUAllocator: |^MemoryError\b|\[Errno 12\]|Cannot allocate memory",
        Cause.OTHER,
        "The machine's main memory ran out (not the GPU's).",
    ),
    _rule(
        r"larger than the number of available GPUs|invalid device ordinal",
        Cause.OTHER,
        "More GPUs are asked for than this server may use.",
    ),
    _rule(r"\[Errno 28\]|No space left on device", Cause.DISK_FULL, "A disk (or /dev/shm) is full."),
    _rule(r"\[Errno 122\]|Disk quota exceeded", Cause.DISK_FULL, "The disk quota is used up."),
    _rule(
        r"Address already in use.*ipc://|EADDRINUSE|failed to listen on any local network address",
        Cause.OTHER,
        "An address that vLLM's processes use among themselves is taken; it is not the server's own port.",
    ),
    _rule(
        r"\[Errno (?:98|48)\].*address already in use|error while attempting to bind on address",
        Cause.PORT_IN_USE,
        "Another process listens on the port already.",
    ),
    _rule(
        r"NCCL error|\bnccl\w+Error\b|DistBackendError|Watchdog caught collective operation timeout",
        Cause.NCCL,
        "The GPUs could not talk to each other over NCCL.",
    ),
    _rule(
        r"Failed to infer device type|NVIDIA driver on your system is too old|Found no NVIDIA driver"
        r"|CUDA driver version is insufficient|no CUDA-capable device|Driver/library version mismatch"
        r"|No CUDA GPUs are available|forward compatibility was attempted|libcuda\w*\.so[.\d]*: cannot open"
        r"|system not yet initialized|unsupported display driver|cudaGetDeviceCount|undefined symbol",
        Cause.DRIVER,
        "vLLM cannot use the GPU: its driver, CUDA libraries or build do not go together.",
    ),
    # the model on this GPU
    _rule(
        r"only supported on GPUs with compute capability|no kernel image is available|kernel image is invalid"
        r"|not supported (?:for|on|by|in) (?:the |this |your )?(?:current )?(?:GPU|architecture|device|platform)"
        r"|is not supported for quantization method|Minimum capability|requires? (?:a )?compute capability",
        Cause.UNSUPPORTED_BY_GPU,
        "This GPU cannot run the model's number format or a kernel that it needs.",
    ),
    _rule(
        r"heads.*must be divisible by tensor.parallel|not divisible by (?:the )?(?:tensor|tp)"
        r"|is not divisible by weight quantization block|^AssertionError: \d+ is not divisible by \d+$",
        Cause.TP_NOT_DIVISOR,
        "The model cannot be split over this many GPUs: tensor-parallel-size does not divide its shape.",
    ),
    # the model's files
    _rule(
        r"gated repo|GatedRepoError|Access to model .* is restricted|You must (?:be authenticated|have access to it)",
        Cause.GATED,
        "The model's repository is gated: it needs a Hugging Face token of an account with access.",
    ),
    _rule(
        r"custom code\b.* must be executed|(?:set the option|pass the argument) `?trust_remote_code"
        r"|setting `?trust_remote_code=True|using the `?--trust-remote-code",
        Cause.TRUST_REMOTE_CODE,
        "The model brings code of its own, which runs only with trust-remote-code.",
    ),
    _rule(
        r"Can't load tokenizer|instantiate the backend tokenizer|Tokenizer class \S+ does not exist"
        r"|supplied chat template|chat template .*(?:not|looks like|must|invalid)|error while loading.*tokenizer",
        Cause.TOKENIZER,
        "The tokenizer or chat template could not be loaded.",
    ),
    _rule(
        r"Repo id must be in the form|RepositoryNotFoundError|not a valid model identifier|LocalEntryNotFoundError"
        r"|OfflineModeIsEnabled|Invalid repository ID or local directory|Cannot find any model weights"
        r"|does not appear to have a file named|Can't load the configuration of|Incorrect path_or_model_id"
        r"|EntryNotFoundError|couldn't connect to .*huggingface|No supported config format found"
        r"|No such file or directory: '[^']*(?:config\.json|\.safetensors)",
        Cause.MODEL_NOT_FOUND,
        "There is no such model: neither a folder with its files, nor in the local cache, nor at the hub.",
    ),
    _rule(
        r"does not recognize this architecture|Model architectures .* (?:are|is) not supported",
        Cause.OTHER,
        "This vLLM (or its transformers) does not know the model's architecture; a newer one may.",
    ),
    # ends from outside
    _rule(r"^KeyboardInterrupt\b", Cause.INTERRUPTED, "The start was interrupted (SIGINT, as by ctrl+c)."),
    _rule(
        r"illegal memory access|device-side assert|misaligned address|CUDA error: unspecified launch failure",
        Cause.OTHER,
        "A kernel crashed on the GPU; this is a fault of vLLM, a kernel or the GPU.",
    ),
)
"""Lines that name the cause by themselves; the first rule that matches a line counts."""

DEATHS: tuple[Rule, ...] = (
    _rule(
        r"Failed core proc\(s\): \{'[^}]*: -9\}",
        Cause.ENGINE_DIED,
        "The engine's process was killed (SIGKILL), often by the kernel because the machine's memory ran out.",
    ),
    _rule(r"Failed core proc\(s\): \{'[^}]*-\d+\}", Cause.ENGINE_DIED, "The engine's process was ended by a signal."),
    _rule(r"RPC call to \w+ timed out", Cause.ENGINE_DIED, "A worker did not answer the engine in time."),
    _rule(r"Worker proc .* died unexpectedly", Cause.ENGINE_DIED, "A worker process died without a word of its own."),
    _rule(r"Engine core proc .* died unexpectedly|EngineDeadError|Engine loop (?:has|is) (?:died|dead)",
          Cause.ENGINE_DIED, "The engine's process died without a word of its own."),
    _rule(r"Fatal Python error|Segmentation fault|terminate called|Bus error|core dumped", Cause.ENGINE_DIED,
          "The process crashed outside of Python."),
)  # fmt: skip
"""Lines that say that something died, not why: used where no better line is found."""

AFTERMATH = re.compile(
    r"Engine core initialization failed|See (?:root cause|stack trace)|Engine(?:Core)? (?:failed to start|encountered)"
    r"|EngineDeadError|EngineGenerateError|WorkerProc (?:initialization failed|hit an exception|failed to start)"
    r"|Worker failed with error|Failed core proc|Timed out waiting for engine|output_handler failed"
    r"|^(?:\w+\.)*(?:SystemExit|CancelledError|BrokenPipeError|ConnectionResetError|EOFError|GeneratorExit|RayActorError)\b"
    r"|died unexpectedly|shutting down|Shutdown|Application (?:shutdown|startup)",
    re.IGNORECASE,
)
"""What other processes say after one of them has failed."""
