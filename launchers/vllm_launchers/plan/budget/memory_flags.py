"""The flags that determine memory, with the defaults of vLLM's release and the GPU filled in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import msgspec

from vllm_launchers.engine_model.gpu_models import batch_defaults
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.flags import (
    ASYNC,
    CHUNKED,
    DATA,
    EXPERTS,
    KV_DTYPE,
    KV_OFFLOAD,
    KV_OFFLOAD_BY,
    PREFIX,
    QUANTIZATION,
    TRANSFER,
    WHOLE_ITEMS,
    token_count,
)
from vllm_launchers.vllm.flags.changes import Flags, json_flag, whole_number
from vllm_launchers.vllm.flags.several_words import several_words
from vllm_launchers.vllm.flags.speculation import draft_tokens, sequence_tokens, speculates
from vllm_launchers.vllm.modelfacts.facts import UNKNOWN_FORMAT, LayerKind, ModelFacts
from vllm_launchers.vllm.release_defaults import (
    NEWEST,
    WHOLE_PROMPTS_SINCE,
    Release,
    caches_linear_prefixes,
    default_utilization,
    graphs_in_share,
)

_DRAFT_LAYERS = {
    "ngram": 0,
    "ngram_gpu": 0,
    "suffix": 0,
    "medusa": 0,
    "mlp_speculator": 0,
    "eagle": 1,
    "eagle3": 1,
    "dflash": 5,
}
"""Attention layers that a draft adds; the most common number if the method does not determine it."""
_NO_DRAFT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix"})
_OWN_LAYERS = lazy_pattern(r"(?:.*_)?mtp")
_MAX_TOKENS_PER_MM_ITEM: Mapping[str, Mapping[str, int]] = {"gemma4": {"video": 2496, "audio": 750, "image": 280}}
"""Tokens of the largest item of each kind, by model type: for types with bidirectional attention over an item, whose
items vLLM never splits into chunks (``disable_chunked_mm_input``)."""

LARGEST_MM_ITEM = max(max(kinds.values()) for kinds in _MAX_TOKENS_PER_MM_ITEM.values())
"""Assumed for a model of which it is only known that it needs whole items."""

_LARGEST_NUMBER = 2**50

MEMORY_FLAGS = frozenset(
    {"all2all-backend", "block-size", "compilation-config", "cpu-offload-gb", "cudagraph-capture-sizes",
     "data-parallel-size", "decode-context-parallel-size", "dtype", "eplb-config", "gpu-memory-utilization",
     "hf-overrides", "kv-cache-dtype", "kv-cache-memory-bytes", "kv-events-config", "kv-transfer-config",
     "limit-mm-per-prompt", "lora-target-modules", "mamba-cache-mode", "max-cudagraph-capture-size", "max-lora-rank",
     "max-loras", "max-model-len", "max-num-batched-tokens", "max-num-seqs", "mm-encoder-tp-mode",
     "mm-processor-kwargs", "num-gpu-blocks-override", "offload-backend", "offload-group-size", "optimization-level",
     "performance-mode", "pipeline-parallel-size", "quantization", "runner", "spec-method", "spec-model",
     "spec-tokens", "speculative-config", "task", "tensor-parallel-size"}
)  # fmt: skip
"""Flags with a value on which a memory budget depends."""


class EffectiveFlags(msgspec.Struct, frozen=True):
    """Flags as set, or vLLM's defaults. Sizes in tokens and numbers of GPUs.

    ``max_model_len`` is None if the model's context is unknown. With ``fit_length`` vLLM searches for the longest that
    fits (``auto``). ``capture_sizes`` is the number of batch sizes with a CUDA graph, 0 without graphs.
    ``draft_layers`` are the attention layers that speculative decoding adds, ``draft_tokens`` the tokens that it
    predicts at once.
    """

    release: Release
    tensor: int
    pipeline: int
    data: int
    expert_parallel: bool
    """Whether experts are kept whole and distributed over the GPUs, rather than each split over all of them."""
    redundant_experts: int
    """Copies of experts that expert parallelism keeps in addition, to balance load (``eplb-config``)."""
    pads_experts: bool
    """Whether experts in MXFP4 are padded to the tiles of Marlin's kernel, as on GPUs before compute capability 9."""
    decode_context: int
    utilization: float
    max_num_seqs: int
    max_batched: int
    in_flight: int
    """Tokens that may be scheduled but not completed; windowed layers hold them in addition to the window."""
    block_size: int
    max_model_len: int | None
    fit_length: bool
    kv_dtype: str
    dtype: str
    draft_layers: int
    draft_tokens: int
    lora_ranks: int
    """Sum of the ranks of all LoRA adapters that one batch may use; 0 without LoRA."""
    expert_adapters: bool
    """Whether LoRA adapters may also change experts."""
    mixed_adapters: bool
    """Whether adapters may change gate and up projections of experts separately in any model."""
    shared_adapters: bool
    """Whether the matrices of adapters that are as long as the model is wide are shared by all experts of a layer."""
    sharded_adapters: bool
    """Whether both of an adapter's matrices are split by tensor parallelism, not only the second."""
    capture_sizes: int
    whole_graphs: bool
    """Whether CUDA graphs of whole decode steps are captured, attention included."""
    graphs_in_share: bool
    """Whether CUDA graphs count against the share of ``gpu-memory-utilization`` (0.20 and later)."""
    hybrid_cache: bool
    """Whether vLLM's hybrid KV cache manager is on, so that windowed layers keep no more than their window."""
    keep_states: bool
    """Whether states of linear layers are also kept for the prefix cache (``mamba-cache-mode align``)."""
    states_per_block: bool
    """Whether a state is kept for each block (``all``)."""
    pooling: bool
    encoder: bool
    """Whether vLLM profiles the model's vision or audio encoder, if it has one, with its largest input."""
    encoder_split: int
    """Number of GPUs that share the encoder's layers; 1 if each has all of it (``mm-encoder-tp-mode data``)."""
    videos: bool
    """Whether videos may be sent to a model that accepts them (``limit-mm-per-prompt``)."""
    max_pixels: int | None
    """The largest image that ``mm-processor-kwargs`` allows, in pixels; None if the model decides."""

    @property
    def gpus_per_engine(self) -> int:
        """Number of GPUs per copy of the model."""
        return self.tensor * self.pipeline


