from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.prepared_process import Prepared
from vllm_launchers.prepared.command import BOOTSTRAP

Start = Callable[..., Prepared]


def server_facts(prepared: Prepared) -> dict[str, Any]:
    """What the fake server has printed about its process."""
    lines = prepared.server_output.read_text().splitlines()
    answer: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return answer


def served(prepared: Prepared) -> dict[str, Any]:
    """Let an accepted server run to its end."""
    prepared.until("accepted")
    prepared.go()
    assert prepared.step() == {"step": "started"}
    assert prepared.step() == {}, "the socket is closed"
    assert prepared.wait() == 7, "what vLLM's main returns"
    return server_facts(prepared)


# -- accepted, go -----------------------------------------------------------------------------------------------------


def test_startup_steps(start: Start) -> None:
    prepared = start("serve", "m", "--port", "81")
    assert prepared.step() == {"step": "importing"}
    imported = prepared.step()
    assert (imported["step"], imported["vllm"]) == ("imported", "0.99.0")
    judged = prepared.step()
    assert judged.pop("seconds") >= imported["seconds"]
    assert judged == {"step": "judged", "config_checked": True}
    accepted = prepared.step()
    assert accepted.pop("seconds") >= imported["seconds"]
    assert accepted == {"step": "accepted", "cuda_initialized": False, "config_checked": True}
    assert prepared.process.poll() is None
    assert "prepared in" in prepared.own_output.read_text(), "the beginning of the server's log"


def test_server_equals_one_started_by_its_own_command(start: Start, tmp_path: Path) -> None:
    server = served(start("serve", "m", "--port", "81"))
    script = tmp_path / "bin" / "vllm"
    assert server["argv"] == [str(script), "serve", "m", "--port", "81"]
    assert server["path"] == str(script.parent)
    assert server["port"] == 81
    assert server["sigint"] is True
    assert server["method"] == "spawn"


def test_module_command_has_the_working_folder_on_its_path(start: Start, tmp_path: Path) -> None:
    server = served(start("serve", "m", script="vllm.entrypoints.cli.main"))
    assert server["path"] == str(tmp_path)


def test_server_survives_the_keepers_death(start: Start) -> None:
    assert served(start())["death_signal"] == 0


def test_socket_and_output_are_closed_in_the_server(start: Start) -> None:
    # One extra descriptor is used by the listing itself.
    assert len(served(start(FAKE_RANKS="2"))["descriptors"]) == 4


def test_socket_is_not_inherited_by_children(start: Start) -> None:
    prepared = start()
    prepared.until("accepted")
    flags = Path(f"/proc/{prepared.process.pid}/fdinfo/3").read_text().partition("flags:")[2].split()[0]
    assert int(flags, 8) & os.O_CLOEXEC


def test_output_switches_to_the_servers_file(start: Start) -> None:
    prepared = start()
    served(prepared)
    assert "the model is m" in prepared.own_output.read_text()
    assert "the model is m" in prepared.server_output.read_text(), "messages logged once are in the server's log, too"
    assert "death_signal" not in prepared.own_output.read_text()


def test_users_multiprocessing_method_is_kept(start: Start) -> None:
    assert served(start(VLLM_WORKER_MULTIPROC_METHOD="fork"))["method"] == "fork"


# -- the engine's process ---------------------------------------------------------------------------------------------


def spawned(prepared: Prepared) -> list[str]:
    """Output of a server about the processes that it spawns, after the line about itself."""
    served(prepared)
    lines = prepared.server_output.read_text().splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith("{")) + 1 :]


def test_first_spawned_process_uses_the_preimported_spare(start: Start) -> None:
    prepared = start("serve", "m", "--spawn", "2")
    pid = prepared.process.pid
    first, files, end, *second = spawned(prepared)
    assert "imported by ['--spare']" in prepared.own_output.read_text()
    assert (first, end) == (f"in the child {pid} None False", "ended with 5")
    assert second == ["imported by ['serve']", f"in the child {pid} None True", files, end]


@pytest.mark.parametrize(
    "environment",
    [
        {"FAKE_ADDED": '{"ADDED": "x"}'},
        {"FAKE_RANKS": "2"},
        {"VLLM_WORKER_MULTIPROC_METHOD": "fork"},
        {"FAKE_CUDA": "12.9"},
    ],
    ids=["another environment", "data parallel", "forked", "its imports need the GPU"],
)
def test_process_that_must_import_by_itself_does(start: Start, environment: dict[str, str]) -> None:
    lines = spawned(start("serve", "m", "--spawn", "1", **environment))
    assert lines[0] == "imported by ['serve']"
    assert lines[1].endswith("True")
    assert lines[-1] == "ended with 5"


