"""Levels of lines, in both forms of vLLM's prefix."""

from __future__ import annotations

import pytest

from vllm_console.logs.file import LogFile, LogLevel, log_level_of


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("INFO 11-20 10:03:52 [api_utils.py:286] hello", LogLevel.INFO),
        ("(EngineCore pid=7) WARNING 11-20 10:03:57 [cpu.py:224] Triton is not installed.", LogLevel.WARNING),
        ("(EngineCore_DP0 pid=7) ERROR 11-20 10:03:57 [core.py:9] EngineCore failed", LogLevel.ERROR),
        ("(VllmWorker rank=0 pid=123) ERROR 11-20 10:03:57 [m.py:380] failed", LogLevel.ERROR),
        ("(RayWorkerWrapper pid=8, ip=10.0.0.2) ERROR 11-20 10:03:57 [m.py:380] failed", LogLevel.ERROR),
        ("(pid=8, ip=10.0.0.2) WARNING 11-20 10:03:57 [m.py:380] slow", LogLevel.WARNING),
        ("(EngineCore_DP0 pid=7) (RayWorkerProc pid=8) (Worker pid=8) ERROR 11-20 10:03:57 [m.py:9] x", LogLevel.ERROR),
        ("(ServeReplica:default:LLMServer pid=8, ip=10.0.0.2) OSError: no space", LogLevel.ERROR),
        ("(APIServer pid=7) CRITICAL 11-20 10:03:57 [x.py:9] no", LogLevel.ERROR),
        ("DEBUG 11-20 10:03:57 [x.py:9] detail", LogLevel.DEBUG),
        ('INFO:     127.0.0.1:1234 - "GET /health HTTP/1.1" 200 OK', LogLevel.INFO),
        ('(APIServer pid=7) INFO:     127.0.0.1:1 - "GET / HTTP/1.1" 500', LogLevel.INFO),
        ("W1120 10:02:46.571000 26830 torch/_library/triton.py:53] Triton not available", LogLevel.WARNING),
        ("[W1120 10:03:57.679076039 utils.cpp:68] Warning: NUMA binding", LogLevel.WARNING),
        ("Traceback (most recent call last):", LogLevel.ERROR),
        ("(Worker_TP0 pid=9) Traceback (most recent call last):", LogLevel.ERROR),
        ('  File "venv/bin/vllm", line 8, in <module>', LogLevel.ERROR),
        ("OSError: [Errno 98] Address already in use", LogLevel.ERROR),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", LogLevel.ERROR),
        ("vllm: error: unrecognized arguments: --no-such-flag", LogLevel.ERROR),
        ("vllm serve: error: argument --dtype: invalid choice: 'foo'", LogLevel.ERROR),
        ("a/dispatcher.py:138: FutureWarning: `x` is deprecated", LogLevel.WARNING),
        ('{"asctime": "x", "levelname": "WARNING", "message": "m"}', LogLevel.WARNING),
        ("Loading safetensors checkpoint shards:  25% Completed", None),
        ("INFORMATION is no level", None),
        ("", None),
    ],
)
def test_level_of_a_line(text, level):
    assert log_level_of(text) is level


TRACEBACK = b"""INFO 11-20 10:00:00 [a.py:1] fine
    indented but harmless
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    main()
  File "b.py", line 2, in main
    raise ValueError("x")
ValueError: x
INFO 11-20 10:00:01 [a.py:1] fine again
"""


def test_lines_in_a_traceback_have_its_level(writer):
    writer.write(TRACEBACK)
    levels = [line.level for line in LogFile(writer.path).tail(20)]
    assert levels == [LogLevel.INFO, None, *[LogLevel.ERROR] * 6, LogLevel.INFO]


def test_page_that_begins_in_a_traceback_has_its_level(writer):
    writer.write(TRACEBACK)
    levels = [line.level for line in LogFile(writer.path).tail(5)]
    assert levels == [*[LogLevel.ERROR] * 4, LogLevel.INFO]