def effective_flags(
    facts: ModelFacts,
    flags: Flags,
    release: Release | None,
    environment: Mapping[str, str],
    gpu: GpuShape | None,
    assumed: list[str],
    draft: ModelFacts | None = None,
) -> EffectiveFlags:
    """Fill in unset flags. ``gpu`` is one of the assigned GPUs, or None for the CPU; ``draft`` is the draft model.

    Adds a sentence to ``assumed`` for each assumption.
    """
    if release is None:
        release = NEWEST
        assumed.append(f"the defaults of vLLM {NEWEST[0]}.{NEWEST[1]}, since your version is unknown")
    seqs, batched = batch_sizes(facts, flags, release, gpu)
    length, fit = _length(facts, flags, release, assumed)
    pipeline = whole(flags, "pipeline-parallel-size", 1)
    draft_layers, draft_tokens = _draft(facts, flags, assumed, draft)
    captured = captured_batches(flags, seqs, batched, gpu, release, draft_tokens)
    kept = caches_states(facts, flags, release)
    mode = flags.get("mamba-cache-mode", "none")
    if mode == "none" and kept and caches_every_state(facts, release) and not speculates(flags):
        mode = "all"
    return EffectiveFlags(
        release=release,
        tensor=whole(flags, "tensor-parallel-size", 1),
        pipeline=pipeline,
        data=whole(flags, "data-parallel-size", 1),
        expert_parallel=flags.get("enable-expert-parallel") is True,
        redundant_experts=whole(json_flag(flags, "eplb-config"), "num_redundant_experts", 0),
        pads_experts=weight_method(facts, flags) in _PADDED and gpu is not None and (gpu.major_capability or 9) < 9,
        decode_context=whole(flags, "decode-context-parallel-size", 1),
        utilization=accepted_utilization(flags, release),
        max_num_seqs=seqs,
        max_batched=batched,
        in_flight=batched * _batches_in_flight(flags, release, pipeline, gpu is None),
        block_size=whole(flags, "block-size", 16 if gpu is not None else 128),
        max_model_len=length,
        fit_length=fit,
        kv_dtype=cache_dtype(facts, flags, release),
        dtype=_dtype(facts, flags, release, gpu),
        draft_layers=draft_layers,
        draft_tokens=draft_tokens,
        lora_ranks=_lora_ranks(flags),
        expert_adapters=release >= EXPERT_ADAPTERS_SINCE and _targets_experts(flags),
        mixed_adapters=flags.get("enable-mixed-moe-lora-format") is True,
        shared_adapters=flags.get("enable-moe-shared-loras") is True,
        sharded_adapters=flags.get("fully-sharded-loras") is True,
        capture_sizes=len(captured),
        whole_graphs=bool(captured) and _whole_graphs(flags),
        graphs_in_share=_graphs_in_share(release, environment),
        hybrid_cache=hybrid_cache(facts, flags, release, environment),
        keep_states=kept and mode != "all",
        states_per_block=kept and mode == "all",
        pooling=pools(flags),
        encoder=_encoder_is_tried(facts, flags),
        encoder_split=1 if flags.get("mm-encoder-tp-mode") == "data" else whole(flags, "tensor-parallel-size", 1),
        videos=_may_have(flags, "video"),
        max_pixels=_max_pixels(flags),
    )


