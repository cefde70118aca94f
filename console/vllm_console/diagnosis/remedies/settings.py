"""Remedies where a flag, or the model with its flags, is not what this vLLM or this GPU takes."""

from __future__ import annotations

import difflib
import re

from vllm_console.diagnosis.case import Case
from vllm_console.diagnosis.model import Remedy
from vllm_launchers.plan.errors import FlagError
from vllm_launchers.plan.flags import normalise, parse_value
from vllm_launchers.plan.model import Changes
from vllm_launchers.presets.rules import FLAG_NAME

_UNRECOGNIZED = re.compile(r"unrecognized arguments: (?P<words>.*)")
_ARGUMENT = re.compile(r"argument (?P<names>--?[\w./-]+): (?P<why>.*)")
_CHOICES = re.compile(r"invalid choice: '?(?P<given>[^'(]*?)'? \(choose from (?P<choices>[^)]*)\)")
_DERIVED = re.compile(r"derived max_model_len \((?P<why>[^)]*?(?P<length>\d+))[^)\d]*\)")
_HEADS = re.compile(r"heads \((?P<heads>\d+)\).*?divisible by tensor.parallel.?size \((?P<size>\d+)\)", re.IGNORECASE)
_BLOCKS = re.compile(r"= (?P<part>\d+) is not divisible by weight quantization block_\w = (?P<block>\d+)")
_FIELD = re.compile(r"^--(?P<name>[a-z][a-z0-9-]*): ")


def unknown_flag(case: Case) -> tuple[Remedy, ...]:
    """Leave out what vLLM does not know."""
    told = _UNRECOGNIZED.search(case.text)
    words = [word.partition("=")[0] for word in told["words"].split() if word.startswith("--")] if told else []
    names = [name for word in words if FLAG_NAME.fullmatch(name := word.lstrip("-").replace("_", "-"))]
    if not names:
        return ()
    listed = ", ".join(f"--{name}" for name in names)
    version = f"vLLM {case.version}" if case.version else "This vLLM"
    many = "them" if len(names) > 1 else "it"
    return (Remedy(Changes(unset=tuple(names)), f"{version} does not know {listed}: leave {many} out."),)


def invalid_value(case: Case) -> tuple[Remedy, ...]:
    """The nearest value that is allowed, or the flag left out."""
    if told := _DERIVED.search(case.text):
        length = int(told["length"])
        why = f"The model's own context is {length:,} tokens."
        return (Remedy(Changes({"max-model-len": length}), why, "Longer requests are refused."),)
    name = _named(case)
    if name is None:
        return ()
    found = []
    if told := _CHOICES.search(case.text):
        choices = [choice.strip().strip("'\"") for choice in told["choices"].split(",")]
        near = difflib.get_close_matches(told["given"].strip(), choices, n=1, cutoff=0.6)
        if near:
            found.append(Remedy(Changes({name: parse_value(near[0], name=name)}), f"--{name} takes {near[0]}."))
    why = f"Without it, vLLM's own default for --{name} counts."
    return (*found, Remedy(Changes(unset=(name,)), why))


def _named(case: Case) -> str | None:
    """The flag that the message is about."""
    told = _ARGUMENT.search(case.text)
    word = max(told["names"].split("/"), key=len) if told else ""
    if not word and (field := _FIELD.match(case.text)):
        word = field["name"]
    if not word and "quantization method" in case.text:
        word = "quantization"
    try:
        return normalise(word) if word else None
    except FlagError:
        return None


def tp_not_divisor(case: Case) -> tuple[Remedy, ...]:
    """Fewer GPUs for each layer, or layers one after another."""
    size = int(case.number("tensor-parallel-size", 1))
    if told := _HEADS.search(case.text):
        heads, size = int(told["heads"]), int(told["size"])
        fitting = max(part for part in range(1, size + 1) if heads % part == 0 and size % part == 0)
        why = f"{heads} attention heads can be split over {fitting} GPUs, not over {size}."
    elif told := _BLOCKS.search(case.text):
        return _whole_blocks(int(told["part"]), int(told["block"]), size)
    else:
        fitting, why = (size // 2 if size > 1 else 0), "The model cannot be split over that many GPUs."
    if not fitting or fitting == size:
        return ()
    found = [Remedy(Changes({"tensor-parallel-size": fitting}), why, "Each GPU holds more of the weights.")]
    if size % fitting == 0 and fitting < size:
        both = {"tensor-parallel-size": fitting, "pipeline-parallel-size": size // fitting}
        price = "A single request is slower: its steps pass through the stages one after another."
        found.append(Remedy(Changes(both), f"All {size} GPUs stay in use, {fitting} for each layer.", price))
    return tuple(found)


def _whole_blocks(part: int, block: int, size: int) -> tuple[Remedy, ...]:
    """A rank's part must be a multiple of the checkpoint's blocks: parts grow as ranks get fewer."""
    factor = next((times for times in (2, 4, 8, 16, 32) if part * times % block == 0), 0)
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
