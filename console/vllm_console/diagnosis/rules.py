"""How failures read in a log: rules from a line, or from the functions of a traceback, to a cause. Pure."""

from __future__ import annotations

import re

from vllm_console.diagnosis.causes import Cause, Rule


def _rule(pattern: str, cause: Cause, explanation: str, confidence: float = 0.95, *also: Cause) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), cause, explanation, confidence, also)


OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP|XPU|Triton Error \[CUDA\]:)(?: (?:driver )?error:)? out of memory|OutOfMemoryError"
    r"|out of memory occurred when|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""The GPU's memory ran out; where it did, the traceback tells."""

WEIGHTS_TOO_LARGE = Rule(
    OUT_OF_MEMORY, Cause.WEIGHTS_DO_NOT_FIT, "The model's weights do not fit into the GPU's memory."
)
GRAPHS_TOO_LARGE = Rule(
    OUT_OF_MEMORY, Cause.OOM_GRAPH_CAPTURE, "The GPU ran out of memory while CUDA graphs were captured."
)
OUT_OF_MEMORY_ELSEWHERE = Rule(OUT_OF_MEMORY, Cause.OOM_RUNTIME, "The GPU ran out of memory while the model was run.")
OUT_OF_MEMORY_AT_ONCE = Rule(
    OUT_OF_MEMORY,
    Cause.OOM_RUNTIME,
    "The GPU had no memory at all for this process: another one holds it.",
    0.6,
    (Cause.FREE_MEMORY_BELOW_UTILIZATION,),
)

OUT_OF_MEMORY_PLACES = (
    (
        re.compile(
            r"_?capture_model|_?capture_(?:cuda_?)?graphs?|_capture_cudagraphs|capture_full_graph|capture_(?:end|begin)"
            r"|_warmup_and_capture|profile_cudagraph_memory"
        ),
        GRAPHS_TOO_LARGE,
    ),
    (
        re.compile(r"load_model|load_weights|create_weights|initialize_model|process_weights_after_loading"),
        WEIGHTS_TOO_LARGE,
    ),
    (re.compile(r"init_device|set_device"), OUT_OF_MEMORY_AT_ONCE),
)
"""A function in the traceback, and what running out of memory there means. The first that is found counts."""

OUT_OF_MEMORY_STAGES = (
    (re.compile(r"Capturing (?:CUDA ?graphs?|the model for CUDA graphs|cudagraphs)", re.IGNORECASE), GRAPHS_TOO_LARGE),
    (
        re.compile(r"Loading (?:model )?weights took|Model loading took|model weights take|Memory profiling takes"),
        OUT_OF_MEMORY_ELSEWHERE,
    ),
    (re.compile(r"Starting to load model|Loading (?:safetensors|pt) checkpoint shards"), WEIGHTS_TOO_LARGE),
)
"""The same, by the last of these lines before it, where the log has no traceback."""

TOKENIZER_PLACES = re.compile(
    r"(?:cached_)?get_(?:cached_)?tokenizer|init_tokenizer\w*|cached_tokenizer_from_config"
    r"|load_chat_template|resolve_chat_template|_?compile_jinja_template"
)
TOKENIZER_PLACE = Rule(TOKENIZER_PLACES, Cause.TOKENIZER, "The tokenizer or chat template could not be loaded.", 0.7)
"""Where an exception without a name of its own passes one of these functions."""

NOT_THE_TOKENIZER = re.compile(r"Import|Module|Connection|Timeout|Permission|HTTP|FileNotFound", re.IGNORECASE)
"""Exceptions that say nothing against the tokenizer itself."""

CONFIG_PLACES = re.compile(
    r"create_(?:engine|model|\w+)_config\w*|validate_parsed_serve_args|from_cli_args|from_engine_args|__post_init__"
    r"|_verify_\w+|verify_\w+|_get_and_verify_\w+"
)
"""Functions in which vLLM checks what it was given."""

REFUSED = "vLLM does not take this value for the flag."