_PADDED = frozenset({"mxfp4", "gpt_oss_mxfp4"})
_NO_ENCODER = ("skip-mm-profiling", "language-model-only")


def _lora_ranks(flags: Flags) -> int:
    return whole(flags, "max-loras", 1) * whole(flags, "max-lora-rank", 16) if flags.get("enable-lora") is True else 0


EXPERT_ADAPTERS_SINCE: Release = (0, 11, 1)
"""First release that puts LoRA adapters on experts, which are then wrapped whatever the adapters contain."""

TARGETS = "lora-target-modules"


def _targets_experts(flags: Flags) -> bool:
    """Whether experts are among the modules that adapters may change: all of them by default."""
    given = flags.get(TARGETS)
    if given is None:
        return True
    words = several_words(TARGETS, given) or (str(given),)
    return any(word.startswith("experts.") or word.rpartition(".")[2] == "experts" for word in words)


def _encoder_is_tried(facts: ModelFacts, flags: Flags) -> bool:
    """Whether the encoder may get any input; kinds missing from ``limit-mm-per-prompt`` are allowed."""
    if any(flags.get(name) is True for name in _NO_ENCODER):
        return False
    limits = {kind: decimal(_of_each(value)) for kind, value in json_flag(flags, "limit-mm-per-prompt").items()}
    if any(limits.values()) or not limits:
        return True
    videos = facts.encoder is not None and facts.encoder.token_pixels > 0
    return not ({"image", "video"} <= limits.keys() if videos else limits.keys() & {"image", "audio"})


def _may_have(flags: Flags, kind: str) -> bool:
    return decimal(_of_each(json_flag(flags, "limit-mm-per-prompt").get(kind))) != 0


def _of_each(limit: object) -> object:
    """The limit of a kind per request: a number, or the ``count`` of an object that also limits sizes."""
    return limit.get("count", 1) if isinstance(limit, dict) else limit


def _max_pixels(flags: Flags) -> int | None:
    kwargs = json_flag(flags, "mm-processor-kwargs")
    images = kwargs.get("images_kwargs")
    for source in (kwargs, images if isinstance(images, dict) else {}):
        size = source.get("size")
        for value in (source.get("max_pixels"), size.get("longest_edge") if isinstance(size, dict) else None):
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_NUMBER:
                return value
    return None


def whole(flags: Flags, name: str, default: int) -> int:
    """A flag's positive whole number, or the default if it has none (invalid values are reported elsewhere)."""
    return min(whole_number(flags, name, default), _LARGEST_NUMBER)


def decimal(value: object) -> float | None:
    """A number, possibly written as text; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 2**63:
        return None
    return float(value)


def accepted_utilization(flags: Flags, release: Release | None) -> float:
    """``gpu-memory-utilization`` if vLLM accepts its value, else the release's default."""
    share = decimal(flags.get("gpu-memory-utilization"))
    return share if share is not None and 0 < share <= 1 else default_utilization(release)


