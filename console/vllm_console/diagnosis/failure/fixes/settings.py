"""Fixes for flags, or a model with its flags, that this vLLM or this GPU does not support."""

from __future__ import annotations

import difflib
import math
import re

from vllm_console.diagnosis.failure.case import Case
from vllm_console.diagnosis.failure.fixes.speculation import speculation
from vllm_console.diagnosis.failure.literals import flags_in
from vllm_console.diagnosis.finding import Fix
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.attention import AMPERE
from vllm_launchers.plan.budget.memory_flags import lacks_float32, refuses_float16, weight_method
from vllm_launchers.plan.checks.hardware import TURING
from vllm_launchers.plan.checks.model import IN_FLIGHT
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.plan.flags import ASYNC, CHUNKED, normalize, parse_value
from vllm_launchers.plan.model_conditions import adapter_problem
from vllm_launchers.presets.rules import FLAG_NAME
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue
from vllm_launchers.vllm.flags.releases import RELEASES, release_table
from vllm_launchers.vllm.model_folder import RANKS
from vllm_launchers.vllm.release_defaults import NEWEST, online_fp8
from vllm_launchers.vllm.removed_flags import REMOVED_FLAGS, removed_value

_UNRECOGNIZED = lazy_pattern(r"unrecognized arguments: (?P<words>.*)")
_ARGUMENT = lazy_pattern(r"argument (?P<names>--?[\w./-]+): (?P<why>.*)")
_CHOICES = lazy_pattern(r"invalid choice: '?(?P<given>[^'(]*?)'? \(choose from (?P<choices>[^)]*)\)")
_DERIVED = lazy_pattern(r"derived max_model_len \((?P<why>[^)]*?(?P<length>\d+))(?:\.\d+)?[^)\d]*\)")
_HEADS = lazy_pattern(
    r"heads ?[(=] ?(?P<heads>\d+)\)?.*?divisible by (?:tensor.parallel.?(?:world )?size|tp_size) ?[(=] ?(?P<size>\d+)",
    re.IGNORECASE,
)
_BLOCKS = lazy_pattern(
    r"= ?(?P<part>\d+) is not divisible by\s+"
    r"(?:weight quantization block_\w|min_thread_\w|group_size) ?= ?(?P<block>\d+)"
)
_KEYWORD = lazy_pattern(r"unexpected keyword argument '(?P<name>[a-z][a-z0-9_]*)'")
_STEP = lazy_pattern(
    r"max_num_batched_tokens \((?P<step>\d+)\) (?:is smaller than|must be greater than or equal to) "
    r"(?P<what>max_model_len|max_num_seqs) \((?P<least>\d+)\)"
)
_PARSERS = lazy_pattern(
    r"(?:invalid (?P<kind>tool call|reasoning) parser: |(?P<named>Reasoning|Tool) parser ')(?P<given>[^\s']+)"
    r"(?: \(chose from \{|' not found\. Available parsers: )(?P<choices>[^}\"]*)"
)
_MULTIPLE = lazy_pattern(r"No common block size for \d+ \([^()]{0,80}MultipleOf\((?P<step>\d+)\)")
_PERCENT = lazy_pattern(r"(?:input_value=|Got )(?P<given>\d+(?:\.\d+)?)\b")
_AGAIN = lazy_pattern(r"Re-run with --kv-cache-dtype (?P<value>[a-z0-9_]+)")
_SUPPORTED = lazy_pattern(r"Supported dtypes: \[(?P<listed>[\w., ]{1,200})\]")
_METHOD = lazy_pattern(r"Unknown quantization method: (?P<method>\w+)")
_FIELD = lazy_pattern(r"^--(?P<name>[a-z][a-z0-9-]*): ")
_OTHER_KERNELS = {"awq_marlin": TURING, "gptq_marlin": 6.0}
"""Compute capability from which vLLM has other kernels for such files."""
_TRADEOFFS = {
    "float16": "Some models overflow in float16: check the output.",
    "float32": "The model takes twice the memory.",
}
_NEWER_GPU = Fix(
    Changes(),
    "Use a GPU with bfloat16 (compute capability 8.0 or later), or an unquantized checkpoint: vLLM runs this model "
    "neither in float16, nor in float32 with its quantized weights.",
)
_OTHER_FORMAT = "Use a checkpoint in a format that this GPU supports: AWQ and GPTQ run on Turing and newer."


