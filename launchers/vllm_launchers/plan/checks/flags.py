"""Flags and variables that the chosen vLLM does not know, has removed, or will reject. Pure.

Codes: ``flag_unknown``, ``flag_dead``, ``flag_too_new``, ``flag_value``, ``flag_deprecated``, ``config_drops_false``;
``variable_dead``, ``variable_unknown``, ``variable_misread``, ``variable_value``, ``variable_inherited``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches

import msgspec
from msgspec.structs import replace

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.budget.budget import HIGHEST_UTILIZATION
from vllm_launchers.plan.budget.memory_flags import (
    is_encoder,
    least_step,
    max_tokens_per_mm_item,
    pools,
    whole_prompts,
)
from vllm_launchers.plan.checks.request import fewer_sequences, simulated, target_of, utilization
from vllm_launchers.plan.choices.choice import BudgetFor, fits_with
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import (
    BATCHED,
    BLOCKS,
    BYTES,
    CHUNKED,
    LENGTH,
    SEQUENCES,
    TRANSFER,
    TRUE_ONLY,
    UTILIZATION,
    flag_words,
    quoted,
    token_count,
)
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.model_conditions import broken_model_conditions
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue, apply_changes
from vllm_launchers.vllm.flags.check_nested import part_at
from vllm_launchers.vllm.flags.check_value import Given, problem, refused_together
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.releases import first_release, newest_first, variable_releases
from vllm_launchers.vllm.flags.search import resolve_flag_name
from vllm_launchers.vllm.flags.wording import listed
from vllm_launchers.vllm.release_defaults import Release, default_utilization, parse_release
from vllm_launchers.vllm.removed_flags import (
    MISREAD_VARIABLES,
    NEVER,
    REMOVED_FLAGS,
    REMOVED_VARIABLES,
    RemovalKind,
    RemovedFlag,
    removed_value,
    unread_fate,
)

NEAR = 0.75
"""Minimum similarity for a name to be suggested."""
CLEARLY = 0.8
"""Minimum similarity to also offer a fix, if no other name is as near (``_APART``)."""

_APART = 0.05
_FALSE_DROPPED_TO: Release = (0, 32, 99)
"""Last release whose ``vllm serve --config`` drops ``x: false``: the fix in 0.28 covers only its API server."""
_NAME = lazy_pattern(r"\[\w+\]")
_BATCHING = (SEQUENCES, BATCHED)
"""Flags whose conditions with others `_batching` reports, with fixes."""
_OPEN_VALUES = ("quantization", "kv-cache-dtype", "load-format", "tokenizer-mode", "config-format")
"""Flags whose values plugins may extend: an unknown value is most likely, but not certainly, a typo."""


_EXACT = "config-format"
"""The only one of these whose value is case-sensitive (``get_config_parser``)."""

_SET_ON_THE_CPU = frozenset({"VLLM_WORKER_MULTIPROC_METHOD", "VLLM_DISABLE_SHARED_EXPERTS_STREAM"})
"""Variables that the CPU build sets itself before it reads them (``CpuPlatform.check_and_update_config``)."""


class EngineFacts(msgspec.Struct, frozen=True):
    """What is known about the vLLM that gets the flags, and about its model."""

    table: FlagTable
    release: Release | None = None
    plugins: tuple[str, ...] = ()
    multimodal: bool = False
    """Whether the model is known to accept more than text."""
    own_draft: bool | None = False
    """Whether the model brings its own draft (`ModelFacts.own_draft`); None if unknown."""

    @property
    def name(self) -> str:
        """Its name in findings."""
        return "vLLM " + ".".join(map(str, self.release)) if self.release else "this vLLM"


def flag_findings(flags: Flags, environment: Mapping[str, str], engine: EngineFacts) -> list[PlanFinding]:
    """Return how this vLLM will react to these flags and variables.

    ``flags`` have normalized names (no leading dashes); ``environment`` has the variables that are explicitly set for
    the server.
    """
    if (engine.release is None or engine.table.assumed) and engine.table.version:
        engine = replace(engine, release=parse_release(engine.table.version))
    found: list[PlanFinding] = []
    known: dict[str, FlagValue] = {}
    for name, value in flags.items():
        of_name = [_refusing(name, one) for one in _flag(name, value, flags, engine)]
        found += of_name
        if not any(finding.level is Level.ERROR for finding in of_name):
            known[name] = value
    found += _values(known, engine)
    for name, value in environment.items():
        if name.startswith("VLLM_"):
            found += _variable(name, value, flags, engine)
    return found


def _refusing(name: str, finding: PlanFinding) -> PlanFinding:
    return replace(finding, refused=name) if finding.level is Level.ERROR else finding


def refused_by_all(flags: Flags, names: Iterable[str], engine: EngineFacts) -> frozenset[str]:
    """Those of the flags ``names`` that every recorded release refuses as they are set."""
    left = frozenset(names)
    for table in newest_first():
        if not left:
            break
        found = flag_findings(flags, {}, replace(engine, table=table, release=None))
        left &= {finding.refused for finding in found}
    return left


def variable_value_findings(
    environment: Mapping[str, str], given: Mapping[str, str], engine: EngineFacts, build: str | None
) -> Iterator[PlanFinding]:
    """Values of environment variables that vLLM cannot convert.

    ``environment`` is the server's complete environment; variables not in ``given`` are inherited.
    """
    for name, spec in engine.table.values.items():
        value = environment.get(name)
        wanted = spec.problem(value) if value is not None else None
        if value is None or wanted is None or (build == "cpu" and name in _SET_ON_THE_CPU):
            continue
        shown = "".join(c if c.isprintable() else "?" for c in value[:40])
        whence = "" if name in given else " (inherited from this shell: unset or change it)"
        code = "variable_value" if name in given else "variable_inherited"
        if engine.table.reads_all:
            text = f"{engine.name} will not start: {name} takes {wanted}, not '{shown}'{whence}"
            yield PlanFinding(code, Level.ERROR, text)
        else:
            text = f"{engine.name} fails where it reads {name}: it takes {wanted}, not '{shown}'{whence}"
            yield PlanFinding(code, Level.WARNING, text)


def _flag(name: str, value: FlagValue, flags: Flags, engine: EngineFacts) -> Iterator[PlanFinding]:
    head, _, key = name.partition(".")
    removed = REMOVED_FLAGS.get(head)
    fate = removed.fate(engine.release) if removed and engine.release else None
    spec, several = resolve_flag_name(engine.table, head)
    if spec is not None and spec.name == head:
        if removed and fate is RemovalKind.IGNORED:
            yield _dead(removed, key, flags, engine, RemovalKind.IGNORED)
        if spec.deprecated:
            yield _deprecated(spec)
    elif removed:
        taken = spec is not None and spec.opposite == head
        yield _dead(removed, key, flags, engine, RemovalKind.WARNED if taken else RemovalKind.REFUSED)
    elif spec is not None:
        yield from _second_name(spec, head, key, value)
    else:
        yield _unknown(head, key, value, several, engine)
    if head == "config" and engine.release and engine.release <= _FALSE_DROPPED_TO:
        message = f"{engine.name} silently drops a line 'x: false' of the --config file; write 'no-x: true' there"
        yield PlanFinding("config_drops_false", Level.ADVICE, message)


def _dead(removed: RemovedFlag, key: str, flags: Flags, engine: EngineFacts, fate: RemovalKind) -> PlanFinding:
    fix = removed.changes(flags, engine.release) if not key else None  # unknown where a single key went
    if fix is not None and any(name not in engine.table.flags for name in fix.set):
        fix = Changes(unset=fix.unset)
    if fate is RemovalKind.REFUSED:
        gone = f"removed in {_short(removed.since)}" if removed.since != NEVER else "removed long ago"
        message = f"{engine.name} refuses --{removed.name} ({gone}): {removed.instead}"
        return PlanFinding("flag_dead", Level.ERROR, message, fix)
    what = "but ignores it" if fate is RemovalKind.IGNORED else "only as the negation of another flag"
    message = f"{engine.name} takes --{removed.name} {what}: {removed.instead}"
    return PlanFinding("flag_dead", Level.WARNING, message, fix)


def _deprecated(spec: FlagSpec) -> PlanFinding:
    notice = " ".join(spec.deprecated.split())
    message = notice if f"--{spec.name}" in notice else f"--{spec.name} is deprecated: {notice}"
    return PlanFinding("flag_deprecated", Level.ADVICE, message)


def _second_name(spec: FlagSpec, head: str, key: str, value: FlagValue) -> Iterator[PlanFinding]:
    """A name that this vLLM accepts for a flag, but others may not."""
    written = f"{head}.{key}" if key else head
    if spec.opposite == head:
        if isinstance(value, bool):
            fix = _swap(written, spec.name, "", not value)
            message = f"--{head} is the name for --no-{spec.name} in vLLM 0.33 and later only"
            yield PlanFinding("flag_unknown", Level.WARNING, message, fix)
    elif f"--{head}" not in spec.aliases:
        message = f"--{head} is short for --{spec.name}; write it in full: another release may have two such flags"
        yield PlanFinding("flag_unknown", Level.WARNING, message, _swap(written, spec.name, key, value))


def _values(flags: Flags, engine: EngineFacts) -> Iterator[PlanFinding]:
    """Findings on values, each alone and then together."""
    known = dict(flags)
    for name, value in flags.items():
        if (finding := _value(name, value, engine) or _broken_json(name, value, engine)) is not None:
            del known[name]
            yield _refusing(name, finding)
    if (finding := _connector(known, engine)) is not None:
        yield finding
    yield from _dropped_objects(known, engine)
    refused = refused_together(engine.table, known, multimodal=engine.multimodal)
    sure = refused
    if engine.own_draft is not False:
        sure = refused_together(engine.table, known, multimodal=engine.multimodal, own_draft=True)
    if engine.own_draft is None:
        for _, sentence in (one for one in refused if one not in sure):
            text = (
                f"{sentence}: {engine.name} will not start, unless the model's own config names a draft (speculators)"
            )
            yield PlanFinding("flag_value", Level.WARNING, text)
    alone = refused_together(engine.table, known, multimodal=engine.multimodal, alone=True)
    for name, sentence in sure:
        own = problem(engine.table, name, known[name], multimodal=engine.multimodal) if name in known else None
        if name in _BATCHING and own != sentence:
            continue
        fix = _right_value(name, str(known[name]), engine) if own == sentence else None
        text = f"{engine.name} will not start: {sentence}"
        yield PlanFinding("flag_value", Level.ERROR, text, fix, refused=name if (name, sentence) in alone else "")


def _dropped_objects(flags: Flags, engine: EngineFacts) -> Iterator[PlanFinding]:
    """JSON flags that are set both as an object and by keys: vLLM builds an object from the keys and uses only that."""
    for name in flags:
        keys = [other for other in flags if other.startswith(f"{name}.")]
        if keys:
            text = (
                f"{engine.name} ignores --{name}, since its keys are set separately ({listed(keys)}): set all of "
                "them in the same way"
            )
            yield PlanFinding("flag_value", Level.WARNING, text)


def _choices(name: str, table: FlagTable) -> tuple[str, ...]:
    """The only values that a flag, or a key of a JSON flag, accepts; empty if unknown."""
    head, _, path = name.partition(".")
    spec, _ = resolve_flag_name(table, head)
    if spec is not None and path:
        spec = part_at(spec, path)
    if spec is None:
        return ()
    return spec.words if spec.closed and spec.words else spec.choices


def _value(name: str, value: FlagValue, engine: EngineFacts) -> PlanFinding | None:
    """Findings on a value beyond those of vLLM's parser and configuration."""
    spec = engine.table.get(name)
    if spec is None:
        return None
    shown = f"--{name} {str(value)[:40]}"
    gone = removed_value(name, value)
    if gone is not None and gone.plugin in engine.plugins:
        return None
    if gone is not None and gone.dropped(engine.release, engine.plugins):
        since = f"removed in {_short(gone.since)}" if gone.since != NEVER else "removed long ago"
        fix = Changes(set={name: gone.new_value}) if gone.new_value else None
        instead = f"install {gone.plugin} alongside it, or {gone.instead}" if gone.plugin else gone.instead
        return PlanFinding(
            "flag_value", Level.ERROR, f"{engine.name} does not support {shown} ({since}): {instead}", fix
        )
    if value is False and spec.kind is ValueKind.BOOL and not spec.negatable and name not in TRUE_ONLY:
        message = f"{engine.name} will not start: --{name} can't be set to false, only omitted"
        return PlanFinding("flag_value", Level.ERROR, message, Changes(unset=(name,)))
    word = str(value) if name == _EXACT else str(value).lower()
    if name in _OPEN_VALUES and not spec.closed and spec.words and word not in spec.words:
        fix = _nearest_value(name, str(value), spec.words)
        hint = f"; did you mean {fix.set[name]}?" if fix else ""
        return PlanFinding(
            "flag_value", Level.ERROR, f"{engine.name} does not support {shown}{hint}", fix, surely=False
        )
    return None


