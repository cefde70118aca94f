"""Log lines are parsed in every format of vLLM's releases."""

from __future__ import annotations

import pytest

from vllm_console.logs.vllm_lines import parse_lines


@pytest.mark.parametrize(
    ("text", "process", "level", "message"),
    [
        ("(EngineCore pid=7) ERROR 11-20 10:03:58 [core.py:15]   File x", "EngineCore", "ERROR", "  File x"),
        ("\x1b[1;36m(Worker_TP0 pid=7)\x1b[0;0m INFO 10-01 23:05:53 [a.py:1] hi", "Worker_TP0", "INFO", "hi"),
        ("(EngineCore_DP0 pid=7)     raise ValueError(", "EngineCore_DP0", "", "    raise ValueError("),
        ("ERROR 06-30 13:53:19 [core.py:515] EngineCore failed", "", "ERROR", "EngineCore failed"),
        ("ERROR 03-12 18:19:00 engine.py:400] ValueError: x", "", "ERROR", "ValueError: x"),
        ("[rank0]: RuntimeError: x", "", "", "RuntimeError: x"),
        ("(W pid=1) [rank2]:E0716 18:21:22.792000 13 torch/a/b.py:874] OSError: x", "W", "ERROR", "OSError: x"),
        ("[W1120 10:03:57.679076039 utils.cpp:68] Warning: NUMA", "", "WARNING", "Warning: NUMA"),
        ("(RayWorkerWrapper pid=182, ip=10.0.0.1) INFO 03-02 03:24:42 a.py:2] hi", "RayWorkerWrapper", "INFO", "hi"),
        (
            'INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK',
            "",
            "INFO",
            '127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK',
        ),
        ("2026-11-20T10:00:00.123Z (A pid=1) WARNING 11-20 10:00:00 [a.py:1] x", "A", "WARNING", "x"),
        ("vllm-1  | ERROR 06-30 13:53:19 [core.py:515] x", "", "ERROR", "x"),
        ("(VllmWorker rank=1 pid=7) ERROR 06-05 06:18:13 [m.py:470] x", "VllmWorker", "ERROR", "x"),
        ("Aug 17 18:42:18 box vllm[80]: (APIServer pid=80) ValueError: x", "APIServer", "", "ValueError: x"),
        ("2026-11-20T10:00:00.123Z stderr F ValueError: x", "", "", "ValueError: x"),
        ("2025-06-20 20:03:45,362 - __main__ - ERROR - it ended", "", "ERROR", "it ended"),
        ("/env/a/b.py:61: UserWarning: odd", "", "WARNING", "odd"),
        ("(raylet) A worker died", "raylet", "", "A worker died"),
        ("Loading: 0%\rLoading: 100%", "", "", "Loading: 100%"),
        ("ValueError: 06-30 13:53:19 [not:1] a prefix", "", "", "ValueError: 06-30 13:53:19 [not:1] a prefix"),
        ("2026-05-01 18:57:24.911 | (APIServer pid=1) OSError: x", "APIServer", "", "OSError: x"),
        ("2026-08-17T18:42:18+0200 box vllm[80]: (APIServer pid=80) OSError: x", "APIServer", "", "OSError: x"),
        ("    (APIServer pid=1) ERROR 11-20 10:00:00 [a.py:1] x", "APIServer", "ERROR", "x"),
        ("  ERROR 11-20 10:00:00 [a.py:1] x", "", "ERROR", "x"),
        ("(Worker pid=1) [Stage-0] ERROR 03-12 08:22:28 [a.py:800] x", "Worker", "ERROR", "x"),
        ("^[[1;36m(EngineCore_DP0 pid=27)^[[0;0m ERROR 09-24 13:00:49 [a.py:1] x", "EngineCore_DP0", "ERROR", "x"),
        ("\ufffd[1;36m(W rank=3 pid=4)\ufffd[0;0m ERROR 07-26 18:47:24 [a.py:5] x", "W", "ERROR", "x"),
        ("#033[1;36m(W pid=4)#033[0;0m INFO 02-14 08:23:15 w.py:26] x", "W", "INFO", "x"),
        ('{"levelname": "ERROR", "processName": "MainProcess", "message": "x"}', "APIServer", "ERROR", "x"),
        ('vllm-1  | {"level": "error", "message": "x"}', "", "ERROR", "x"),
        ("", "", "", ""),
    ],
)
def test_line_formats(text: str, process: str, level: str, message: str) -> None:
    [line] = parse_lines([text])
    assert (line.number, line.process, line.level, line.message) == (1, process, level, message)


def test_multi_line_json_record_keeps_its_number() -> None:
    parsed = list(parse_lines(["x", '{"levelname": "ERROR", "processName": "P", "message": "a\\nb"}', "{no json"]))
    assert [(line.number, line.message) for line in parsed] == [(1, "x"), (2, "a"), (2, "b"), (3, "{no json")]
    assert parsed[1].process == "P"
    assert not parsed[1].harmless


@pytest.mark.parametrize(
    ("text", "clock"),
    [
        ("(A pid=1) INFO 11-20 10:03:58 [a.py:1] x", "11-20 10:03:58"),
        ("2026-11-20T08:03:59.1Z (A pid=1) INFO 11-20 10:03:58 [a.py:1] x", "11-20 10:03:58"),
        ("2026-11-20T08:03:59.1Z (A pid=1) x", "2026-11-20T08:03:59"),
        ("Aug  7 18:42:18 box vllm[80]: x", "Aug  7 18:42:18"),
        ('{"asctime": "2026-11-20 10:03:58,123", "message": "x"}', "2026-11-20 10:03:58"),
        ('2026-11-20T08:03:59.1Z {"message": "x"}', "2026-11-20T08:03:59"),
        ("x", ""),
    ],
)
def test_vllms_own_time_precedes_that_of_the_log_collector(text: str, clock: str) -> None:
    assert [line.clock for line in parse_lines([text])] == [clock]
