"""A console stays open while other consoles remove servers and reuse their names."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import pytest

from vllm_console.attached import Endpoint, attached_folder, first_record
from vllm_console.fleet.local import LocalFleet
from vllm_console.history.store import HISTORY, HistoryWriter
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import Exit, Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.private import make_folder

MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
PORT = "OSError: [Errno 98] Address already in use"


def failed(state: Path, created_at: float, line: str) -> None:
    """Record a server that failed at its first start, with this line in its log."""
    folder = folders.prepare(state, "chat")
    (folder / "server.log").write_text(f"{line}\n")
    end, ended = created_at + 9, Exit(created_at + 9, 1, None, False, "exit code 1")
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1)
    generation = Generation(1, spec, created_at, ended_at=end, exit=ended)
    folders.write_record(
        folder, ServerRecord("chat", State.FAILED, end, created_at, (generation,), reason="exit code 1")
    )


def test_failure_reason_is_not_that_of_an_earlier_server(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path, interactive=True, observe=False, gpus=False)
    try:
        failed(tmp_path, 1_000.0, MEMORY)
        assert "out of memory" in fleet.snapshot().servers[0].reason
        shutil.rmtree(folders.server_folder(tmp_path, "chat"))
        failed(tmp_path, 2_000.0, PORT)
        assert "Address already in use" in fleet.snapshot().servers[0].reason
    finally:
        fleet.close()


def attached(state: Path, name: str) -> Path:
    folder = attached_folder(state, name)
    make_folder(folder.parent)
    make_folder(folder)
    folders.write_record(folder, first_record(name, Endpoint("http://192.0.2.1:8000"), time.time()))
    return folder


def test_numbered_launch_name_does_not_hide_an_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attached(tmp_path, "chatbot-2")
    monkeypatch.setattr(LocalFleet, "launch_name", lambda *_: "chatbot-2")  # its own name is in use
    fleet = LocalFleet(tmp_path, observe=False, gpus=False)
    with pytest.raises(OperationError, match="attached as 'chatbot-2'"):
        fleet.start(LaunchRequest("chatbot", engine="simulated"))
    fleet.close()


def opened(name: str) -> list[str]:
    """Files with this name that this process has open."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(descriptor.readlink()))
    return [link for link in links if name in link]


def test_history_of_an_endpoint_detached_elsewhere_is_closed(tmp_path: Path) -> None:
    folder = attached(tmp_path, "far")
    writer = HistoryWriter(folder / HISTORY)
    writer.append(Sample(time.time(), {"0": EngineSample(generation_tokens_total=1.0)}))
    writer.close()
    fleet = LocalFleet(tmp_path, interactive=True, observe=False, gpus=False, read_only=True)
    try:
        assert [view.name for view in fleet.snapshot().servers] == ["far"]
        assert opened(str(folder))
        shutil.rmtree(folder)
        assert fleet.snapshot().servers == ()
        assert opened(str(folder)) == []
    finally:
        fleet.close()