def _broken_json(name: str, value: FlagValue, engine: EngineFacts) -> PlanFinding | None:
    """A list or object for a key of a JSON flag that is truncated or otherwise invalid, which vLLM takes as text.

    Not certain, because a key may accept any text. ``[ngram]`` is a name.
    """
    text = value.strip() if isinstance(value, str) else ""
    if "." not in name or name.endswith("+") or not text.startswith(("[", "{")) or _NAME.fullmatch(text):
        return None
    if _is_json(text) or problem(engine.table, name, value) is not None:
        return None
    kind = "list" if text[0] == "[" else "object"
    message = f"{engine.name} takes --{name} {quoted(text)} as text: it looks like a JSON {kind} but is not valid JSON"
    return PlanFinding("flag_value", Level.ERROR, message, _completed(name, text), surely=False)


def _completed(name: str, text: str) -> Changes | None:
    """Complete a truncated JSON list or object."""
    whole = next((text + end for end in ("]", "}", "]}", "}]") if text[:1] in "[{" and _is_json(text + end)), None)
    return Changes(set={name: whole}) if whole is not None else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _connector(flags: Flags, engine: EngineFacts) -> PlanFinding | None:
    """A KV cache connector that this vLLM does not have, though a plugin may add it."""
    given = Given(engine.table, flags, {})
    name, part = given.key(TRANSFER, "kv_connector"), given.part(TRANSFER, "kv_connector")
    elsewhere = given.key(TRANSFER, "kv_connector_module_path") is not None
    if part is None or not part.words or not isinstance(name, str) or name in part.words or elsewhere:
        return None
    close = [word for word in get_close_matches(name, part.words, 3, 0.6) if _alike(name, word)][:1]
    hint = f"did you mean {close[0]}?" if close else f"it has {listed(part.words)}"
    key = f"{TRANSFER}.kv_connector"
    fix = Changes(set={key: close[0]}) if close and key in flags else None
    text = f"{engine.name} has no connector '{name[:40]}' for --{TRANSFER}; {hint}"
    return PlanFinding("flag_value", Level.ERROR, text, fix, surely=False)


