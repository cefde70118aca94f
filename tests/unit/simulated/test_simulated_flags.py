from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_launchers.engine_model.gpu_models import UnknownGpuError, find_gpu
from vllm_launchers.simulated.flags import normalize, parse_flags, parse_human_int, with_objects
from vllm_launchers.simulated.memory import MemoryBudgetError
from vllm_launchers.simulated.settings import ModelNotFoundError, Simulated, ValidationError, resolve_model


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25_600), ("1m", 10**6), ("1M", 2**20), ("2G", 2**31)],
)
def test_human_readable_numbers(text: str, value: int) -> None:
    assert parse_human_int(text) == value


@pytest.mark.parametrize(
    "spelling",
    [
        ["--max-num-seqs", "7"],
        ["--max-num-seqs=7"],
        ["--max_num_seqs", "7"],
        ["--max_num_seqs=7"],
        ["--max-num-se", "7"],
    ],
)
def test_flags_accept_vllms_spellings(spelling: list[str]) -> None:
    assert parse_flags(["serve", "m", *spelling]).max_num_seqs == 7


@pytest.mark.parametrize(
    ("words", "objects"),
    [
        ("--compilation-config.mode 3", '--compilation-config {"mode": 3}'),
        ("--compilation_config.cudagraph_mode=FULL", '--compilation-config {"cudagraph_mode": "FULL"}'),
        ("-cc.a.b 1.5 -cc.a.c=true", '-cc {"a": {"b": 1.5, "c": true}}'),
        ("--x.size 80g --x.size=[1] --x.size [2] --x.size+ 3,a", '--x {"size": [1, 2, "3", "a"]}'),
        ("--y.a {} --max_num_seqs 7 --y.a.b null", '--max-num-seqs 7 --y {"a": {"b": null}}'),
        ("--mean=0.5 --y", "--mean=0.5 --y"),
    ],
)
def test_keys_of_a_json_flag_become_its_object(words: str, objects: str) -> None:
    """Like ``FlexibleArgumentParser`` of 0.32."""
    assert " ".join(with_objects(normalize(words.split()))) == objects


def test_flag_set_by_keys_is_read_once() -> None:
    words = "--compilation-config.mode 3 --compilation-config.cudagraph_mode=NONE"
    assert parse_flags(["serve", "m", *words.split()]).ignored == ["--compilation-config"]


def test_booleans_have_a_negation() -> None:
    assert parse_flags(["serve", "m", "--no-enable-prefix-caching"]).enable_prefix_caching is False
    assert parse_flags(["serve", "m", "--enable_chunked_prefill"]).enable_chunked_prefill is True
    assert parse_flags(["serve", "m"]).enforce_eager is False


def test_unmodeled_flags_are_accepted_and_named() -> None:
    words = "--trust-remote-code --seed 3 --no-async-scheduling -sc {} --lora-modules a=b c=d --disable-log-stats"
    args = parse_flags(["serve", "m", *words.split()])
    assert args.ignored == ["--trust-remote-code", "--seed", "--no-async-scheduling", "-sc", "--lora-modules"]
    assert args.disable_log_stats is True


def test_given_flags_are_distinguished_from_defaults() -> None:
    args = parse_flags(["serve", "m", "--port", "8000", "--max-model-len", "4K"])
    assert args.given["max_model_len"] == 4096
    assert "port" not in args.given


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["--no-such-flag"], "vllm: error: unrecognized arguments: --no-such-flag"),
        (["--swap-space", "4"], "vllm: error: unrecognized arguments: --swap-space 4"),
        (["--dtype", "foo"], "vllm serve: error: argument --dtype: invalid choice: 'foo' (choose from "),
        (["--port", "many"], "vllm serve: error: argument --port: invalid int value: 'many'"),
        (["--max-num", "4"], "vllm serve: error: ambiguous option: --max-num could match "),
    ],
)
def test_invalid_flag_is_refused_like_vllm(words: list[str], last: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_flags(["serve", "m", *words])
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert lines[0].startswith("usage: vllm")
    assert lines[-1].startswith(last)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--gpu-memory-utilization 1.5",
            "Input should be less than or equal to 1 [type=less_than_equal, input_value=1.5",
        ),
        ("--gpu-memory-utilization 0", "Input should be greater than 0"),
        ("--max-num-seqs 0", "SchedulerConfig\nmax_num_seqs"),
        ("--tensor-parallel-size 3", "attention heads (32) must be divisible by tensor parallel size (3)"),
        ("--quantization gptq", "Quantization method specified in the model config (awq) does not match"),
        ("--max-model-len 50000", "User-specified max_model_len (50000) is greater than the derived max_model_len"),
        ("--block-size 20", "must be a multiple of 16"),
        ("--no-enable-chunked-prefill --max-num-batched-tokens 512", "is smaller than max_model_len (40960)"),
        ("--max-num-batched-tokens 64 --max-num-seqs 128", "must be greater than or equal to max_num_seqs (128)"),
    ],
)
def test_invalid_value_is_refused_with_vllms_message(lab: Callable[..., Any], line: str, words: str) -> None:
    with pytest.raises(ValidationError) as error:
        lab(line)
    assert words in str(error.value)
    assert "1 validation error for" in str(error.value)


def test_quantization_is_refused_for_an_unquantized_checkpoint(lab: Callable[..., Any]) -> None:
    with pytest.raises(ValidationError, match="Cannot find the config file for awq"):
        lab("--quantization awq", model="Qwen/Qwen3-8B")