RULES: tuple[Rule, ...] = (
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
        "max-model-len is longer than the model's own context.",
    ),
    _rule(
        r"Unknown quantization method|does not match the quantization method specified in",
        Cause.INVALID_FLAG_VALUE,
        "vLLM does not take this value for the flag quantization with this model.",
        0.9,
    ),
    _rule(
        r"max_num_batched_tokens \(\d+\) (?:is smaller than|must be greater)"
        r"|invalid (?:tool call|reasoning) parser|^\w+: Error: --\S+ requires"
        r"|GPU memory utilization must be|Invalid kv_cache_dtype|model type \S+ does not support b?float16"
        r"|[Uu]nknown [\w ]+: '[^']*'\. Valid (?:options|values|choices) are"
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
        "The KV cache cannot hold even one request of max-model-len tokens.",
    ),
    _rule(
        r"Free memory on device .*is less than (?:the )?(?:desired GPU memory utilization|engine's budget)",
        Cause.FREE_MEMORY_BELOW_UTILIZATION,
        "Less GPU memory is free than gpu-memory-utilization asks for: other processes hold the rest.",
    ),
    _rule(
        r"Available memory on node .*is less than desired CPU memory utilization",
        Cause.FREE_MEMORY_BELOW_UTILIZATION,
        "Less main memory is free than gpu-memory-utilization asks for (on a CPU it counts for main memory).",
    ),
    _rule(
        r"Failed to load model - not enough GPU memory",
        Cause.WEIGHTS_DO_NOT_FIT,
        "The model's weights do not fit into the GPU's memory.",
    ),
    # the machine
    _rule(
        r"DefaultCPUAllocator: |^MemoryError\b|\[Errno 12\]|Cannot allocate memory|OutOfMemoryError: Task was killed",
        Cause.OTHER,
        "The machine's main memory ran out (not the GPU's).",
    ),
    _rule(
        r"larger than the number of available GPUs|invalid device ordinal|exceeds the total number of available GPUs"
        r"|Current node has no GPU available",
        Cause.OTHER,
        "More GPUs are asked for than this server may use.",
    ),
    _rule(r"\[Errno 28\]|No space left on device|\(os error 28\)", Cause.DISK_FULL, "A disk (or /dev/shm) is full."),
    _rule(r"\[Errno 122\]|Disk quota exceeded", Cause.DISK_FULL, "The disk quota is used up."),
    _rule(
        r"Address already in use.*(?:ipc|tcp)://|EADDRINUSE|failed to listen on any local network address",
        Cause.OTHER,
        "An address that vLLM's processes use among themselves is taken; it is not the server's own port.",
    ),
    _rule(
        r"\[Errno (?:98|48)\].*address already in use|port is already allocated"
        r"|failed to bind (?:host )?port .*address already in use|listen tcp\S* \S+ bind: address already in use",
        Cause.PORT_IN_USE,
        "Another process listens on the port already.",
    ),
    _rule(
        r"NCCL error|\bnccl\w+Error\b|Watchdog caught collective operation timeout|DistBackendError.*NCCL",
        Cause.NCCL,
        "The GPUs could not talk to each other over NCCL.",
    ),
    _rule(
        r"NVIDIA driver on your system is too old|Found no NVIDIA driver|CUDA driver version is insufficient"
        r"|Driver/library version mismatch|forward compatibility was attempted|unsupported display driver"
        r"|unsatisfied condition: cuda|PTX was compiled with an unsupported toolchain|cudaErrorInsufficientDriver"
        r"|NVIDIA-SMI has failed|system not yet initialized|couldn't communicate with the NVIDIA driver",
        Cause.DRIVER,
        "The GPU's driver does not go with this CUDA, or does not work.",
    ),
    _rule(
        r"Failed to infer device type|no CUDA-capable device|No (?:CUDA|HIP) GPUs are available|cudaGetDeviceCount"
        r"|CUDA unknown error|libcuda\w*\.so[.\d]*: cannot open|nvidia-container-cli: "
        r"|could not select device driver .*\[gpu\]|NVML(?:Error_|_ERROR_)?\w*(?:Driver|DRIVER|LIBRARY|Library)\w*",
        Cause.DRIVER,
        "vLLM cannot use the GPU: its driver, CUDA libraries or build do not go together.",
        0.9,
    ),
    _rule(
        r"ImportError: .*(?:\.so[.\d]*: (?:undefined symbol|cannot open shared object)|GLIBC)"
        r"|lib(?:cu|nv|nccl|torch|c10)\w*\.so[.\d]*: (?:cannot open|undefined symbol)",
        Cause.DRIVER,
        "A library that vLLM was built for is missing or another one: vLLM, torch and CUDA do not go together.",
        0.75,
    ),
    # the model on this GPU
    _rule(
        r"(?<!FA\d is )only supported on (?:GPUs|devices) with compute capability|compute capability \S+ is not"
        r"|not supported (?:for|on|by|in) (?:the |this |your )(?:current )?(?:GPU|architecture)\b"
        r"|Min(?:imum)? capability: |requires? (?:a )?(?:GPU )?(?:with )?compute capability"
        r"|only support(?:s|ed on)? (?:\w+ (?:and|or) )?(?:Turing|Ampere|Ada|Hopper|Blackwell)"
        r"|requires \.target sm_|not supported on CUDA arch"
        r"|requires? (?:a )?(?:\w+ or )?(?:Ampere|Ada|Hopper|Blackwell)\b.* GPU|requires (?:the |an? )?(?:SM|sm_?)\d\d"
        r"|kv-cache on this device",
        Cause.UNSUPPORTED_BY_GPU,
        "This GPU cannot run the model's number format or a kernel that it needs.",
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
        "The quantization's kernels do not compute in this number format.",
        0.7,
        Cause.INVALID_FLAG_VALUE,
    ),
    _rule(
        r"(?:is not|must be) divisible by (?:the )?(?:tensor|tp\b|tp_size|world_size)"
        r"|is not divisible by weight quantization block|is not divisible by\s+min_thread_[nk]"
        r"|too large tensor parallel size|(?:reducing|decrease) (?:the )?`?tensor[_ -]parallel",
        Cause.TP_NOT_DIVISOR,
        "The model cannot be split over this many GPUs: tensor-parallel-size does not divide its shape.",
        0.9,
    ),
    # `divide` of vLLM's tensor parallelism says no more than this
    _rule(
        r"^AssertionError: \d+ is not divisible by \d+$",
        Cause.TP_NOT_DIVISOR,
        "The model cannot be split over this many GPUs: tensor-parallel-size does not divide its shape.",
        0.8,
    ),
    # the model's files
    _rule(
        r"(?<!private or )gated repo|GatedRepoError|Access to model .* is restricted|awaiting a review from the repo"
        r"|You must (?:be authenticated|have access to it)|LocalTokenNotFoundError"
        r"|Invalid (?:user token|credentials in Authorization header)",
        Cause.GATED,
        "The model's repository is gated: it needs a Hugging Face token of an account with access.",
    ),
    _rule(
        r"custom code\b.* must be executed|(?:set the option|pass the argument) `?trust_remote_code"
        r"|setting `?trust_remote_code=True|using the `?--trust-remote-code",
        Cause.TRUST_REMOTE_CODE,
        "The model brings code of its own, which runs only with trust-remote-code.",
        0.9,
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
        "There is no such model: neither a folder with its files, nor in the local cache, nor at the hub.",
        0.85,
        Cause.GATED,  # the hub does not tell strangers of private repositories
    ),
    _rule(
        r"Repo id must be (?:in the form|a string)"
        r"|Invalid repository ID or local directory|Cannot find any model weights|RevisionNotFoundError"
        r"|is not a valid git identifier|Can't load the configuration of|Incorrect path_or_model_id"
        r"|No supported config format found"
        r"|does not appear to have a file named (?:config|params|model|pytorch_model)\b"
        r"|No such file or directory: '[^']*(?:config\.json|\.safetensors|\.gguf)",
        Cause.MODEL_NOT_FOUND,
        "There is no such model: neither a folder with its files, nor in the local cache, nor at the hub.",
        0.9,
    ),
    _rule(
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to .*huggingface|EntryNotFoundError"
        r"|does not appear to have a file named",
        Cause.MODEL_NOT_FOUND,
        "The model's files are not there, and could not be fetched.",
        0.7,
    ),
    _rule(
        r"does not recognize this architecture|Model architectures .* (?:are|is) not supported",
        Cause.OTHER,
        "This vLLM (or its transformers) does not know the model's architecture; a newer one may.",
    ),
    # ends from outside
    _rule(r"^KeyboardInterrupt\b", Cause.INTERRUPTED, "The start was interrupted (SIGINT, as by ctrl+c).", 0.6),
    _rule(
        r"illegal memory access|device-side assert|misaligned address|CUDA error: unspecified launch failure"
        r"|uncorrectable ECC|Memory access fault by GPU",
        Cause.OTHER,
        "A kernel crashed on the GPU; this is a fault of vLLM, a kernel or the GPU.",
    ),
)
"""Lines that name the cause by themselves; the first rule that matches a line counts."""

