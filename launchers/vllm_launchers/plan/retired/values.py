"""Values that a flag took once: quantization methods and load formats that left vLLM."""

from __future__ import annotations

from vllm_launchers.plan.retired.model import NEVER, Release, RetiredValue

_OTHER = "take a checkpoint that was quantized in another way"


def _quantization(since: Release, names: str, instead: str = _OTHER, new: str | None = None) -> list[RetiredValue]:
    return [RetiredValue("quantization", name, since, instead, new) for name in names.split()]


RETIRED_VALUES: tuple[RetiredValue, ...] = (
    *_quantization(NEVER, "squeezellm"),
    *_quantization((0, 10, 1), "aqlm"),
    *_quantization((0, 10, 2), "marlin", "gptq_marlin does the same", "gptq_marlin"),
    *_quantization((0, 9, 0), "nvfp4", "it is called modelopt_fp4", "modelopt_fp4"),
    *_quantization((0, 10, 2), "qqq neuron_quant"),
    *_quantization((0, 14, 0), "tpu_int8"),
    *_quantization((0, 15, 0), "deepspeedfp hqq rtn"),
    *_quantization((0, 15, 0), "auto-round", "it is called inc", "inc"),
    *_quantization((0, 16, 0), "bitblas gptq_bitblas gptq_marlin_24 ipex"),
    *_quantization((0, 19, 0), "ptpc_fp8"),
    *_quantization((0, 20, 0), "petit_nvfp4"),
    *_quantization((0, 24, 0), "gguf", "take a safetensors checkpoint of the model, such as an AWQ one"),
    *_quantization((0, 28, 0), "bitsandbytes",
                   "take a quantized checkpoint such as an AWQ one, or --quantization fp8 for a plain one"),
    RetiredValue("load-format", "gguf", (0, 24, 0), "take a safetensors checkpoint of the model"),
    RetiredValue("load-format", "bitsandbytes", (0, 28, 0), "take a quantized checkpoint such as an AWQ one"),
    RetiredValue("tokenizer-mode", "slow", (0, 31, 0), "leave it out: there are only fast tokenizers"),
)  # fmt: skip
"""What went since 0.8.5, and what guides older than that name."""

_BY_VALUE = {(value.flag, value.value): value for value in RETIRED_VALUES}


def retired_value(flag: str, value: object) -> RetiredValue | None:
    """What is known of a value that a flag took once, or None."""
    return _BY_VALUE.get((flag, str(value)))
