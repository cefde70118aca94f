"""Starts of real vLLM that fail: the line that shows why is found in what it really writes."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_console.diagnosis.causes import Cause
from vllm_console.diagnosis.failure_line import FailureLine, failure_line

if TYPE_CHECKING:
    from conftest import RealServer, StartServer
else:
    RealServer = StartServer = Any

pytestmark = pytest.mark.real


def why(server: RealServer) -> tuple[int, FailureLine]:
    """Exit code and the line found in the log once the server has ended."""
    code = server.wait_exit()
    lines = server.log_lines()
    line = failure_line(lines, code)
    assert line is not None, "\n".join(lines[-20:])
    shown = lines[line.number - 1].strip()
    # A line that does not say which flag it speaks of is given with the flag's name before it.
    assert line.text in shown or line.text.endswith(shown)
    return code, line


@pytest.mark.parametrize(
    ("words", "code", "cause", "text"),
    [
        (["--no-such-flag"], 2, Cause.UNKNOWN_FLAG, "unrecognized arguments: --no-such-flag"),
        (["--dtype", "foo"], 2, Cause.INVALID_FLAG_VALUE, "argument --dtype: invalid choice: 'foo'"),
        (["--gpu-memory-utilization", "1.5"], 1, Cause.INVALID_FLAG_VALUE, "less than or equal to 1"),
        (["--max-model-len", "9999"], 1, Cause.INVALID_FLAG_VALUE, "max_model_len (9999)"),
    ],
)
def test_flags_that_vllm_refuses(
    start_server: StartServer, words: list[str], code: int, cause: Cause, text: str
) -> None:
    exit_code, line = why(start_server(*words))
    assert exit_code == code
    assert text in line.text
    assert line.cause is cause


def test_a_port_that_is_taken(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, line = why(start_server(port=taken.getsockname()[1]))
    assert (code, line.cause) == (1, Cause.PORT_IN_USE)
    assert "Address already in use" in line.text


def test_a_model_that_is_not_there(start_server: StartServer, tmp_path: Path) -> None:
    code, line = why(start_server(model=tmp_path / "nope"))
    assert (code, line.cause) == (1, Cause.MODEL_NOT_FOUND)


def test_a_context_that_the_kv_cache_cannot_hold(start_server: StartServer) -> None:
    server = start_server("--max-model-len", "2048", "--num-gpu-blocks-override", "8")
    code, line = why(server)
    assert (code, line.cause) == (1, Cause.KV_CACHE_TOO_SMALL)
    assert "KV cache" in line.text
    assert len(server.log_lines()) - line.number > 50  # the end of the log only refers to it