def batch_sizes(
    facts: ModelFacts | None, flags: Flags, release: Release | None, gpu: GpuShape | None
) -> tuple[int, int]:
    """``max-num-seqs`` and ``max-num-batched-tokens`` of a server: its flags, else vLLM's defaults.

    From ``EngineArgs`` (``vllm/engine/arg_utils.py``). ``gpu`` is None for the CPU, ``facts`` for an unknown model; an
    unknown release counts as the newest.
    """
    if gpu is None:
        world = whole(flags, "tensor-parallel-size", 1) * whole(flags, "pipeline-parallel-size", 1)
        defaults = 128 * world, 2048 * world
    else:
        defaults = batch_defaults(gpu.name, gpu.total_gib, release or NEWEST)
    if _batches_experts(flags, release or NEWEST):
        defaults = defaults[0], _SMALL_STEP
    doubled = 2 if flags.get("performance-mode") == "throughput" else 1
    asked = whole(flags, "max-num-seqs", 0)
    seqs = asked or defaults[0] * doubled
    if (batched := whole(flags, "max-num-batched-tokens", 0)) > 0:
        return asked or min(seqs, batched), batched
    batched = max(defaults[1] * doubled, max_tokens_per_mm_item(facts, flags))
    length = token_count(flags.get("max-model-len"))
    if length is None and facts is not None:
        length = facts.longest_context(release)
    if length is None:
        return seqs, batched
    if whole_prompts(facts, flags, release):
        batched = max(batched, length)
    batched = max(1, min(batched, seqs * length))
    return asked or min(seqs, batched), batched


_BATCHED_EXPERTS, _BATCHED_EXPERTS_SINCE = ("deepep_low_latency", "nixl_ep"), (0, 20, 0)
"""All-to-all backends whose buffers grow with the step, and the first release with smaller ones for them."""

_SMALL_STEP = 256


def _batches_experts(flags: Flags, release: Release) -> bool:
    """Whether vLLM's default step is a small one (``ParallelConfig.use_batched_dp_moe``)."""
    spread = flags.get(EXPERTS) is True and whole(flags, DATA, 1) > 1
    return spread and flags.get("all2all-backend") in _BATCHED_EXPERTS and release >= _BATCHED_EXPERTS_SINCE


def pools(flags: Flags) -> bool:
    """Whether a server is known to pool, e.g. to compute embeddings, rather than to generate."""
    return flags.get("runner") == "pooling" or flags.get("task") in ("embed", "classify", "score", "reward")


_ENCODERS = frozenset(
    f"{family}{use}"
    for family in ("Bert", "Roberta", "XLMRoberta", "ModernBert")
    for use in ("Model", "ForSequenceClassification", "ForTokenClassification")
)
"""Architectures of encoders, whose attention keeps no keys and values (``EncoderOnlyAttention``)."""


def is_encoder(facts: ModelFacts) -> bool:
    """Whether vLLM is known to keep no KV cache for the model, nor chunks its prompts, whatever the flags say."""
    return facts.architecture in _ENCODERS


def whole_prompts(facts: ModelFacts | None, flags: Flags, release: Release | None) -> bool:
    """Whether vLLM wants a step to hold any prompt: chunked prefill is off, and the release honors that."""
    if facts is not None and is_encoder(facts):
        return flags.get(CHUNKED) is not True
    if flags.get(CHUNKED) is not False:
        return False
    return release is None or release >= WHOLE_PROMPTS_SINCE or pools(flags)


def max_tokens_per_mm_item(facts: ModelFacts | None, flags: Flags) -> int:
    """Tokens of the largest image, video or sound that must be computed in one step; 0 if vLLM may chunk it."""
    if facts is None or not facts.multimodal or flags.get("language-model-only") is True:
        return 0
    kinds = _MAX_TOKENS_PER_MM_ITEM.get(facts.model_type or "", {})
    return max((tokens for kind, tokens in kinds.items() if _may_have(flags, kind)), default=0)


def needs_unknown_items_whole(facts: ModelFacts | None, flags: Flags) -> bool:
    """Whether a flag makes vLLM compute each image or video in one step, and it is unknown how large that must be."""
    if flags.get(WHOLE_ITEMS) is not True or flags.get("language-model-only") is True:
        return False
    return facts is None or (facts.multimodal and not max_tokens_per_mm_item(facts, flags))