INTERNAL_ADDRESS = _rule(
    "", Cause.OTHER, "An address that vLLM's processes use among themselves is taken; it is not the server's own port."
)

DEATHS: tuple[Rule, ...] = (
    _rule(
        r"Failed core proc\(s\): \{'[^}]*: -9\}",
        Cause.ENGINE_DIED,
        "The engine's process was killed (SIGKILL), often by the kernel because the machine's memory ran out.",
        0.75,
    ),
    _rule(r"Failed core proc\(s\): \{'[^}]*-\d+\}", Cause.ENGINE_DIED,
          "The engine's process was ended by a signal.", 0.75),
    _rule(r"RPC call to \w+ timed out", Cause.ENGINE_DIED, "A worker did not answer the engine in time.", 0.7),
    _rule(r"(?:Worker proc|RayWorkerProc) .*died unexpectedly|(?:Actor|RayActor)DiedError|WorkerCrashedError"
          r"|A worker died or was killed while executing", Cause.ENGINE_DIED,
          "A worker process died without a word of its own.", 0.6),
    _rule(r"Engine core proc .* died unexpectedly|EngineDeadError|Engine loop (?:has|is) (?:died|dead)",
          Cause.ENGINE_DIED, "The engine's process died without a word of its own.", 0.6),
    _rule(r"Fatal Python error|Segmentation fault|Segfault encountered|terminate called|Bus error|core dumped"
          r"|ChildProcessError: worker died",
          Cause.ENGINE_DIED, "The process crashed outside of Python.", 0.6),
)  # fmt: skip
"""Lines that say that something died, not why: used where no better line is found."""

