"""The line that shows why a server died is found, whatever follows it and in every log format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.diagnosis.failure.failure_line import FailureLine, failure_in
from vllm_console.diagnosis.failure.rules import Topic
from vllm_console.diagnosis.finding import Cause
from vllm_console.logs.vllm_lines import parse_lines

Form = Callable[[str, str], str]
"""Formats process and text of a traceback line as a log line."""


def failure_line(lines: Sequence[str], exit_code: int | None = None) -> FailureLine | None:
    """Result of `failure_in` for these lines."""
    return failure_in(list(parse_lines(lines)), exit_code)


def before_031(process: str, text: str) -> str:
    return f"\x1b[0;36m({process} pid=77)\x1b[0;0m {text}"


def from_031(process: str, text: str) -> str:
    return text


def record(process: str, text: str, level: str = "ERROR") -> str:
    return f"({process} pid=77) {level} 11-20 10:00:01 [core.py:900] {text}"


def traceback(*ends: str, functions: Sequence[str] = ("run_engine_core", "__init__")) -> list[str]:
    lines = ["Traceback (most recent call last):"]
    for number, function in enumerate(functions):
        lines += [
            f'  File "/env/vllm/v1/engine/core.py", line {number}, in {function}',
            "    self.go()",
            "    ^^^^^^^^^",
        ]
    return [*lines, *ends]


def engine_failure(end: str, form: Form, **options: Sequence[str]) -> list[str]:
    """A failed start as vLLM logs it: the engine's exception twice, then the API server's."""
    lines = [
        record("APIServer", "non-default args: {'model': 'tiny'}", "INFO"),
        record("EngineCore", "something deprecated, ValueError: not this", "WARNING"),
        record("EngineCore", "EngineCore failed to start."),
    ]
    lines += [record("EngineCore", line) for line in traceback(end, **options)]
    lines += [form("EngineCore", line) for line in ["Process EngineCore:", *traceback(end, **options)]]
    follow_up = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    lines += [form("APIServer", line) for line in traceback(follow_up, functions=["f"] * 30)]
    return lines


def found(lines: Sequence[str], exit_code: int | None = 1) -> FailureLine:
    line = failure_line(lines, exit_code)
    assert line is not None
    written = lines[line.number - 1]
    assert line.text in written or line.text.endswith(f": {written.strip()}")  # preceded by the flag that it is about
    return line


@pytest.mark.parametrize("form", [before_031, from_031])
@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("ValueError: No available memory for the cache blocks. Try more.", Cause.KV_CACHE_TOO_SMALL),
        ("ValueError: To serve at least one request with the model's max seq len (2048), …", Cause.KV_CACHE_TOO_SMALL),
        (
            "ValueError: Free memory on device cuda:0 (0.6/31 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 28 GiB).",
            Cause.FREE_MEMORY_BELOW_UTILIZATION,
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", Cause.OOM_RUNTIME),
        ("OSError: [Errno 28] No space left on device", Cause.DISK_FULL),
        ("OSError: [Errno 122] Disk quota exceeded: '/home/u/.cache'", Cause.DISK_FULL),
        ("RuntimeError: NCCL error: unhandled system error", Cause.NCCL),
        ("zmq.error.ZMQError: Address already in use (addr='ipc:///tmp/x')", Cause.OTHER),
        (
            "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
            Cause.UNSUPPORTED_BY_GPU,
        ),
        ("TypeError: type 'array.array' is not subscriptable", Cause.OTHER),
        ("AssertionError", Cause.OTHER),
        ("KeyboardInterrupt", Cause.INTERRUPTED),
    ],
)
def test_engine_exception_is_found_above_its_echoes(end: str, cause: Cause, form: Form) -> None:
    lines = engine_failure(end, form)
    line = found(lines)
    assert line.text == end
    assert line.cause is cause
    assert line.number == next(number for number, text in enumerate(lines, 1) if text.endswith(end))


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("capture_model", Cause.OOM_GRAPH_CAPTURE),
        ("load_model", Cause.WEIGHTS_DO_NOT_FIT),
        ("execute_model", Cause.OOM_RUNTIME),
    ],
)
def test_out_of_memory_is_classified_by_its_location(function: str, cause: Cause) -> None:
    lines = engine_failure("torch.OutOfMemoryError: CUDA out of memory.", from_031, functions=["go", function, "empty"])
    assert found(lines).cause is cause


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("OSError: You are trying to access a gated repo.", Cause.GATED),
        ("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.", Cause.MODEL_NOT_FOUND),
        ("OSError: nope is not a local folder and is not a valid model identifier", Cause.MODEL_NOT_FOUND),
        ("ValueError: x contains custom code which must be executed to load the model.", Cause.TRUST_REMOTE_CODE),
        ("OSError: Can't load tokenizer for 'x'.", Cause.TOKENIZER),
        (
            "ValueError: Total number of attention heads (40) must be divisible by tensor parallel size (3).",
            Cause.TP_NOT_DIVISOR,
        ),
        ("AssertionError: 151936 is not divisible by 3", Cause.TP_NOT_DIVISOR),
        ("ValueError: The quantization method x is not supported for the current GPU.", Cause.UNSUPPORTED_BY_GPU),
        ("RuntimeError: CUDA error: no kernel image is available for execution", Cause.UNSUPPORTED_BY_GPU),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12020).", Cause.DRIVER),
        ("ImportError: libcudart.so.13: cannot open shared object file", Cause.DRIVER),
        ("ValueError: Unknown quantization method: foo.", Cause.INVALID_FLAG_VALUE),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", Cause.OTHER),
        ("ValueError: World size (4) is larger than the number of available GPUs (2)", Cause.OTHER),
    ],
)
def test_known_causes_are_named_and_explained(end: str, cause: Cause) -> None:
    line = found(traceback(end))
    assert (line.text, line.cause) == (end, cause)
    assert line.explanation


@pytest.mark.parametrize(
    ("end", "raylet"),
    [
        ("RuntimeError: The node 10.0.0.2 died while running the task.", True),
        (
            "RuntimeError: The node with node id: a1 and address: 10.0.0.2 and node name: b has been marked dead "
            "because the detector has missed too many heartbeats from it.",
            True,
        ),
        ("RuntimeError: The node 'lm_head' of the graph died during fusion", False),
    ],
)
def test_only_rays_own_messages_report_a_lost_raylet(end: str, raylet: bool) -> None:
    assert (found(traceback(end)).topic is Topic.RAYLET_GONE) == raylet


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("vllm: error: unrecognized arguments: --no-such-flag", Cause.UNKNOWN_FLAG),
        ("api_server.py: error: argument --dtype: invalid choice: 'x' (choose from 'auto')", Cause.INVALID_FLAG_VALUE),
        ("vllm serve: error: argument --port: invalid int value: 'abc'", Cause.INVALID_FLAG_VALUE),
    ],
)
def test_flag_parser_errors(line: str, cause: Cause) -> None:
    usage = ["usage: vllm serve [model_tag] [options]", "            [--dtype {auto,half}] [--port PORT]"]
    assert found([*usage, line, ""], 2) == FailureLine(3, line, cause, found([line]).explanation, confidence=0.95)


def test_pydantic_message_is_shown_not_its_headline() -> None:
    lines = [
        *traceback("pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig"),
        "gpu_memory_utilization",
        "  Input should be less than or equal to 1 [type=less_than_equal, input_value=1.5, input_type=float]",
        "    For further information visit https://errors.pydantic.dev/2/v/less_than_equal",
    ]
    line = found(lines)
    assert line.text.startswith("--gpu-memory-utilization: Input should be less than or equal to 1")
    assert line.cause is Cause.INVALID_FLAG_VALUE


def test_of_several_pydantic_errors_the_flag_that_was_set_is_named() -> None:
    def error(field: str) -> list[str]:
        return [
            field, "  Input should be greater than or equal to 1 [type=greater_than_equal, input_value=0]",
            "    For further information visit https://errors.pydantic.dev/2/v/greater_than_equal",
        ]  # fmt: skip

    below = [
        *traceback("pydantic_core._pydantic_core.ValidationError: 2 validation errors for SchedulerConfig"),
        *error("max_num_batched_tokens"), *error("max_num_seqs"),
    ]  # fmt: skip
    given = "(APIServer pid=7) INFO 11-20 10:00:01 [utils.py:286] non-default args: {'model': 'm', 'max_num_seqs': 0}"
    assert found([given, *below]).text.startswith("--max-num-seqs: Input should be")
    assert found(below).text.startswith("--max-num-batched-tokens: ")


def test_block_size_that_the_backend_does_not_take() -> None:
    lines = traceback("ValueError: No common block size for 7 (CPU_ATTN: [MultipleOf(32)]).")
    told = diagnose(lines, 1, {"block-size": 7})
    assert told.cause is Cause.INVALID_FLAG_VALUE
    assert [(fix.changes.set, fix.changes.unset) for fix in told.fixes] == [
        ({"block-size": 32}, ()),
        ({}, ("block-size",)),
    ]
    (only,) = diagnose(lines, 1, {"max-num-seqs": 7}).fixes
    assert only.changes.set == {"block-size": 32}


def test_quantization_without_a_config_file_in_a_pydantic_message() -> None:
    lines = [
        *traceback("pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig"),
        "  Value error, Cannot find the config file for awq [type=value_error, input_value=ArgsKwargs(())]",
    ]
    told = diagnose(lines, 1, {"quantization": "awq"})
    assert told.cause is Cause.INVALID_FLAG_VALUE
    assert told.fixes[0].changes.unset == ("quantization",)


@pytest.mark.parametrize(("code", "cause"), [(-9, Cause.KILLED), (137, Cause.KILLED), (0, Cause.INTERRUPTED)])
def test_signal_that_an_engine_gets_after_its_api_server_was_killed_is_not_the_cause(code: int, cause: Cause) -> None:
    lines = [
        "(APIServer pid=1) INFO:     Application startup complete.",
        "(EngineCore pid=88) INFO 07-29 10:02:41 [core.py:1263] [shutdown] EngineCore: trigger received signal=SIGTERM",
        "(EngineCore pid=88) INFO 07-29 10:02:41 [core.py:1301] [shutdown] EngineCore: start mode=abort timeout=0s",
    ]
    told = diagnose(lines, code)
    assert told.cause is cause
    assert any("dmesg" in fix.why for fix in told.fixes) is (cause is Cause.KILLED)
    stopped = "(APIServer pid=1) INFO 11-03 08:05:11 [launcher.py:254] [shutdown] API server: shutdown triggered"
    assert diagnose([lines[0], stopped, *lines[1:]], code).cause is Cause.INTERRUPTED


def test_cause_inside_a_pydantic_message_is_named() -> None:
    lines = [
        *traceback("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"),
        "  Value error, Invalid repository ID or local directory specified: 'nope'.",
        "Please verify it: [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]",
    ]
    assert found(lines).cause is Cause.MODEL_NOT_FOUND


def test_http_port_is_distinguished_from_internal_addresses() -> None:
    assert found(traceback("OSError: [Errno 98] Address already in use")).cause is Cause.PORT_IN_USE
    inside = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address."
    assert found(traceback(inside)).cause is Cause.OTHER


@pytest.mark.parametrize(
    ("message", "fix_text"),
    [
        ("RuntimeError: ifa != nullptr. Unable to find address for: eth9", "an interface of this node, not to eth9"),
        ("zmq.error.ZMQError: Cannot assign requested address (addr='tcp://10.99.9.9:0')",
         "Set VLLM_HOST_IP to an address of this node, not to 10.99.9.9"),
        ("zmq.error.ZMQError: Cannot assign requested address (addr='tcp://[fd00::9]:0')", "not to fd00::9"),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
         "port: 29577, code: -98, name: EADDRINUSE", "a port other than 29577 with --master-port"),
        ("DistNetworkError: The client socket has timed out after 9ms while trying to connect to (node-0, 29501)",
         "getent hosts node-0"),
        ("DistNetworkError: The client socket has timed out after 9ms while trying to connect to (fd00::1, 29501)",
         "each node reaches the first one (fd00::1, port 29501)"),
    ],
)  # fmt: skip
def test_nodes_that_cannot_connect_get_a_matching_fix(message: str, fix_text: str) -> None:
    fixes = diagnose(traceback(message)).fixes
    assert fix_text in " ".join(fix.why for fix in fixes)
    assert ("getent" in " ".join(fix.why for fix in fixes)) == ("node-0" in message)


def test_outer_exception_is_shown_unless_the_inner_names_the_cause() -> None:
    chain = ["", "During handling of the above exception, another exception occurred:", ""]
    outer = traceback("ValueError: Unknown layer kind 'foo'")
    assert found([*traceback("KeyError: 'foo'"), *chain, *outer]).text == "ValueError: Unknown layer kind 'foo'"
    disk = [
        *traceback("OSError: [Errno 28] No space left on device"),
        *chain,
        *traceback("RuntimeError: compile failed"),
    ]
    assert found(disk).cause is Cause.DISK_FULL


def test_message_below_its_exception_line_is_shown() -> None:
    lines = [
        "(APIServer pid=7) Traceback (most recent call last):",
        '(APIServer pid=7)   File "multiprocessing/spawn.py", line 164, in _check_not_importing_main',
        "(APIServer pid=7)     raise RuntimeError(message)",
        "(APIServer pid=7) RuntimeError: ",
        "(EngineCore pid=8) something of another process",
        "(APIServer pid=7)         An attempt has been made to start a new process before the",
        "(APIServer pid=7)         current process has finished its bootstrapping phase.",
    ]
    whole, cut = failure_line(lines, 1), failure_line(lines[:4], 1)
    assert whole is not None
    assert cut is not None
    assert whole.text == "RuntimeError: An attempt has been made to start a new process before the"
    assert cut.text == "RuntimeError:", "nothing follows"


def test_exceptions_ignored_by_python_do_not_count() -> None:
    ignored = [
        "Exception ignored in: <function Executor.__del__ at 0x7f>",
        *traceback("AttributeError: no shutdown hook"),
    ]
    assert failure_line(ignored, 1) is None
    assert found([*ignored, *traceback("ValueError: this one")]).text == "ValueError: this one"


def test_dead_engine_is_only_a_fallback_cause() -> None:
    dead = traceback("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
    assert found(dead, 0).cause is Cause.ENGINE_DIED
    line = found([*traceback("TimeoutError: RPC call to execute_model timed out."), *dead], 0)
    assert line.text.startswith("TimeoutError")


def test_killed_engine_is_recognized_by_failed_process_list() -> None:
    end = "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_0': -9}"
    line = found(traceback(end))
    assert line.cause is Cause.ENGINE_DIED
    assert line.explanation is not None
    assert "SIGKILL" in line.explanation


def served(errors: Sequence[str]) -> list[str]:
    return [
        record("APIServer", "non-default args: {}", "INFO"),
        "INFO:     Application startup complete.",
        *errors,
    ]


def test_earlier_request_errors_are_not_the_cause() -> None:
    request = [record("APIServer", line) for line in traceback("ValueError: The prompt is longer than the context.")]
    death = [record("EngineCore", "EngineCore encountered a fatal error.")]
    death += [record("EngineCore", line) for line in traceback("RuntimeError: the sampler broke")]
    dead = [record("APIServer", line) for line in traceback("EngineDeadError: EngineCore encountered an issue.")]
    assert found(served([*request, *death, *dead]), 0).text == "RuntimeError: the sampler broke"


REQUEST = [record("APIServer", line) for line in traceback("ValueError: the chat template must not be empty")]
ACCESS = 'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK'


def test_failed_requests_are_not_a_server_failure() -> None:
    assert failure_line(served([*REQUEST, ACCESS]), None) is None
    assert failure_line([ACCESS, *REQUEST, ACCESS], None) is None  # the head of the log is missing


def test_failed_requests_do_not_explain_a_silent_death() -> None:
    death = record("APIServer", "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.")
    line = found(served([*REQUEST, ACCESS, death, *traceback("EngineDeadError: see above"), *REQUEST]), 0)
    assert line.text.startswith("Engine core proc")
    assert line.cause is Cause.ENGINE_DIED
    assert line.confidence < 0.8


def test_engine_error_right_before_its_death_is_found() -> None:
    crash = [record("EngineCore", line) for line in traceback("torch.OutOfMemoryError: CUDA out of memory.")]
    death = record("APIServer", "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.")
    assert found(served([*REQUEST, *crash, death]), 0).cause is Cause.OOM_RUNTIME


def test_log_that_stops_during_startup_is_a_silent_death() -> None:
    end = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    begun = record("EngineCore", "CPU KV cache size: 4,194,304 tokens", "INFO")
    line = found([begun, *traceback(end)])
    assert (line.cause, line.text) == (Cause.ENGINE_DIED, end)
    assert line.confidence < 0.6
    failed = record("EngineCore", "EngineCore failed to start.")
    for lines in ([*traceback(end)], [begun, failed, *traceback(end)]):
        other = failure_line(lines, 1)
        assert other is None or other.cause is Cause.OTHER


def test_interruption_is_the_cause_unless_something_failed_first() -> None:
    after = traceback("OSError: [Errno 28] No space left on device")
    assert found([*traceback("KeyboardInterrupt"), *after]).cause is Cause.INTERRUPTED
    assert found([*traceback("TypeError: odd"), *traceback("KeyboardInterrupt")]).text == "TypeError: odd"


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ("INFO 11-20 10:00:00 [g.py:1] Starting to load model some/model...", Cause.WEIGHTS_DO_NOT_FIT),
        ("INFO 11-20 10:00:00 [g.py:1] Model loading took 14.2 GiB", Cause.OOM_RUNTIME),
        ("Capturing CUDA graphs (decode, FULL):   9%|9   | 3/35", Cause.OOM_GRAPH_CAPTURE),
    ],
)
def test_without_a_traceback_the_last_step_locates_out_of_memory(before: str, cause: Cause) -> None:
    assert found([before, "torch.OutOfMemoryError: CUDA out of memory."]).cause is cause


def test_similar_file_name_is_not_a_graph_capture() -> None:
    lines = traceback("torch.OutOfMemoryError: CUDA out of memory.", functions=["profile_run", "__call__"])
    assert found([line.replace("core.py", "cuda_graph.py") for line in lines]).cause is Cause.OOM_RUNTIME


def test_traceback_without_indentation_is_read() -> None:
    lines = traceback("torch.OutOfMemoryError: CUDA out of memory.", functions=["load_model", "__init__"])
    assert found([record("EngineCore", line.strip()) for line in lines]).cause is Cause.WEIGHTS_DO_NOT_FIT


def test_error_record_counts_less_than_a_following_exception() -> None:
    complaint = "Cannot use this: it is only supported on GPUs with compute capability of at least 9.0"
    lines = [record("EngineCore", complaint), *traceback("OSError: [Errno 28] No space left on device")]
    assert found(lines).cause is Cause.DISK_FULL
    assert found(lines[:1]).confidence < 0.8


def test_internal_address_is_not_the_servers_port() -> None:
    lines = [record("EngineCore", line) for line in traceback("OSError: [Errno 98] Address already in use")]
    assert found(lines).cause is Cause.OTHER


@pytest.mark.parametrize(
    ("function", "end", "cause"),
    [
        ("get_tokenizer", "AttributeError: 'list' object has no attribute 'keys'", Cause.TOKENIZER),
        ("get_tokenizer", "ModuleNotFoundError: No module named 'something'", Cause.OTHER),
        ("create_model_config", "ValueError: max_num_seqs must not be odd", Cause.INVALID_FLAG_VALUE),
        ("create_model_config", "ValueError: layers must not be odd", Cause.OTHER),
        ("forward", "ValueError: max_num_seqs must not be odd", Cause.OTHER),
    ],
)
def test_exception_without_a_known_name_is_classified_by_location(function: str, end: str, cause: Cause) -> None:
    line = found(traceback(end, functions=["run_server", function, "inner"]))
    assert line.cause is cause
    assert line.confidence <= 0.75


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("  Value error, max_num_seqs must not be odd [type=value_error, input_value=3]", Cause.INVALID_FLAG_VALUE),
        ("  Value error, this model cannot be inspected [type=value_error, input_value=3]", Cause.OTHER),
    ],
)
def test_pydantic_check_blames_a_flag_only_if_it_names_one(text: str, cause: Cause) -> None:
    lines = [*traceback("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"), text]
    assert found(lines).cause is cause


@pytest.mark.parametrize(
    "end",
    [
        "OSError: [Errno 99] error while attempting to bind on address ('10.1.1.1', 8000): cannot assign it",
        "ValueError: query heads must be divisible by key heads",
        "If you are trying to access a private or gated repo, make sure you are authenticated.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "/env/torch/cuda/__init__.py:61: UserWarning: The NVIDIA driver on your system is too old",
    ],
)
def test_similar_wording_is_not_a_cause(end: str) -> None:
    line = failure_line(traceback(end), 1)
    assert line is None or (line.cause is Cause.OTHER and line.confidence <= 0.3)


def test_only_the_last_start_in_a_log_counts() -> None:
    lines = [
        *engine_failure("ValueError: No available memory for the cache blocks.", from_031),
        *engine_failure("OSError: [Errno 28] No space left on device", from_031),
    ]
    line = found(lines)
    assert line.cause is Cause.DISK_FULL
    assert line.number > len(lines) / 2


def test_after_a_kill_only_a_named_cause_counts() -> None:
    lines = engine_failure("TypeError: odd", from_031)
    assert found(lines, 1).text == "TypeError: odd"
    assert failure_line(lines, -9) is None
    assert (
        found(engine_failure("torch.OutOfMemoryError: CUDA out of memory.", from_031), 137).cause is Cause.OOM_RUNTIME
    )


def test_kill_is_certain_and_has_a_hint() -> None:
    for code in (-9, 137):
        killed = diagnose(["(APIServer pid=70) INFO:     Application startup complete."], code)
        assert (killed.cause, killed.confidence) == (Cause.KILLED, 1.0)
        assert "dmesg" in killed.fixes[0].why


def test_healthy_log_has_no_failure_line() -> None:
    healthy = [
        *served([]),
        record("EngineCore", "No available memory for the cache blocks", "WARNING"),
        'INFO:     127.0.0.1:5 - "GET /metrics HTTP/1.1" 200 OK',
    ]
    assert failure_line(healthy, 0) is None
    assert failure_line([], None) is None


def test_json_records_are_read() -> None:
    message = {
        "levelname": "ERROR",
        "processName": "EngineCore",
        "message": "\n".join(traceback("ValueError: bad shape")),
    }
    line = failure_line([json.dumps({"levelname": "INFO", "message": "hello"}), json.dumps(message)], 1)
    assert line == FailureLine(2, "ValueError: bad shape", Cause.OTHER, None, confidence=0.3)


def test_container_logs_are_read() -> None:
    lines = [f"vllm-1  | {line}" for line in engine_failure("OSError: [Errno 28] No space left on device", before_031)]
    assert found(lines).text == "OSError: [Errno 28] No space left on device"


def test_text_has_no_escape_codes() -> None:
    line = failure_line(["\x1b[31mValueError: \x1b]0;title\x07evil\x1b[0m\x07"], 1)
    assert line is not None
    assert line.text == "ValueError: evil"


@given(st.lists(st.text(max_size=60), max_size=30), st.one_of(st.none(), st.integers(-64, 255)))
@settings(max_examples=200, deadline=None)
def test_any_text_is_handled(lines: list[str], exit_code: int | None) -> None:
    line = failure_line(lines, exit_code)
    assert line is None or 1 <= line.number <= len(lines)


def test_killed_worker_is_named_before_the_failed_executor() -> None:
    found = failure_line(
        [
            "INFO:     Application startup complete.",
            "(EngineCore pid=7) ERROR 11-20 10:00:00 [multiproc_executor.py:315] Worker proc VllmWorker-0 died "
            "unexpectedly (exit code: None), shutting down executor.",
            "Traceback (most recent call last):",
            '  File "core.py", line 1702, in _handle_client_request',
            "RuntimeError: Executor failed.",
        ],
        0,
    )
    assert found is not None
    assert (found.cause, found.number) == (Cause.ENGINE_DIED, 2)


@pytest.mark.parametrize(
    ("under", "cause"),
    [
        ("Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'", Cause.DRIVER),
        ("Error while creating shared memory segment /dev/shm/x (size 9), error: No space left on device (28)",
         Cause.DISK_FULL),
        ("Cuda failure 'an illegal memory access was encountered'", Cause.OTHER),
        ("Cuda failure 'out of memory': CUDA out of memory", Cause.OOM_RUNTIME),
        ("Bootstrap : no socket interface found", Cause.NCCL),
    ],
)  # fmt: skip
def test_nccl_error_detail_below_the_message_is_shown(under: str, cause: Cause) -> None:
    lines = [
        *traceback("torch.distributed.DistBackendError: NCCL error in: a/NCCLUtils.cpp:94, unhandled cuda error"),
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "Last error:",
        under,
    ]
    line = found(lines)
    assert line.cause is cause
    assert (line.text == under) is (cause is not Cause.NCCL)


def test_nccl_error_is_not_explained_by_the_next_exception() -> None:
    lines = [*traceback("RuntimeError: NCCL error: unhandled system error"), *traceback("OSError: [Errno 28] No space")]
    assert found(lines).cause is Cause.NCCL


def test_waiting_process_repeats_the_workers_error() -> None:
    repeated = "RuntimeError: Worker failed with error 'a shape is odd', please check the stack trace above"
    died = "Worker proc VllmWorker-0 died unexpectedly, shutting down executor."
    line = found([*traceback(repeated), record("EngineCore", died)])
    assert (line.text, line.cause) == (repeated, Cause.OTHER)
    silent = repeated.replace("a shape is odd", "")
    assert found([*traceback(silent), record("EngineCore", died)]).cause is Cause.ENGINE_DIED


def test_value_outside_the_valid_options_is_an_invalid_flag_value() -> None:
    line = found(traceback("ValueError: Unknown state backend: 'X'. Valid options are: A, B"))
    assert line.cause is Cause.INVALID_FLAG_VALUE


@pytest.mark.parametrize("carry", ["vllm-1  | ", "2026-11-20T10:00:00.1Z ", "Aug 17 18:42:18 box vllm[80]: ", "    "])
def test_forwarded_log_is_diagnosed_like_the_original(carry: str) -> None:
    lines = engine_failure("torch.OutOfMemoryError: CUDA out of memory.", before_031, functions=["load_model"])
    line = failure_line([carry + text for text in lines], 1)
    own = failure_line(lines, 1)
    assert line is not None
    assert own is not None
    assert (line.cause, line.number, line.text) == (own.cause, own.number, own.text)
    assert line.cause is Cause.WEIGHTS_DO_NOT_FIT


@pytest.mark.parametrize(
    "end",
    [
        "RuntimeError: Engine core process EngineCore_DP0 died unexpectedly.",
        "RuntimeError: Process ApiServer_1 (PID: 9028) died with exit code 1",
    ],
)
def test_dead_data_parallel_engine_is_named(end: str) -> None:
    lines = ["INFO:     Application startup complete.", *traceback(end, functions=("run_multi_api_server",))]
    found = failure_line(lines)
    assert found is not None
    assert (found.cause, found.text) == (Cause.ENGINE_DIED, end)


def test_sigterm_in_the_ray_handler_does_not_explain_a_sigkill() -> None:
    lines = [
        "(APIServer pid=70) INFO:     Application startup complete.",
        "*** SIGTERM received at time=1795320211 on cpu 0 ***",
        "(EngineCore pid=77) INFO 11-22 04:03:31 [core.py:1499] [shutdown] EngineCore: exiting busy loop",
    ]
    assert failure_line(lines, -9) is None
    stopped = failure_line(lines, 0)
    assert stopped is not None
    assert stopped.cause is Cause.INTERRUPTED