def least_step(
    flags: Flags,
    release: Release | None,
    *,
    facts: ModelFacts | None = None,
    sequences: int = 0,
    context: int | None = None,
    mm_item: int = 0,
    state_block: int = 0,
) -> int:
    """The smallest ``max-num-batched-tokens`` that vLLM accepts and in which all sequences advance.

    A step must hold the next token of each of the ``sequences`` and its drafts, a whole prompt of up to ``context``
    tokens without chunked prefill, a whole item of some multimodal models (see `max_tokens_per_mm_item`), and in some
    releases a block of tokens with one cached state of linear layers.
    """
    prompt = context or 0 if whole_prompts(facts, flags, release) else 0
    return max(1, sequences * sequence_tokens(flags, release), prompt, mm_item, state_block)


def _batches_in_flight(flags: Flags, release: Release, pipeline: int, on_cpu: bool) -> int:
    """Maximum number of steps in flight at once; since 0.26 a window's blocks are kept for all of them."""
    if release < (0, 26, 0):
        return 1
    overlap = flags.get(ASYNC) is not False and not on_cpu and pipeline == 1
    return 2 if overlap else pipeline


def _length(facts: ModelFacts, flags: Flags, release: Release, assumed: list[str]) -> tuple[int | None, bool]:
    value = flags.get("max-model-len")
    length = token_count(value)
    fit = length is None and value in ("auto", "-1")
    if length is None:
        length = facts.longest_context(release)
        if length is None:
            assumed.append("the model's context length is unknown: set max-model-len to see the concurrency")
    if length is not None and flags.get("disable-sliding-window") is True and facts.window:
        length = min(length, facts.window)
    return length, fit


def _dtype(facts: ModelFacts, flags: Flags, release: Release, gpu: GpuShape | None) -> str:
    """The dtype of activations: the flag's, else the checkpoint's if the GPU and the model allow it.

    vLLM runs float32 checkpoints in 16 bits if possible (``_resolve_auto_dtype``).
    """
    value = str(flags.get("dtype", "auto"))
    if value != "auto":
        return {"half": "float16", "float": "float32"}.get(value, value)
    able = ["float16", "float32"] if gpu is not None and gpu.before_ampere else ["bfloat16", "float16", "float32"]
    if refuses_float16(facts, release):
        able.remove("float16")
    return facts.dtype if facts.dtype in able and facts.dtype != "float32" else able[0]


_REFUSE_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""Types of models that vLLM does not run in FP16 (``_FLOAT16_NOT_SUPPORTED_MODELS``)."""

_PLAMO_UNTIL: Release = (0, 27, 0)
"""First release without ``plamo2`` among them."""


def refuses_float16(facts: ModelFacts, release: Release | None) -> bool:
    """Whether vLLM refuses to run a model in FP16, for its range; an unknown release counts as the newest."""
    older = release is not None and release < _PLAMO_UNTIL
    return facts.model_type in _REFUSE_FLOAT16 or (older and facts.model_type == "plamo2")


_TAKE_FLOAT32 = frozenset({"bitsandbytes", "compressed-tensors", "gguf", "torchao", UNKNOWN_FORMAT})
"""Quantization methods with FP32 among their ``get_supported_act_dtypes``, in all releases."""


def refuses_float32(method: str) -> bool:
    """Whether vLLM refuses to run weights of this quantization method in FP32."""
    return bool(method) and method not in _TAKE_FLOAT32


def lacks_float32(method: str) -> bool:
    """Whether vLLM refuses these weights in FP32, or accepts them and has no GPU kernel for that.

    Marlin's and CUTLASS's kernels for compressed-tensors compute in 16 bits, which fails in the profile run.
    """
    return refuses_float32(method) or method == "compressed-tensors"


def weight_method(facts: ModelFacts | None, flags: Flags) -> str:
    """The quantization method of the weights: the flag's, else the checkpoint's; empty if there is none."""
    asked = flags.get(QUANTIZATION)
    if isinstance(asked, str):
        return asked
    return facts.quantization.method if facts is not None and facts.quantization is not None else ""


_OWN_CACHE_SINCE: Mapping[str, Release] = {"modelopt": (0, 14, 0), "compressed-tensors": (0, 16, 0)}
"""First releases that keep the KV cache in the format that a checkpoint has scales for. 0.15 was not examined.