def _alike(name: str, word: str) -> bool:
    """Whether the names of two connectors are similar in more than their common ending."""
    short, other = (text.lower().removesuffix("connector") for text in (name, word))
    return SequenceMatcher(None, name, word).ratio() >= CLEARLY or SequenceMatcher(None, short, other).ratio() >= NEAR


def _right_value(name: str, value: str, engine: EngineFacts) -> Changes | None:
    """The value that was most likely meant by one that vLLM refuses."""
    if name == UTILIZATION:
        return Changes(set={name: default_utilization(engine.release)})
    return _nearest_value(name, value, _choices(name, engine.table)) or _completed(name, value)


def _nearest_value(name: str, value: str, choices: tuple[str, ...]) -> Changes | None:
    exact = [choice for choice in choices if choice.casefold() == value.casefold()]
    near = exact or get_close_matches(value, choices, 1, NEAR)
    return Changes(set={name: near[0]}) if near else None


def _unknown(head: str, key: str, value: FlagValue, several: tuple[str, ...], engine: EngineFacts) -> PlanFinding:
    written = f"{head}.{key}" if key else head
    first = first_release(head)
    if first is not None and engine.release is not None and engine.release < (parse_release(first) or NEVER):
        message = f"{engine.name} does not have --{head} yet: added in {first}"
        return PlanFinding("flag_too_new", Level.ERROR, message, Changes(unset=(written,)))
    if several:
        names = " or ".join(f"--{name}" for name in several[:3]) + (" or another" if len(several) > 3 else "")
        return PlanFinding("flag_unknown", Level.ERROR, f"{engine.name} refuses --{head}: it could be {names}")
    new = _other_form(head, value, engine.table)
    if new is not None:
        message = f"{engine.name} has no --{head}; write {flag_words(dict([new]))[0]}"
        return PlanFinding("flag_unknown", Level.ERROR, message, Changes(set=dict([new]), unset=(written,)))
    meant, clear = _meant(head, engine.table)
    hint = f"; did you mean --{meant}?" if meant else ""
    fits = clear and not problem(engine.table, meant + (f".{key}" if key else ""), value)
    fix = _swap(written, meant, key, value) if fits else None
    return PlanFinding("flag_unknown", Level.ERROR, f"{engine.name} has no --{head}{hint}", fix)


