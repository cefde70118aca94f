"""Whether vLLM would accept a flag's value: predicts what its parser and its configuration reject. Pure.

A value is judged in its argv form: ``True`` as ``--flag``, ``False`` as ``--no-flag``, all else as one word after it.
What depends on a model, a GPU or a file is not judged here. No complaint guarantees nothing; a complaint is certain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from vllm_launchers.vllm.flags.changes import FlagValue, Number, human_int
from vllm_launchers.vllm.flags.conditions import broken_conditions
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.flags.search import closest, resolve

__all__ = ["judge", "problem"]

_SHOWN = 60
_MANY = 8
_NESTED = re.compile(r"(?s)^\s*{.*}\s*$")
_SUFFIXED = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_QUOTED = re.compile(r'("(?:[^"\\]|\\.)*")')
_FRONTEND = "Frontend"
_ONLY_WITH = {"LoRAConfig": "enable-lora"}
"""Groups whose configuration is only created, and so only validated, if another flag is on."""


def judge(
    table: FlagTable, flags: Mapping[str, FlagValue], resolved: Mapping[str, FlagValue] | None = None
) -> list[tuple[str, str]]:
    """What vLLM would reject among flags that are set together: ``(flag, sentence)``, in the flags' order.

    ``flags`` are named as in a plan: no leading dashes, ``-`` between words. Conditions between flags come after those
    of single ones, and only if the flags involved are valid by themselves. ``resolved`` are values that vLLM will
    derive from GPU and model for unset flags, as far as the caller knows them: ``max-num-seqs``,
    ``max-num-batched-tokens``, ``max-model-len``.
    """
    found: list[tuple[str, str]] = []
    bad: set[str] = set()
    for name, value in flags.items():
        spec, _ = resolve(table, name.partition(".")[0])
        switch = _ONLY_WITH.get(spec.group) if spec is not None else None
        idle = switch is not None and flags.get(switch) is not True
        if (sentence := _problem(table, name, value, bounds=not idle)) is not None:
            found.append((name, sentence))
            bad.add(name)
    return found + broken_conditions(table, {name: flags[name] for name in flags if name not in bad}, resolved)


def problem(table: FlagTable, name: str, value: FlagValue) -> str | None:
    """Why vLLM would reject a flag with this value, in one sentence, or None."""
    return _problem(table, name, value, bounds=True)


def _problem(table: FlagTable, name: str, value: FlagValue, *, bounds: bool) -> str | None:
    head, dot, key = name.partition(".")
    spec, several = resolve(table, head)
    if spec is None:
        return _unknown(table, head, several)
    if dot:
        return _key_problem(spec, key)
    if spec.kind is ValueKind.BOOL:
        if isinstance(value, bool):
            return _opposite_problem(spec, head, value)
        return f"--{head} is on or off and takes no value, not {_shown(value)}"
    if isinstance(value, bool):
        if spec.bare and (value or spec.negatable):
            return None
        return f"--{head} needs a value: {expected(spec)}"
    text = str(value)
    if spec.nullable and text in ("", "None") and (not spec.many or spec.group == _FRONTEND):
        return None  # but a list of nothing but None is rejected where a configuration checks it
    sentence = _kind_problem(spec, text) or _choice_problem(spec, text)
    if sentence is None and bounds:
        sentence = _bound_problem(spec, text)
    return None if sentence is None else f"--{head} {sentence}"


def _unknown(table: FlagTable, head: str, several: tuple[str, ...]) -> str:
    which = f"vLLM {table.version.partition('+')[0]}" if table.version else "this vLLM"
    if several:
        names = ", ".join(f"--{name}" for name in several[:_MANY]) + (" and others" if len(several) > _MANY else "")
        return f"--{head} is not one flag of {which} but the beginning of several: {names}"
    close = closest(table, head)
    if not close:
        return f"{which} has no flag --{head}"
    return f"{which} has no flag --{head}; did you mean {_either([f'--{name}' for name in close])}?"


def _opposite_problem(spec: FlagSpec, head: str, value: bool) -> str | None:
    """An ``--x`` that is switched off is written ``--no-x``, which not every option has."""
    option = head.replace("_", "-")
    if not value and spec.opposite and option == spec.opposite:
        return f"--{head} has no --no- form; set {spec.name} instead"
    return None


def _key_problem(spec: FlagSpec, key: str) -> str | None:
    """A key of a JSON flag, set by itself; vLLM merges the keys into one object."""
    first = key.rstrip("+").partition(".")[0]
    if spec.kind not in (ValueKind.JSON, ValueKind.OTHER) and (spec.kind is not ValueKind.TEXT or spec.choices):
        return f"--{spec.name} has no keys: it takes {expected(spec)}"
    return _part_problem(spec, first)


def _part_problem(spec: FlagSpec, key: str) -> str | None:
    known = [part.name for part in spec.parts]
    if not known or key in known:
        return None
    from difflib import get_close_matches  # only needed if something is wrong

    close = get_close_matches(key, known, n=2, cutoff=0.6)
    hint = f"; did you mean {_either(close)}?" if close else f"; it has {_listed(known)}"
    return f"--{spec.name} has no key {_shown(key)}{hint}"


def _kind_problem(spec: FlagSpec, text: str) -> str | None:
    """The rest of the sentence after ``--flag``, or None."""
    if spec.nullable and spec.many and text in ("", "None"):
        return f"takes {expected(spec)}, not {_shown(text)}"
    match spec.kind:
        case ValueKind.INT | ValueKind.FLOAT | ValueKind.HUMAN_INT:
            return None if _number(spec, text) is not None else f"takes {expected(spec)}, not {_shown(text)}"
        case ValueKind.JSON | ValueKind.JSON_LIST:
            return _json_problem(spec, text)
        case ValueKind.OTHER if not spec.choices and _NESTED.match(text):
            return None if _decoded(text)[0] else "looks like a JSON object but is none"
    return None


def _json_problem(spec: FlagSpec, text: str) -> str | None:
    good, document = _decoded(text)
    if not good and spec.parts:  # only objects that a class reads may have numbers such as 80g
        good, document = _decoded(_with_plain_numbers(text))
    wanted: type = list if spec.kind is ValueKind.JSON_LIST else dict
    if not good or not isinstance(document, wanted):
        return f"takes {expected(spec)}, not {_shown(text)}"
    if isinstance(document, dict):
        for key in document:
            if (sentence := _part_problem(spec, key)) is not None:
                return sentence.removeprefix(f"--{spec.name} ")
    return None


def _decoded(text: str) -> tuple[bool, object]:
    try:
        return True, json.loads(text)
    except (ValueError, RecursionError):
        return False, None


def _with_plain_numbers(text: str) -> str:
    pieces = _QUOTED.split(text)
    pieces[::2] = [_SUFFIXED.sub(lambda match: str(human_int(match[0]) or match[0]), piece) for piece in pieces[::2]]
    return "".join(pieces)


def _choice_problem(spec: FlagSpec, text: str) -> str | None:
    choices = spec.choices
    if choices:
        word = str(_number(spec, text)) if spec.kind is ValueKind.INT else text
        if spec.kind is ValueKind.OTHER:
            word = text.lower().replace("-", "_")
        return None if word in choices or text in choices else f"takes {expected(spec)}, not {_shown(text)}"
    if spec.closed and spec.words:
        known = {word.lower() for word in spec.words} | {"auto"}
        return None if text.lower() in known else f"takes {expected(spec)}, not {_shown(text)}"
    return None


def _bound_problem(spec: FlagSpec, text: str) -> str | None:
    number = _number(spec, text)
    if number is None or spec.many:
        return None
    if spec.name == "max-model-len" and number == 0:
        return "must be 1 or more, or auto, not '0'"
    if spec.minimum is not None and not number >= spec.minimum:
        return f"must be {spec.minimum:g} or more, not {_shown(text)}"
    if spec.above is not None and not number > spec.above:
        return f"must be above {spec.above:g}, not {_shown(text)}"
    if spec.maximum is not None and not number <= spec.maximum:
        return f"must be {spec.maximum:g} or less, not {_shown(text)}"
    if spec.below is not None and not number < spec.below:
        return f"must be below {spec.below:g}, not {_shown(text)}"
    return None


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


def expected(spec: FlagSpec) -> str:
    """What a flag accepts, in words: ``a whole number``, ``auto, fp8 or fp8_e4m3``."""
    if spec.choices:
        return _either(spec.choices)
    if spec.closed and spec.words:
        return _either(spec.words)
    plain = {
        ValueKind.BOOL: "on or off",
        ValueKind.INT: "a whole number",
        ValueKind.FLOAT: "a number",
        ValueKind.HUMAN_INT: "a whole number such as 4096, 4k (4,000) or 4K (4,096)",
        ValueKind.JSON: 'a JSON object such as {"key": 1}',
        ValueKind.JSON_LIST: 'a JSON list such as ["*"]',
    }
    words = plain.get(spec.kind, "text")
    return f"{words}, or {spec.words[0]}" if spec.kind is ValueKind.HUMAN_INT and spec.words else words


def _either(names: tuple[str, ...] | list[str]) -> str:
    if len(names) > _MANY:
        return _listed(names)
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:_MANY]) + (f" or one of {len(names) - _MANY} others" if len(names) > _MANY else "")


def _shown(value: object) -> str:
    text = str(value)
    text = "".join(c if c.isprintable() else "?" for c in text[:_SHOWN]) + ("…" if len(text) > _SHOWN else "")
    return f"'{text}'"