def unknown_flag(case: Case) -> tuple[Fix, ...]:
    """Replace unknown flags by their present or most likely intended names, in one change; otherwise remove them."""
    given = _given(case.text)
    if not given:
        return ()
    listed = ", ".join(f"--{name}" for name in given)
    version = f"vLLM {case.version}" if case.version else "This vLLM"
    many = "them" if len(given) > 1 else "it"
    without = Fix(Changes(unset=tuple(given)), f"{version} does not support {listed}: remove {many}.")
    right = {name: found for name in given if (found := _right_name(name, given, case)) is not None}
    wanted = {new: value for fix in right.values() for new, value in fix.changes.set.items()}
    why = " ".join(fix.why for fix in right.values())
    if wanted:
        return (Fix(Changes(wanted, tuple(given)), why), without)
    return (Fix(without.changes, f"{without.why} {why}".strip()),)


def _given(text: str) -> dict[str, FlagValue]:
    """The flags that the parser did not recognize, with the values that followed them."""
    if found := _KEYWORD.search(text):
        return {found["name"].replace("_", "-"): True}
    found = _UNRECOGNIZED.search(text)
    given: dict[str, FlagValue] = {}
    last = None
    for word in found["words"].split() if found else ():
        name, _, value = word.partition("=")
        name = name.lstrip("-").replace("_", "-")
        if word.startswith("--") and FLAG_NAME.fullmatch(name):
            last = name
            given[name] = parse_value(value, name=name) if value else True
        elif last is not None and given[last] is True:
            given[last] = parse_value(word, name=last)
    return given


def _right_name(name: str, given: Flags, case: Case) -> Fix | None:
    """The change to the present spelling of a removed flag, or to the flag with the most similar name."""
    table = release_table(case.version or RELEASES[-1])
    if table is None:
        return None
    if removed := REMOVED_FLAGS.get(name):
        changes = removed.changes({**case.flags, **given}, case.release)
        known = changes is not None and all(new.partition(".")[0] in table.flags for new in changes.set)
        return Fix(changes if changes is not None and known else Changes(), f"--{name}: {removed.instead}.")
    near = difflib.get_close_matches(name, table.flags, n=1, cutoff=0.8)
    return Fix(Changes({near[0]: given[name]}), f"--{name} is called --{near[0]}.") if near else None


def _other_checkpoint(text: str) -> Fix:
    """The fix for model files in a format that this vLLM does not read, or reads only with a plugin."""
    named = _METHOD.search(text)
    gone = removed_value("quantization", named["method"]) if named is not None else None
    instead = "use another checkpoint (AWQ, FP8)."
    if gone is None or not gone.plugin:
        return Fix(Changes(), f"The model's files are in this format, which this vLLM does not read: {instead}")
    return Fix(
        Changes(), f"This vLLM reads these files only with {gone.plugin}: install that alongside it, or {instead}"
    )


def invalid_value(case: Case) -> tuple[Fix, ...]:
    """The nearest allowed value, or removing the flag."""
    if derived := _DERIVED.search(case.text):
        length = int(derived["length"])
        why = f"The model's context length is {length:,} tokens."
        return (Fix(Changes({"max-model-len": length}), why, "Longer requests are rejected."),)
    if (derived := _STEP.search(case.text)) and int(derived["step"]) < int(derived["least"]):
        least = int(derived["least"])
        what = "max-model-len" if "max_model_len" in derived["what"] else "max-num-seqs"
        why = f"A step must hold at least the {least:,} tokens of {what}."
        return (Fix(Changes({"max-num-batched-tokens": least}), why, "Steps need more memory for activations."),)
    name = _named(case)
    if name is None:
        return ()
    if name == "quantization" and case.flags and name not in case.flags:
        return (_other_checkpoint(case.text),)
    if name == "num-speculative-tokens" and name not in case.flags:
        return speculation(case)  # a key of a JSON flag
    found = []
    if (derived := _CHOICES.search(case.text)) or (derived := _PARSERS.search(case.text)):
        choices = [choice.strip().strip("'\"") for choice in derived["choices"].split(",")]
        near = difflib.get_close_matches(derived["given"].strip(), choices, n=1, cutoff=0.6)
        if near:
            found.append(Fix(Changes({name: parse_value(near[0], name=name)}), f"--{name} takes {near[0]}."))
    if (
        name == "gpu-memory-utilization"
        and (derived := _PERCENT.search(case.text))
        and 10 <= float(derived["given"]) <= 100
    ):
        share = min(0.95, float(derived["given"]) / 100)
        found.append(Fix(Changes({name: share}), f"It is a fraction, not a percentage: {share:g}."))
    shown = name != "kv-transfer-config"  # the log prints it as an object, which is not read
    if (
        shown and case.flags and name not in case.flags
    ):  # an unset flag's default is at fault only together with what is set
        return tuple(found)
    return (*found, *_removed(name))


