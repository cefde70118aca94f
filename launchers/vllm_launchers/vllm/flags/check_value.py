"""Predicts which flag values vLLM's parser and configuration reject. Pure.

A value is judged in its argv form: ``True`` as ``--flag``, ``False`` as ``--no-flag``, anything else as one argument.
Nothing that depends on a model, a GPU or a file is judged here. A reported problem is certain; no report proves
nothing.

Conditions between flags are from vLLM 0.32 and were also checked in 0.10.2, 0.13, 0.20 and 0.25. ``since`` is the first
of these releases that has the condition, if its flags are older. A condition applies only if the installation has all
of its flags.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches

import msgspec

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.flags.bounds import out_of_bounds
from vllm_launchers.vllm.flags.changes import Flags, FlagValue, Number, human_int, json_object
from vllm_launchers.vllm.flags.check_nested import decoded, key_problem, nested_problem, part_at, with_plain_keys
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.search import closest, resolve_flag_name
from vllm_launchers.vllm.flags.several_words import several_words
from vllm_launchers.vllm.flags.speculation import METHOD_FLAGS, startup_slots
from vllm_launchers.vllm.flags.wording import MANY, either, expected, shown
from vllm_launchers.vllm.release_defaults import CHECKED_SINCE, WHOLE_PROMPTS_SINCE, Release, parse_release

_NESTED = lazy_pattern(r"(?s)^\s*{.*}\s*$")
_SUFFIXED = lazy_pattern(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_QUOTED = lazy_pattern(r'("(?:[^"\\]|\\.)*")')
_VERSION = lazy_pattern(r"(?i)\s*v?(?:\d+!)?\d+(?:\.\d+)*(?:[-_.]?[a-z]+[-_.]?\d*)*(?:-\d+)?(?:\+[a-z0-9._-]+)?\s*")
"""At least every version that Python's ``packaging`` reads."""
_FRONTEND = "Frontend"
_ONLY_WITH = {"LoRAConfig": "enable-lora"}
"""Groups whose configuration is only created, and so only validated, if another flag is on."""
_ONLY_SEEING = "MultiModalConfig"
"""The group whose configuration is only created for a model that accepts images, audio or video."""


def refused_together(
    table: FlagTable,
    flags: Mapping[str, FlagValue],
    resolved: Mapping[str, FlagValue] | None = None,
    *,
    multimodal: bool = False,
    own_draft: bool = False,
    alone: bool = False,
) -> list[tuple[str, str]]:
    """Return what vLLM would reject among these flags, as ``(flag, sentence)``, in the flags' order.

    ``flags`` are named as in a plan: no leading dashes, ``-`` between words. Conditions between flags come last, and
    only if the flags involved are valid on their own. ``resolved`` are the values that vLLM will derive from GPU and
    model for unset flags, as far as the caller knows them: ``max-num-seqs``, ``max-num-batched-tokens``,
    ``max-model-len``.
    ``multimodal``: the model is known to accept more than text. ``own_draft``: the model's config is in the speculators
    format, so vLLM takes the draft model from it. ``alone``: only flags that are rejected whatever the others are.
    """
    found: list[tuple[str, str]] = []
    bad: set[str] = set()
    for name, value in flags.items():
        spec, _ = resolve_flag_name(table, name.partition(".")[0])
        switch = _ONLY_WITH.get(spec.group) if spec is not None else None
        idle = switch is not None and flags.get(switch) is not True
        if (sentence := _problem(table, name, value, bounds=not idle, multimodal=multimodal)) is not None:
            found.append((name, sentence))
            bad.add(name)
    valid = {name: flags[name] for name in flags if name not in bad}
    return found + broken_conditions(table, valid, resolved, own_draft=own_draft, alone=alone)


def problem(table: FlagTable, name: str, value: FlagValue, *, multimodal: bool = False) -> str | None:
    """Why vLLM would reject a flag's value, in one sentence, or None. ``multimodal`` as in `refused_together`."""
    return _problem(table, name, value, bounds=True, multimodal=multimodal)


def _problem(table: FlagTable, name: str, value: FlagValue, *, bounds: bool, multimodal: bool) -> str | None:
    words = several_words(name, value) or (value,)
    found = (_word_problem(table, name, word, bounds=bounds, multimodal=multimodal) for word in words)
    return next(filter(None, found), None)


def _word_problem(table: FlagTable, name: str, value: FlagValue, *, bounds: bool, multimodal: bool) -> str | None:
    head, dot, key = name.partition(".")
    spec, several = resolve_flag_name(table, head)
    if spec is None:
        return _unknown(table, head, several)
    if dot:
        return _key_problem(spec, key, value)
    if spec.kind is ValueKind.BOOL:
        if isinstance(value, bool):
            return _opposite_problem(spec, head, value)
        return f"--{head} is on or off and takes no value, not {shown(value)}"
    if isinstance(value, bool):
        if spec.bare and (value or spec.negatable):
            return None
        return f"--{head} needs a value: {expected(spec)}"
    text = str(value)
    if spec.nullable and text in ("", "None") and (not spec.many or spec.group == _FRONTEND):
        return None  # but a list that is just None is rejected where a configuration checks it
    checked = bounds and (multimodal or spec.group != _ONLY_SEEING)
    sentence = _kind_problem(spec, text) or _choice_problem(spec, text, configured=checked)
    if sentence is None and checked:
        sentence = _bound_problem(spec, text)
    if sentence is None and spec.parts:
        document = _document(spec, text)
        return nested_problem(spec, document) if isinstance(document, dict) else None
    return None if sentence is None else f"--{head} {sentence}"


def _unknown(table: FlagTable, head: str, several: tuple[str, ...]) -> str:
    which = f"vLLM {table.version.partition('+')[0]}" if table.version else "this vLLM"
    if several:
        names = ", ".join(f"--{name}" for name in several[:MANY]) + (" and others" if len(several) > MANY else "")
        return f"--{head} is not one flag of {which} but the beginning of several: {names}"
    close = closest(table, head)
    if not close:
        return f"{which} has no flag --{head}"
    return f"{which} has no flag --{head}; did you mean {either([f'--{name}' for name in close])}?"


