"""Remedies where a flag, or the model with its flags, is not what this vLLM or this GPU takes."""

from __future__ import annotations

import difflib
import math
import re

from vllm_console.diagnosis.case import Case
from vllm_console.diagnosis.model import Remedy
from vllm_console.diagnosis.words import flags_in
from vllm_launchers.plan.errors import FlagError
from vllm_launchers.plan.flags import normalise, parse_value
from vllm_launchers.plan.model import Changes, Flags
from vllm_launchers.presets.model import FlagValue
from vllm_launchers.presets.rules import FLAG_NAME

_UNRECOGNIZED = re.compile(r"unrecognized arguments: (?P<words>.*)")
_ARGUMENT = re.compile(r"argument (?P<names>--?[\w./-]+): (?P<why>.*)")
_CHOICES = re.compile(r"invalid choice: '?(?P<given>[^'(]*?)'? \(choose from (?P<choices>[^)]*)\)")
_DERIVED = re.compile(r"derived max_model_len \((?P<why>[^)]*?(?P<length>\d+))(?:\.\d+)?[^)\d]*\)")
_HEADS = re.compile(
    r"heads ?[(=] ?(?P<heads>\d+)\)?.*?divisible by (?:tensor.parallel.?(?:world )?size|tp_size) ?[(=] ?(?P<size>\d+)",
    re.IGNORECASE,
)
_BLOCKS = re.compile(
    r"= ?(?P<part>\d+) is not divisible by\s+"
    r"(?:weight quantization block_\w|min_thread_\w|group_size) ?= ?(?P<block>\d+)"
)
_KEYWORD = re.compile(r"unexpected keyword argument '(?P<name>[a-z][a-z0-9_]*)'")
_STEP = re.compile(
    r"max_num_batched_tokens \((?P<step>\d+)\) (?:is smaller than|must be greater than or equal to) "
    r"(?P<what>max_model_len|max_num_seqs) \((?P<least>\d+)\)"
)
_PARSERS = re.compile(
    r"invalid (?P<kind>tool call|reasoning) parser: (?P<given>\S+) \(chose from \{(?P<choices>[^}]*)\}"
)
_PERCENT = re.compile(r"(?:input_value=|Got )(?P<given>\d+(?:\.\d+)?)\b")
_AGAIN = re.compile(r"Re-run with --kv-cache-dtype (?P<value>[a-z0-9_]+)")
_SUPPORTED = re.compile(r"Supported dtypes: \[(?:torch\.)?(?P<first>\w+)")
_FIELD = re.compile(r"^--(?P<name>[a-z][a-z0-9-]*): ")


def unknown_flag(case: Case) -> tuple[Remedy, ...]:
    """What the flags are called now, or were most likely meant for, in one change; else leave them out."""
    given = _given(case.text)
    if not given:
        return ()
    listed = ", ".join(f"--{name}" for name in given)
    version = f"vLLM {case.version}" if case.version else "This vLLM"
    many = "them" if len(given) > 1 else "it"
    without = Remedy(Changes(unset=tuple(given)), f"{version} does not know {listed}: leave {many} out.")
    right = {name: found for name in given if (found := _right_name(name, given, case)) is not None}
    wanted = {new: value for remedy in right.values() for new, value in remedy.changes.set.items()}
    why = " ".join(remedy.why for remedy in right.values())
    if wanted:
        return (Remedy(Changes(wanted, tuple(given)), why), without)
    return (Remedy(without.changes, f"{without.why} {why}".strip()),)


def _given(text: str) -> dict[str, FlagValue]:
    """The flags that the parser did not know, with the values that stood behind them."""
    if told := _KEYWORD.search(text):
        return {told["name"].replace("_", "-"): True}
    told = _UNRECOGNIZED.search(text)
    given: dict[str, FlagValue] = {}
    last = None
    for word in told["words"].split() if told else ():
        name, _, value = word.partition("=")
        name = name.lstrip("-").replace("_", "-")
        if word.startswith("--") and FLAG_NAME.fullmatch(name):
            last = name
            given[name] = parse_value(value, name=name) if value else True
        elif last is not None and given[last] is True:
            given[last] = parse_value(word, name=last)
    return given


