"""Screenshots of the GPU pane on every recorded host, alone and next to others, and without GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.host.gpu.document import read_host, recorded_hosts
from vllm_launchers.host.gpu.host import GpuClaim, Holder
from vllm_launchers.host.gpu.sharing import GpuShare

SIZES = [(80, 24), (120, 40)]


def recorded(name: str) -> dict[str, Any]:
    return {"host": read_host(Path(name)), "host_recorded": True}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", recorded_hosts())
def test_gpus_alone(snap_compare, app, pressing, fakes, name, size):
    assert snap_compare(app(fakes.chat, fakes.coder, gpus=recorded(name)), terminal_size=size, run_before=pressing("6"))


@pytest.mark.parametrize("keys", ["H", "H,left,left"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_what_a_gpu_did(snap_compare, app, pressing, fakes, size, keys):
    servers = app(fakes.chat, fakes.coder, gpus=recorded("4xa6000"))
    assert snap_compare(servers, terminal_size=size, run_before=pressing(*keys.split(",")))


def test_gpus_beside_the_other_panes(snap_compare, app, pressing, fakes):
    gpus = recorded("4xa6000") | {"gpu_shares": (GpuShare(1, gib=24.0),)}
    assert snap_compare(app(fakes.chat, fakes.coder, gpus=gpus), terminal_size=(200, 60), run_before=pressing())


def test_a_tensor_parallel_server_with_its_traffic(snap_compare, app, pressing, fakes):
    host = read_host(Path("4xa6000"))
    held = (Holder(pid=4242, server="docs", gib=43.1),)
    busy = tuple(
        replace(gpu, used_by=held, free_gib=4.5, nvlink_sent_gbs=12.3, nvlink_received_gbs=11.9)
        if gpu.index in (2, 3)
        else gpu
        for gpu in host.gpus
    )
    gpus = {"host": replace(host, gpus=busy), "host_problem": "driver not answering since 12:40:58"}
    assert snap_compare(app(fakes.chat, fakes.docs, gpus=gpus), terminal_size=(80, 24), run_before=pressing("6"))


@pytest.mark.parametrize(("size", "key"), [((80, 24), "6"), ((120, 40), "6"), ((80, 24), "D")])
def test_gpus_with_which_something_is_the_matter(snap_compare, app, pressing, fakes, size, key):
    host = read_host(Path("4xa6000"))
    claim = GpuClaim("anna", 2e9, "training", words="claimed until 18:00 by anna: training")
    held = (Holder(pid=4242, server="chat", gib=28.8), Holder(pid=99, user="erik", gib=17.5, command="python train.py"))
    hot = replace(
        host.gpus[3], used_by=held, free_gib=1.4, used_gib=46.5, throttle=("too hot (hardware)",), temperature_c=96.0,
        utilization=92.0, pcie_width=4, pcie_generation=3,
    )  # fmt: skip
    gpus = {"host": replace(host, gpus=(*host.gpus[:2], replace(host.gpus[2], claims=(claim,)), hot))}
    assert snap_compare(app(fakes.chat, fakes.coder, gpus=gpus), terminal_size=size, run_before=pressing(key))


def test_no_driver(snap_compare, app, pressing, fakes):
    from vllm_launchers.host.gpu.host import NO_DRIVER

    assert snap_compare(
        app(fakes.chat, fakes.coder, gpus={"host_problem": NO_DRIVER}), terminal_size=(80, 24), run_before=pressing("6")
    )