def _opposite_problem(spec: FlagSpec, head: str, value: bool) -> str | None:
    """An ``--x`` that is off is written ``--no-x``; not every flag has that form."""
    option = head.replace("_", "-")
    if not value and spec.opposite and option == spec.opposite:
        return f"--{head} has no --no- form; set {spec.name} instead"
    return None


def _key_problem(spec: FlagSpec, key: str, value: FlagValue) -> str | None:
    """Check one key of a JSON flag (``--flag.key``); vLLM merges such keys into one object."""
    if spec.kind not in (ValueKind.JSON, ValueKind.OTHER) and (spec.kind is not ValueKind.TEXT or spec.choices):
        return f"--{spec.name} has no keys: it takes {expected(spec)}"
    return key_problem(spec, key, value)


def _kind_problem(spec: FlagSpec, text: str) -> str | None:
    """Return the sentence after ``--flag``, or None."""
    if spec.nullable and spec.many and text in ("", "None"):
        return f"takes {expected(spec)}, not {shown(text)}"
    match spec.kind:
        case ValueKind.INT | ValueKind.FLOAT | ValueKind.HUMAN_INT:
            return None if _number(spec, text) is not None else f"takes {expected(spec)}, not {shown(text)}"
        case ValueKind.JSON | ValueKind.JSON_LIST:
            return _json_problem(spec, text)
        case ValueKind.OTHER if not spec.choices and _NESTED.match(text):
            return None if _decoded(text)[0] else "looks like a JSON object but is not valid JSON"
    return None


def _json_problem(spec: FlagSpec, text: str) -> str | None:
    wanted: type = list if spec.kind is ValueKind.JSON_LIST else dict
    if isinstance(_document(spec, text), wanted) or (_is_null(text) and _may_be_null(spec)):
        return None
    return f"takes {expected(spec)}, not {shown(text)}"


def _is_null(text: str) -> bool:
    return text.strip() == "null"


def _may_be_null(spec: FlagSpec) -> bool:
    """Whether vLLM accepts JSON null: it builds no class from the value, and nothing requires the flag to be set."""
    return spec.kind is ValueKind.JSON and (spec.nullable or spec.group in (_FRONTEND, _ONLY_SEEING))


def _document(spec: FlagSpec, text: str) -> object:
    """The parsed JSON of a flag; None if invalid."""
    good, document = _decoded(text)
    if not good and spec.parts:  # only objects that are parsed into a class may have numbers such as 80g
        document = _decoded(_with_plain_numbers(text))[1]
    return document


def _decoded(text: str) -> tuple[bool, object]:
    try:
        return True, json.loads(text)
    except (ValueError, RecursionError):
        return False, None


def _with_plain_numbers(text: str) -> str:
    pieces = _QUOTED.split(text)
    pieces[::2] = [_SUFFIXED.sub(lambda match: str(human_int(match[0]) or match[0]), piece) for piece in pieces[::2]]
    return "".join(pieces)


def _choice_problem(spec: FlagSpec, text: str, *, configured: bool) -> str | None:
    choices = spec.choices
    if choices:
        word = str(_number(spec, text)) if spec.kind is ValueKind.INT else text
        if spec.kind is ValueKind.OTHER:
            word = text.lower().replace("-", "_")
        return None if word in choices or text in choices else f"takes {expected(spec)}, not {shown(text)}"
    if spec.closed and spec.words and configured:
        known = {word.lower() for word in spec.words} | {"auto"}
        return None if text.lower() in known else f"takes {expected(spec)}, not {shown(text)}"
    return None


def _bound_problem(spec: FlagSpec, text: str) -> str | None:
    number = _number(spec, text)
    if number is None or spec.many:
        return None
    if spec.name == "max-model-len" and number == 0:
        return "must be 1 or more, or auto, not '0'"
    return out_of_bounds(spec, number, text)


def _number(spec: FlagSpec, text: str) -> Number | None:
    """The number that vLLM's parser reads from the text, or None."""
    if spec.kind is ValueKind.HUMAN_INT:
        return -1 if text.strip().lower() in spec.words else human_int(text)
    try:
        if spec.kind is ValueKind.INT:
            return int(text)
        return float(text) if spec.kind is ValueKind.FLOAT else None
    except ValueError:
        return None


