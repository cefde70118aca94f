"""The machine's environment without its GPUs."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from vllm_launchers.host.environment import open_files_limit, read_environment
from vllm_launchers.host.hub_folders import has_hub_token


def test_environment_is_read(tmp_path: Path) -> None:
    seen = read_environment(
        environment={"HF_HOME": str(tmp_path / "not" / "yet"), "HF_TOKEN": "hf_x", "VLLM_USE_V1": "1"}
    )
    assert seen.model_disk == str(tmp_path / "not" / "yet" / "hub")
    assert seen.model_disk_free_gib is not None
    assert seen.model_disk_free_gib > 0
    assert seen.memory_free_gib is not None
    assert seen.has_hub_token is True
    assert seen.port_problem == ""
    assert seen.variables == {"HF_HOME": str(tmp_path / "not" / "yet"), "VLLM_USE_V1": "1"}


def test_download_folder_decides_the_disk(tmp_path: Path) -> None:
    assert read_environment(environment={"HOME": "/h"}, download_dir=str(tmp_path)).model_disk == str(tmp_path)


def test_port_problem_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert "pid" in read_environment(port=port, environment={}).port_problem
        assert read_environment(environment={}).port_problem == ""  # no port was given


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_hub_token_in_the_environment(name: str) -> None:
    assert has_hub_token({name: "hf_x", "HOME": "/nowhere"})
    assert not has_hub_token({name: "", "HOME": "/nowhere"})


def test_hub_token_stored_by_a_login(tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path)}
    assert not has_hub_token(home)
    (tmp_path / "token").write_text("hf_x")
    assert has_hub_token(home)
    assert has_hub_token({"HF_TOKEN_PATH": str(tmp_path / "token"), "HOME": "/nowhere"})
    # The models may be elsewhere, but the token is not.
    assert has_hub_token(home | {"HF_HUB_CACHE": "/models"})


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [
        (1024, 1024, 1024),
        (1024, 4096, 4096),  # vLLM raises its own limit
        (1024, 1_048_576, 65_535),
        (200_000, 1_048_576, 200_000),
        (1024, resource.RLIM_INFINITY, None),
    ],
)
def test_open_files_limit(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, limit: int | None) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    assert open_files_limit() == limit


def test_absent_files_among_those_asked_about(tmp_path: Path) -> None:
    here, gone = tmp_path / "here", tmp_path / "gone"
    here.touch()
    seen = read_environment(environment={}, files=[str(here), str(gone), "/nul\0"])
    assert seen.absent == (str(gone), "/nul\0")