def _other_form(head: str, value: FlagValue, table: FlagTable) -> tuple[str, FlagValue] | None:
    """The flag for a short alias that was typed with two dashes, or for the opposite of a flag."""
    for spec in table.flags.values():
        if f"-{head}" in spec.aliases:
            return spec.name, value
    prefix, _, rest = head.partition("-")
    other = table.get({"enable": "disable", "disable": "enable"}.get(prefix, "") + f"-{rest}")
    if other is not None and other.kind is ValueKind.BOOL and other.negatable and isinstance(value, bool):
        return other.name, not value
    return None


def _swap(written: str, name: str, key: str, value: FlagValue) -> Changes:
    """Rename a flag. Overrides a value that the new name already has, most likely the preset's."""
    return Changes(set={f"{name}.{key}" if key else name: value}, unset=(written,))


def _meant(head: str, table: FlagTable) -> tuple[str, bool]:
    """The flag with the most similar name, and whether that one is clearly meant."""
    near = get_close_matches(head, table.flags, 2, NEAR)
    if not near:
        return "", False
    likeness = [SequenceMatcher(None, head, name).ratio() for name in near]
    return near[0], likeness[0] >= CLEARLY and (len(near) == 1 or likeness[0] - likeness[1] >= _APART)


def _variable(name: str, value: str, flags: Flags, engine: EngineFacts) -> Iterator[PlanFinding]:
    if meaning := MISREAD_VARIABLES.get(name):
        yield PlanFinding("variable_misread", Level.ADVICE, f"{name}: {meaning}")
        return
    known = engine.table.variables
    if name in known or (not known and engine.release is None):
        return
    strict = flags.get("fail-on-environ-validation") is True
    removed = REMOVED_VARIABLES.get(name)
    if removed and (known or (engine.release and removed.fate(engine.release))):
        fix = removed.carry(value, flags) if removed.carry else None
        if fix is not None and any(flag not in engine.table.flags for flag in fix.set):
            fix = None
        message = f"{_unread(name, engine)}: {removed.instead}"
        yield PlanFinding("variable_dead", Level.ERROR if strict else Level.WARNING, message, fix)
    elif known:
        yield _unread_variable(name, known, engine, Level.ERROR if strict else Level.WARNING)