class Given:
    """Flags as set, on top of vLLM's defaults. Looked up by full name, whichever alias was used.

    ``resolved`` are values that vLLM derives for unset flags. ``own_draft`` as in `refused_together`. ``release`` is
    None if unknown.
    """

    def __init__(self, table: FlagTable, flags: Flags, resolved: Flags, *, own_draft: bool = False) -> None:
        self._table = table
        self.release = parse_release(table.version or "")
        self.own_draft = own_draft
        self._resolved = resolved
        self._flags: dict[str, FlagValue] = {}
        self._keys: dict[str, dict[str, FlagValue]] = {}
        for name, value in flags.items():
            head, dot, key = name.partition(".")
            spec, _ = resolve_flag_name(table, head)
            if spec is None:
                continue
            if dot:
                first = key.partition(".")[0]
                self._keys.setdefault(spec.name, {}).update(with_plain_keys(spec.name, {first: value}))
            elif spec.opposite and head.replace("_", "-") == spec.opposite:
                self._flags[spec.name] = not value
            else:
                self._flags[spec.name] = value

    def has(self, name: str) -> bool:
        """Whether a flag is set to a value."""
        if name not in self._flags or self._flags[name] in ("", "None"):
            return False
        spec = self._table.get(name)
        return spec is None or spec.kind is not ValueKind.JSON or not _is_null(str(self._flags[name]))

    def on(self, name: str) -> bool:
        """Whether a switch is on, explicitly or by default."""
        if name in self._flags:
            return self._flags[name] is True
        spec = self._table.get(name)
        return spec is not None and spec.kind is ValueKind.BOOL and spec.default == "true"

    def off(self, name: str) -> bool:
        """Whether a switch was set to off."""
        return self._flags.get(name) is False

    def text(self, name: str) -> str:
        """A value as text, set or default; empty if there is none."""
        if name in self._flags:
            return str(self._flags[name]) if self.has(name) else ""
        spec = self._table.get(name)
        return (spec.default or "") if spec is not None else ""

    def count(self, name: str, *, given: bool = False) -> int | None:
        """A whole number, set or default; None if there is none, or if ``given`` and it was not set."""
        if given and not self.has(name):
            return None
        return human_int(self.text(name))

    def limit(self, name: str) -> int | None:
        """A whole number, set or derived by vLLM, if known."""
        return self.count(name, given=True) if self.has(name) else human_int(str(self._resolved.get(name, "")))

    def words(self, name: str) -> tuple[str, ...]:
        """The suggested values of a flag."""
        spec = self._table.get(name)
        return spec.words if spec is not None else ()

    def part(self, name: str, key: str) -> FlagSpec | None:
        """The specification of a JSON flag's key, if known."""
        spec = self._table.get(name)
        return part_at(spec, key) if spec is not None else None

    def configured(self, name: str) -> bool:
        """Whether a JSON flag is set, as an object or key by key."""
        return self.has(name) or bool(self._keys.get(name))

    def key(self, name: str, key: str) -> object:
        """A key of a JSON flag, or None. Keys set one by one replace the whole object, as in vLLM."""
        if keys := self._keys.get(name):
            return None if keys.get(key) == "null" else keys.get(key)
        document = json_object(self.text(name)) if self.has(name) else None
        return with_plain_keys(name, document).get(key) if document is not None else None

    def document(self, name: str) -> Mapping[str, object]:
        """All top-level keys of a JSON flag, however they were set; empty if it is not set."""
        if keys := self._keys.get(name):
            return {key: decoded(value) for key, value in keys.items()}
        return json_object(self.text(name)) or {} if self.has(name) else {}


class Condition(msgspec.Struct, frozen=True):
    """One rule. Its first flag is the one reported; ``broken`` returns the problem, if any."""

    flags: tuple[str, ...]
    broken: Callable[[Given], str | None]
    since: tuple[int, ...] = (0, 0)


def broken_conditions(
    table: FlagTable, flags: Flags, resolved: Flags | None = None, *, own_draft: bool = False, alone: bool = False
) -> list[tuple[str, str]]:
    """Return violated conditions between flags as ``(flag, sentence)``. Parameters as in `refused_together`."""
    given = Given(table, flags, resolved or {}, own_draft=own_draft)
    found = []
    for condition in CONDITIONS:
        known = all(table.get(name) is not None for name in condition.flags)
        in_force = known and (given.release is None or given.release >= condition.since)
        if alone and len(condition.flags) > 1:
            continue
        if in_force and (sentence := condition.broken(given)) is not None:
            found.append((condition.flags[0], sentence))
    return found


def _more(small: str, large: str, *, needs: str = "") -> Condition:
    """``small``, if set, must not exceed ``large``."""

    def broken(given: Given) -> str | None:
        low, high = given.count(small, given=True), given.limit(large)
        if low is None or high is None or low <= high or (needs and not given.on(needs)):
            return None
        return _too_many(given, small, low, large, high)

    return Condition((small, large), broken)


def _too_many(given: Given, small: str, low: int, large: str, high: int) -> str:
    own = "" if given.has(large) else ", as vLLM works out here"
    return f"--{small} {low} is more than --{large} {high}{own}, which vLLM refuses"


def _active(given: Given) -> str | None:
    active, running = given.count("max-num-active-seqs", given=True), given.limit("max-num-seqs")
    if active is None or running is None:
        return None
    tokens = given.count("max-num-batched-tokens", given=True)
    if not given.has("max-num-seqs") and tokens is not None:
        running = min(running, tokens)  # as vLLM does with values that it derives itself
    return _too_many(given, "max-num-active-seqs", active, "max-num-seqs", running) if active > running else None


def _when(
    flags: tuple[str, ...], applies: Callable[[Given], bool], text: str, since: tuple[int, ...] = (0, 0)
) -> Condition:
    """A condition with one sentence, whatever the values."""
    return Condition(flags, lambda given: text if applies(given) else None, since)


def _needs(name: str, other: str, words: str = "", since: tuple[int, ...] = (0, 0)) -> Condition:
    """A switch that is on, or a value that is set, requires another switch or value."""

    def broken(given: Given) -> str | None:
        if not (given.on(name) or (given.has(name) and not given.off(name))):
            return None
        if given.on(other) or (given.has(other) and not given.off(other)):
            return None
        return f"--{name} needs --{other}{words}"

    return Condition((name, other), broken, since)


def _not_both(name: str, other: str, since: tuple[int, ...] = (0, 0)) -> Condition:
    def broken(given: Given) -> str | None:
        return f"--{name} and --{other} can't both be on" if given.on(name) and given.on(other) else None

    return Condition((name, other), broken, since)


def _set_twice(name: str, config: str, key: str, since: tuple[int, ...] = (0, 0)) -> Condition:
    """A flag that duplicates a key of a JSON flag: only one of the two may be set."""

    def broken(given: Given) -> str | None:
        value, part = given.key(config, key), given.part(config, key)
        derived = part is not None and "auto" in part.words and str(value).lower() == "auto"
        if not given.has(name) or value is None or derived:
            return None
        return f"--{name} and --{config}.{key} are one setting; set only one of them"

    return Condition((name, config), broken, since)


def _unchunked(given: Given) -> str | None:
    tokens, length = given.count("max-num-batched-tokens", given=True), given.limit("max-model-len")
    if not given.off("enable-chunked-prefill") or tokens is None or length is None or tokens >= length:
        return None
    return (
        f"--max-num-batched-tokens {tokens} is less than --max-model-len {length}, "
        f"which vLLM refuses without chunked prefill"
    )


def _context_parallel(given: Given) -> str | None:
    size, shards = given.count("tensor-parallel-size"), given.count("decode-context-parallel-size")
    if not size or not shards or (given.count("prefill-context-parallel-size") or 1) != 1 or size % shards == 0:
        return None
    return f"--decode-context-parallel-size {shards} must divide --tensor-parallel-size {size}"