def _removed(name: str) -> tuple[Fix, ...]:
    """Leaving the flag out."""
    if name == "tool-call-parser":
        why = "Without it the server runs, but takes no requests with tools that the model may choose."
        family = Fix(Changes(), "Choose the parser of the model's family from the list in that line.")
        return (family, Fix(Changes(unset=("enable-auto-tool-choice", name)), why))
    return (Fix(Changes(unset=(name,)), f"Without it vLLM's default for --{name} applies."),)


def _named(case: Case) -> str | None:
    found = _ARGUMENT.search(case.text)
    word = max(found["names"].split("/"), key=len) if found else ""
    if not word and (field := _FIELD.match(case.text)):
        word = field["name"]
    if not word and (found := _PARSERS.search(case.text)):
        tools = "tool call" in (found["kind"], "tool call" if found["named"] == "Tool" else "")
        word = "tool-call-parser" if tools else "reasoning-parser"
    if not word and "GPU memory utilization must" in case.text:
        word = "gpu-memory-utilization"
    if not word and "Load format" in case.text:
        word = "load-format"
    if not word and "Unsupported connector type" in case.text:
        word = "kv-transfer-config"
    if not word and "quantization method" in case.text:
        word = "quantization"
    if not word:
        spoken = list(flags_in(case.text))
        word = next((name for name in spoken if name in case.flags), spoken[0] if spoken else "")
    try:
        return normalize(word) if word else None
    except FlagError:
        return None


