"""Non-NVIDIA accelerators: recognized, so that users learn what this program can do with them.

Recognized by keywords in their names, and on this machine by the kernel's list of PCI devices, without any vendor
library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vllm_launchers.host.gpu.host import NO_DRIVER

_DEVICES = Path("/sys/bus/pci/devices")
_DEV = Path("/dev")
_MOST_DEVICES = 4096
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
"""PCI base classes: display controllers, and processing accelerators."""

_NVIDIA, _AMD, _INTEL, _HABANA, _GOOGLE = "0x10de", "0x1002", "0x8086", "0x1da3", "0x1ae0"
_TPU_DEVICES = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
"""PCI device ids of TPU v2 and v3 up to v7; Google's network cards have the same vendor id."""


class Vendor(msgspec.Struct, frozen=True):
    """A vendor's accelerators. ``name``: plural. ``build``: vLLM's name for their build.

    ``devices``: the environment variable that selects among them; empty if there is none.
    """

    name: str
    build: str
    way: str
    devices: str
    words: str
    """Regular expression for keywords in their names."""

    @property
    def sentence(self) -> str:
        """What this program can and cannot do with them, in one sentence."""
        chosen = f" (choose them yourself, with --env {self.devices}=…)" if self.devices else ""
        return (
            f"{self.name} are not supported: vllm-console starts, supervises and monitors {self.way} there, but it "
            f"can't read these devices, so it shows no device figures, estimates no memory and assigns none{chosen}"
        )


VENDORS = (
    Vendor(
        "AMD GPUs",
        "rocm",
        "vLLM's ROCm build",
        "HIP_VISIBLE_DEVICES",
        r"amd|radeon|instinct|rocm|mi\d{2,3}[a-z]?|gfx\d+\w*|rx \d{4}\w*|w7[89]00",
    ),
    Vendor(
        "Intel Gaudi accelerators",
        "hpu",
        "vLLM with its Gaudi plugin",
        "HABANA_VISIBLE_DEVICES",
        r"gaudi ?\d?|habana|hpu|hl-?\d{3}\w*",
    ),
    Vendor(
        "Intel GPUs",
        "xpu",
        "vLLM's XPU build",
        "ZE_AFFINITY_MASK",
        r"intel|xpu|arc(?: pro)? [ab]\d+\w*|[ab][357][1-9]0m?|data center gpu|ponte vecchio|battlemage",
    ),
    Vendor("TPUs", "tpu", "vLLM's TPU build", "", r"tpu|tpus|tpu ?v\d\w*|trillium|ironwood"),
)
"""The first entry with a keyword in a name wins."""


def vendor_of(name: str | None) -> Vendor | None:
    """The vendor of a named accelerator; None if it is NVIDIA or unknown."""
    if not name or re.search(r"nvidia|geforce|quadro|tesla", name, re.IGNORECASE):
        return None
    words = name.replace("_", " ")
    return next((one for one in VENDORS if re.search(rf"\b(?:{one.words})\b", words, re.IGNORECASE)), None)


def vendor_of_build(build: str | None) -> Vendor | None:
    """The accelerators that a vLLM was built for; None for CUDA, the CPU and unknown builds."""
    return next((vendor for vendor in VENDORS if vendor.build == build), None)


def vendors_here(devices: Path = _DEVICES, dev: Path = _DEV) -> tuple[Vendor, ...]:
    """Other vendors' accelerators in this machine, each vendor once.

    Integrated graphics do not count: AMD's without a compute device (``/dev/kfd``), Intel's on bus 0. Nothing is
    reported if there is an NVIDIA GPU, because that can be used.
    """
    found = set(_builds(devices, dev))
    return () if "cuda" in found else tuple(vendor for vendor in VENDORS if vendor.build in found)


def no_driver(devices: Path = _DEVICES, dev: Path = _DEV) -> str:
    """Why there are no GPUs to show without NVIDIA's driver: another vendor's GPUs, or none at all."""
    return "; ".join(vendor.sentence for vendor in vendors_here(devices, dev)) or NO_DRIVER


def _builds(devices: Path, dev: Path) -> Iterator[str]:
    try:
        folders = sorted(devices.iterdir())[:_MOST_DEVICES]
    except OSError:
        return
    for folder in folders:
        vendor, kind, device = (_read(folder / name) for name in ("vendor", "class", "device"))
        accelerates = kind.startswith(_ACCELERATOR)
        computes = accelerates or kind.startswith(_DISPLAY)
        if vendor == _NVIDIA and computes:
            yield "cuda"
        elif vendor == _AMD and computes and (dev / "kfd").exists():
            yield "rocm"
        elif vendor == _HABANA and (accelerates or (dev / "accel").is_dir()):
            yield "hpu"
        elif vendor == _INTEL and kind.startswith(_DISPLAY) and not re.match(r"[0-9a-f]{4,8}:00:", folder.name):
            yield "xpu"
        elif vendor == _GOOGLE and device in _TPU_DEVICES:
            yield "tpu"


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(16).decode("ascii", "replace").strip().lower()
    except OSError:
        return ""