def _balanced(given: Given) -> str | None:
    if not given.on("enable-eplb"):
        return None
    if not given.on("enable-expert-parallel"):
        return "--enable-eplb needs --enable-expert-parallel"
    sizes = ("tensor-parallel-size", "prefill-context-parallel-size", "data-parallel-size")
    if all((given.count(size) or 1) <= 1 for size in sizes):
        return "--enable-eplb needs more than one GPU: --tensor-parallel-size or --data-parallel-size above 1"
    return None


def _hybrid(given: Given) -> str | None:
    if not given.on("data-parallel-hybrid-lb") or given.has("data-parallel-size-local"):
        return None
    if given.has("data-parallel-rank") or (given.count("nnodes") or 1) > 1:
        return None
    return "--data-parallel-hybrid-lb needs --data-parallel-size-local, the number of ranks on this machine"


def _balancers(given: Given) -> str | None:
    """Load balancing across ranks is external, hybrid, or one server per rank (``ServeSubcommand``): set only one."""
    several = "data-parallel-multi-port-external-lb"
    outside = _first_given(given, "data-parallel-external-lb", "data-parallel-rank")
    hybrid = "data-parallel-hybrid-lb" if given.on("data-parallel-hybrid-lb") else ""
    if not hybrid and not given.on(several) and given.has("data-parallel-start-rank"):
        hybrid = "data-parallel-start-rank"
    found = [name for name in (outside, hybrid, several if given.on(several) else "") if name]
    if found[:2] == ["data-parallel-external-lb", "data-parallel-hybrid-lb"]:
        return None  # a separate condition
    return f"--{found[0]} and --{found[1]} are different ways to balance ranks; set one" if len(found) > 1 else None


def _first_given(given: Given, switch: str, number: str) -> str:
    return switch if given.on(switch) else number if given.has(number) else ""


def _external(given: Given) -> str | None:
    rank = given.has("data-parallel-rank")
    if not (rank or given.on("data-parallel-external-lb")) or (given.count("data-parallel-size") or 1) > 1:
        return None
    return f"--data-parallel-{'rank' if rank else 'external-lb'} needs --data-parallel-size above 1"


def _local_ranks(given: Given) -> str | None:
    local, size = given.count("data-parallel-size-local", given=True), given.count("data-parallel-size") or 1
    if local is None or local <= size:
        return None
    return f"--data-parallel-size-local {local} must not be more than --data-parallel-size {size}"


def _supervised(given: Given) -> str | None:
    name = "--data-parallel-multi-port-external-lb"
    if not given.on(name.lstrip("-")):
        return None
    size, local = given.count("data-parallel-size") or 1, given.count("data-parallel-size-local") or 0
    if size < 2 or local < 2:
        return f"{name} needs --data-parallel-size and --data-parallel-size-local of 2 or more"
    if size % local:
        return f"{name} needs a --data-parallel-size that --data-parallel-size-local divides"
    if given.has("data-parallel-rank"):
        return f"{name} sets --data-parallel-rank itself: leave it out"
    return None


def _tolerant(given: Given) -> str | None:
    external = given.on("data-parallel-external-lb") or given.has("data-parallel-rank")
    if not given.on("enable-fault-tolerance") or external:
        return None
    return "--enable-fault-tolerance needs --data-parallel-external-lb or --data-parallel-rank"


def _speculates(given: Given) -> bool:
    return any(given.configured(name) for name in METHOD_FLAGS)


_NEVER_AHEAD = ("suffix", "custom_class")
"""Speculative decoding methods that no release combines with async scheduling."""

_NOT_AHEAD = ("ngram", "medusa", "mlp_speculator")
"""The others that releases before 0.33 do not combine with it. Since then, only the old model runner refuses it."""

_AHEAD_SINCE: tuple[Release, Release] = ((0, 11, 0), (0, 14, 0))
"""First releases that combine it with EAGLE and MTP heads, and with draft models and pipelines, as far as seen."""


def _ahead(given: Given) -> str | None:
    if not given.on("async-scheduling"):
        return None
    method, release = given.key("speculative-config", "method") or given.text("spec-method"), given.release
    if release is not None and release < _AHEAD_SINCE[0] and _speculates(given):
        return "--async-scheduling does not work with speculative decoding in this release"
    refused: tuple[str, ...] = _NEVER_AHEAD
    if release is not None and release < (0, 33, 0):
        refused += _NOT_AHEAD
    if release is not None and release < _AHEAD_SINCE[1]:
        refused += ("draft_model",)
    return f"--async-scheduling does not work with speculative decoding by {method}" if method in refused else None


def _pipelined(given: Given) -> str | None:
    stages = given.count("pipeline-parallel-size") or 1
    if given.release is None or given.release >= _AHEAD_SINCE[1] or stages < 2 or not given.on("async-scheduling"):
        return None
    return f"--async-scheduling does not work with --pipeline-parallel-size {stages} in this release"


_SIXTEEN_BITS = ("float16", "bfloat16")


def _float_cache(given: Given) -> str | None:
    cache, dtype = given.text("kv-cache-dtype"), {"half": "float16", "float": "float32"}.get(given.text("dtype"))
    dtype = dtype or given.text("dtype")
    if cache not in _SIXTEEN_BITS or dtype in ("", "auto", cache):
        return None
    return f"--kv-cache-dtype {cache} must be that of --dtype, {dtype}, or auto"


WITHOUT_ADAPTERS = (
    "deep_gemm_mega_moe", "flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_deep_gemm", "aiter_mega_moe"
)  # fmt: skip
"""Backends of expert layers that do not apply LoRA adapters."""


def _adapted_experts(given: Given) -> str | None:
    backend = given.text("moe-backend").lower().replace("-", "_")
    if not given.on("enable-lora") or backend not in WITHOUT_ADAPTERS:
        return None
    return f"--enable-lora does not work with --moe-backend {backend}"