def tp_not_divisor(case: Case) -> tuple[Fix, ...]:
    """Fewer GPUs per layer, or pipeline stages."""
    size = int(case.number("tensor-parallel-size", 1))
    if heads_line := _HEADS.search(case.text):
        heads, size = int(heads_line["heads"]), int(heads_line["size"])
        fitting = math.gcd(heads, size)
        why = f"{heads} attention heads can be split over {counted(fitting, 'GPU')}, not over {size}."
    elif heads_line := _BLOCKS.search(case.text):
        return _whole_blocks(case, int(heads_line["part"]), int(heads_line["block"]))
    else:
        fitting, why = (size // 2 if size > 1 else 0), "The model can't be split over that many GPUs."
    if not fitting or fitting >= size:
        return ()
    found = [Fix(Changes({"tensor-parallel-size": fitting}), why, "Each GPU holds more of the weights.")]
    if size % fitting == 0 and fitting < size:
        stages = int(case.number("pipeline-parallel-size", 1)) * (size // fitting)
        both = {"tensor-parallel-size": fitting, "pipeline-parallel-size": stages}
        tradeoff = "A single request is slower: it passes through the stages one after another."
        found.append(Fix(Changes(both), f"All {fitting * stages} GPUs stay in use, {fitting} per layer.", tradeoff))
    return tuple(found)


def _whole_blocks(case: Case, part: int, block: int) -> tuple[Fix, ...]:
    """A rank's part must be a multiple of the checkpoint's block size; parts grow as the number of ranks shrinks."""
    size = int(case.number("tensor-parallel-size", 1))
    factor = next((times for times in (2, 4, 8, 16, 32) if block and part * times % block == 0), 0)
    why = f"A rank's shard of {part} columns is not a multiple of the checkpoint's block size {block}"
    found = []
    if factor and size % factor == 0:
        why += f"; over {counted(size // factor, 'GPU')} it is {part * factor}."
        found.append(Fix(Changes({"tensor-parallel-size": size // factor}), why, "Each GPU holds more of the weights."))
    elif factor and not case.flags:
        found.append(Fix(Changes(), f"{why}: divide --tensor-parallel-size by {factor}."))
    else:
        found.append(Fix(Changes(), f"{why}: use a checkpoint with smaller blocks, or an unquantized one."))
    data = int(case.number("data-parallel-size", 1))
    if case.has_experts and not adapter_problem(case.facts, case.flags, case.release, tensor=size, data=data):
        why = "For a mixture of experts: distributes whole experts over the GPUs."
        found.append(Fix(Changes({"enable-expert-parallel": True}), why))
    return tuple(found)


def unsupported_by_gpu(case: Case) -> tuple[Fix, ...]:
    """Another number format, or another kernel."""
    text = case.text.lower()
    if found := _AGAIN.search(case.text):
        why = f"This GPU supports a KV cache in {found['value']}."
        return (Fix(Changes({"kv-cache-dtype": found["value"]}), why, "It may hold half as many tokens."),)
    if (found := _SUPPORTED.search(case.text)) or "bfloat16" in text or "bf16" in text:
        return _other_dtypes(case, found["listed"] if found else "")
    if "fp8" in text and str(case.flags.get("kv-cache-dtype", "")).startswith("fp8"):
        why = "This GPU does not support an FP8 KV cache."
        return (Fix(Changes(unset=("kv-cache-dtype",)), why, "The KV cache holds half as many tokens."),)
    if "fp8" in text and not case.flags and "kv cache" not in text and "kv_cache" not in text:
        why = "Remove --kv-cache-dtype fp8 if it was set: FP8 needs compute capability 8.9."
        return (Fix(Changes(), why), Fix(Changes(), _OTHER_FORMAT))
    # Without the flag vLLM reads the method from the files, and rejects it again if it is the same one.
    method = str(case.flags.get("quantization", ""))
    if case.capability is not None and case.capability >= _OTHER_KERNELS.get(method, math.inf):
        why = f"This GPU has no kernel for {method}; without the flag vLLM uses other kernels for the same files."
        return (Fix(Changes(unset=("quantization",)), why),)
    if method in IN_FLIGHT and not case.stored_quantized:
        why = "This GPU has no kernel for that quantization."
        return (Fix(Changes(unset=("quantization",)), why, "The weights take as much memory as their files."),)
    if case.capability is not None and case.capability < TURING:
        return (Fix(Changes(), "Use a GPTQ or unquantized checkpoint: this GPU runs these."),)
    return (Fix(Changes(), _OTHER_FORMAT),)


def _other_dtypes(case: Case, listed: str) -> tuple[Fix, ...]:
    """Number formats that the GPU and the model allow; ``listed`` are those that the weights' kernels support."""
    only_wide = case.facts is not None and refuses_float16(case.facts, case.release)
    if listed:
        why = "The quantization kernels support this number format."
        refused = {"float16": only_wide, "bfloat16": case.capability is not None and case.capability < AMPERE}
        dtypes = [one for one in re.findall(r"bfloat16|float16|float32", listed) if not refused.get(one)]
        return tuple(Fix(Changes({"dtype": one}), why, _TRADEOFFS.get(one, "")) for one in dtypes) or (_NEWER_GPU,)
    if only_wide and lacks_float32(case.quantization or weight_method(case.facts, case.flags)):
        return (_NEWER_GPU,)
    if only_wide:
        why = "This GPU supports float16, not bfloat16, and vLLM does not run this model in float16."
        return (Fix(Changes({"dtype": "float32"}), why, _TRADEOFFS["float32"]),)
    why = "This GPU supports float16, not bfloat16."
    return (Fix(Changes({"dtype": "half"}), why, _TRADEOFFS["float16"]),)


def _asks_for_backend(case: Case) -> str:
    """How an attention backend is set in the log's vLLM: with a flag since 0.13, with a variable before 0.15."""
    flag, variable = "--attention-backend", "the variable VLLM_ATTENTION_BACKEND"
    if case.release is None:
        return f"{flag} (before 0.15 {variable})"
    if case.release >= (0, 15):
        return flag
    return f"{flag} or {variable}" if case.release >= (0, 13) else variable


def backend_fixes(case: Case) -> tuple[Fix, ...]:
    """vLLM's own choice of the backend, or settings that it supports."""
    found = []
    if "attention-backend" in case.flags:
        why = "Without it vLLM chooses a backend that this GPU and model support."
        found.append(Fix(Changes(unset=("attention-backend",)), why))
    elif "Selected backend" in case.text or "Invalid attention backend" in case.text:
        why = f"Remove {_asks_for_backend(case)}: vLLM then chooses one."
        found.append(Fix(Changes(), why))
    if "kv_cache_dtype not supported" in case.text and "kv-cache-dtype" in case.flags:
        why = "No backend supports this KV cache dtype on this GPU."
        found.append(Fix(Changes(unset=("kv-cache-dtype",)), why, "The KV cache holds fewer tokens."))
    if "block_size not supported" in case.text and "block-size" in case.flags:
        found.append(Fix(Changes(unset=("block-size",)), "Without it vLLM chooses the block size."))
    if not found:
        why = "No attention backend supports this model on this GPU: use another model, a newer GPU, or a newer vLLM."
        found.append(Fix(Changes(), why))
    return tuple(found)


def block_size(case: Case) -> tuple[Fix, ...]:
    """A multiple that the backend supports, if the message states it, or the backend's own choice."""
    found = []
    if derived := _MULTIPLE.search(case.text):
        step = int(derived["step"])
        found.append(Fix(Changes({"block-size": step}), f"The backend supports multiples of {step}."))
    if "block-size" in case.flags or not case.flags:
        found.append(Fix(Changes(unset=("block-size",)), "Without it vLLM chooses one that the backend supports."))
    return tuple(found)


def quantization_config(case: Case) -> tuple[Fix, ...]:
    """The quantization method of the files, or other files."""
    found = []
    if "quantization" in case.flags:
        why = "Without it vLLM reads the method from the model's files; an unquantized model needs none."
        found.append(Fix(Changes(unset=("quantization",)), why))
    size = int(case.number("tensor-parallel-size", 1))
    if size > 1 and "linear" in case.text:
        why = f"With {counted(size // 2, 'GPU')} each rank's shard is larger, and more kernels support it."
        found.append(Fix(Changes({"tensor-parallel-size": size // 2}), why, "Each GPU holds more of the weights."))
    why = "Use a 4-bit checkpoint with group size 128 (AWQ or GPTQ), or one with complete files."
    return (*found, Fix(Changes(), why))


def unquantized_weights(case: Case) -> tuple[Fix, ...]:
    """Load the weights as they are, or get the quantized ones."""
    if "quantization" in case.flags:
        why = "The files are not quantized: without it vLLM loads them as they are."
        return (Fix(Changes(unset=("quantization",)), why, "The weights take as much memory as their files."),)
    again = Fix(Changes(), "Download the quantized model again into an empty folder (hf download MODEL).")
    why = "vLLM ignores the quantization_config of config.json and loads the files as they are."
    if case.flags and "hf-overrides" not in case.flags:
        plain = Changes({"hf-overrides": '{"quantization_config": null}'})
        return (again, Fix(plain, why, "The weights take as much memory as their files."))
    return (again, Fix(Changes(), "Or remove quantization_config from config.json: the files are not quantized."))


def listen_port(case: Case) -> tuple[Fix, ...]:
    """A port that needs no privilege."""
    if "must be" in case.text:
        return (Fix(Changes({"port": 8000}), "8000 is vLLM's default."),)
    return (Fix(Changes({"port": 8000}), "Ports from 1024 need no privilege; a proxy can serve the lower one."),)


def tokenizer(case: Case) -> tuple[Fix, ...]:
    """Another tokenizer or template."""
    given = "chat-template" in case.flags or "supplied chat template" in case.text
    if "template" in case.text.lower() and given:
        own = Fix(Changes(unset=("chat-template",)), "Uses the model's own chat template.")
        missing = "appears path-like" in case.text
        return (Fix(Changes(), "Check the path in --chat-template: no such file."), own) if missing else (own,)
    if "template" in case.text.lower():
        return (Fix(Changes(), "Pass a template with --chat-template FILE; base models have none."),)
    return (Fix(Changes(), "Check that the tokenizer's files are complete, or name another with --tokenizer."),)


_LEAST_BATCH = lazy_pattern(
    r"(?:block_size|max_tokens_per_mm_item) \((?P<least>\d{1,9})\) (?:must be <=|is larger than) max_num_batched_tokens"
)
_STATES = lazy_pattern(r"max_num_seqs \(\d+\) exceeds available Mamba cache blocks \((?P<most>\d{1,9})\)")
_LONG = lazy_pattern(
    r"long_prefill_token_threshold \(\d+\) cannot be greater than the max_model_len \((?P<most>\d{1,12})\)"
)
_SHARDS = lazy_pattern(r"tp_size=(?P<size>\d{1,4}) must be divisible by dcp_size=(?P<shards>\d{1,4})")
_RANKS = lazy_pattern(r"data_parallel_size_local \(\d+\) must be <= data_parallel_size \((?P<most>\d{1,4})\)")
_AHEAD = lazy_pattern(
    r"async scheduling is (?:currently )?(?:only|not) supported|async scheduling is not (?:yet )?compatible"
    r"|not supported with async scheduling",
    re.IGNORECASE,
)
_CHUNKS = lazy_pattern(r"Chunked prefill is required")
_RANK = lazy_pattern(r"LoRA rank (?P<rank>\d{1,6}) is greater than max_lora_rank")
_ONLINE = lazy_pattern(r"`fp8` quantization method no longer supports online")


def conflicting_flags(case: Case) -> tuple[Fix, ...]:
    """The value that the message itself allows, or removing the flag."""
    text = case.text
    if found := _LEAST_BATCH.search(text):
        least = int(found["least"])
        what = "a KV cache block" if "block_size" in found[0] else "the largest image or video"
        why = f"A step must hold {what}: {least:,} tokens for this model."
        return (Fix(Changes({"max-num-batched-tokens": least}), why, "Steps need more memory for activations."),)
    if (found := _STATES.search(text)) and int(found["most"]) > 0:
        return _fewer_states(int(found["most"]))
    if found := _LONG.search(text):
        why = f"It must not exceed max-model-len, {int(found['most']):,} tokens."
        return (Fix(Changes({"long-prefill-token-threshold": int(found["most"])}), why),)
    if found := _SHARDS.search(text):
        size, shards = int(found["size"]), int(found["shards"])
        why = f"It must divide tensor-parallel-size, {size}."
        return (Fix(Changes({"decode-context-parallel-size": math.gcd(size, shards)}), why),)
    if found := _RANKS.search(text):
        why = f"It must not exceed data-parallel-size, {found['most']}."
        return (Fix(Changes({"data-parallel-size-local": int(found["most"])}), why),)
    if _ONLINE.search(text):
        why = "This method quantizes weights while they are loaded."
        return (Fix(Changes({"quantization": online_fp8(NEWEST)}), why),)
    if found := _RANK.search(text):
        return _larger_rank(int(found["rank"]))
    if "LoRA is not enabled" in text:
        why = "--lora-modules names adapters, which vLLM loads only with --enable-lora."
        return (Fix(Changes({"enable-lora": True}), why, "GPU memory is reserved for adapters."),)
    if "num_speculative_tokens" in text:
        return speculation(case)
    return _left_out(case)


def _larger_rank(rank: int) -> tuple[Fix, ...]:
    least = next((one for one in RANKS if one >= rank), None)
    if least is None:
        return (Fix(Changes(), f"vLLM runs no adapter of a rank above {RANKS[-1]}: use another adapter."),)
    why = f"The adapter has rank {rank}."
    return (Fix(Changes({"max-lora-rank": least}), why, "More GPU memory is reserved for adapters."),)


def _fewer_states(most: int) -> tuple[Fix, ...]:
    why = (
        "Each running sequence needs a state for this model's Mamba or linear-attention layers, and memory has "
        f"room for {most:,}."
    )
    return (Fix(Changes({"max-num-seqs": most}), why, "More requests queue under full load."),)


def _left_out(case: Case) -> tuple[Fix, ...]:
    """Remove the flag that the model does not support, or that vLLM decides itself if it is not set."""
    if "Number of experts" in case.text:
        why = "This model has no experts to distribute over GPUs."
        return (Fix(Changes(unset=("enable-expert-parallel",)), why),)
    if "external data parallel mode" in case.text:
        given = tuple(sorted(name for name in case.flags if name.startswith("data-parallel-")))
        why = "Only mixture-of-experts ranks work together: for this model, start a separate server per rank."
        return (Fix(Changes(unset=given), why),)
    if "Pipeline parallelism is not supported" in case.text:
        why = "vLLM can't split this model into pipeline stages."
        tradeoff = "Fewer GPUs hold it; --tensor-parallel-size uses more, if it divides the attention heads."
        return (Fix(Changes(unset=("pipeline-parallel-size",)), why, tradeoff),)
    for pattern, name in ((_AHEAD, ASYNC), (_CHUNKS, CHUNKED)):
        if pattern.search(case.text) and name in case.flags:
            return (Fix(Changes(unset=(name,)), f"Without --{name} vLLM chooses based on the other settings."),)
    return ()
