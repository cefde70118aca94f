"""The longest context that vLLM accepts for a model, including changes to its config. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.checks.request import on, variables
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import LENGTH, OVERRIDES, token_count
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes, Flags, json_object
from vllm_launchers.vllm.modelfacts.config import LENGTHS
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts
from vllm_launchers.vllm.release_defaults import scales_yarn

LONGER_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

_NO_WINDOW, _WINDOW = "disable-sliding-window", "sliding_window"
_POSITIONS, _DECIDES = "max_position_embeddings", "model_max_length"
_MAY_MATTER = lazy_pattern(r"len|rope|pos|ctx|context|seq|window|max|config|type|arch")
"""Matches keys of a config that may affect its context."""
_ROPE = ("rope_parameters", "rope_scaling")
_NO_MEMORY = frozenset(
    {"architectures", "bos_token_id", "classifier_from_token", "eos_token_id", "hidden_act", "id2label",
     "initializer_range", "is_matryoshka", "is_original_qwen3_reranker", "label2id", "layer_norm_eps",
     "matryoshka_dimensions", "method", "pad_token_id", "problem_type", "rms_norm_eps", "rope_theta",
     "transformers_version", "use_cache"}
)  # fmt: skip
"""Keys of a config that do not affect memory."""
_YARN = ("yarn", "deepseek_yarn")
_NOT_STRETCHED = frozenset({*_YARN, "llama3", "deepseek_llama_scaling"})


def longest_supported(plan: Plan, inputs: PlanInputs) -> int | None:
    """The largest ``max-model-len`` that vLLM accepts for the model; None if unknown or if the limit was lifted."""
    longest, window = _longest_by_config(plan, inputs), _only_window(plan, inputs.facts)
    return longest if longest is None or window is None else min(longest, window)


def _only_window(plan: Plan, facts: ModelFacts | None) -> int | None:
    """The sliding window of layers if it is disabled, which then limits the request length. None if there is none."""
    if facts is None or plan.flags.get(_NO_WINDOW) is not True or facts.positions is None:
        return None  # a rotary embedding would stretch the window, too
    window = (config_overrides(plan.flags) or {}).get(_WINDOW)
    if isinstance(window, int) and window > 0:
        return window
    return facts.window if LayerKind.SLIDING in facts.layers else None


def _longest_by_config(plan: Plan, inputs: PlanInputs) -> int | None:
    if inputs.facts is None or on(variables(plan, inputs), LONGER_ALLOWED):
        return None
    if any(name.partition(".")[0] == "rope-scaling" for name in plan.flags):
        return None
    changed = config_overrides(plan.flags)
    if changed is None or any(_MAY_MATTER.search(key) for key in changed if key not in (*_ROPE, *LENGTHS, _WINDOW)):
        return None
    if any(key in changed for key in LENGTHS):
        return _overridden(changed, inputs.facts)
    if any(key in changed for key in _ROPE) and not _unstretched(plan, changed):
        return None
    longest, stretched = inputs.facts.longest_context(plan.engine.release), inputs.facts.stretched_context
    if longest is None or stretched is None or plan.engine.release is not None:
        return longest
    return max(longest, stretched)


def context_findings(plan: Plan, inputs: PlanInputs, facts: ModelFacts, *, surely: bool) -> Iterator[PlanFinding]:
    """A context beyond the longest supported one."""
    asked, most = token_count(plan.flags.get(LENGTH)), longest_supported(plan, inputs)
    if asked is None or most is None or asked <= most:
        return
    text = f"--{LENGTH} {asked:,} exceeds the {most:,} tokens that {facts.model} supports; vLLM will refuse it"
    fix = Changes(set={LENGTH: most})
    changed = config_overrides(plan.flags) or {}
    if any(key in changed for key in LENGTHS):
        text = f"--{LENGTH} {asked:,} exceeds the {most:,} tokens that --{OVERRIDES} sets; vLLM will refuse it"
    elif most == _only_window(plan, facts):
        text = (
            f"--{LENGTH} {asked:,} exceeds the sliding window of {facts.model}, {most:,} tokens; with "
            f"--{_NO_WINDOW} vLLM will refuse it"
        )
    elif any(changed[key].get("rope_type") in _YARN for key in _ROPE if key in changed):
        text += f", since YaRN's factor does not raise them: set {_POSITIONS} in --{OVERRIDES} as well"
        whole = json.dumps({**changed, _POSITIONS: asked})
        if not facts.multimodal:  # a multimodal model has them in a nested config
            by_keys = any(name.startswith(f"{OVERRIDES}.") for name in plan.flags)  # then vLLM ignores the object
            at_once = OVERRIDES in plan.flags and not by_keys
            raised = {OVERRIDES: whole} if at_once else {f"{OVERRIDES}.{_POSITIONS}": asked}
            fix = Changes(set=dict(raised))
    refused = LENGTH if surely else ""
    yield PlanFinding("context_over_model", Level.ERROR, text, fix, surely=surely, refused=refused)


def _overridden(changed: Mapping[str, Any], facts: ModelFacts) -> int | None:
    """The limit with other lengths in the config; None if rotary scaling may change it, or others are unknown."""
    if facts.positions is None or facts.multimodal or any(key in changed for key in _ROPE):
        return None
    given = [changed[key] for key in (_DECIDES, *LENGTHS) if key in changed]
    if not all(isinstance(length, int) and length > 0 and length is not True for length in given):
        return None
    lengths = [*map(int, given), *([] if _POSITIONS in changed else [facts.positions])]
    return lengths[0] if _DECIDES in changed else min(lengths)


def config_overrides(flags: Flags) -> Mapping[str, Any] | None:
    """The changes to the model's config by ``--hf-overrides``; None if they can't be parsed."""
    keys: dict[str, Any] = {}
    for name, value in flags.items():
        head, dot, path = name.partition(".")
        if head == OVERRIDES and dot:
            *outer, last = path.split(".")
            place = keys
            for key in outer:
                place = place.setdefault(key, {})
                if not isinstance(place, dict):
                    return None
            place[last] = value
    if keys or OVERRIDES not in flags:
        return keys
    return json_object(flags[OVERRIDES])


def unestimated_override(flags: Flags) -> str:
    """A change by ``--hf-overrides`` that may affect memory but is not estimated, as a clause; empty if there is none.

    Lengths affect it if they determine ``max-model-len``.
    """
    changed = config_overrides(flags)
    if changed is None:
        return f"--{OVERRIDES} is not readable"
    lengths = (*LENGTHS, *_ROPE) if LENGTH in flags else ()
    name = next((key for key in changed if key not in _NO_MEMORY and key not in lengths), None)
    return f"the effect of {name} in --{OVERRIDES} is not considered" if name is not None else ""


def _unstretched(plan: Plan, changed: Mapping[str, Any]) -> bool:
    """Whether it is known that the changes to the rotary embedding do not lengthen the context in this release."""
    release = plan.engine.release
    return (
        release is not None
        and not scales_yarn(release)
        and all(_keeps_length(changed[key]) for key in _ROPE if key in changed)
    )


def _keeps_length(rope: object) -> bool:
    if not isinstance(rope, dict):
        return False
    kind = rope.get("rope_type")
    return kind in _NOT_STRETCHED or (kind == "default" and "factor" not in rope)