@pytest.fixture
def impatient(tmp_path: Path) -> Path:
    """The bootstrap with near-zero timeouts for its spare and for the driver."""
    text, changes = re.subn(r"(?m)^(SPARE|FREED)_SECONDS = .*", r"\1_SECONDS = 0.001", BOOTSTRAP.read_text())
    assert changes == 2
    path = tmp_path / "bootstrap.py"
    path.write_text(text)
    return path


def test_late_spare_takes_over_after_its_imports(start: Start, impatient: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    late = {"FAKE_WORKER": "vllm.engine.late.Worker", "FAKE_GATE": str(gate)}
    prepared = start("serve", "m", "--spawn", "1", bootstrap=impatient, **late)
    prepared.until("accepted")
    (spare,) = children(prepared)
    wait_for(prepared, "spare is late")
    prepared.go()
    prepared.until("started")
    with ending(spare) as ended:
        gate.write_text("")  # blocks until it is read
        assert prepared.wait() == 7
        assert ended()
    assert "in the child" in prepared.server_output.read_text()
    assert prepared.server_output.read_text().endswith("ended with 5\n")


def test_late_spare_that_cannot_be_used_is_ended(start: Start, impatient: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    late = {"FAKE_WORKER": "vllm.engine.late.Worker", "FAKE_GATE": str(gate), "FAKE_ADDED": '{"ADDED": "x"}'}
    prepared = start("serve", "m", "--spawn", "1", bootstrap=impatient, **late)
    wait_for(prepared, "spare is late")
    (spare,) = children(prepared)
    with ending(spare) as ended:
        lines = spawned(prepared)
        assert ended()
    assert lines[0] == "imported by ['serve']"
    assert lines[-1] == "ended with 5", "and no zombie is left"


def test_dead_spare_is_replaced_by_a_normal_start(start: Start) -> None:
    prepared = start("serve", "m", "--spawn", "1")
    prepared.until("accepted")
    (spare,) = children(prepared)
    with ending(spare) as ended:
        os.kill(spare, signal.SIGKILL)
        assert ended()
    prepared.go()
    assert prepared.wait() == 7
    assert "imported by ['serve']" in prepared.server_output.read_text()
    assert prepared.server_output.read_text().endswith("ended with 5\n"), "and no zombie is left"


def test_nothing_is_left_when_the_keeper_closes_the_socket(start: Start) -> None:
    prepared = start()
    prepared.until("accepted")
    (spare,) = children(prepared)
    with ending(spare) as ended:
        prepared.close()
        assert prepared.wait() == 0
        assert ended()


def test_nothing_is_left_when_killed_while_the_spare_imports(start: Start) -> None:
    prepared = start(FAKE_WORKER="vllm.engine.hangs.Worker")
    wait_for(prepared, "spare hangs")
    (spare,) = children(prepared)
    with ending(spare) as ended:
        prepared.process.kill()
        assert ended()


@contextlib.contextmanager
def ending(pid: int) -> Iterator[Callable[[], bool]]:
    """Tells whether a process ends; enter while it lives."""
    descriptor = os.pidfd_open(pid)
    try:
        yield lambda: bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)


def wait_for(prepared: Prepared, words: str) -> None:
    while words not in prepared.own_output.read_text():
        assert prepared.process.poll() is None
        time.sleep(0.01)


def children(prepared: Prepared) -> list[int]:
    pid = prepared.process.pid
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-such-flag"], "vllm: error: unrecognized arguments: --no-such-flag"),
        (["--port", "x"], "vllm serve: error: argument --port: invalid int value: 'x'"),
        (["--auto"], "Error: --auto requires --parser"),
        (["--error", "value"], "the value is wrong"),
        (["--error", "type"], "--this requires --that"),
        (["--error", "key"], "KeyError: 'head_dim'"),
        (["--error", "exit"], "vLLM exited with code 1 when it checked its configuration"),
        (["--error", "package"], "pip install fast-loader to use this"),
        (
            ["--error", "validation"],
            "SchedulerConfig.max_num_seqs: Input should be greater than or equal to 1\ntoo long for the model",
        ),
    ],
)
def test_flags_are_refused_with_vllms_message(start: Start, flags: list[str], message: str) -> None:
    prepared = start("serve", "m", *flags)
    assert prepared.until("refused")["message"] == message
    assert prepared.wait() == 2