def _right_name(name: str, given: Flags, case: Case) -> Remedy | None:
    """The change to today's spelling of a retired flag, or to the flag whose name is nearly the same."""
    from vllm_launchers.machine.flags.releases import RELEASES, UnknownReleaseError, release_table
    from vllm_launchers.plan.retired.flags import RETIRED_FLAGS

    try:
        table = release_table(case.version or RELEASES[-1])
    except UnknownReleaseError:
        return None
    if retired := RETIRED_FLAGS.get(name):
        changes = retired.carry({**case.flags, **given})
        known = changes is not None and all(new.partition(".")[0] in table.flags for new in changes.set)
        return Remedy(changes if changes is not None and known else Changes(), f"--{name}: {retired.instead}.")
    near = difflib.get_close_matches(name, table.flags, n=1, cutoff=0.8)
    return Remedy(Changes({near[0]: given[name]}), f"--{name} is called --{near[0]}.") if near else None


def invalid_value(case: Case) -> tuple[Remedy, ...]:
    """The nearest value that is allowed, or the flag left out."""
    if told := _DERIVED.search(case.text):
        length = int(told["length"])
        why = f"The model's own context is {length:,} tokens."
        return (Remedy(Changes({"max-model-len": length}), why, "Longer requests are refused."),)
    if (told := _STEP.search(case.text)) and int(told["step"]) < int(told["least"]):
        least = int(told["least"])
        what = "max-model-len" if "max_model_len" in told["what"] else "max-num-seqs"
        why = f"A step must hold at least the {least:,} tokens of {what}."
        return (Remedy(Changes({"max-num-batched-tokens": least}), why, "Steps need more memory for activations."),)
    name = _named(case)
    if name is None:
        return ()
    found = []
    if (told := _CHOICES.search(case.text)) or (told := _PARSERS.search(case.text)):
        choices = [choice.strip().strip("'\"") for choice in told["choices"].split(",")]
        near = difflib.get_close_matches(told["given"].strip(), choices, n=1, cutoff=0.6)
        if near:
            found.append(Remedy(Changes({name: parse_value(near[0], name=name)}), f"--{name} takes {near[0]}."))
    if name == "gpu-memory-utilization" and (told := _PERCENT.search(case.text)) and 10 <= float(told["given"]) <= 100:
        share = min(0.95, float(told["given"]) / 100)
        found.append(Remedy(Changes({name: share}), f"It is a share, not a percentage: {share:g}."))
    why = f"Without it, vLLM's own default for --{name} counts."
    return (*found, Remedy(Changes(unset=(name,)), why))


def _named(case: Case) -> str | None:
    """The flag that the message is about."""
    told = _ARGUMENT.search(case.text)
    word = max(told["names"].split("/"), key=len) if told else ""
    if not word and (field := _FIELD.match(case.text)):
        word = field["name"]
    if not word and (told := _PARSERS.search(case.text)):
        word = "tool-call-parser" if told["kind"] == "tool call" else "reasoning-parser"
    if not word and "GPU memory utilization must" in case.text:
        word = "gpu-memory-utilization"
    if not word and "quantization method" in case.text:
        word = "quantization"
    if not word:
        spoken = list(flags_in(case.text))
        word = next((name for name in spoken if name in case.flags), spoken[0] if spoken else "")
    try:
        return normalise(word) if word else None
    except FlagError:
        return None