_DROPPED_METHODS = ("medusa", "mlp_speculator")
"""Speculative decoding methods that 0.33 removed."""


def _dropped_method(given: Given) -> str | None:
    method = given.key("speculative-config", "method")
    return f"--speculative-config: vLLM 0.33 removed the method {method}" if method in _DROPPED_METHODS else None


def _sleeping_store(given: Given) -> str | None:
    connector = given.key("kv-transfer-config", "kv_connector")
    if not given.on("enable-sleep-mode") or connector != "MooncakeStoreConnector":
        return None
    return f"--kv-transfer-config: {connector} does not work with --enable-sleep-mode"


_FROM_THE_PROMPT = ("ngram", "ngram_gpu", "[ngram]")
"""Methods without a draft model; vLLM also accepts them as the model's name."""


def _guesses(given: Given) -> str | None:
    """Numbers out of range."""
    config = "speculative-config"
    tokens = given.key(config, "num_speculative_tokens")
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens <= 0:
        return f"--{config} needs num_speculative_tokens of 1 or more, not {tokens}"
    least, most = (given.key(config, f"prompt_lookup_{end}") for end in ("min", "max"))
    if isinstance(least, int) and isinstance(most, int) and least > most:
        return f"--{config}: prompt_lookup_min {least} is more than prompt_lookup_max {most}"
    return None


_WITH_A_DRAFT = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash")
"""Methods that use a separate draft model or head."""


def _draft_shards(given: Given) -> str | None:
    """A draft model's TP size is 1 or the target's; methods without a draft model ignore it."""
    config, tensor = "speculative-config", given.count("tensor-parallel-size") or 1
    shards = given.key(config, "draft_tensor_parallel_size")
    method = given.key(config, "method") or given.text("spec-method")
    model = str(given.key(config, "model") or given.text("spec-model") or "")
    drafts = method in _WITH_A_DRAFT if method else "/" in model
    if not drafts or not isinstance(shards, int) or isinstance(shards, bool) or shards < 1 or shards in (1, tensor):
        return None
    return f"--{config}: draft_tensor_parallel_size {shards} must be 1 or --tensor-parallel-size, which is {tensor}"


_ALWAYS_COUNTED = (*_FROM_THE_PROMPT, "custom_class", "extract_hidden_states")
"""Methods without a draft model that need the number of tokens to be set."""


def _drafter(given: Given) -> tuple[str, str]:
    """The method and its model, empty if not set. Derives the method from the model where vLLM does."""
    config = "speculative-config"
    method = str(given.key(config, "method") or given.text("spec-method") or "")
    model = str(given.key(config, "model") or given.text("spec-model") or "")
    if not method and model in _FROM_THE_PROMPT:
        method = "ngram"
    if not method and _is_class(model):
        method = "custom_class"
    return method, model


def _is_class(model: str) -> bool:
    """Whether it is a class path (``package.Class``) rather than a model's name."""
    words = model.split(".")
    return len(words) > 1 and all(word.isidentifier() for word in words)


def _uncounted(given: Given) -> tuple[bool, str]:
    """Return whether the number of tokens per step is missing, and the method if known.

    Suffix decoding has a default, and the config of a draft model, or of the model itself, may specify it.
    """
    method, model = _drafter(given)
    counted = given.has("spec-tokens") or given.key("speculative-config", "num_speculative_tokens") is not None
    may_count = given.own_draft or method == "suffix" or (model and method not in _ALWAYS_COUNTED)
    return _speculates(given) and not counted and not may_count, method


def _counts(*, looked_up: bool, short: bool) -> Callable[[Given], str | None]:
    """Condition for prompt-lookup methods or others, configured only by the short ``--spec-*`` flags or by JSON."""

    def broken(given: Given) -> str | None:
        uncounted, method = _uncounted(given)
        if not uncounted or (method in _FROM_THE_PROMPT) is not looked_up:
            return None
        if given.configured("speculative-config") is short:
            return None
        if short:
            return f"--spec-method {method} needs --spec-tokens, the tokens per step"
        with_method = f", with the method {method}" if method else ""
        return f"--speculative-config needs num_speculative_tokens, the tokens per step{with_method}"

    return broken


_OF_METHOD = {
    "index_share_for_mtp_iteration": ("mtp",),
    "use_heterogeneous_vocab": ("draft_model",),
}
"""Keys of ``speculative-config`` that only some methods accept."""


def _of_method(given: Given) -> str | None:
    config = "speculative-config"
    method, _ = _drafter(given)
    if not method or method.endswith("_mtp"):
        return None
    for key, methods in _OF_METHOD.items():
        if given.key(config, key) not in (None, False) and method not in methods and method != "draft_model":
            return f"--{config}: {key} needs the method {either(methods)}, not {method}"
    return None


def _synthetic(given: Given) -> str | None:
    """Synthetic acceptance rates, for benchmarks."""
    config = "speculative-config"
    keys = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
    count = sum(given.key(config, key) is not None for key in keys)
    if given.key(config, "rejection_sample_method") == "synthetic":
        return None if count == 1 else f"--{config} needs one of {either(keys)} with rejection_sample_method synthetic"
    return f"--{config}: {either(keys)} needs rejection_sample_method synthetic" if count else None


def _draft(given: Given) -> str | None:
    config = "speculative-config"
    if given.own_draft:
        return None
    tokens = given.key(config, "num_speculative_tokens") or given.count("spec-tokens", given=True)
    method = given.key(config, "method") or given.text("spec-method")
    if not tokens or given.key(config, "model") or given.has("spec-model") or (method and method not in _WITH_A_DRAFT):
        return None
    return f"--{config} needs model, the name of the draft model" + (f", with the method {method}" if method else "")


