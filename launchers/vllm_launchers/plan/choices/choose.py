"""Every flag that a launch sets, with reason, trade-off and source. Pure.

A user's settings take precedence, then the preset's; the rest follows from traffic, model and machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.plan.budget.memory_flags import is_encoder
from vllm_launchers.plan.choices.choice import (
    PARALLEL_FLAGS,
    WORKLOAD_FLAGS,
    Choice,
    ChoiceInputs,
    Source,
    overlay,
)
from vllm_launchers.plan.choices.layout import (
    expert_choice,
    fit_layout,
    kv_choice,
    layout_choices,
    own_format,
    quantization_choice,
)
from vllm_launchers.plan.choices.lengths import (
    batched_tokens,
    chunked_prefill,
    context,
    keeps_up,
    prefix_caching,
    sequences,
    shorter_context,
    within_states,
)
from vllm_launchers.plan.choices.nodes import layout_on_cpu, layout_over_nodes
from vllm_launchers.plan.choices.pool import Pool, pool_of
from vllm_launchers.plan.flags import (
    BATCHED,
    CHUNKED,
    EXPERTS,
    KV_DTYPE,
    LENGTH,
    PIPELINE,
    PREFIX,
    QUANTIZATION,
    SEQUENCES,
    TENSOR,
    spellings,
    token_count,
)
from vllm_launchers.plan.model_conditions import broken_by_cached_states
from vllm_launchers.presets.model import FlagSetting
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue, same_value
from vllm_launchers.vllm.modelfacts.facts import LayerKind

_Maker = Callable[[], Choice | None]

YOU_LEFT_IT_OUT = "unset by you: vLLM's default applies"
RUNS_NOW = "current value"

CLOSE = 1 / 8
"""A measured length or count that differs by no more than this share does not justify a restart."""


def choose(
    preset_flags: Mapping[str, FlagSetting],
    changes: Changes,
    inputs: ChoiceInputs,
    *,
    over_preset: bool = False,
    keep: Collection[str] = (),
) -> tuple[Choice, ...]:
    """Return every flag of a launch in argv order, including those left to vLLM (value None), with a reason.

    ``over_preset`` recomputes what follows from traffic (for measured traffic), overriding the preset's own values,
    except for the flags in ``keep``.

    Raises:
        FlagError: a change names an invalid flag, a secret, or a setting chosen elsewhere.
    """
    given = _given(preset_flags, changes)
    _drop_refused_caching(given, inputs)
    before = {name: choice for name, choice in given.items() if choice.source is Source.PRESET}
    if inputs.facts is not None and is_encoder(inputs.facts):
        _drop_chunking(given, before)
    if over_preset:
        recomputed = [name for name in WORKLOAD_FLAGS if name not in keep]
        given = {name: c for name, c in given.items() if c.source is not Source.PRESET or name not in recomputed}
    _keep_own_format(given, inputs)
    picked = _Picked(inputs, given, before)
    picked.run()
    if not over_preset:
        _keep_to_states(given, inputs, picked.flags)
    everything = picked.chosen | given
    order = dict.fromkeys((*before, *given, *picked.chosen))
    listed = [everything[name] for name in order if name in everything]
    return tuple(sorted(listed, key=lambda choice: choice.value is None))


def suggest(running: Flags, inputs: ChoiceInputs, keep: Collection[str] = ()) -> tuple[Choice, ...]:
    """Return the changes to the running flags that measured traffic calls for; nothing that is left to vLLM.

    The server keeps its GPUs and layout, and the flags in ``keep``. Its context is never raised. Lengths and counts
    within an eighth of the running values are left alone.
    """
    kept = {name: FlagSetting(value=value, why=RUNS_NOW) for name, value in running.items()}
    for name in PARALLEL_FLAGS:
        kept.setdefault(name, FlagSetting(value=1, why=RUNS_NOW))
    wanted = choose(kept, Changes(), inputs, over_preset=True, keep=keep)
    return tuple(
        choice
        for choice in wanted
        if choice.source not in (Source.PRESET, Source.YOU)
        and choice.value is not None
        and not _alike(choice.flag, running.get(choice.flag), choice.value)
    )


def _given(preset_flags: Mapping[str, FlagSetting], changes: Changes) -> dict[str, Choice]:
    """Combine the preset's flags, a user's changes, and the flags that the user unset."""
    given = overlay(preset_flags, changes)
    for name in changes.unset:
        plain = spellings(name)[0]
        if plain not in given and (plain in preset_flags or plain in _CHOSEN):
            given[plain] = Choice(plain, None, YOU_LEFT_IT_OUT, Source.YOU)
    return given


def _drop_refused_caching(given: dict[str, Choice], inputs: ChoiceInputs) -> None:
    """Drop a preset's prefix caching if vLLM would refuse it, so that it is decided anew."""
    facts, asked = inputs.facts, given.get(PREFIX)
    if facts is None or asked is None or asked.source is not Source.PRESET:
        return
    flags = {name: choice.value for name, choice in given.items() if choice.value is not None}
    if any(broken_by_cached_states(facts, flags, inputs.release)):
        del given[PREFIX]


def _drop_chunking(given: dict[str, Choice], before: dict[str, Choice]) -> None:
    """Drop a preset's chunked prefill for a model whose prompts vLLM never chunks; its steps stay if they hold any."""
    for name in before.keys() & {CHUNKED, BATCHED}:
        del given[name]
    before.pop(CHUNKED, None)