def test_complete_refusal_is_in_its_output(start: Start) -> None:
    prepared = start("serve", "m", "--error", "value")
    prepared.until("refused")
    assert prepared.wait() == 2
    text = prepared.own_output.read_text()
    assert text.startswith("the model is m\nTraceback")
    assert text.endswith("ValueError: the value is wrong\n")
    parser = start("serve", "m", "--no-such-flag")
    parser.until("refused")
    assert parser.wait() == 2
    assert "Traceback" not in parser.own_output.read_text()
    assert parser.own_output.read_text().startswith("usage: vllm")


def test_checked_values_are_not_in_a_message(start: Start) -> None:
    prepared = start("serve", "m", "--error", "validation")
    assert "s3cret" not in prepared.until("refused")["message"]


def test_message_length_is_limited(start: Start) -> None:
    message = start("serve", "m", "--error", "long").until("refused")["message"]
    assert len(message) == 10_000
    assert message.endswith("…")


# -- unprepared -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["serve", "m"], {"FAKE_IMPORT": "fails"}, "importing it failed: No module named 'vllm.gone'"),
        (["serve", "m"], {"FAKE_LAYOUT": "renamed"}, "'vllm.entrypoints.cli.serve' has no attribute"),
        (["serve", "m"], {"FAKE_IMPORT": "exits"}, "importing it failed: no server here"),
        (["serve", "m"], {"FAKE_LAYOUT": "copied"}, "has an unknown structure"),
        (["serve", "m"], {"FAKE_SIGNATURE": "1"}, "unexpected keyword argument 'usage_context'"),
        (["serve", "m"], {"FAKE_DEVICE": "tpu"}, "it is unknown whether a tpu stays untouched"),
        (["serve", "m", "--error", "missing"], {}, "No module named 'vllm.gone'"),
        (["serve", "m", "--error", "attribute"], {}, "no such attribute"),
        (["serve", "m", "--error", "busy"], {}, "CUDA error: device is busy"),
        (["serve", "m", "--error", "memory"], {}, "no memory"),
        (["serve", "--help"], {}, "this command line does not serve"),
        (["bench", "m"], {}, "only 'vllm serve' can be prepared"),
        (["serve", "m", "--omni"], {}, "only 'vllm serve' can be prepared"),
    ],
)
def test_failure_unrelated_to_flags_is_not_a_refusal(
    start: Start, words: list[str], environment: dict[str, str], message: str
) -> None:
    prepared = start(*words, **environment)
    assert message in prepared.until("unprepared")["message"]
    assert prepared.wait() == 3
    assert "SERVES" not in prepared.own_output.read_text()


def test_python_without_vllm(start: Start, tmp_path: Path) -> None:
    prepared = start(PYTHONPATH=str(tmp_path))
    assert prepared.until("unprepared")["message"] == "importing it failed: No module named 'vllm'"


def test_upgrade_between_verdict_and_start_is_noticed(start: Start, fake_vllm: Path) -> None:
    prepared = start()
    prepared.until("accepted")
    upgraded = fake_vllm / "vllm" / "upgraded"
    upgraded.write_text("__version__ = '1.0.0'\n")
    upgraded.replace(fake_vllm / "vllm" / "__init__.py")
    prepared.go()
    assert prepared.until("unprepared")["message"] == "its files were replaced after it was imported"
    assert prepared.wait() == 3


# -- the GPU ----------------------------------------------------------------------------------------------------------


def test_only_the_parser_judges_if_the_configuration_needs_the_gpu(start: Start) -> None:
    prepared = start("serve", "m", "--gpu", FAKE_CUDA="12.9")
    pid = prepared.process.pid
    steps = [prepared.step() for _ in range(6)]
    names = ["importing", "imported", "importing", "imported", "judged", "accepted"]
    assert [step["step"] for step in steps] == names
    assert (steps[-1]["cuda_initialized"], steps[-1]["config_checked"]) == (False, False)
    assert prepared.process.pid == pid
    prepared.go()
    assert prepared.step() == {"step": "started"}
    assert prepared.wait() == 7, "the server itself may use the GPU"