def _unread_variable(name: str, known: frozenset[str], engine: EngineFacts, level: Level) -> PlanFinding:
    span = variable_releases(name)
    if span is None:
        near = get_close_matches(name, known, 1, NEAR)
        hint = f"; did you mean {near[0]}?" if near else ""
        return PlanFinding("variable_unknown", level, f"{_unread(name, engine)}{hint}")
    first, last = span
    if last is not None and engine.release is not None and engine.release > (parse_release(last) or NEVER):
        return PlanFinding("variable_dead", level, f"{_unread(name, engine)}: {last} was the last that did")
    return PlanFinding("variable_unknown", level, f"{_unread(name, engine)}: releases from {first} on do")


def _unread(name: str, engine: EngineFacts) -> str:
    silent = engine.release is not None and unread_fate(engine.release) is RemovalKind.IGNORED
    return f"{engine.name} {'silently ignores' if silent else 'does not read'} {name}"


def _short(release: Release) -> str:
    major, minor, patch = release
    return f"{major}.{minor}.{patch}" if patch else f"{major}.{minor}"


# -- values that vLLM's own configuration checks reject, alone or together. Pure --------------------------------------


ENOUGH_TOKENS = 2048
"""Minimum number of tokens per step to offer: vLLM's own default on small GPUs."""