def _keep_own_format(given: dict[str, Choice], inputs: ChoiceInputs) -> None:
    """Drop a preset's FP8 cache if vLLM would reject it. A user's setting stays, with a warning."""
    asked = given.get(KV_DTYPE)
    if asked is None or asked.source is not Source.PRESET or inputs.build == "cpu":
        return
    flags = {name: choice.value for name, choice in given.items() if choice.value is not None}
    pool = pool_of(inputs.host, inputs.gpus, inputs.shares)
    if (other := own_format(inputs, flags, pool)) is not None:
        given[KV_DTYPE] = other


def _keep_to_states(given: dict[str, Choice], inputs: ChoiceInputs, flags: Flags) -> None:
    """Lower a preset's number of sequences to those for which there are states. A user's value stays, with an error."""
    asked = given.get(SEQUENCES)
    linear = inputs.facts is not None and LayerKind.LINEAR in inputs.facts.layers
    if asked is None or asked.source is not Source.PRESET or not linear:
        return
    found, count = inputs.budget(flags), token_count(asked.value)
    most = found.most_sequences if found is not None and found.fits else None
    if most is not None and count is not None and most < count:
        given[SEQUENCES] = within_states(most)


_CHOSEN = frozenset((*WORKLOAD_FLAGS, *PARALLEL_FLAGS, KV_DTYPE, QUANTIZATION, EXPERTS))


class _Picked:
    """Makes the choices, each based on earlier ones. ``given`` never changes.

    ``before`` has the preset's values, which stay if traffic decides nothing.
    """

    def __init__(self, inputs: ChoiceInputs, given: Mapping[str, Choice], before: Mapping[str, Choice]) -> None:
        self.inputs = inputs
        self.given = given
        self.before = before
        self.chosen: dict[str, Choice] = {}
        self.flags: dict[str, FlagValue] = {
            name: choice.value for name, choice in given.items() if choice.value is not None
        }

    def run(self) -> None:
        """Make all open choices: lengths, then what the machine requires, then what depends on that."""
        inputs = self.inputs
        self._take(LENGTH, self._context)
        budget, pool = self._machine()
        self._take(PREFIX, lambda: prefix_caching(inputs, self.flags))
        self._take(CHUNKED, lambda: chunked_prefill(inputs))
        self._take(SEQUENCES, lambda: sequences(inputs, self.flags, budget))
        memory, name = (pool.memory_gib, pool.name) if pool is not None else (None, "")
        kept = self.before.get(BATCHED)
        step = token_count(kept.value) if kept is not None else None
        if kept is not None and step is not None and keeps_up(inputs, self.flags, step):
            self._put(kept)
        else:
            self._take(BATCHED, lambda: batched_tokens(inputs, self.flags, memory, name))
        if SEQUENCES in self.chosen and (pool is not None or inputs.build == "cpu"):
            # Steps and sequences take memory too: check again what is left for the KV cache.
            settled = inputs.budget(self.flags)
            self._take(SEQUENCES, lambda: sequences(inputs, self.flags, settled))

    def _context(self) -> Choice:
        if self.inputs.longest is None:
            return context(self.inputs)
        present = self.before.get(LENGTH)
        return shorter_context(self.inputs, self.inputs.longest, present.value if present is not None else None)

    def _machine(self) -> tuple[MemoryBudget | None, Pool | None]:
        """Choose what GPUs and model require; a CPU build needs at most a layout over nodes."""
        inputs = self.inputs
        if inputs.build == "cpu":
            if inputs.nodes > 1 and PIPELINE not in self.given:
                self._take(TENSOR, lambda: layout_on_cpu(inputs))
            return inputs.budget(self.flags), None
        pool = pool_of(inputs.host, inputs.gpus, inputs.shares)
        found = fit_layout(inputs, self.flags, pool, self.given) if pool is not None else None
        self._take(QUANTIZATION, lambda: quantization_choice(inputs, found, pool, self.flags))
        if found is not None and pool is not None:
            known, near = found, pool
            self._take(KV_DTYPE, lambda: kv_choice(inputs, known, near, self.flags))
            if inputs.nodes > 1:
                for choice in layout_over_nodes(inputs, found, pool):
                    self._put(choice)
            elif not found.fixed:
                for choice in layout_choices(inputs, found, pool):
                    self._put(choice)
            self._take(EXPERTS, lambda: expert_choice(inputs, self.flags))
        return (found.budget if found is not None else None), pool

    def _take(self, name: str, choose_it: _Maker) -> None:
        if name not in self.given and (choice := choose_it()) is not None:
            self._put(choice)

    def _put(self, choice: Choice) -> None:
        if choice.flag in self.given:
            return
        if choice.value is None:
            choice = self.before.get(choice.flag, choice)
        self.chosen[choice.flag] = choice
        if choice.value is not None:
            self.flags[choice.flag] = choice.value


def _alike(name: str, one: FlagValue | None, other: FlagValue) -> bool:
    """Whether two values of a flag are equal, or nearly equal for lengths and counts."""
    before, after = token_count(one), token_count(other)
    if before is not None and after is not None and name in (LENGTH, SEQUENCES, BATCHED):
        return abs(after - before) <= CLOSE * before
    return same_value(one, other)
