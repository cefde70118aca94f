"""Flags that vLLM refuses together for some models. Pure.

Plans report them as errors, and no proposal may lead to them. Conditions that hold for every model are in
`check_value`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from vllm_launchers.plan.budget.memory_flags import (
    CONNECTORS_KEEP_SINCE,
    EVERY_STATE,
    EXPERT_ADAPTERS_SINCE,
    HYBRID_OFF,
    KEPT_ON_REQUEST,
    TARGETS,
    caches_every_state,
    caches_states,
    hybrid_cache,
    hybrid_cache_off,
    refuses_float16,
    refuses_float32,
    weight_method,
)
from vllm_launchers.plan.flags import (
    ASYNC,
    CHUNKED,
    DATA,
    EXPERTS,
    KV_OFFLOAD,
    KV_OFFLOAD_BY,
    LORA,
    PREFIX,
    TENSOR,
    TRANSFER,
    WHOLE_ITEMS,
)
from vllm_launchers.vllm.flags.changes import Flags, whole_number
from vllm_launchers.vllm.flags.speculation import speculates, speculation_flags
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts
from vllm_launchers.vllm.release_defaults import (
    NEWEST,
    Release,
    can_cache_linear_prefixes,
)


class BrokenCondition(msgspec.Struct, frozen=True):
    """``flags`` are those to unset; ``sentence`` says why. ``surely`` is False if vLLM may accept it after all.

    ``missing`` is a switch with which it accepts the flags, if there is one.
    """

    flags: tuple[str, ...]
    sentence: str
    surely: bool = True
    missing: str = ""


def broken_model_conditions(
    facts: ModelFacts, flags: Flags, release: Release | None, environment: Mapping[str, str] | None = None
) -> Iterator[BrokenCondition]:
    """What vLLM refuses in these flags for this model; an unknown release counts as the newest.

    ``environment`` is the server's; without it, no variable is assumed to be set.
    """
    if facts.experts and flags.get(EXPERTS) is True:
        yield from _adapters_of_whole_experts(facts, flags, release)
    dtype = flags.get("dtype")
    if dtype in ("float16", "half") and refuses_float16(facts, release):
        yield BrokenCondition(("dtype",), f"--dtype {dtype} does not work with the model type {facts.model_type}")
    if dtype in ("float32", "float") and refuses_float32(method := weight_method(facts, flags)):
        yield BrokenCondition(("dtype",), f"--dtype {dtype} does not work with {method} weights")
    yield from _drafts_beside_states(facts, flags, release or NEWEST)
    yield from _states_beside_attention(facts, flags, release or NEWEST)
    yield from _offloading(facts, flags, release or NEWEST, environment or {})
    yield from _manager_kept(facts, flags, release or NEWEST, environment or {})
    yield from broken_by_cached_states(facts, flags, release)


# -- linear layers beside attention -----------------------------------------------------------------------------------


_ONE_KIND_REFUSED_SEEN: Release = (0, 11, 0)
"""First release that surely refuses that (``unify_hybrid_kv_cache_specs``); earlier ones may have used engine V0."""


def _mixed(facts: ModelFacts) -> bool:
    """Whether the model has both attention and layers with a state."""
    return LayerKind.LINEAR in facts.layers and not facts.attention_free


_MIXED = "a model with both attention and Mamba or linear-attention layers"


def _states_beside_attention(facts: ModelFacts, flags: Flags, release: Release) -> Iterator[BrokenCondition]:
    if not _mixed(facts) or not (off := hybrid_cache_off(flags, release)):
        return
    heads = list(dict.fromkeys(name.partition(".")[0] for name in off))
    text = f"{' and '.join(f'--{name}' for name in heads)} turns off the hybrid KV cache manager, which {_MIXED} needs"
    if heads == [TRANSFER] and KEPT_ON_REQUEST <= release < CONNECTORS_KEEP_SINCE:
        text += f"; --no-{HYBRID_OFF} keeps it on if the connector supports it"
    yield BrokenCondition(off, text, surely=release >= _ONE_KIND_REFUSED_SEEN)


def _manager_kept(
    facts: ModelFacts, flags: Flags, release: Release, environment: Mapping[str, str]
) -> Iterator[BrokenCondition]:
    """The hybrid KV cache manager is asked for, beside what forbids it."""
    if flags.get(HYBRID_OFF) is not False or release < KEPT_ON_REQUEST:
        return
    if off := hybrid_cache_off(flags, release):
        why = f"--{off[0].partition('.')[0]} in this release"
    elif not hybrid_cache(facts, flags, release, environment):
        why = "the chunked attention of this model and these settings"
    else:
        return
    yield BrokenCondition((HYBRID_OFF,), f"--no-{HYBRID_OFF} does not work with {why}")


# -- offloading of the KV cache ---------------------------------------------------------------------------------------


_OFFLOADED_ALONE: Release = (0, 14, 0)
"""First release in which the size has an effect without a backend."""
_NATIVE_KEPT: Release = (0, 21, 0)
"""First release whose own connector supports the hybrid KV cache manager."""
_SIMPLE, _SIMPLE_SINCE = "VLLM_USE_SIMPLE_KV_OFFLOAD", (0, 19, 0)
"""Chooses another connector of vLLM's own, which has always supported it."""