def _adapted_drafts(given: Given) -> str | None:
    """With LoRA adapters, one step must hold the draft tokens of all sequences."""
    config = "speculative-config"
    drafts = given.key(config, "num_speculative_tokens") or given.count("spec-tokens", given=True)
    seqs, tokens = given.limit("max-num-seqs"), given.limit("max-num-batched-tokens")
    if not given.on("enable-lora") or not isinstance(drafts, int) or seqs is None or tokens is None:
        return None
    needed = seqs * (drafts + 1)
    if tokens >= needed:
        return None
    own = "" if given.has("max-num-batched-tokens") else ", as vLLM works out here"
    return (
        f"--max-num-batched-tokens {tokens}{own} is less than {needed}: with --enable-lora a step must hold {drafts} "
        f"drafted tokens and one more of each of {seqs} sequences"
    )


def _drafted_slots(given: Given) -> str | None:
    """In some releases, a step must have room for what a draft model adds for all sequences."""
    config = "speculative-config"
    drafts = given.key(config, "num_speculative_tokens") or given.count("spec-tokens", given=True)
    seqs, tokens = given.limit("max-num-seqs"), given.limit("max-num-batched-tokens")
    if given.release is None or not isinstance(drafts, int) or seqs is None or tokens is None:
        return None
    parallel = given.key(config, "parallel_drafting") in (True, "true")
    slots = seqs * startup_slots(_drafter(given)[0], drafts, given.release, parallel=parallel)
    if tokens > slots:
        return None
    own = "" if given.has("max-num-batched-tokens") else ", as vLLM works out here"
    return (
        f"--max-num-batched-tokens {tokens}{own} must be more than {slots}: in this release, a step must have room "
        f"for what the draft model adds for each of {seqs} sequences"
    )


_OF_THE_TARGET = (*_ALWAYS_COUNTED, "suffix")
"""Methods that do not use the length of a draft model's context."""


def _drafts_context(given: Given) -> str | None:
    """A draft model's context may not be longer than the target's."""
    config = "speculative-config"
    drafts, length = given.key(config, "max_model_len"), given.limit("max-model-len")
    if not isinstance(drafts, int) or isinstance(drafts, bool) or length is None or 0 <= length >= drafts:
        return None
    if length < 0 or _drafter(given)[0] in _OF_THE_TARGET:
        return None
    own = "" if given.has("max-model-len") else ", as vLLM works out here"
    return f"--max-model-len {length}{own} is less than max_model_len {drafts} in --{config}, which vLLM refuses"


_FP8_WEIGHTS = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel")


def _wide_fp8(given: Given) -> str | None:
    method, dtype = given.text("quantization"), given.text("dtype")
    if method.lower() not in _FP8_WEIGHTS or dtype not in ("float32", "float"):
        return None
    return f"--quantization {method} does not work with --dtype {dtype}"


def _executor(given: Given) -> str | None:
    text = given.text("distributed-executor-backend")
    if not text or text in ("ray", "mp", "uni", "external_launcher") or "." in text:
        return None
    return f"--distributed-executor-backend '{text}' is neither ray, mp, uni, external_launcher nor a mod.Class"


def _adapters(given: Given) -> str | None:
    text = given.text("lora-modules")
    words = several_words("lora-modules", text) or ((text,) if text else ())
    return next(filter(None, map(_adapter, words)), None)


def _adapter(word: str) -> str | None:
    if word.lstrip().startswith("{"):
        document = _decoded(word)[1]
        missing = [key for key in ("name", "path") if isinstance(document, dict) and key not in document]
        return f"--lora-modules needs {' and '.join(missing)} in its JSON object" if missing else None
    if "=" in word and "," not in word:
        return None
    return "--lora-modules takes NAME=PATH or a JSON object with name and path"


def _parser_name(name: str, plugin: str, switch: str = "") -> Condition:
    """A name must be in vLLM's registry, unless a plugin may add its own."""

    def broken(given: Given) -> str | None:
        text, known = given.text(name), given.words(name)
        if not text or not known or text in known or given.has(plugin) or (switch and not given.on(switch)):
            return None
        close = get_close_matches(text, known, n=2, cutoff=0.6)
        hint = f"; did you mean {' or '.join(close)}?" if close else f": {', '.join(known[:8])} or others"
        return f"--{name} has no '{text}'{hint}"

    return Condition((name, plugin), broken)


def _rank(given: Given) -> str | None:
    rank, size = given.count("data-parallel-rank", given=True), given.count("data-parallel-size")
    if rank is None or size is None or size <= 1 or 0 <= rank < size:
        return None
    return f"--data-parallel-rank {rank} must be from 0 to {size - 1}"


def _node(given: Given) -> str | None:
    nodes, rank = given.count("nnodes") or 1, given.count("node-rank") or 0
    if nodes <= 1 or 0 <= rank < nodes:
        return None
    return f"--node-rank {rank} must be from 0 to {nodes - 1}, as --nnodes is {nodes}"


def _nodes_divide(given: Given) -> str | None:
    nodes, total = given.count("nnodes") or 1, 1
    for axis in ("pipeline", "tensor", "prefill-context", "data"):
        total *= given.count(f"{axis}-parallel-size") or 1
    return f"--nnodes {nodes} must divide the {total} GPUs that the parallel sizes ask for" if total % nodes else None


def _grouped(given: Given) -> str | None:
    group, inside = given.count("offload-group-size") or 0, given.count("offload-num-in-group") or 0
    if group <= 0 and given.text("offload-backend") != "prefetch":
        return None
    if inside > group:
        return f"--offload-num-in-group {inside} must not be more than --offload-group-size {group}"
    step = given.count("offload-prefetch-step")
    return "--offload-prefetch-step must be 1 or more" if step is not None and step < 1 else None


def _connected(kind: str, *, always: bool) -> Condition:
    """A connector needs a role. With ``always``, a configuration without a connector is rejected too."""
    config, connector, role = f"{kind}-transfer-config", f"{kind}_connector", f"{kind}_role"

    def broken(given: Given) -> str | None:
        if given.key(config, connector) is not None:
            part = given.part(config, role)
            roles = f": {either(part.choices)}" if part is not None and part.choices else ""
            return f"--{config} needs {role} beside {connector}{roles}" if given.key(config, role) is None else None
        return f"--{config} needs {connector}, the name of a connector" if always and given.configured(config) else None

    return Condition((config,), broken, CHECKED_SINCE)