_ENDS = ("SystemExit", "CancelledError", "BrokenPipeError", "ConnectionResetError", "EOFError", "GeneratorExit",
         "RayActorError")  # fmt: skip

AFTERMATH = re.compile(
    "|".join(rf"^(?:\w+\.)*{name}\b" for name in _ENDS)
    + r"|Engine core initialization failed|See (?:root cause|stack trace)"
    r"|Engine(?:Core)? (?:failed to start|encountered)"
    r"|EngineDeadError|EngineGenerateError|WorkerProc (?:initialization failed|hit an exception|failed to start)"
    r"|Worker failed with error|Failed core proc|Timed out waiting for engine|output_handler failed"
    r"|Did not receive response from front-end|Exception in worker \w+ while processing"
    r"|died unexpectedly|RuntimeError: Executor failed|shutting down|Shutdown|Application (?:shutdown|startup)",
    re.IGNORECASE,
)
"""What other processes say after one of them has failed."""

ENDS_A_SERVER = frozenset(
    {Cause.OOM_RUNTIME, Cause.OOM_GRAPH_CAPTURE, Cause.NCCL, Cause.DISK_FULL, Cause.DRIVER, Cause.INTERRUPTED}
)
"""Causes that end a server which was serving; other exceptions then are those of single requests."""