def _offloading(
    facts: ModelFacts, flags: Flags, release: Release, environment: Mapping[str, str]
) -> Iterator[BrokenCondition]:
    """Older releases choose the connector after they have left the manager on (``_post_init_kv_transfer_config``)."""
    backend = flags.get(KV_OFFLOAD_BY)
    until = CONNECTORS_KEEP_SINCE if backend == "lmcache" else _NATIVE_KEPT
    simple = release >= _SIMPLE_SINCE and backend != "lmcache" and environment.get(_SIMPLE, "0") not in ("", "0")
    idle = KV_OFFLOAD not in flags or (backend is None and release < _OFFLOADED_ALONE)
    if release >= until or idle or simple or not hybrid_cache(facts, flags, release, environment):
        return
    given = tuple(name for name in (KV_OFFLOAD, KV_OFFLOAD_BY) if name in flags)
    if _mixed(facts):
        yield BrokenCondition(given, f"in this release, --{KV_OFFLOAD} does not work with {_MIXED}")
    else:
        yield BrokenCondition(given, f"in this release, --{KV_OFFLOAD} needs --{HYBRID_OFF}", missing=HYBRID_OFF)


# -- speculative decoding with linear layers --------------------------------------------------------------------------


_DRAFTS_BESIDE_STATES_SINCE: Release = (0, 17, 0)
_DRAFTED_BEFORE = "qwen3_next"
"""The only type of model with linear layers that could be drafted for before."""

_DRAFTS_REFUSED_SEEN: Release = (0, 10, 2)
"""First release in which that was seen, in ``GPUModelRunner`` or ``MambaBase.get_kv_cache_spec``."""


def _drafts_beside_states(facts: ModelFacts, flags: Flags, release: Release) -> Iterator[BrokenCondition]:
    drafts = LayerKind.LINEAR in facts.layers and (speculates(flags) or facts.own_draft)
    if drafts and release < _DRAFTS_BESIDE_STATES_SINCE and facts.model_type != _DRAFTED_BEFORE:
        text = "in this release, speculative decoding does not work with Mamba or linear-attention layers"
        yield BrokenCondition(speculation_flags(flags), text, surely=release >= _DRAFTS_REFUSED_SEEN)


# -- LoRA adapters on whole experts -----------------------------------------------------------------------------------


_WHOLE_EXPERT_ADAPTERS_SINCE: Release = (0, 21, 0)
"""First release that can do that with expert parallelism (``FusedMoEWithLoRA._ep_check``)."""

_ALL_TO_ALL, _GATHERED = "all2all-backend", ("allgather_reducescatter", "pplx", "naive")
"""The only all-to-all backend that works with it, and those that vLLM replaces by it."""

_SAME_TOKENS = frozenset(
    {"AfmoeForCausalLM", "BailingMoeForCausalLM", "Ernie4_5_MoeForCausalLM", "Ernie4_5_VLMoeForConditionalGeneration",
     "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
     "Glm4MoeForCausalLM", "HYV3ForCausalLM", "JambaForCausalLM", "LagunaForCausalLM", "Lfm2MoeForCausalLM",
     "MiniMaxM2ForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "Param2MoEForCausalLM", "PhiMoEForCausalLM",
     "Qwen2MoeForCausalLM", "SarvamMLAForCausalLM"}
)  # fmt: skip
"""Models with experts and adapters that are never sequence parallel: no layer gets ``is_sequence_parallel``."""


