"""Decides whether a flag change may be proposed, that is, whether vLLM would accept the resulting flags. Pure.

Everything that proposes changes uses it: findings and alternatives of plans, and fixes of live findings and failures.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.memory_flags import (
    batch_sizes,
    is_encoder,
    max_tokens_per_mm_item,
    needs_unknown_items_whole,
)
from vllm_launchers.plan.flags import BATCHED, DECODE_CONTEXT, LENGTH, SEQUENCES, WHOLE_ITEMS, token_count
from vllm_launchers.plan.model_conditions import broken_model_conditions
from vllm_launchers.plan.tensor_sizes import tensor_problem
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue, apply_changes
from vllm_launchers.vllm.flags.check_value import refused_together
from vllm_launchers.vllm.flags.flag_table import FlagTable
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.release_defaults import Release

_NOT_LEFT_OUT = (SEQUENCES, BATCHED, DECODE_CONTEXT)
"""Flags that determine memory use: without them, a change that was found to fit may not fit."""

_MOST_LEFT_OUT = 4


class Target(msgspec.Struct, frozen=True):
    """What flags are checked against. Unknown parts are not checked.

    ``table``: its flags, or assumed ones. ``gpu``: one of the server's GPUs; none with ``on_cpu``.
    """

    table: FlagTable | None = None
    facts: ModelFacts | None = None
    gpu: GpuShape | None = None
    on_cpu: bool = False
    release: Release | None = None

    def derived(self, flags: Flags) -> Flags:
        """Limits that vLLM derives if no flag sets them."""
        found: dict[str, FlagValue] = {}
        longest = self.facts.longest_context(self.release) if self.facts is not None else None
        if longest is not None:
            found[LENGTH] = longest
        if self.gpu is not None or self.on_cpu:
            gpu = None if self.on_cpu else self.gpu
            found[SEQUENCES], found[BATCHED] = batch_sizes(self.facts, flags, self.release, gpu)
        return found


def newly_refused(target: Target, flags: Flags, changes: Changes) -> tuple[tuple[str, str], ...]:
    """What vLLM would reject after these changes but does not reject now: pairs of flag and sentence."""
    before, after = set(_refused(target, flags)), apply_changes(flags, changes)
    return tuple(one for one in (*_refused(target, after), *_cut_items(target, flags, after)) if one not in before)


def _cut_items(target: Target, flags: Flags, after: Flags) -> Iterator[tuple[str, str]]:
    """Smaller steps may hold no whole image, which vLLM refuses if a flag forbids to chunk them."""
    if not needs_unknown_items_whole(target.facts, after):
        return
    step, less = (token_count({**target.derived(one), **one}.get(BATCHED)) for one in (flags, after))
    if less is not None and BATCHED in after and (step is None or less < step):
        yield "", f"--{BATCHED} {less} may hold no whole image or video, as --{WHOLE_ITEMS} requires"


def acceptable(target: Target, flags: Flags, changes: Changes) -> Changes | None:
    """The changes if vLLM accepts the result, else with conflicting flags unset as well; None if it never does.

    For example, ``enable-eplb`` needs ``enable-expert-parallel``: unsetting the latter unsets the former, too.
    """
    for _ in range(_MOST_LEFT_OUT):
        refused = newly_refused(target, flags, changes)
        if not refused:
            return changes
        heads = {name.partition(".")[0] for name, _ in refused} - set(_NOT_LEFT_OUT)
        given = [name for name in flags if name not in changes.set and name not in changes.unset]
        contradicting = sorted(name for name in given if name.partition(".")[0] in heads)
        if not contradicting:
            return None
        changes = Changes(changes.set, (*changes.unset, *contradicting))
    return None


def _refused(target: Target, flags: Flags) -> Iterator[tuple[str, str]]:
    facts = target.facts
    if target.table is not None:
        seeing, drafting = facts is not None and facts.multimodal, facts is not None and facts.own_draft
        derived = target.derived(flags)
        yield from refused_together(target.table, flags, derived, multimodal=seeing, own_draft=drafting)
    if facts is None:
        return
    if problem := tensor_problem(facts, flags):
        yield "", problem
    for broken in broken_model_conditions(facts, flags, target.release):
        yield from ((name, broken.sentence) for name in broken.flags or ("",))
    batched, item = token_count(flags.get(BATCHED)), max_tokens_per_mm_item(facts, flags)
    if batched is not None and batched < item:
        yield "", f"--{BATCHED} {batched} holds no whole image or video of up to {item} tokens"
    length = token_count(flags.get(LENGTH)) or facts.longest_context(target.release)
    if batched is not None and length is not None and is_encoder(facts) and batched < length:
        yield "", f"--{BATCHED} {batched} holds no prompt of {length} tokens, and an encoder's are not chunked"