From ``resolve_kv_cache_dtype_string``, and ``kv_cache_scheme`` in ``Attention``, but not in ``MLAAttention``.
"""

_FLAG_BEFORE_SCHEME: Release = (0, 22, 0)
"""Earlier releases ignore the flag if a compressed-tensors checkpoint has scales."""


def cache_dtype(facts: ModelFacts, flags: Flags, release: Release | None) -> str:
    """The format of the KV cache: the flag's, or the checkpoint's; ``auto`` if it is that of the activations."""
    asked, release = str(flags.get(KV_DTYPE, "auto")), release or NEWEST
    own, method = facts.kv_cache_quantization, facts.quantization.method if facts.quantization is not None else ""
    since = _OWN_CACHE_SINCE.get("modelopt" if method.startswith("modelopt") else method)
    by_scheme = method == "compressed-tensors"
    if own is None or since is None or release < since or (by_scheme and facts.mla):
        return asked
    forced = by_scheme and release < _FLAG_BEFORE_SCHEME
    return own if asked == "auto" or forced else asked


_HYBRID_SINCE: Release = (0, 9, 2)
HYBRID_OFF = "disable-hybrid-kv-cache-manager"
KEPT_ON_REQUEST: Release = (0, 13, 0)
"""First release in which the flag's negation differs from leaving it out."""
_EVENTS, _EVENTS_KEEP_SINCE = "kv-events-config", (0, 20, 0)
"""Turned the manager off in all earlier releases."""
CONNECTORS_KEEP_SINCE: Release = (0, 22, 0)
"""First release in which only connectors that do not support the manager turn it off, rather than all."""
_CONNECTORS_WITHOUT = frozenset(
    {"ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1", "P2pNcclConnector"}
)
"""Connectors that do not. ``LMCacheMPConnector`` depends on the version of LMCache."""
_MORIIO, _MORIIO_KEEPS_SINCE = "MoRIIOConnector", (0, 30, 0)
_LMCACHE_TURNS_OFF: tuple[Release, Release] = ((0, 22, 0), (0, 23, 0))
"""From the first of these releases, and before the second, offloading to LMCache chooses ``LMCacheConnectorV1``."""
_CHUNKED_VARIABLE, _CHUNKED_SINCE = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", (0, 14, 0)
"""Whether the manager stays on for chunked attention, and the first release in which it does by default."""


def hybrid_cache(facts: ModelFacts, flags: Flags, release: Release, environment: Mapping[str, str]) -> bool:
    """Whether the hybrid KV cache manager is on, unless a connector that is not known turns it off."""
    if release < _HYBRID_SINCE or hybrid_cache_off(flags, release):
        return False
    if LayerKind.CHUNKED not in facts.layers:
        return True
    config = json_flag(flags, "speculative-config")
    eagle = str(config.get("method", flags.get("spec-method", ""))).startswith("eagle")
    allowed = environment.get(_CHUNKED_VARIABLE, "1" if release >= _CHUNKED_SINCE else "0")
    return not eagle and allowed != "0"


def hybrid_cache_off(flags: Flags, release: Release) -> tuple[str, ...]:
    """The flags that surely turn off the hybrid KV cache manager, whatever the model (``VllmConfig``)."""
    asked = flags.get(HYBRID_OFF)
    if asked is True:
        return (HYBRID_OFF,)
    found = [name for name in flags if name.partition(".")[0] == _EVENTS and release < _EVENTS_KEEP_SINCE]
    kept = asked is False and release >= KEPT_ON_REQUEST
    if kept:
        return tuple(found)
    without = _CONNECTORS_WITHOUT | ({_MORIIO} if release < _MORIIO_KEEPS_SINCE else set())
    if release < CONNECTORS_KEEP_SINCE or not without.isdisjoint(_connectors(json_flag(flags, TRANSFER))):
        found += [name for name in flags if name.partition(".")[0] == TRANSFER]
    first, end = _LMCACHE_TURNS_OFF
    if first <= release < end and KV_OFFLOAD in flags and flags.get(KV_OFFLOAD_BY) == "lmcache":
        found += (KV_OFFLOAD, KV_OFFLOAD_BY)
    return tuple(found)