def value_findings(plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> Iterator[PlanFinding]:
    """Values that the parser accepts but vLLM can't start with, then contradictory ones.

    ``budget`` returns the memory with other flags, because a larger step needs more.
    """
    yield from _cache_blocks(plan)
    yield from _utilization(plan, budget)
    yield from _batching(plan, inputs, budget)
    yield from _cache_bytes(plan)


def _cache_blocks(plan: Plan) -> Iterator[PlanFinding]:
    """vLLM accepts any whole number, but needs a block to start (``BlockPool``)."""
    blocks = plan.flags.get(BLOCKS)
    if isinstance(blocks, int) and not isinstance(blocks, bool) and blocks < 1:
        text = f"--{BLOCKS} {blocks} leaves no block for the KV cache, so vLLM will not start: expected 1 or more"
        yield PlanFinding("flag_value", Level.ERROR, text, Changes(unset=(BLOCKS,)), refused=BLOCKS)


def _cache_bytes(plan: Plan) -> Iterator[PlanFinding]:
    """KV cache sizes too small for a block. On a GPU, 0 counts as not set (``Worker.determine_available_memory``)."""
    try:
        size = int(plan.flags.get(BYTES, 1))
    except ValueError:
        return  # with a unit, or not a number: reported elsewhere
    if size < 0 or (size == 0 and plan.engine.build == "cpu"):
        text = f"--{BYTES} {size} leaves no memory for the KV cache, so vLLM will not start: expected bytes above 0"
        yield PlanFinding("flag_value", Level.ERROR, text, Changes(unset=(BYTES,)), refused=BYTES)
    elif size == 0:
        text = f"--{BYTES} 0 counts as unset: --{UTILIZATION} decides"
        yield PlanFinding("flag_value", Level.WARNING, text, Changes(unset=(BYTES,)))


def _utilization(plan: Plan, budget: BudgetFor) -> Iterator[PlanFinding]:
    share = utilization(plan)
    if share <= HIGHEST_UTILIZATION:
        return
    text = (
        f"--{UTILIZATION} {share:g} leaves {1 - share:.0%} of the GPU free. vLLM can run out of memory while "
        "serving, because it sizes the KV cache before its full memory need is known. Use at most "
        f"{HIGHEST_UTILIZATION}"
    )
    lower = Changes(set={UTILIZATION: HIGHEST_UTILIZATION})
    too_little = fits_with(budget, apply_changes(plan.flags, lower)) is False
    yield PlanFinding("utilization_high", Level.WARNING, text, None if too_little else lower)


def _batching(plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> Iterator[PlanFinding]:
    """vLLM's own conditions on ``max-num-batched-tokens``.

    ``SchedulerConfig.verify_max_model_len``, and ``MultiModalBudget`` for models whose images and videos are not
    chunked.
    """
    flags, release = plan.flags, plan.engine.release
    yield from _chunks_off(plan, inputs)
    batched, sequences = token_count(flags.get(BATCHED)), token_count(flags.get(SEQUENCES))
    if batched is None:
        yield from _over_default_step(plan, inputs, sequences, budget)
        return
    context, said = token_count(flags.get(LENGTH)), f"--{LENGTH}"
    if LENGTH not in flags and inputs.facts is not None:
        context, said = inputs.facts.longest_context(release), "the model's context"
    facts, encoder = inputs.facts, inputs.facts is not None and is_encoder(inputs.facts)
    cut = context is not None and batched < context and whole_prompts(facts, flags, release)
    chunked: dict[str, FlagValue] = {CHUNKED: True} if cut and not encoder else {}
    item = max_tokens_per_mm_item(facts, flags)
    least = least_step(
        {**flags, **chunked}, release, facts=facts, sequences=sequences or 0, context=context, mm_item=item
    )
    larger = Changes(set={**chunked, BATCHED: max(ENOUGH_TOKENS, least)})
    if sequences is not None and batched < sequences:
        text = (
            f"vLLM will refuse --{BATCHED} {batched}: each of {sequences} sequences (--{SEQUENCES}) "
            "needs room for a token in every step"
        )
        yield PlanFinding("batch_too_small", Level.ERROR, text, _more_or_fewer(larger, plan, inputs, budget))
    if batched < item:
        text = (
            f"vLLM will refuse --{BATCHED} {batched}: the largest image or video of this model has {item:,} tokens and "
            "must fit in one step"
        )
        yield PlanFinding("batch_too_small", Level.ERROR, text, larger, surely=False)
    if cut:
        text = (
            f"vLLM will refuse --{BATCHED} {batched} without chunked prefill: a whole prompt of up to "
            f"{context} tokens ({said}) must fit in one step"
        )
        sure = not encoder or (facts is not None and facts.certain)
        yield PlanFinding(
            "batch_too_small", Level.ERROR, text, Changes(set=chunked) if chunked else larger, surely=sure
        )
    elif encoder and context is not None and batched < context:
        text = (
            f"--{CHUNKED} has no effect for an encoder: a prompt of more than --{BATCHED} {batched} tokens would wait "
            f"forever, and all others behind it; {said} allows {context:,}"
        )
        whole = Changes(set={BATCHED: max(ENOUGH_TOKENS, least, context)}, unset=(CHUNKED,))
        yield PlanFinding("prompts_not_chunked", Level.WARNING, text, whole)


def _more_or_fewer(larger: Changes, plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> Changes:
    """Larger steps, or fewer sequences if larger steps do not fit in memory."""
    fewer = fewer_sequences(plan, inputs)
    too_little = fits_with(budget, apply_changes(plan.flags, larger)) is False
    return fewer if fewer is not None and too_little else larger


def _over_default_step(
    plan: Plan, inputs: PlanInputs, sequences: int | None, budget: BudgetFor
) -> Iterator[PlanFinding]:
    """More sequences than vLLM's default tokens per step on these GPUs, which vLLM does not raise."""
    default = target_of(plan, inputs).derived(plan.flags).get(BATCHED)
    if sequences is None or not isinstance(default, int) or default >= sequences:
        return
    text = (
        f"vLLM will refuse --{SEQUENCES} {sequences}: without --{BATCHED} a step has {default:,} tokens here, and each "
        "sequence needs room for one in every step"
    )
    fix = _more_or_fewer(Changes(set={BATCHED: sequences}), plan, inputs, budget)
    yield PlanFinding("batch_too_small", Level.ERROR, text, fix)


def _chunks_off(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """Chunked prefill turned off for a generative model, at any length, unless the model does not allow it at all.

    The flag is ignored up to 0.11.0 and has an effect since 0.11.1; since 0.12 vLLM warns about it
    (``EngineArgs._set_default_chunked_prefill_and_prefix_caching_args``).
    """
    if plan.flags.get(CHUNKED) is not False or pools(plan.flags) or simulated(plan):
        return
    facts, release = inputs.facts, plan.engine.release
    if facts is not None and is_encoder(facts):
        return
    if facts is not None and any(CHUNKED in one.flags for one in broken_model_conditions(facts, plan.flags, release)):
        return
    if not whole_prompts(facts, plan.flags, release):
        text = f"vLLM {plan.engine.public_version} ignores --no-{CHUNKED}: prompts are still chunked"
    else:
        text = (
            f"--no-{CHUNKED}: vLLM does not support disabling chunked prefill for generative models; it warns that "
            "the engine may crash or give wrong answers"
        )
    yield PlanFinding("chunked_prefill_off", Level.WARNING, text, Changes(unset=(CHUNKED,)))