def tp_not_divisor(case: Case) -> tuple[Remedy, ...]:
    """Fewer GPUs for each layer, or layers one after another."""
    size = int(case.number("tensor-parallel-size", 1))
    if told := _HEADS.search(case.text):
        heads, size = int(told["heads"]), int(told["size"])
        fitting = math.gcd(heads, size)
        why = f"{heads} attention heads can be split over {fitting} GPUs, not over {size}."
    elif told := _BLOCKS.search(case.text):
        return _whole_blocks(int(told["part"]), int(told["block"]), size)
    else:
        fitting, why = (size // 2 if size > 1 else 0), "The model cannot be split over that many GPUs."
    if not fitting or fitting >= size:
        return ()
    found = [Remedy(Changes({"tensor-parallel-size": fitting}), why, "Each GPU holds more of the weights.")]
    if size % fitting == 0 and fitting < size:
        both = {"tensor-parallel-size": fitting, "pipeline-parallel-size": size // fitting}
        price = "A single request is slower: its steps pass through the stages one after another."
        found.append(Remedy(Changes(both), f"All {size} GPUs stay in use, {fitting} for each layer.", price))
    return tuple(found)


def _whole_blocks(part: int, block: int, size: int) -> tuple[Remedy, ...]:
    """A rank's part must be a multiple of the checkpoint's blocks: parts grow as ranks get fewer."""
    factor = next((times for times in (2, 4, 8, 16, 32) if block and part * times % block == 0), 0)
    why = f"A rank's part of {part} columns is no multiple of the checkpoint's blocks of {block}"
    found = []
    if factor and size % factor == 0:
        why += f"; over {size // factor} GPUs it is {part * factor}."
        found.append(
            Remedy(Changes({"tensor-parallel-size": size // factor}), why, "Each GPU holds more of the weights.")
        )
    elif factor:
        found.append(Remedy(Changes(), f"{why}: divide --tensor-parallel-size by {factor}."))
    why = "For a mixture of experts: whole experts are spread over the GPUs, and none is cut."
    found.append(Remedy(Changes({"enable-expert-parallel": True}), why))
    return tuple(found)


def unsupported_by_gpu(case: Case) -> tuple[Remedy, ...]:
    """Another number format, or another kernel."""
    text = case.text.lower()
    if told := _AGAIN.search(case.text):
        why = f"This GPU keeps the KV cache in {told['value']}."
        return (Remedy(Changes({"kv-cache-dtype": told["value"]}), why, "It may hold half as many tokens."),)
    if told := _SUPPORTED.search(case.text):
        why = f"The quantization's kernels compute in {told['first']}."
        return (Remedy(Changes({"dtype": told["first"]}), why, "Some models overflow in float16; try the answers."),)
    if "bfloat16" in text or "bf16" in text:
        why = "This GPU computes in float16, not in bfloat16."
        return (Remedy(Changes({"dtype": "half"}), why, "Some models overflow in float16; try the answers."),)
    if "fp8" in text and str(case.flags.get("kv-cache-dtype", "")).startswith("fp8"):
        why = "This GPU cannot keep the KV cache in FP8."
        return (Remedy(Changes(unset=("kv-cache-dtype",)), why, "The KV cache holds half as many tokens."),)
    if "quantization" in case.flags:
        why = "This GPU has no kernel for that quantization."
        return (Remedy(Changes(unset=("quantization",)), why, "The weights take the memory that their files have."),)
    return (Remedy(Changes(), "Take a checkpoint in a format that this GPU knows: AWQ or GPTQ run from Turing on."),)


def trust_remote_code(_case: Case) -> tuple[Remedy, ...]:
    """Let the model's own code run."""
    price = "Code from the model's repository runs as you: read it first, and pin --revision."
    return (Remedy(Changes({"trust-remote-code": True}), "The model brings code of its own.", price),)


def tokenizer(case: Case) -> tuple[Remedy, ...]:
    """Another tokenizer or template."""
    if "template" in case.text.lower() and "chat-template" in case.flags:
        return (Remedy(Changes(unset=("chat-template",)), "The model's own chat template is taken instead."),)
    if "template" in case.text.lower():
        return (Remedy(Changes(), "Give a template with --chat-template FILE; base models have none of their own."),)
    return (Remedy(Changes(), "See that the tokenizer's files are complete, or name another with --tokenizer."),)