def _connectors(config: Mapping[str, object]) -> list[str]:
    """Names of the KV connectors in a ``kv-transfer-config``: one, or those that ``MultiConnector`` combines."""
    more = config.get("kv_connector_extra_config")
    parts = more.get("connectors") if isinstance(more, dict) else None
    parts = parts if isinstance(parts, list) and config.get("kv_connector") == "MultiConnector" else [config]
    plain = [part for part in parts if isinstance(part, dict) and not part.get("kv_connector_module_path")]
    return [str(part.get("kv_connector")) for part in plain]


EVERY_STATE = frozenset({"bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba2"})
"""Types of models whose states vLLM can cache for each block (``SupportsMambaPrefixCaching``)."""

_EVERY_STATE_RELEASES: tuple[Release, Release] = ((0, 13, 0), (0, 28, 0))
"""From the first of these releases, and before the second, that is the default for them."""


def caches_every_state(facts: ModelFacts, release: Release) -> bool:
    """Whether prefix caching keeps a state for each block unless ``mamba-cache-mode`` says otherwise."""
    first, end = _EVERY_STATE_RELEASES
    return first <= release < end and facts.model_type in EVERY_STATE


def caches_states(facts: ModelFacts, flags: Flags, release: Release) -> bool:
    """Whether prefix caching, which keeps states of linear layers, is on for a model that has such layers.

    On request; by default since 0.28, but not without attention or for pooling (``is_prefix_caching_supported``).
    """
    if LayerKind.LINEAR not in facts.layers:
        return False
    asked = flags.get(PREFIX)
    if isinstance(asked, bool):
        return asked
    return caches_linear_prefixes(release) and not facts.attention_free and not pools(flags)


def draft_model(flags: Flags) -> str:
    """The speculative model: a draft model or an EAGLE head; empty if there are no separate weights."""
    config = json_flag(flags, "speculative-config")
    named = config.get("model", flags.get("spec-model", ""))
    method = str(config.get("method", flags.get("spec-method", "")) or "")
    own = method in _NO_DRAFT_MODEL or _OWN_LAYERS.fullmatch(method) or named in _NO_DRAFT_MODEL
    return named if isinstance(named, str) and not own else ""


def draft_tensor(flags: Flags, tensor: int) -> int:
    """Number of GPUs that the draft model is split over: the model's, unless ``draft_tensor_parallel_size`` is set."""
    size = json_flag(flags, "speculative-config").get("draft_tensor_parallel_size")
    return size if isinstance(size, int) and 0 < size <= tensor else tensor