def test_parser_refuses_without_a_gpu(start: Start) -> None:
    prepared = start("serve", "m", "--gpu", "--no-such-flag", FAKE_CUDA="12.9")
    assert "--no-such-flag" in prepared.until("refused")["message"]


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_start_waits_until_the_ended_servers_gpu_memory_is_free(
    start: Start, tmp_path: Path, holder: subprocess.Popen[bytes]
) -> None:
    """It does not wait for memory of a neighbor or of a process unknown to this machine."""
    listed = tmp_path / "listed"
    listed.write_text(f"{os.getpid()} 4194305\n{holder.pid}\n")
    prepared = start(FAKE_CUDA="12.9", FAKE_HOLDERS=str(listed))
    prepared.until("accepted")
    holder.kill()
    holder.wait()
    prepared.go()
    assert not select.select([prepared.socket], [], [], 0.5)[0], "the driver still lists it"
    new = tmp_path / "new"
    new.write_text(f"{os.getpid()} 4194305\n\n")
    new.replace(listed)
    assert prepared.step() == {"step": "started"}
    assert prepared.wait() == 7
    assert "GPU memory was free after" in prepared.server_output.read_text()


def test_unreleased_memory_is_logged_and_left_to_the_server(
    start: Start, tmp_path: Path, holder: subprocess.Popen[bytes], impatient: Path
) -> None:
    listed = tmp_path / "listed"
    listed.write_text(f"{holder.pid}\n\n")
    prepared = start(FAKE_CUDA="12.9", FAKE_HOLDERS=str(listed), bootstrap=impatient)
    prepared.until("accepted")
    holder.kill()
    holder.wait()
    prepared.go()
    assert prepared.step() == {"step": "started"}
    assert prepared.wait() == 7
    assert f"GPU memory of ended processes is still held: {holder.pid}" in prepared.server_output.read_text()


def test_failing_driver_does_not_block_a_restart(start: Start, tmp_path: Path) -> None:
    listed = tmp_path / "listed"
    listed.write_text(f"{os.getpid()}\n\n")
    prepared = start(FAKE_CUDA="12.9", FAKE_HOLDERS=str(listed))
    prepared.until("accepted")
    listed.unlink()
    prepared.go()
    assert prepared.step() == {"step": "started"}
    assert prepared.wait() == 7
    assert "it is unknown whether GPU memory was freed" in prepared.server_output.read_text()


def test_vllm_that_initializes_the_gpu_on_import_is_not_prepared(start: Start, fake_vllm: Path) -> None:
    serve = fake_vllm / "vllm/entrypoints/cli/serve.py"
    serve.write_text("import contextlib, torch\nwith contextlib.suppress(Exception):\n    torch.cuda._lazy_init()\n")
    prepared = start(FAKE_CUDA="12.9")
    assert "initializes the GPU" in prepared.until("unprepared")["message"]


# -- its end ----------------------------------------------------------------------------------------------------------


def test_preparation_ends_quietly_when_the_socket_closes(start: Start) -> None:
    prepared = start()
    prepared.until("accepted")
    before = prepared.own_output.read_text()
    prepared.close()
    assert prepared.wait() == 0
    assert prepared.own_output.read_text() == before


def test_preparation_ends_quietly_without_a_keeper_during_import(start: Start) -> None:
    prepared = start()
    prepared.close()
    assert prepared.wait() == 0
    assert "Traceback" not in prepared.own_output.read_text()


def test_unknown_command_ends_the_preparation(start: Start) -> None:
    prepared = start()
    prepared.until("accepted")
    prepared.socket.sendall(b"x")
    assert prepared.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_waiting_process_without_a_traceback(start: Start, number: signal.Signals) -> None:
    prepared = start()
    prepared.until("accepted")
    prepared.process.send_signal(number)
    assert prepared.wait() == -number
    assert "Traceback" not in prepared.own_output.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_import_leaves_no_traceback(start: Start, number: signal.Signals) -> None:
    prepared = start(FAKE_IMPORT="hangs")
    wait_for(prepared, "hangs")
    prepared.process.send_signal(number)
    assert prepared.wait() == -number
    assert "Traceback" not in prepared.own_output.read_text()


# -- the file ---------------------------------------------------------------------------------------------------------


def test_bootstrap_parses_with_the_oldest_supported_python() -> None:
    ast.parse(BOOTSTRAP.read_text(), feature_version=(3, 9))


def test_bootstrap_imports_nothing_of_this_program() -> None:
    tree = ast.parse(BOOTSTRAP.read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not {name for name in imported if name and name.startswith("vllm")}
