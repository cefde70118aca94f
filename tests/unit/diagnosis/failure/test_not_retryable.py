"""Failures that the keeper does not retry."""

from __future__ import annotations

import re

import pytest

from vllm_console.diagnosis.failure.diagnose import NOT_RETRYABLE
from vllm_launchers.keeper.records import NotRetryable


def found(log: str) -> NotRetryable | None:
    """Search like the keeper."""
    return next((one for one in NOT_RETRYABLE if re.search(one.pattern, log, re.IGNORECASE | re.MULTILINE)), None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("vllm: error: unrecognized arguments: --max-seqs", "does not know the flag"),
        ("vllm serve: error: argument --dtype: invalid choice: 'fp4'", "does not accept this flag value"),
        ("(EngineCore pid=7) ValueError: To serve at least one request with the models's max seq len (40960), 4.38 GiB "
         "KV cache is needed", "can't hold even one request"),
        ("\x1b[0;36m(EngineCore pid=7)\x1b[0;0m ERROR 11-21 10:00:00 [core.py:1] ValueError: No available memory for "
         "the cache blocks.", "no memory for the KV cache"),
        ("OSError: nobody/nothing is not a local folder and is not a valid model identifier listed on the hub",
         "Model not found"),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", "gated"),
        ("AssertionError: 28 is not divisible by 3", "can't be split"),
    ],
)  # fmt: skip
def test_failures_that_a_retry_cannot_fix(line, reason):
    one = found(f"INFO 11-21 10:00:00 [utils.py:1] starting\n{line}\nmore\n")
    assert one is not None
    assert reason in one.reason
    assert not one.reason.endswith(".")


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: Free memory on device cuda:0 (3/48 GiB) is less than desired GPU memory utilization (0.9, 43).",
        "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use",
        "OSError: [Errno 28] No space left on device",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB.",
        "RuntimeError: NCCL error: unhandled system error",
        "INFO 11-21 10:00:00 [api.py:1] Using supplied chat template: None",
        "(APIServer pid=5) WARNING 11-21 10:00:00 [config.py:1] Unknown quantization method: odd",
    ],
)
def test_transient_failures_are_retried(line):
    assert found(f"{line}\nended\n") is None


def test_model_not_found_without_network_is_retried():
    missing = "OSError: Can't load the configuration of 'a/b'.\n"
    assert found(missing) is not None
    assert found("requests.exceptions.ConnectionError: Max retries exceeded with url\n" + missing) is None