def _as_layers(facts: ModelFacts, draft: ModelFacts) -> int | None:
    """The draft's KV cache in units of the model's layers; None if one of the shapes is unknown."""
    own = (draft.kv_heads or 0) * (draft.head_dim or 0) * len(draft.layers)
    layer = (facts.kv_heads or 0) * (facts.head_dim or 0)
    return -(-own // layer) if own and layer and facts.kv_lora_rank is None else None


def _draft(facts: ModelFacts, flags: Flags, assumed: list[str], draft: ModelFacts | None = None) -> tuple[int, int]:
    """Attention layers that speculative decoding adds, and tokens that it predicts at once."""
    config = json_flag(flags, "speculative-config")
    method = str(config.get("method", flags.get("spec-method", "")) or "")
    tokens = draft_tokens(flags)
    if not speculates(flags):
        return 0, 0
    if not method and (named := config.get("model", flags.get("spec-model"))) in _NO_DRAFT_MODEL:
        method = str(named)  # vLLM accepts these as the model's name
    if _OWN_LAYERS.fullmatch(method):
        return 1, tokens
    layers = _DRAFT_LAYERS.get(method)
    if draft is not None and (known := _as_layers(facts, draft)) is not None:
        return known, tokens
    if method not in _NO_DRAFT_MODEL and not (draft is not None and (draft.weight_bytes or draft.parameters)):
        count = "its KV cache neither" if layers is None else f"its KV cache is, with {layers} layer(s)"
        assumed.append(f"the draft model's weights are not counted; {count}")
    return layers or 0, tokens


_USUAL_BATCHES = (1, 2, 4, *range(8, 256, 8), *range(256, 8193, 16))
_LARGEST_CAPTURE, _LARGEST_CAPTURE_ON_10 = 512, 1024
_LARGER_SINCE = (0, 28, 0)
"""First release seen to capture larger batches on compute capability 10.x."""

_FINE_SINCE, _WHOLE_STEP_SINCE = (0, 20, 0), (0, 24, 0)
_WHOLE_DRAFTS_SINCE, _ALL_SEQUENCES_SINCE = (0, 30, 0), (0, 31, 0)
"""First releases seen to also capture small batches of each size with ``performance-mode interactivity``, the largest
step, multiples of the tokens that a sequence has with speculative decoding, and ``max-num-seqs``."""


def captured_batches(
    flags: Flags, seqs: int, batched: int, gpu: GpuShape | None, release: Release, draft_tokens: int = 0
) -> list[int]:
    """Batch sizes in tokens with a CUDA graph, from ``VllmConfig._set_cudagraph_sizes``; none on the CPU (no ``gpu``).

    ``seqs`` and ``batched`` are the sequences and tokens of a step.
    """
    config = json_flag(flags, "compilation-config")
    level = decimal(flags.get("optimization-level", config.get("level", config.get("mode"))))
    mode = str(config.get("cudagraph_mode", "")).upper()
    eager = flags.get("enforce-eager") is True or mode == "NONE" or level == 0 or config.get("use_cudagraph") is False
    if gpu is None or eager:
        return []
    sizes = flags.get("cudagraph-capture-sizes", config.get("cudagraph_capture_sizes"))
    if isinstance(sizes, int) and not isinstance(sizes, bool):
        found = {sizes}
    elif words := several_words("cudagraph-capture-sizes", sizes):
        found = {int(word) for word in words if word.isdecimal()}
    elif isinstance(sizes, list):
        found = {size for size in sizes if isinstance(size, int)}
    else:
        most = decimal(flags.get("max-cudagraph-capture-size", config.get("max_cudagraph_capture_size")))
        fine = flags.get("performance-mode") == "interactivity" and release >= _FINE_SINCE
        if most is not None and most >= 0:
            found = _up_to(int(most), batched, release, fine=fine)
        else:
            wider = release >= _LARGER_SINCE and gpu.major_capability == 10
            ceiling = _LARGEST_CAPTURE_ON_10 if wider else _LARGEST_CAPTURE
            largest = min(2 * seqs * (1 + draft_tokens), ceiling)
            found = _up_to(largest, batched, release, fine=fine)
            found |= {size for size in _uniform(min(seqs, ceiling), draft_tokens, release) if size <= largest}
    return sorted(size for size in found if size <= batched)


def _up_to(largest: int, batched: int, release: Release, *, fine: bool) -> set[int]:
    """The usual batch sizes: 1, 2, 4, every 8 up to 256, and every 16 above."""
    found = {*_USUAL_BATCHES[: bisect_right(_USUAL_BATCHES, largest)]}
    if fine:
        found |= {*range(1, min(largest, 32) + 1)}
    if batched <= largest and release >= _WHOLE_STEP_SINCE:
        found.add(batched)
    return found


def _uniform(seqs: int, draft_tokens: int, release: Release) -> set[int]:
    """Batch sizes in which each of up to ``seqs`` sequences has one token, or all that speculation predicts for it."""
    if release < (_WHOLE_DRAFTS_SINCE if draft_tokens else _ALL_SEQUENCES_SINCE):
        return set()
    if not draft_tokens:
        return {seqs}
    return {count * (1 + draft_tokens) for count in (*_USUAL_BATCHES, seqs) if count <= seqs}


def _whole_graphs(flags: Flags) -> bool:
    """Whether CUDA graphs are of whole decode steps, as by default, rather than only of the parts between attention.

    Not if another compilation mode may change that.
    """
    config = json_flag(flags, "compilation-config")
    if pools(flags) or config.get("mode", _COMPILES) != _COMPILES:
        return False
    if asked := str(config.get("cudagraph_mode", "")).upper():
        return asked.startswith("FULL")
    return decimal(flags.get("optimization-level", 2)) in (2, 3)


_COMPILES = 3
"""vLLM's default compilation mode (``CompilationMode.VLLM_COMPILE``)."""


def _graphs_in_share(release: Release, environment: Mapping[str, str]) -> bool:
    wanted = environment.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "")
    if release >= (0, 18, 1) and wanted in ("0", "1"):
        return wanted == "1"
    return graphs_in_share(release)