def _structured(given: Given) -> str | None:
    config = "structured-outputs-config"
    backend = given.key(config, "backend") or "auto"
    for key, backends in (
        ("disable_any_whitespace", ("xgrammar", "guidance")),
        ("disable_additional_properties", ("guidance",)),
    ):
        if given.key(config, key) is True and backend not in backends:
            return f"--{config}: {key} needs the backend {either(backends)}, not {backend}"
    return None


def _profiled(given: Given) -> str | None:
    config = "profiler-config"
    profiler, folder = given.key(config, "profiler"), given.key(config, "torch_profiler_dir")
    if profiler != "torch" and folder:
        return f"--{config}: torch_profiler_dir needs the profiler torch"
    for name in ("torch", "proton"):
        if profiler == name and not given.key(config, f"{name}_profiler_dir"):
            return f"--{config} needs {name}_profiler_dir, a folder for the traces, with the profiler {name}"
    return None


def _hidden_metrics(given: Given) -> str | None:
    name = "show-hidden-metrics-for-version"
    version = given.text(name)
    return f"--{name} takes a version such as 0.31, not {shown(version)}" if _unreadable(version) else None


def _unreadable(version: str) -> bool:
    return bool(version) and _VERSION.fullmatch(version) is None


def _custom_ops(given: Given) -> list[str]:
    words: list[str] = []
    for key in ("custom_ops", "custom_ops+"):
        value = given.key("compilation-config", key)
        document = _decoded(value)[1] if isinstance(value, str) and not key.endswith("+") else value
        listed = document if isinstance(document, list) else str(document).split(",") if value is not None else []
        words += [word for word in listed if isinstance(word, str)]
    return words


def _base_modes(given: Given) -> str | None:
    """``all`` and ``none`` may occur only once in total."""
    if sum(word in ("all", "none") for word in _custom_ops(given)) <= 1:
        return None
    return "--compilation-config: custom_ops may have all or none once, not several of them"


def _switched_ops(given: Given) -> str | None:
    """Each other custom op needs a sign, and may not have both."""
    words = [word for word in _custom_ops(given) if word not in ("all", "none")]
    wrong = next((word for word in words if len(word) < 2 or word[0] not in "+-"), None)
    if wrong is not None:
        return f"--compilation-config: custom_ops takes all, none, +NAME or -NAME, not {shown(wrong)}"
    both = next((word[1:] for word in words if word[0] == "+" and f"-{word[1:]}" in words), None)
    return None if both is None else f"--compilation-config: custom_ops has both +{both} and -{both}"


MICROBATCHED = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")
"""All-to-all backends that support microbatching."""


def _microbatches(given: Given) -> str | None:
    count, backend = given.count("ubatch-size", given=True) or 0, given.text("all2all-backend")
    if count <= 1 or not backend or backend in MICROBATCHED:
        return None
    return f"--ubatch-size {count} needs --all2all-backend {either(MICROBATCHED)}, not {backend}"


def _split_batches(given: Given) -> str | None:
    """A batch that is split needs at least one token per part."""
    parts = 2 if given.on("enable-dbo") else given.count("ubatch-size") or 0
    if parts < 2:
        return None
    for kind in ("decode", "prefill"):
        least = given.count(name := f"dbo-{kind}-token-threshold")
        if least is not None and least < parts:
            return f"--{name} {least} must be {parts} or more: a token for each part of a batch"
    return None


def _spare_experts(given: Given) -> str | None:
    spare = given.key("eplb-config", "num_redundant_experts")
    if given.on("enable-eplb") or not isinstance(spare, int) or spare <= 0:
        return None
    return "--eplb-config: num_redundant_experts needs --enable-eplb"


def _modality_limits(given: Given) -> str | None:
    """Validated for every model, though only multimodal models use them."""
    name = "limit-mm-per-prompt"
    for kind, limit in given.document(name).items():
        if not isinstance(limit, int | dict):
            return f"--{name}: {kind} takes a number or an object with count, not {shown(str(limit))}"
    return None


def _modality_options(given: Given) -> str | None:
    name = "media-io-kwargs"
    wrong = next((kind for kind, options in given.document(name).items() if not isinstance(options, dict)), None)
    return None if wrong is None else f"--{name}: {wrong} takes an object"