def test_weights_can_be_converted_to_fp8_while_loading(lab: Callable[..., Any]) -> None:
    plain = lab("--max-model-len 4096", model="Qwen/Qwen3-8B")
    halved = lab("--max-model-len 4096 --quantization fp8", model="Qwen/Qwen3-8B")
    assert halved.plan.weights < 0.62 * plain.plan.weights


@pytest.mark.parametrize(
    ("gpu", "seqs", "tokens"),
    [
        ("RTX A6000", 256, 2048),
        ("A100 80GB", 256, 2048),
        ("H100 80GB", 1024, 8192),
        ("nvidia h200", 1024, 8192),
        ("B200", 1024, 16384),
        ("GB200", 1024, 16384),
        ("GB10", 256, 2048),  # it shares the CPU's memory, whose size NVML does not report
    ],
)
def test_defaults_depend_on_the_gpu(lab: Callable[..., Any], gpu: str, seqs: int, tokens: int) -> None:
    limits = lab(SIMULATED_GPU=gpu).settings.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (seqs, tokens)


def test_weights_that_do_not_fit_run_out_of_memory(lab: Callable[..., Any]) -> None:
    with pytest.raises(MemoryBudgetError, match="CUDA out of memory") as error:
        lab(model="meta-llama/Llama-3.3-70B-Instruct")
    assert error.value.kind == "torch.OutOfMemoryError"


def test_no_room_for_any_block(lab: Callable[..., Any]) -> None:
    with pytest.raises(MemoryBudgetError, match="No available memory for the cache blocks"):
        lab("--gpu-memory-utilization 0.14")


def test_context_that_does_not_fit_names_one_that_would(lab: Callable[..., Any]) -> None:
    line = "--num-gpu-blocks-override 8 --block-size 32"
    with pytest.raises(MemoryBudgetError, match="the estimated maximum model length is 224") as error:
        lab(f"{line} --max-model-len 2048")
    assert error.value.kind == "ValueError"
    assert lab(f"{line} --max-model-len 224").plan.tokens == 256


def test_auto_context_is_what_fits(lab: Callable[..., Any]) -> None:
    built = lab("--max-model-len auto --num-gpu-blocks-override 101")
    assert built.plan.max_model_len == 1600
    assert built.core.scheduler.limits.max_model_len == 1600


@pytest.mark.parametrize(
    ("model", "billions", "bytes_per_token"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03, 131_072),
        ("meta-llama/Llama-3.3-70B-Instruct", 70.6, 327_680),
        ("Qwen/Qwen3-8B-AWQ", 8.2, 147_456),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", 7.6, 57_344),
        ("Qwen/Qwen3-4B-Instruct-2507-FP8", 4.0, 147_456),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7.25, 131_072),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46.7, 131_072),
        ("deepseek-ai/DeepSeek-R1", 671.0, 70_272),
    ],
)
def test_known_models(model: str, billions: float, bytes_per_token: int) -> None:
    geometry = resolve_model(model)
    assert geometry.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert geometry.kv_bytes_per_token(2) == bytes_per_token
    assert not geometry.note


def test_tensor_parallelism_splits_keys_and_values_per_head() -> None:
    model = resolve_model("meta-llama/Llama-3.3-70B-Instruct")
    assert model.kv_bytes_per_token(2, tensor_parallel=8) == 40_960
    assert model.kv_bytes_per_token(2, tensor_parallel=16) == 40_960


def test_unknown_model_is_estimated_from_the_size_in_its_name() -> None:
    geometry = resolve_model("somebody/Unheard-Of-13B-chat-AWQ")
    assert geometry.parameters == pytest.approx(13e9, rel=0.02)
    assert geometry.quantization == "awq"
    assert "13B" in geometry.note


@pytest.mark.parametrize("name", ["nope", "/no/such/folder", "./missing", "a/b/c"])
def test_invalid_model_name_fails_like_vllm(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="Repo id must be in the form"):
        resolve_model(name)


def test_model_folder_is_read(tmp_path: Path) -> None:
    config = {
        "architectures": ["TinyForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 300, "intermediate_size": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    geometry = resolve_model(str(tmp_path))
    assert (geometry.architecture, geometry.max_len, geometry.weight_bytes) == ("TinyForCausalLM", 512, 1000)
    assert geometry.kv_bytes_per_token(2) == 2 * 2 * 16 * 2 * 2


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"num_attention_heads": 0}'])
def test_folder_without_a_model_is_reported(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_invalid_gpu_or_number_in_the_environment_is_named() -> None:
    with pytest.raises(UnknownGpuError, match="RTX A6000"):
        find_gpu("Voodoo 2")
    with pytest.raises(ValueError, match="SIMULATED_SPEED must be a number"):
        Simulated.from_environment({"SIMULATED_SPEED": "fast"})
    with pytest.raises(ValueError, match="SIMULATED_STARTUP_SECONDS must be at least 0"):
        Simulated.from_environment({"SIMULATED_STARTUP_SECONDS": "-1"})


def test_reading_flags_imports_nothing_heavy() -> None:
    heavy = "uvicorn starlette prometheus_client asyncio"
    code = (
        "import sys\nfrom vllm_launchers.simulated.__main__ import main\n"
        "try: main(['serve', 'm', '--no-such-flag'])\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy.split()!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "[]"
