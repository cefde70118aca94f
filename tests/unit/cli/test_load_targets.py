"""The servers to which commands may send load."""

from __future__ import annotations

import argparse
import os
from types import ModuleType

import pytest
from msgspec.structs import replace

from vllm_console.attached import Endpoint
from vllm_console.cli import bench, load_target
from vllm_console.cli.load_target import find_target
from vllm_console.fleet.snapshot import ServerView
from vllm_launchers.errors import RefusedError, UsageError
from vllm_launchers.host.ports import user_name


def test_server_that_this_user_started_by_hand_may_be_named(fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_hand(at: float) -> ServerView:
        return replace(fakes.observed(at), name="vllm@8200", port=8200, owner=user_name(os.getuid()))

    fleet = fakes.FakeFleet(fakes.observed, by_hand)
    monkeypatch.setattr(load_target, "open_fleet", lambda _: fleet)

    def target(name: str, flag: str) -> load_target.Target:
        asked = argparse.Namespace(server=name, preset=None)
        return find_target(asked, flag, others_allowed=False)

    assert target("vllm@8200", "--remote").server is None
    for name, flag in (("anna-8100", "--remote"), ("vllm@8200", "")):
        with pytest.raises(RefusedError, match="outside this console: nothing is sent to it"):
            target(name, flag)


def test_attached_server_of_this_machine_is_refused_by_any_of_its_addresses(
    fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of the endpoint replaces that of the process, which may be another user's."""

    def attached(at: float) -> ServerView:
        return replace(fakes.observed(at), name="far", owner="", attached=Endpoint("http://localhost:8100"))

    monkeypatch.setattr(load_target, "open_fleet", lambda _: fakes.FakeFleet(attached))
    asked = argparse.Namespace(server="http://127.0.0.1:8100/v1", preset=None)
    with pytest.raises(RefusedError, match="is attached as far: nothing is sent to it without --remote"):
        find_target(asked, "--remote", others_allowed=False)
    with pytest.raises(UsageError, match="contains a user name"):
        find_target(argparse.Namespace(server="http://u:p@127.0.0.1:8100"), "--remote", others_allowed=False)


@pytest.mark.parametrize("url", ["https://gpubox", "https://gpubox:443/v1"])
def test_attached_server_is_recognized_by_its_address(
    fakes: ModuleType, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    def attached(at: float) -> ServerView:
        return replace(fakes.observed(at), name="far", owner="", attached=Endpoint("https://gpubox:443"))

    monkeypatch.setattr(load_target, "open_fleet", lambda _: fakes.FakeFleet(attached))
    asked = argparse.Namespace(server=url, preset=None)
    found = find_target(asked, "--remote", others_allowed=True, remote_allowed=True)
    assert found.server is not None
    assert found.server.name == "far"


@pytest.mark.parametrize("server", ["anna-8100", "http://127.0.0.1:8100"])
def test_bench_offers_no_option_for_servers_of_others(
    fakes: ModuleType, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setattr(load_target, "open_fleet", lambda _: fakes.FakeFleet(fakes.observed))
    with pytest.raises(RefusedError, match=r"nothing is sent to it$"):
        bench.run(argparse.Namespace(server=server, preset=None, yes=True))
