"""``host``, ``topology`` and ``gpus``: JSON and text output."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vllm_console.history.gpu_history import GPU_HISTORY, GpuHistoryWriter
from vllm_launchers.host.gpu.document import read_host

MATRIX = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV4\t0-15\t0\t\tN/A\n"
    "GPU1\tNV4\t X \t0-15\t0\t\tN/A\n"
)


def test_stdout_is_only_the_best_free_gpu_set(program: Callable[..., Any]) -> None:
    answer = program("gpus", "--free", "2", "--host", "4xa6000")
    assert (answer.returncode, answer.stdout) == (0, "2,3\n")
    assert "2,3: NVLink ×4, 112 GB/s, both idle" in answer.stderr
    assert "GPU 2  GPU-" in answer.stderr
    by_uuid = program("gpus", "--free", "2", "--host", "4xa6000", "--uuid").stdout.strip().split(",")
    assert [len(uuid) for uuid in by_uuid] == [40, 40]


def test_stdout_is_empty_when_no_gpu_set_is_free(program: Callable[..., Any]) -> None:
    answer = program("gpus", "--free", "4", "--host", "4xa6000")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "anna holds 20.5 GiB" in answer.stderr
    shared = program("gpus", "--free", "4", "--host", "4xa6000", "--need-gib", "20")
    assert shared.stdout == "0,1,2,3\n"
    assert "anna holds 20.5 GiB" in shared.stderr
    assert program("gpus", "--free", "0", "--host", "4xa6000").returncode == 2
    assert program("gpus", "--free", "1", "--need-gib", "nan", "--host", "4xa6000").returncode == 2


def test_ranking_as_json(program: Callable[..., Any]) -> None:
    document = program.json("gpus", "--free", "1", "--host", "1xa100-mig")  # type: ignore[attr-defined]
    first = document["sets"][0]
    assert first["cuda_visible_devices"].startswith("MIG-")
    assert first["fits"] is True


def test_gpu_set_respects_configured_shares_and_reports_it(program: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "config" / "vllm-console" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[shares]\n1 = 0\n2 = "24 GiB"\n')
    alone = program("gpus", "--free", "1", "--host", "4xa6000")
    assert alone.stdout == "3\n"
    assert "\n  GPU 1: your share is 0.0 GiB\n" in alone.stderr
    pair = program("gpus", "--free", "2", "--host", "4xa6000")
    assert pair.stdout == "2,3\n"
    assert "\n! GPU 2: your share is 24.0 GiB\n" in pair.stderr
    none = program("gpus", "--free", "2", "--host", "4xa6000", "--need-gib", "30")
    assert (none.returncode, none.stdout) == (1, "")
    assert "GPU 1: your share is 0.0 GiB" in none.stderr
    assert "GPU 2: your share is 24.0 GiB" in none.stderr
    document = program.json("gpus", "--free", "1", "--host", "4xa6000")  # type: ignore[attr-defined]
    assert document["shares"] == [
        {"gpu": 1, "limit_gib": 0.0, "left_gib": 0.0},
        {"gpu": 2, "limit_gib": 24.0, "left_gib": 24.0},
    ]
    assert [found["gpus"] for found in document["sets"] if found["fits"]] == [[3], [2]]


def test_saved_topology_matrix_becomes_a_host(program: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "topo.txt").write_text(MATRIX)
    made = program("host", "--from-topo", str(tmp_path / "topo.txt"), "--gpu", "RTX 3090")
    document = json.loads(made.stdout)
    assert document["islands"] == [[0, 1]]
    assert document["links"][0] == {
        "a": 0, "b": 1, "kind": "NV4", "bandwidth_gbs": 112.5, "switch": False, "p2p": None,
    }  # fmt: skip
    (tmp_path / "host.json").write_text(made.stdout)
    answer = program("gpus", "--free", "2", "--host", str(tmp_path / "host.json"))
    assert answer.stdout == "0,1\n"


def test_recorded_host_is_printed_as_json_and_text(program: Callable[..., Any]) -> None:
    document = program.json("host", "--host", "8xh100")  # type: ignore[attr-defined]
    assert {"hostname", "driver", "cuda", "cpu", "memory_gib", "gpus", "links", "islands"} <= document.keys()
    assert {"index", "uuid", "name", "memory_gib", "free_gib", "used_by", "utilization"} <= document["gpus"][0].keys()
    assert {"pid", "user", "gib", "server"} <= document["gpus"][0]["used_by"][0].keys()
    told = program("host", "--host", "8xh100").stdout
    assert "61.2 GiB by anna for 2h35m, pid 48211: python train.py" in told
    assert "71.0 GiB by chat (yours)" in told
    assert "18 of 18 up version 4.0 by NVSwitch" in told


def test_topology_is_drawn_at_requested_width(program: Callable[..., Any]) -> None:
    drawn = program("topology", "--host", "4xa6000", "--width", "80").stdout
    assert "  0    ·  NV4   SYS  SYS" in drawn
    assert "NVLink islands: 0,1 (112 GB/s)  2,3 (112 GB/s)" in drawn
    assert "NVLinks: 4 of 4 up on 0-3, no errors" in drawn
    assert "GPU 0,1  NV4" in program("topology", "--host", "4xa6000", "--width", "20").stdout


def test_unusable_files_print_one_line(program: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("\x1b[31m{")
    for words in (
        ("host", "--host", str(tmp_path / "wrong")),
        ("topology", "--host", str(tmp_path / "missing")),
        ("host", "--from-topo", str(tmp_path / "wrong")),
        ("host", "--gpu", "H100"),
        ("host", "--host", "8xh100", "--from-topo", str(tmp_path / "wrong")),
    ):
        answer = program(*words)
        assert answer.returncode == 2, words
        assert answer.stdout == ""
        assert answer.stderr.startswith("vllm-console: ")
        assert len(answer.stderr.splitlines()) == 1
        assert "\x1b" not in answer.stderr


def test_missing_driver_is_reported_with_the_rest_intact(program: Callable[..., Any]) -> None:
    document = program.json("host")  # type: ignore[attr-defined]
    assert document["memory_gib"]
    assert bool(document["gpus"]) != bool(document["problem"])


def test_server_gets_best_gpus_with_reason(program: Callable[..., Any]) -> None:
    words = ("start", "chatbot", "--engine", "simulated", "--gpus", "auto", "--set", "tensor-parallel-size=2")
    answer = program("--host", "4xa6000", *words)
    assert answer.returncode == 0, answer.stderr
    assert "GPU 2,3: NVLink ×4, 112 GB/s, both idle" in answer.stderr
    again = program("--host", "4xa6000", *words, "--set", "gpu-memory-utilization=0.9")
    assert again.returncode == 1
    assert "needs 2 GPUs, each with" in again.stderr
    assert "GPU 0,1 come closest with at least 27.1 GiB available (GPU 0: anna holds 20.5 GiB" in again.stderr


def test_invalid_gpu_selections_are_rejected(program: Callable[..., Any]) -> None:
    wrong = program("start", "chatbot", "--gpus", "first")
    assert wrong.returncode == 2
    assert "expected auto, none, or indices" in wrong.stderr
    missing = program("--host", "4xa6000", "start", "chatbot", "--engine", "simulated", "--gpus", "7")
    assert missing.returncode == 2
    assert "there is no GPU 7" in missing.stderr
    nowhere = program("--host", "nowhere.json", "list")
    assert nowhere.returncode == 2
    assert "there is no such file" in nowhere.stderr


def test_global_host_option_applies_to_gpu_commands(program: Callable[..., Any]) -> None:
    assert program("--host", "4xa6000", "gpus", "--free", "2").stdout == "2,3\n"


def with_board(tmp_path: Path) -> None:
    """Configure a board."""
    board = tmp_path / "board"
    board.mkdir()
    board.chmod(0o1777)
    config = tmp_path / "config" / "vllm-console" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'board = "{board}"\n')


def test_gpus_of_a_recorded_host_are_not_claimed_as_this_machines(program: Callable[..., Any], tmp_path: Path) -> None:
    with_board(tmp_path)
    refused = program("--host", "4xa6000", "claim", "3", "--until", "1h")
    assert refused.returncode == 4
    assert "GPUs of a recorded host can't be claimed: the board is this machine's; omit --host" in refused.stderr
    assert program.json("board")["claims"] == []  # type: ignore[attr-defined]


def test_simulated_server_occupies_recorded_gpu_while_running(program: Callable[..., Any], tmp_path: Path) -> None:
    with_board(tmp_path)

    def gpu(index: int, host: str = "4xa6000") -> Any:
        return program.json("host", "--host", host)["gpus"][index]  # type: ignore[attr-defined]

    def best() -> str:
        return str(program("gpus", "--free", "1", "--host", "4xa6000").stdout)

    before, first, elsewhere = gpu(1), best(), gpu(1, "2xrtx3090")
    assert first == "1\n"
    answer = program("--host", "4xa6000", "start", "chatbot", "--engine", "simulated", "--name", "one", "--wait")
    assert answer.returncode == 0, answer.stderr
    held = gpu(1)
    assert held["free_gib"] < 5
    assert [holder["server"] for holder in held["used_by"]] == ["one"]
    assert best() == "2\n"
    assert gpu(1, "2xrtx3090") == elsewhere, "it is on one recorded host only"
    plan = program("--host", "2xrtx3090", "plan", "chatbot", "--engine", "simulated", "--gpus", "1")
    assert "one holds" not in plan.stdout + plan.stderr
    announced = program.json("board")["servers"]  # type: ignore[attr-defined]
    assert [(server["name"], server["gpus"]) for server in announced] == [("one", [])]
    for words in (["--set", "max-num-seqs=8"], ["--preset", "batch"]):
        refused = program("--host", "2xrtx3090", "restart", "one", *words)
        assert refused.returncode == 4
        assert "one simulates a GPU of the recorded host gpubox, not of workstation: omit --host" in refused.stderr
    assert program("restart", "one", "--set", "max-num-seqs=8", "--wait").returncode == 0
    again = gpu(1)
    assert [holder["server"] for holder in again["used_by"]] == ["one"], "it keeps its GPU"
    log = program("logs", "one").stdout
    assert f"it is timed as {held['name']} by a roofline" in log
    assert program("stop", "one").returncode == 0
    assert gpu(1) == before
    assert best() == first


def test_gpu_history_as_table_and_json(program: Callable[..., Any], tmp_path: Path) -> None:
    none = program("host", "--history", "1h")
    assert none.returncode == 1
    assert "no GPU history yet" in none.stderr
    assert "unknown range; use one of 5m" in program("host", "--history", "1y").stderr
    host = read_host(Path("4xa6000"))
    state = tmp_path / "state" / "vllm-console"
    state.mkdir(parents=True, mode=0o700)
    writer = GpuHistoryWriter(state / GPU_HISTORY)
    now = time.time()
    for second in range(-600, 0, 5):
        busy = replace(host.gpus[0], power_w=310.0 if second < -300 else 290.0)
        writer.append(replace(host, gpus=(busy, *host.gpus[1:])), now + second)
    writer.close()
    text = program("host", "--history", "1h").stdout
    assert "GPU 3 (NVIDIA RTX A6000)" in text
    power = next(line.split() for line in text.splitlines() if "power W" in line)
    assert power == ["power", "W", "300", "310", "300"]
    assert "NVLink" not in text, "missing values are not shown"
    document = program.json("host", "--history", "15m")  # type: ignore[attr-defined]
    first = document["gpus"][0]
    assert (first["power_limit_w"], first["temperature_slowdown_c"], first["step"]) == (300, 95, 5.0)
    assert {value for value in first["values"]["power_w"] if value is not None} == {310.0, 290.0}
    assert [link["remote"] for link in first["nvlinks"]] == [1, 1, 1, 1]
    assert "nvlink_sent_gbs" not in first["values"]
