"""Failures from the field are identified at the line that shows them first, with any log collector.

``field/*.txt`` contain the cases: a headline with the correct causes, then the log, in which ``@@`` marks the line that
shows the cause. ``known.txt`` was written together with the rules. The other files came later, from published logs, to
measure the rules (initially 59 of 65 causes and 56 of 65 lines were right).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.diagnosis.finding import Cause, Diagnosis

FIELD = Path(__file__).with_name("field")


@dataclass(frozen=True)
class FieldCase:
    """A log, the correct causes, and the number (from 1) of the line that shows the cause, or None."""

    name: str
    causes: frozenset[Cause]
    lines: tuple[str, ...]
    line: int | None


def cases() -> Iterator[FieldCase]:
    for path in sorted(FIELD.glob("*.txt")):
        for text in path.read_text().removeprefix("=== ").split("\n=== "):
            head, *lines = text.rstrip("\n").split("\n")
            name, _, causes = head.rpartition(" | ")
            marked = [number for number, line in enumerate(lines, 1) if line.startswith("@@")]
            yield FieldCase(
                name,
                frozenset(map(Cause, causes.split(","))),
                tuple(line.removeprefix("@@") for line in lines),
                marked[0] if marked else None,
            )


CASES = list(cases())
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@EVERY
def test_cause_and_its_first_line_are_found(case: FieldCase) -> None:
    found = diagnose(case.lines)
    assert found.cause in case.causes
    assert found.line == case.line


Carry = Callable[[int, str], str]
"""Formats number and text of a line as a log collector writes it."""


def clock(number: int) -> str:
    return f"{8 + number // 3600:02d}:{number // 60 % 60:02d}:{number % 60:02d}"


COLLECTORS: dict[str, Carry] = {
    "journald": lambda n, line: f"Nov  3 {clock(n)} gpubox vllm[4711]: {line}",
    "journald without a pid": lambda n, line: f"Nov 03 {clock(n)} gpubox start-vllm.sh: {line}",
    "journald, microseconds": lambda n, line: f"Nov 03 {clock(n)}.000417 gpubox python3.12[4711]: {line}",
    "journald, short-full": lambda n, line: f"Tue 2026-11-03 {clock(n)} UTC gpubox vllm@a.service[4711]: {line}",
    "journald, short-iso": lambda n, line: f"2026-11-03T{clock(n)}+01:00 gpu-box.lan (python3)[4711]: {line}",
    "journald, monotonic": lambda n, line: f"[{1000 + n / 7:12.6f}] gpubox vllm[4711]: {line}",
    "journald, JSON": lambda n, line: json.dumps({"MESSAGE": line, "PRIORITY": "6", "_HOSTNAME": "gpubox"}),
    "journald, JSON bytes": lambda n, line: json.dumps({"MESSAGE": [*line.encode()], "PRIORITY": "6"}),
    "compose": lambda n, line: f"vllm-1  | {line}",
    "compose in color": lambda n, line: f"\x1b[36mvllm-1  | \x1b[0m{line}",
    "compose, times": lambda n, line: f"vllm-1  | 2026-11-03T{clock(n)}.123456789Z {line}",
    "compose, two containers": lambda n, line: f"{'proxy' if not line else 'llm'}-1  | {line}",
    "swarm": lambda n, line: f"stack_vllm.1.k2j3h4k2@gpubox    | {line}",
    "docker --timestamps": lambda n, line: f"2026-11-03T{clock(n)}.123456789Z {line}",
    "docker's json-file": lambda n, line: json.dumps({"log": line + "\n", "stream": "stderr"}),
    "containerd": lambda n, line: f"2026-11-03T{clock(n)}.123456789+00:00 stderr F {line}",
    "kubectl --prefix": lambda n, line: f"[pod/vllm-7d9f6-abcde/vllm] {line}",
    "kubectl --prefix --timestamps": lambda n, line: f"[pod/vllm-7d9f6-abcde/vllm] 2026-11-03T{clock(n)}.12Z {line}",
    "logcli": lambda n, line: f'2026-11-03T{clock(n)}Z {{app="vllm", pod="vllm-0"}} {line}',
    "Loki, JSON lines": lambda n, line: json.dumps({"labels": {"app": "vllm"}, "line": line, "timestamp": "1"}),
    "Fluent Bit": lambda n, line: json.dumps({"@timestamp": clock(n), "log": line, "kubernetes": {"pod": "x"}}),
    "Google Cloud": lambda n, line: json.dumps({"insertId": "x", "textPayload": line, "severity": "INFO"}),
    "Ray": lambda n, line: f"\x1b[36m(ServeReplica:default:LLMServer pid=881, ip=10.0.0.2)\x1b[0m {line}",
    "Ray, pasted": lambda n, line: f"\ufffd[36m(run_vllm pid=881)\ufffd[0m {line}",
    "Ray, escapes lost": lambda n, line: f"[36m(run_vllm pid=881)[0m {line}",
}


@pytest.mark.parametrize("carry", COLLECTORS.values(), ids=COLLECTORS)
def test_log_collector_prefix_changes_nothing(carry: Carry) -> None:
    changed = []
    for case in CASES:
        if any(words in case.name for words in ("quoted with", "with bars", "table of times")):
            continue  # already in a collector's format
        own = diagnose(case.lines)
        found = diagnose([carry(number, line) for number, line in enumerate(case.lines)])
        if (found.cause, found.line) != (own.cause, own.line):
            changed.append((case.name, found.cause.value, found.line, own.line))
    assert not changed


LEARNED: dict[str, Carry] = {
    "stern": lambda n, line: f"vllm-7d9f6-abcde vllm {line}",
    "CloudWatch": lambda n, line: f"2026-11-03T{clock(n)}.123000+00:00 ecs/vllm/0123abcd {line}",
    "a script's logger": lambda n, line: f"2026-11-03 {clock(n)},123 - INFO - [container] {line}",
    "loguru": lambda n, line: f"2026-11-03 {clock(n)}.123 | INFO     | launcher:pump:44 - {line}",
    "supervisor": lambda n, line: f"2026-11-03 {clock(n)},123 DEBG 'vllm' stderr output: {line}",
    "mpirun": lambda n, line: f"[1,{n % 2}]<stderr>:{line}",
    "srun --label": lambda n, line: f"{n % 12:2d}: {line}",
    "ts": lambda n, line: f"Nov 03 {clock(n)} {line}",
    "grep -n": lambda n, line: f"{n + 1}:{line}",
    "cat -n": lambda n, line: f"{n + 1:6d}\t{line}",
    "quoted": lambda n, line: f"> {line}",
    "indented": lambda n, line: f"    {line}",
}
"""Prefixes for which there is no pattern."""


@pytest.mark.parametrize("carry", LEARNED.values(), ids=LEARNED)
def test_unknown_prefix_is_learned_from_the_log(carry: Carry) -> None:
    traceback = [
        "INFO 11-03 08:05:00 [api_server.py:1] vLLM API server version 0.32.0",
        "(EngineCore pid=7) INFO 11-03 08:05:01 [core.py:1] Starting to load model m",
        "(EngineCore pid=7) ERROR 11-03 08:05:02 [core.py:1] EngineCore failed to start.",
        "Traceback (most recent call last):",
        '  File "/env/vllm/v1/worker/gpu_worker.py", line 588, in compile_or_warm_up_model',
        "    self.model_runner.capture_model()",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
    ]
    found = diagnose([carry(number, line) for number, line in enumerate(traceback)])
    assert (found.cause, found.line) == (Cause.OOM_GRAPH_CAPTURE, 7)
    assert found.evidence == "torch.OutOfMemoryError: CUDA out of memory."


SURE = 0.75


@EVERY
def test_truncated_log_never_gets_a_confident_wrong_answer(case: FieldCase) -> None:
    if case.line is None:
        return
    for head in range(case.line):
        for tail in range(case.line, len(case.lines) + 1):
            found = diagnose(case.lines[head:tail])
            assert found.cause in case.causes or found.confidence <= SURE, (head, tail, found)


def test_cases_are_complete_and_unique() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


def fixes(found: Diagnosis) -> str:
    return " ".join(f"{fix.why} {fix.changes}" for fix in found.fixes)


def named(name: str) -> Diagnosis:
    return diagnose(next(case.lines for case in CASES if case.name == name))


def test_missing_symbol_gets_no_driver_advice() -> None:
    found = named("vLLM's module of another torch")
    assert found.explanation.endswith("The GPU driver is not the cause.")
    assert "pip install vllm" in fixes(found)
    assert "nvidia-smi" not in fixes(found)
    assert fixes(named("flash-attention of another torch")).startswith("flash_attn_2_cuda is not part of vLLM")


def test_weights_that_do_not_fit_are_not_a_serving_failure() -> None:
    for name in ("weights, only the innermost frames", "weights of 16 GB do not fit, worker of two GPUs"):
        found = named(name)
        assert "weights" in found.explanation
        assert "serving" not in found.explanation
        assert "max-num-batched-tokens" not in fixes(found)


def test_timeouts_name_their_variables() -> None:
    assert "VLLM_ENGINE_READY_TIMEOUT_S=1800" in fixes(named("the front end did not wait long enough"))
    reached = fixes(named("the first node cannot be reached"))
    assert "10.0.0.1, port 29562" in reached
    assert "GLOO_SOCKET_IFNAME" in reached


def test_refused_chat_names_the_template() -> None:
    found = named("chat requests to a base model")
    assert "--chat-template" in fixes(found)
    assert "--chat-template" not in fixes(named("a request that is too long kills nothing"))


def test_lost_network_is_not_sought_in_the_other_nodes_log() -> None:
    lost = diagnose(["vllm-console: node 1 is gone: the connection to its keeper ended (connection timed out)"])
    ended = diagnose(["vllm-console: node 1 is gone: the connection to its keeper ended (closed)"])
    assert "the network between the two" in lost.fixes[0].why
    assert "log" in ended.fixes[0].why


@pytest.mark.parametrize(
    ("name", "explanation", "fix"),
    [
        ("hidden size of another model", "the weights have other shapes", "into an empty folder"),
        ("intermediate size of another model", "the weights have other shapes", "--hf-overrides"),
        ("vocabulary of another model", "the weights have other shapes", "into an empty folder"),
        ("weights file of the index missing", "weights files are missing", "hf download"),
        ("weights file missing without an index", "lack parameters", "into an empty folder"),
        ("fewer layers than the weights", "hold parameters that the model", "into an empty folder"),
        (
            "GPTQ over unquantized weights",
            "announces quantized weights",
            "'hf-overrides': '{\"quantization_config\": null",
        ),
        ("compressed tensors over unquantized weights", "announces quantized weights", "quantization_config"),
        ("empty weights file", "damaged or incomplete", "hf download"),
        ("damaged index of the weights", ".index.json", "hf download"),
        ("damaged config", "empty or damaged", "Correct ./badjson/config.json"),
        ("number as a string in the config", "wrong type", "config.json (num_key_value_heads)"),
        ("config without a model type", "model_type", "Correct config.json"),
        ("YaRN without a factor", "RoPE parameters", "Correct config.json"),
        ("unknown architecture", "architecture", "newer vLLM"),
    ],
)
def test_models_files_that_do_not_fit_are_explained(name: str, explanation: str, fix: str) -> None:
    found = named(name)
    assert explanation in found.explanation
    assert fix in fixes(found)
    assert found.confidence > 0.7


@pytest.mark.parametrize(
    ("name", "explanation", "fix"),
    [
        ("address of another machine", "address in --host", "'host': '127.0.0.1'"),
        ("host name that does not resolve", "does not resolve", "'host': '127.0.0.1'"),
        ("port out of range", "up to 65535", "'port': 8000"),
        ("socket in a missing folder", "--uds", "Create the folder"),
        ("chat template file missing", "chat template", "Check the path in --chat-template"),
        ("TLS key missing", "does not exist", "--ssl-keyfile"),
        ("TLS key that is none", "not PEM", "openssl pkey"),
        ("unknown reasoning parser", "does not accept", "unset=('reasoning-parser',)"),
        ("unknown tool call parser", "does not accept", "unset=('enable-auto-tool-choice', 'tool-call-parser')"),
        ("damaged JSON in hf-overrides", "does not accept", "unset=('hf-overrides',)"),
        ("config file of the flags missing", "--config", "Check the path"),
        ("logging config missing", "--log-config-file", "Check the path"),
        ("middleware that can't be imported", "--middleware", "unset=('middleware',)"),
        ("adapter without a name", "NAME=PATH", "--lora-modules NAME=PATH"),
        ("adapter without enable-lora", "together", "'enable-lora': True"),
        ("weights of a model as an adapter", "another kind of weights", "--lora-modules"),
        ("load format without its plugin", "does not accept", "unset=('load-format',)"),
        ("unknown KV connector", "does not accept", "unset=('kv-transfer-config',)"),
    ],
)
def test_flags_that_only_the_start_refutes_are_explained(name: str, explanation: str, fix: str) -> None:
    found = named(name)
    assert explanation in found.explanation
    assert fix in fixes(found)
    assert found.confidence > 0.7


def test_parser_name_with_a_typo_is_corrected() -> None:
    line = "KeyError: \"Reasoning parser 'qwen4' not found. Available parsers: olmo3, qwen3, step3\""
    assert diagnose([line], 1, {"reasoning-parser": "qwen4"}).fixes[0].changes.set == {"reasoning-parser": "qwen3"}


def test_failed_assertion_outside_of_weight_loading_is_not_about_weights() -> None:
    head = ["Traceback (most recent call last):", '  File "/env/vllm/v1/core/sched/scheduler.py", line 7, in schedule']
    for end in ("AssertionError", "RuntimeError: The size of tensor a (3) must match the size of tensor b (4)"):
        assert "weights" not in diagnose([*head, end]).explanation


def test_address_is_that_of_the_server_only_where_it_listens() -> None:
    head = ["Traceback (most recent call last):", '  File "/env/vllm/x.py", line 7, in connect']
    assert diagnose([*head, "OSError: [Errno 99] Cannot assign requested address"]).cause is Cause.OTHER
