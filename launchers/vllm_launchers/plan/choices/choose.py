"""Every flag that a launch sets, with reason, price and source. Pure.

What a person set stays, then what the preset set; what both leave open follows from traffic, model and machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm_launchers.machine.gpu.host import Host
from vllm_launchers.machine.gpu.sharing import Share
from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.budget.model import MemoryBudget
from vllm_launchers.plan.choices.caching import chunked_prefill, prefix_caching
from vllm_launchers.plan.choices.lengths import batched_tokens, context, keeps_up, sequences
from vllm_launchers.plan.choices.machine_fit import Fit, budget_for, fit
from vllm_launchers.plan.choices.machine_words import expert_choice, kv_choice, layout_choices, quantization_choice
from vllm_launchers.plan.choices.model import Choice, Source
from vllm_launchers.plan.choices.pool import Pool, pool_of
from vllm_launchers.plan.choices.situation import (
    BATCHED,
    CHUNKED,
    EXPERTS,
    KV_DTYPE,
    LENGTH,
    PARALLEL_FLAGS,
    PREFIX,
    QUANTIZATION,
    SEQUENCES,
    WORKLOAD_FLAGS,
    BudgetFor,
    Release,
    Situation,
)
from vllm_launchers.plan.flags import normalise_setting, spellings, token_count
from vllm_launchers.plan.model import Changes, Flags, FlagValue, same_value
from vllm_launchers.presets.model import FlagSetting, Workload

_Maker = Callable[[], Choice | None]

YOU_SET_IT = "you set it"
YOU_LEFT_IT_OUT = "you left it out: vLLM's default holds"
RUNS_NOW = "it runs so now"

CLOSE = 1 / 8
"""A measured length or count that differs by no more than this is no reason for a restart."""


def choose(
    preset_flags: Mapping[str, FlagSetting],
    changes: Changes,
    workload: Workload,
    facts: ModelFacts | None,
    host: Host | None,
    release: Release | None,
    build: str | None,
    *,
    over_preset: bool = False,
    budget: BudgetFor | None = None,
    gpus: Sequence[int] = (),
    shares: Sequence[Share] = (),
    extra: Sequence[Choice] = (),
) -> tuple[Choice, ...]:
    """Every flag of a launch, in the order of argv; those left to vLLM (value None) are among them, with a reason.

    ``over_preset`` works out anew what follows from traffic, over the preset's own values, for traffic that was
    measured. ``budget`` tells what fits; without one an estimate for GPUs of this kind does. ``gpus`` are those that
    a person gave.
    ``extra`` are flags asked for by name (`with_speculation`, `with_lora`); a person's own values win over them.

    Raises:
        FlagError: a change names no flag, a secret, or what is chosen elsewhere.
    """
    situation = Situation(workload, facts, host, release, build, tuple(gpus), shares, budget)
    given = _given(preset_flags, changes)
    before = {name: choice for name, choice in given.items() if choice.source is Source.PRESET}
    if over_preset:
        given = {name: c for name, c in given.items() if c.source is not Source.PRESET or name not in WORKLOAD_FLAGS}
    for choice in extra:
        given.setdefault(choice.flag, choice)
    picked = _Picked(situation, given, before)
    picked.run()
    everything = picked.chosen | given
    order = dict.fromkeys((*before, *given, *picked.chosen))
    listed = [everything[name] for name in order if name in everything]
    return tuple(sorted(listed, key=lambda choice: choice.value is None))


def suggest(
    running: Flags,
    workload: Workload,
    facts: ModelFacts | None,
    host: Host | None,
    release: Release | None,
    build: str | None,
    *,
    budget: BudgetFor | None = None,
    gpus: Sequence[int] = (),
    shares: Sequence[Share] = (),
) -> tuple[Choice, ...]:
    """What measured traffic asks to change of the flags that run now: only choices that differ, none left to vLLM.

    The server keeps its GPUs and how the model is laid on them. Lengths and counts within an eighth of what runs
    now are left alone.
    """
    kept = {name: FlagSetting(value=value, why=RUNS_NOW) for name, value in running.items()}
    for name in PARALLEL_FLAGS:
        kept.setdefault(name, FlagSetting(value=1, why=RUNS_NOW))
    wanted = choose(
        kept, Changes(), workload, facts, host, release, build,
        over_preset=True, budget=budget, gpus=gpus, shares=shares,
    )  # fmt: skip
    return tuple(
        choice
        for choice in wanted
        if choice.source not in (Source.PRESET, Source.YOU)
        and choice.value is not None
        and not _alike(choice.flag, running.get(choice.flag), choice.value)
    )


def _given(preset_flags: Mapping[str, FlagSetting], changes: Changes) -> dict[str, Choice]:
    unset = {spelling for name in changes.unset for spelling in spellings(name)}
    given = {
        name: Choice(name, setting.value, setting.why, Source.PRESET)
        for name, setting in preset_flags.items()
        if name not in unset
    }
    for name in changes.unset:
        plain = spellings(name)[0]
        if plain in preset_flags or plain in _CHOSEN:
            given[plain] = Choice(plain, None, YOU_LEFT_IT_OUT, Source.YOU)
    for name, value in changes.set.items():
        plain, value = normalise_setting(name, value)
        if plain not in given or not same_value(given[plain].value, value):
            given[plain] = Choice(plain, value, YOU_SET_IT, Source.YOU)
    return given


_CHOSEN = frozenset((*WORKLOAD_FLAGS, *PARALLEL_FLAGS, KV_DTYPE, QUANTIZATION, EXPERTS))


class _Picked:
    """The choices in the making: each may rest on those before it. ``given`` is settled and never changed.

    ``before`` is what the preset says: it stays where traffic decides nothing.
    """

    def __init__(self, situation: Situation, given: Mapping[str, Choice], before: Mapping[str, Choice]) -> None:
        self.situation = situation
        self.given = given
        self.before = before
        self.ask: BudgetFor | None = None
        self.chosen: dict[str, Choice] = {}
        self.flags: dict[str, FlagValue] = {
            name: choice.value for name, choice in given.items() if choice.value is not None
        }

    def run(self) -> None:
        """Choose all that is open: lengths, then what the machine needs, then what depends on it."""
        situation = self.situation
        self._take(LENGTH, lambda: context(situation))
        budget, pool = self._machine()
        self._take(PREFIX, lambda: prefix_caching(situation))
        self._take(CHUNKED, lambda: chunked_prefill(situation))
        self._take(SEQUENCES, lambda: sequences(situation, self.flags, budget))
        memory, name = (pool.memory_gib, pool.name) if pool is not None else (None, "")
        kept = self.before.get(BATCHED)
        step = token_count(kept.value) if kept is not None else None
        if kept is not None and step is not None and keeps_up(situation, self.flags, step):
            self._put(kept)
        else:
            self._take(BATCHED, lambda: batched_tokens(situation, self.flags, memory, name))
        if self.ask is not None and SEQUENCES in self.chosen:
            # Steps and sequences take memory themselves: look once more at what is left for the KV cache.
            settled = self.ask(self.flags)
            self._take(SEQUENCES, lambda: sequences(situation, self.flags, settled))

    def _machine(self) -> tuple[MemoryBudget | None, Pool | None]:
        """What GPUs and model ask for; a CPU build has neither."""
        situation = self.situation
        if situation.build == "cpu":
            self.ask = situation.budget
            return (self.ask(self.flags) if self.ask is not None else None), None
        pool = pool_of(situation.host, situation.gpus, situation.shares)
        found: Fit | None = None
        if pool is not None:
            self.ask = budget_for(situation, pool)
            found = fit(situation, self.flags, pool, self.given)
        formats = found.formats if found is not None else {}
        self._take(QUANTIZATION, lambda: quantization_choice(situation, formats, pool))
        if found is not None and pool is not None:
            known, near = found, pool
            self._take(KV_DTYPE, lambda: kv_choice(situation, known, near))
            if not found.fixed:
                for choice in layout_choices(situation, found, pool):
                    self._put(choice)
            self._take(EXPERTS, lambda: expert_choice(situation, self.flags))
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
    """Whether two values of a flag come to the same, or nearly so for lengths and counts."""
    before, after = token_count(one), token_count(other)
    if before is not None and after is not None and name in (LENGTH, SEQUENCES, BATCHED):
        return abs(after - before) <= CLOSE * before
    return same_value(one, other)