CONDITIONS: tuple[Condition, ...] = (
    _more("max-num-seqs", "max-num-batched-tokens"),
    Condition(("max-num-batched-tokens", "max-model-len", "enable-chunked-prefill"), _unchunked, WHOLE_PROMPTS_SINCE),
    Condition(("max-num-active-seqs", "max-num-seqs"), _active),
    _more("long-prefill-token-threshold", "max-model-len"),
    _more("max-loras", "max-cpu-loras", needs="enable-lora"),
    Condition(("data-parallel-size-local", "data-parallel-size"), _local_ranks),
    _needs("enable-auto-tool-choice", "tool-call-parser", ", the name of the model's format"),
    _needs("enable-log-outputs", "enable-log-requests", since=(0, 13)),
    _when(
        ("enable-per-request-metrics", "disable-log-stats"),
        lambda given: given.on("enable-per-request-metrics") and given.on("disable-log-stats"),
        "--enable-per-request-metrics needs statistics: omit --disable-log-stats",
    ),
    _when(
        ("sse-keep-alive-interval",),
        lambda given: (given.count("sse-keep-alive-interval", given=True) or 0) < 0,
        "--sse-keep-alive-interval must be 0 or more",
    ),
    Condition(("decode-context-parallel-size", "tensor-parallel-size"), _context_parallel),
    Condition(("enable-eplb", "enable-expert-parallel"), _balanced),
    Condition(("data-parallel-rank", "data-parallel-size"), _external),
    Condition(("data-parallel-multi-port-external-lb",), _supervised),
    Condition(("enable-fault-tolerance",), _tolerant),
    _when(
        ("spec-tokens", "spec-model"),
        lambda given: given.has("spec-tokens") and not _speculates(given),
        "--spec-tokens needs --spec-model or --spec-method",
    ),
    Condition(("async-scheduling", "speculative-config"), _ahead, (0, 10, 2)),
    Condition(("async-scheduling", "pipeline-parallel-size"), _pipelined, (0, 10, 2)),
    Condition(("speculative-config",), _guesses),
    _when(
        ("per-request-spec-decode-metrics",),
        lambda given: given.text("per-request-spec-decode-metrics") not in ("", "none") and not _speculates(given),
        "--per-request-spec-decode-metrics needs speculative decoding: --speculative-config",
    ),
    Condition(("distributed-executor-backend",), _executor),
    Condition(("lora-modules",), _adapters),
    _parser_name("reasoning-parser", "reasoning-parser-plugin"),
    _parser_name("tool-call-parser", "tool-parser-plugin", "enable-auto-tool-choice"),
    Condition(("data-parallel-rank",), _rank),
    _not_both("data-parallel-hybrid-lb", "data-parallel-external-lb", (0, 13)),
    Condition(("data-parallel-start-rank", "data-parallel-multi-port-external-lb"), _balancers, CHECKED_SINCE),
    Condition(("data-parallel-hybrid-lb", "data-parallel-size-local"), _hybrid, (0, 13)),
    Condition(("node-rank", "nnodes"), _node),
    Condition(("nnodes",), _nodes_divide),
    _when(
        ("nnodes", "data-parallel-backend"),
        lambda given: (given.count("nnodes") or 1) > 1 and given.text("data-parallel-backend") not in ("mp", ""),
        "--nnodes above 1 needs --data-parallel-backend mp",
    ),
    _when(
        ("api-server-count", "headless"),
        lambda given: given.on("headless") and (given.count("api-server-count", given=True) or 0) > 0,
        "--api-server-count must not be set with --headless",
        (0, 20),
    ),
    _needs("enable-elastic-ep", "enable-eplb"),
    _needs("numa-bind-nodes", "numa-bind"),
    _needs("numa-bind-cpus", "numa-bind"),
    _needs("collect-detailed-traces", "otlp-traces-endpoint", since=(0, 13)),
    _when(
        ("ray-workers-use-nsight",),
        lambda given: given.on("ray-workers-use-nsight") and given.text("distributed-executor-backend") != "ray",
        "--ray-workers-use-nsight needs --distributed-executor-backend ray",
    ),
    Condition(("offload-num-in-group", "offload-group-size"), _grouped),
    _when(
        ("mamba-ssu-algorithm", "mamba-backend"),
        lambda given: given.has("mamba-ssu-algorithm") and given.text("mamba-backend").lower() != "flashinfer",
        "--mamba-ssu-algorithm needs --mamba-backend flashinfer",
    ),
    Condition(("speculative-config",), _draft, (0, 11)),
    _when(
        ("speculative-config",),
        lambda given: given.key("speculative-config", "tensor_parallel_size") is not None,
        "--speculative-config has draft_tensor_parallel_size in place of tensor_parallel_size, which vLLM refuses",
        (0, 16),
    ),
    Condition(("speculative-config", "tensor-parallel-size"), _draft_shards, (0, 10, 2)),
    Condition(("speculative-config",), _counts(looked_up=True, short=False)),
    Condition(("spec-method", "spec-tokens"), _counts(looked_up=True, short=True)),
    Condition(("speculative-config",), _counts(looked_up=False, short=False), CHECKED_SINCE),
    Condition(("spec-method", "spec-tokens"), _counts(looked_up=False, short=True), CHECKED_SINCE),
    _when(
        ("speculative-config",),
        lambda given: _drafter(given) == ("custom_class", ""),
        "--speculative-config needs model, the class, with the method custom_class",
        CHECKED_SINCE,
    ),
    Condition(("speculative-config",), _of_method, CHECKED_SINCE),
    Condition(("speculative-config",), _synthetic, CHECKED_SINCE),
    Condition(("speculative-config", "enable-lora"), _adapted_drafts, (0, 11, 1)),
    Condition(("speculative-config", "max-num-batched-tokens"), _drafted_slots, (0, 17)),
    Condition(("max-model-len", "speculative-config"), _drafts_context),
    Condition(("quantization", "dtype"), _wide_fp8),
    _set_twice("spec-tokens", "speculative-config", "num_speculative_tokens", CHECKED_SINCE),
    _set_twice("spec-method", "speculative-config", "method", CHECKED_SINCE),
    _set_twice("spec-model", "speculative-config", "model", CHECKED_SINCE),
    _connected("kv", always=True),
    _connected("ec", always=False),
    Condition(("structured-outputs-config",), _structured),
    Condition(("profiler-config",), _profiled),
    Condition(("show-hidden-metrics-for-version",), _hidden_metrics, CHECKED_SINCE),
    Condition(("eplb-config", "enable-eplb"), _spare_experts, (0, 13)),
    Condition(("compilation-config",), _base_modes, (0, 10)),
    Condition(("compilation-config",), _switched_ops, CHECKED_SINCE),
    Condition(("ubatch-size", "all2all-backend"), _microbatches, CHECKED_SINCE),
    Condition(("ubatch-size", "enable-dbo"), _split_batches, CHECKED_SINCE),
    Condition(("limit-mm-per-prompt",), _modality_limits, CHECKED_SINCE),
    Condition(("media-io-kwargs",), _modality_options, CHECKED_SINCE),
    Condition(("kv-cache-dtype", "dtype"), _float_cache, (0, 33)),
    Condition(("enable-lora", "moe-backend"), _adapted_experts, (0, 33)),
    Condition(("speculative-config",), _dropped_method, (0, 33)),
    Condition(("kv-transfer-config", "enable-sleep-mode"), _sleeping_store, (0, 33)),
    _set_twice("attention-backend", "attention-config", "backend"),
    _set_twice("enable-flashinfer-autotune", "kernel-config", "enable_flashinfer_autotune"),
    _set_twice("cudagraph-capture-sizes", "compilation-config", "cudagraph_capture_sizes"),
    _set_twice("max-cudagraph-capture-size", "compilation-config", "max_cudagraph_capture_size"),
)