def _adapters_of_whole_experts(facts: ModelFacts, flags: Flags, release: Release | None) -> Iterator[BrokenCondition]:
    tensor, data = whole_number(flags, TENSOR), whole_number(flags, DATA)
    if problem := adapter_problem(facts, flags, release, tensor=tensor, data=data):
        text = f"--{EXPERTS} does not work with --{LORA} {problem}"
        # Experts may not be among the targets, and models that were not examined may not be sequence parallel.
        sure = TARGETS not in flags and not (tensor > 1 and data > 1)
        yield BrokenCondition((EXPERTS,), text, sure)


def adapter_problem(facts: ModelFacts | None, flags: Flags, release: Release | None, *, tensor: int, data: int) -> str:
    """Where LoRA adapters prevent expert parallelism, to follow ``with --enable-lora``; empty if they don't.

    Not with sequence parallelism, which most models use if both sizes are above 1.
    """
    release = release or NEWEST
    if flags.get(LORA) is not True or tensor * data == 1 or release < EXPERT_ADAPTERS_SINCE:
        return ""
    if release < _WHOLE_EXPERT_ADAPTERS_SINCE:
        return "in this release"
    if tensor > 1 and data > 1 and (facts is None or facts.architecture not in _SAME_TOKENS):
        return f"and both --{TENSOR} and --{DATA} above 1"
    if flags.get("fully-sharded-loras") is True:
        return "and --fully-sharded-loras"
    backend = str(flags.get(_ALL_TO_ALL, _GATHERED[0]))
    return "" if backend in _GATHERED else f"and --{_ALL_TO_ALL} {backend}"


# -- cached states of linear layers -----------------------------------------------------------------------------------


_ALWAYS_CHUNKED_SINCE: Release = (0, 32, 0)
"""First release seen to require chunked prefill with every ``mamba-cache-mode``; earlier ones do with ``align``."""

_ASYNC_REFUSED: tuple[Release, Release] = ((0, 16, 0), (0, 17, 0))
"""From the first of these releases, and before the second, asynchronous scheduling is refused (``VllmConfig``)."""

_ALIGNED_SEEN: Release = (0, 16, 0)
"""First release of which the conditions of ``align`` were seen. 0.15 has the mode too."""


def broken_by_cached_states(facts: ModelFacts, flags: Flags, release: Release | None) -> Iterator[BrokenCondition]:
    """What vLLM refuses together with prefix caching, if it is on, of a model with linear layers.

    From ``MambaModelConfig.verify_and_update_config`` and ``VllmConfig.validate_block_size``.
    """
    release = release or NEWEST
    if not caches_states(facts, flags, release) or not can_cache_linear_prefixes(release, drafts=False):
        return
    sure, aligned = release >= _ALIGNED_SEEN, _aligned(facts, flags, release)
    of_these = "prefix caching of a model with Mamba or linear-attention layers"
    if flags.get(CHUNKED) is False and (aligned or release >= _ALWAYS_CHUNKED_SINCE):
        yield BrokenCondition((CHUNKED,), f"--no-{CHUNKED} does not work with {of_these}", sure)
    drafts = facts.model_type == _DRAFTED_BEFORE and (speculates(flags) or facts.own_draft)
    if aligned and not can_cache_linear_prefixes(release, drafts=drafts):
        text = f"in this release, speculative decoding does not work with {of_these}"
        yield BrokenCondition((PREFIX,), text, sure)
    first, end = _ASYNC_REFUSED
    if flags.get(ASYNC) is True and first <= release < end:
        yield BrokenCondition((ASYNC,), f"in this release, --{ASYNC} does not work with {of_these}")
    if aligned and flags.get(WHOLE_ITEMS) is True:
        yield BrokenCondition((WHOLE_ITEMS,), f"--{WHOLE_ITEMS} does not work with {of_these}", sure)


def _aligned(facts: ModelFacts, flags: Flags, release: Release) -> bool:
    """Whether states are cached at the ends of blocks, rather than for each block."""
    mode = str(flags.get("mamba-cache-mode", "none"))
    if mode == "all":
        return facts.model_type not in EVERY_STATE
    return mode == "align" or not caches_every_state(facts, release)
